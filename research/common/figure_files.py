"""Keep what a script measured in ``figures/`` beside it, with digests of the code measured.

``tools/make_figures.py`` writes the tables of pages from these files, and ``tests/docs`` lists the
files whose code has changed since.
"""

import hashlib
import json
import os
import platform
import shlex
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import torch

ROOT: Final = Path(__file__).resolve().parents[2]
OF_A_RUN: Final = tuple(
    f"securevfl/{room}"
    for room in ("data", "dp", "federation", "linkage", "models", "mpc", "runtime")
)
"""Rooms whose code decides what a simulated run finds."""


def digest(path: str) -> str:
    """Return a digest of a file, or of a folder's Python files; ``path`` starts at the root."""
    whole = ROOT / path
    found = hashlib.sha256()
    for file in sorted(whole.rglob("*.py")) if whole.is_dir() else [whole]:
        content = hashlib.sha256(file.read_bytes()).hexdigest()
        found.update(f"{file.relative_to(ROOT).as_posix()} {content}\n".encode())
    return found.hexdigest()[:16]


def changed(path: Path) -> list[str]:
    """Return which files and folders have changed since the figures of ``path`` were measured."""
    code: dict[str, str] = json.loads(path.read_text(encoding="utf-8"))["code"]
    return [
        name for name, then in code.items() if not (ROOT / name).exists() or digest(name) != then
    ]


def keep(name: str, figures: Any, *, seeds: list[int], code: tuple[str, ...] = OF_A_RUN) -> Path:
    """Write NAME.json in ``figures/`` beside the running script.

    Args:
        name: Of the file.
        figures: What was measured, as JSON; numbers keep six digits.
        seeds: Of the runs.
        code: The folders whose code decides the figures; the running script is added.
    """
    running = Path(sys.argv[0]).resolve()
    script = running.relative_to(ROOT).as_posix()
    versions = (
        f"Python {sys.version_info.major}.{sys.version_info.minor}, torch {torch.__version__}"
    )
    content = {
        "command": shlex.join(["python", script, *sys.argv[1:]]),
        "date": datetime.now(UTC).date().isoformat(),
        "machine": f"{os.cpu_count()} cores, {platform.machine()}, {versions.split('+')[0]}",
        "seeds": seeds,
        "code": {path: digest(path) for path in (script, *code)},
        "figures": _rounded(figures),
    }
    path = running.parent / "figures" / f"{name}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return path


def _rounded(found: Any) -> Any:
    if isinstance(found, dict):
        return {name: _rounded(value) for name, value in found.items()}
    if isinstance(found, list | tuple):
        return [_rounded(value) for value in found]
    return float(f"{found:.6g}") if isinstance(found, float) else found
