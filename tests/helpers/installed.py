"""Install a package as pip does: its modules, and a folder that tells its entry points."""

import shutil
import tomllib
from collections.abc import Mapping
from pathlib import Path


def install(package: Path, site: Path) -> Path:
    """Install the package of a ``pyproject.toml`` to ``site``, a folder on Python's path.

    Returns:
        ``site``.
    """
    source = tomllib.loads((package / "pyproject.toml").read_text(encoding="utf-8"))
    project = source["project"]
    for module in source["tool"]["setuptools"]["py-modules"]:
        site.mkdir(exist_ok=True)
        shutil.copy(package / f"{module}.py", site)
    register(site, project["name"], project["entry-points"])
    return site


def register(site: Path, package: str, groups: Mapping[str, Mapping[str, str]]) -> None:
    """Write a package's name and its entry points, by group, to ``site``."""
    lines = []
    for group, names in groups.items():
        lines += [f"[{group}]", *(f"{name} = {value}" for name, value in names.items())]
    folder = site / f"{package.replace('-', '_')}-0.1.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 0.1\n")
    (folder / "entry_points.txt").write_text("\n".join(lines) + "\n")
