"""What was measured of a run's partners: the file in the run folder."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from securevfl.core import files

FILE: Final = "contribution.json"

FORMAT: Final = 1
"""Of the file that this program writes, and the only one that it reads."""


def read_contribution(run_folder: Path, *, run: str) -> dict[str, Any] | None:
    """Read ``contribution.json``; None if there is none, or it is of another run or version.

    Args:
        run_folder: Where it lies.
        run: The run's id.
    """
    path = run_folder / FILE
    if not path.exists():
        return None
    found = files.read_json(path)
    if found.get("format") != FORMAT or found.get("run") != run:
        return None
    return found


def write_contribution(run_folder: Path, measured: Mapping[str, Any]) -> None:
    """Write ``contribution.json``.

    Raises:
        StorageError: If the disk takes no more.
    """
    files.write_json(run_folder / FILE, {"format": FORMAT, **measured}, for_others=True)
