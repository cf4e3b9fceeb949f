"""The scripts of ``research/`` within the test's own process: their imports are paid for once."""

import runpy
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "research"


def run_script(name: str, *arguments: object) -> None:
    """Run a script as its command line does; what it prints is the caller's to capture."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [*sys.path])
        patch.setattr(sys, "argv", [name, *map(str, arguments)])
        runpy.run_path(str(SCRIPTS / name), run_name="__main__")
