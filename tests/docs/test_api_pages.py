"""The reference in docs/api has every public name."""

import importlib
import runpy
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("securevfl", "securevfl.dp", "securevfl.data", "securevfl.models", "securevfl.testing")


@pytest.mark.parametrize("package", PACKAGES)
def test_every_public_name_gets_its_place_in_the_reference(package: str) -> None:
    """By the name that users write, and from the module that defines it."""
    hooks = runpy.run_path(str(ROOT / "tools" / "site_hooks.py"))
    page = ROOT / "docs" / "api" / f"{package.rpartition('.')[2]}.md"
    module = importlib.import_module(package)
    public = {name: getattr(module, name) for name in module.__all__}

    written = hooks["on_page_markdown"](page.read_text(encoding="utf-8"))

    for name, one in public.items():
        if not isinstance(one, ModuleType | str):
            place = (
                f"::: {one.__module__}.{one.__qualname__}\n    options:\n      heading: {name}\n"
            )
            assert place in written
