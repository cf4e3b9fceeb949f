"""What ``import securevfl as sv`` offers: every name is listed, typed and there."""

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.patience import PATIENCE_S

import securevfl as sv
from securevfl.core.stages import part_names

PACKAGES = ("securevfl", "securevfl.data", "securevfl.dp", "securevfl.models", "securevfl.testing")


@pytest.mark.parametrize("name", PACKAGES)
def test_every_public_name_is_listed_and_there(name: str) -> None:
    """``dir`` and tab completion show names that are loaded on first use, and each loads."""
    package = importlib.import_module(name)
    assert set(dir(package)) == set(package.__all__)
    for public in package.__all__:
        assert getattr(package, public) is not None
    with pytest.raises(AttributeError, match=f"module '{name}' has no attribute 'simulat'"):
        _ = package.simulat


@pytest.mark.parametrize("name", PACKAGES)
def test_type_checkers_see_the_same_names(name: str) -> None:
    """The imports that only a type checker runs give the names that users get."""
    path = importlib.import_module(name).__file__
    assert path is not None
    typed = {
        alias.asname or alias.name
        for node in ast.walk(ast.parse(Path(path).read_text(encoding="utf-8")))
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for imported in node.body
        if isinstance(imported, ast.ImportFrom)
        for alias in imported.names
    }
    public = {*importlib.import_module(name).__all__} - {"__version__"}
    if name == "securevfl.models":
        # Families of stages: their manifests alone know the modules.
        public -= {name for name in public if name.lower() in part_names("families")}
    assert typed == public


def test_listing_names_loads_nothing() -> None:
    """Tab completion must not wait for torch."""
    code = "import sys, securevfl; dir(securevfl); sys.exit('torch' in sys.modules)"
    assert (
        subprocess.run([sys.executable, "-c", code], timeout=PATIENCE_S, check=False).returncode
        == 0
    )


def test_names_that_users_rely_on() -> None:
    """Whoever takes a name away breaks users: it has to be taken away here too."""
    assert {"read_federation", "simulate", "train", "link", "compare", "audit"} <= set(dir(sv))
    assert {"RunResult", "SecureVflError", "data", "dp", "models"} <= set(dir(sv))
