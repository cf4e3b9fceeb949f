"""The folder of a result in memory, which goes with the result."""

import contextlib
import os
import shutil
import tempfile
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from securevfl.core import files


class TemporaryFolder:
    """A temporary run folder, removed when no object refers to it, or Python ends.

    ``tempfile.TemporaryDirectory`` warns when it is left to that, and a result in memory always is.
    What a killed program has left is removed when the next folder is made: no process holds its
    lock, which parties that are still at work do too.
    """

    def __init__(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix=_NEW))
        held = None
        if files.LOCKS_ITSELF:
            _remove_left()
            held = os.open(self.path / _HELD, os.O_CREAT | os.O_RDWR, 0o600)
            files.lock(held, self.path / _HELD, shared=False)
            # It has this name from when it is locked.
            self.path = self.path.rename(
                self.path.with_name(f"{_LEFT}{self.path.name.removeprefix(_NEW)}")
            )
        self._removal = weakref.finalize(self, _remove, self.path, os.getpid(), held)

    def remove(self) -> None:
        """Remove it now."""
        self._removal()

    def __getstate__(self) -> dict[str, bytes]:
        """Return what is in it: another process has other folders, and this one may go before."""
        return {
            str(path.relative_to(self.path)): path.read_bytes()
            for path in sorted(self.path.rglob("*"))
            if path.is_file() and path.name != _HELD
        }

    def __setstate__(self, contents: Mapping[str, bytes]) -> None:
        self.__init__()  # type: ignore[misc]
        for name, content in contents.items():
            files.write_bytes(self.path / name, content)


_HELD: Final = ".held"
_NEW: Final = "securevfl-new-"
_LEFT: Final = "securevfl-run-"


def _remove_left() -> None:
    for folder in Path(tempfile.gettempdir()).glob(f"{_LEFT}*"):
        # One that cannot be opened or locked is in use, or another user's.
        with contextlib.suppress(OSError), (folder / _HELD).open("rb") as held:
            files.lock(held.fileno(), folder / _HELD, shared=False)
            if not folder.is_symlink():
                shutil.rmtree(folder, ignore_errors=True)


def _remove(path: Path, owner: int, held: int | None) -> None:
    if os.getpid() == owner:  # and not a process that was forked from it
        shutil.rmtree(path, ignore_errors=True)
        if held is not None:
            os.close(held)
