"""An append-only file of JSON lines that hang together by a :class:`Chain`.

An edit in the middle shows at once. :attr:`ChainedFile.head`, kept elsewhere, shows a cut at the
end too, and a file that was written anew. Every line is synced to the disk before
:meth:`ChainedFile.append` returns, unless the file is opened otherwise. Opening a file never alters
it: what a crash left is mended by the first append, which comes after its reader has found that the
lines are its own.
"""

import contextlib
import json
import os
import stat
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from securevfl.core.errors import ConfigError, PrivacyError, StorageError
from securevfl.core.files import BINARY, make_folder, sync_folder
from securevfl.core.locks import lock, remove_open
from securevfl.federation.chain import Chain

_OWNER_ONLY: Final = 0o600


def now() -> str:
    """Return the time as lines have it: in UTC, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


class ChainedFile:
    """One process's exclusive hold on such a file, or a record in memory without one."""

    def __init__(self, path: Path | None, *, durable: bool = True, read_only: bool = False) -> None:
        """Open ``path``, making it if there is none, and check the whole chain.

        Args:
            path: The file; None keeps the record in memory only.
            durable: Whether a line must outlive a crash of the machine, not only of the process.
            read_only: Whether to look only: a file that is not there is not made.

        Raises:
            ConfigError: If the file cannot be opened, or another process holds it.
            PrivacyError: If a line was altered, removed or put in, or all of them were.
        """
        self.path = path
        self._durable = durable
        self.entries: list[dict[str, Any]] = []
        """What the file held when it was opened, in order, without the chain's own fields."""
        self.chain = Chain()
        """The hashes of all its lines."""
        self._handle: int | None = None
        self._let_go: Callable[[], None] = lambda: None
        self._open = not read_only
        self._size = 0
        self._unended = False
        self._made = False
        if path is None:
            return
        self._handle, self._made, self._let_go = _open_locked(path, read_only=read_only)
        try:
            if not self._made:
                self._read(path)
        except BaseException:
            self.close()
            raise

    @property
    def head(self) -> str:
        """The chain's head after the last line, in hexadecimal digits."""
        return self.chain.head.hex()

    def append(self, entry: Mapping[str, Any]) -> None:
        """Write one line; if the file is durable, it is on the disk when this returns.

        Raises:
            PrivacyError: If the file is closed.
            StorageError: If the line cannot be written; it is not in the file then.
        """
        if not self._open:
            raise PrivacyError(f"ledger {self.path}: is closed; nothing may be released any more")
        line = self.chain.line_of(entry)
        if self._handle is not None:
            self._write(self._handle, f"{line}\n".encode())
        self.chain.add(line)

    def close(self) -> None:
        """Let the file go; later appends raise. One that got no line is removed."""
        self._open = False
        if self._handle is None:
            return
        if self._made and self._size == 0 and self.path is not None:
            remove_open(self.path, self._handle)
        else:
            os.close(self._handle)
        self._handle = None
        self._let_go()

    def _write(self, handle: int, data: bytes) -> None:
        whole = b"\n" + data if self._unended else data
        try:
            if os.fstat(handle).st_size != self._size:
                # A crash or a full disk within a write: that append never returned, so nothing
                # followed from it.
                os.ftruncate(handle, self._size)
            rest = memoryview(whole)
            while rest:
                rest = rest[os.write(handle, rest) :]
            if self._durable:
                os.fsync(handle)
        except OSError as error:
            with contextlib.suppress(OSError):
                os.ftruncate(handle, self._size)
            raise StorageError.of(f"ledger {self.path}", error) from None
        self._size += len(whole)
        self._unended = False

    def _read(self, path: Path) -> None:
        assert self._handle is not None  # set before the file is read
        with os.fdopen(os.dup(self._handle), "rb") as file:
            content = file.read()
        if not content:
            raise PrivacyError(
                f"ledger {path}: is empty, and a ledger never is; what was spent cannot be known. "
                f"Restore it from a copy, or remove the file if nothing was ever released"
            )
        *lines, tail = content.split(b"\n")
        for number, data in enumerate(lines, 1):
            self._take(data, where=f"ledger {path}, line {number}")
        self._size = len(content) - len(tail)
        if not tail or (lines and not _is_whole(tail)):
            return
        self._take(tail, where=f"ledger {path}, line {len(lines) + 1}")
        self._size, self._unended = len(content), True

    def _take(self, data: bytes, *, where: str) -> None:
        self.entries.append(self.chain.take(data, where=where))


def _is_whole(data: bytes) -> bool:
    """Return whether a last line without its newline lacks nothing else."""
    try:
        json.loads(data)
    except (ValueError, RecursionError):
        return False
    return True


def _open_locked(path: Path, *, read_only: bool) -> tuple[int, bool, Callable[[], None]]:
    """Return a handle that no other process has, whether the file is new, and what unlocks it."""
    try:
        handle, made = _opened(path, read_only=read_only)
    except OSError as error:
        raise ConfigError(f"ledger {path}: cannot be opened ({error.strerror})") from None
    try:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise ConfigError(f"ledger {path}: is not a file")
        let_go = lock(handle, path, shared=read_only)
        if made:
            # A new file's name survives a crash as well as its lines.
            sync_folder(path.parent)
    except (BlockingIOError, PermissionError):
        os.close(handle)
        raise ConfigError(
            f"ledger {path}: is in use by another run; wait for it, since two runs at a time "
            f"could spend the same budget twice"
        ) from None
    except OSError as error:
        os.close(handle)
        raise ConfigError(f"ledger {path}: cannot be locked ({error.strerror})") from None
    except BaseException:
        os.close(handle)
        raise
    return handle, made, let_go


def _opened(path: Path, *, read_only: bool) -> tuple[int, bool]:
    if read_only:
        return os.open(path, os.O_RDONLY | BINARY), False
    make_folder(path.parent)
    flags = os.O_RDWR | os.O_APPEND | BINARY
    try:
        return os.open(path, flags | os.O_CREAT | os.O_EXCL, _OWNER_ONLY), True
    except FileExistsError:
        return os.open(path, flags), False
