"""The reference in docs/api has every public name; mkdocs finds a name that is gone by itself."""

import importlib
from pathlib import Path
from types import ModuleType

import pytest

API = Path(__file__).parents[2] / "docs" / "api"
PACKAGES = ("securevfl", "securevfl.dp", "securevfl.data", "securevfl.models")


def homes(package: str) -> set[str]:
    """Return where the public names of a package are defined."""
    module = importlib.import_module(package)
    public = [getattr(module, name) for name in module.__all__]
    return {
        f"{one.__module__}.{one.__qualname__}"
        for one in public
        if not isinstance(one, ModuleType | str)
    }


@pytest.mark.parametrize("package", PACKAGES)
def test_every_public_name_is_in_the_reference(package: str) -> None:
    pages = "\n".join(page.read_text(encoding="utf-8") for page in API.glob("*.md"))
    there = {line.split()[1] for line in pages.splitlines() if line.startswith("::: ")}

    assert homes(package) - there == set(), "docs/api needs a line '::: NAME' for each"
