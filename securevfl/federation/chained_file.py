"""An append-only file of JSON lines, each holding the hash of the line before it.

An edit in the middle shows at once. :attr:`ChainedFile.head`, kept elsewhere, shows a cut at the
end too. Every line is synced to the disk before :meth:`ChainedFile.append` returns, unless the
file is opened otherwise.
"""

import errno
import fcntl
import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from securevfl.core.errors import ConfigError, PrivacyError, StorageError
from securevfl.core.files import make_folder

_GENESIS: Final = "0" * 64
_OWNER_ONLY: Final = 0o600


class ChainedFile:
    """One process's exclusive hold on such a file, or a record in memory without one."""

    def __init__(self, path: Path | None, *, durable: bool = True) -> None:
        """Open ``path``, making it if there is none, and check the whole chain.

        Args:
            path: The file; None keeps the record in memory only.
            durable: Whether a line must outlive a crash of the machine, not only of the process.

        Raises:
            ConfigError: If the file cannot be opened, or another process holds it.
            PrivacyError: If a line was altered, removed or put in.
        """
        self.path = path
        self._durable = durable
        self.entries: list[dict[str, Any]] = []
        """What the file held when it was opened, in order, without the chain's own hashes."""
        self._head = _GENESIS
        self._hashes = {_GENESIS}
        self._handle: int | None = None
        self._open = True
        if path is None:
            return
        self._handle = _open_locked(path)
        try:
            self._read(path)
        except BaseException:
            self.close()
            raise

    @property
    def head(self) -> str:
        """Hash of the last line."""
        return self._head

    def contains(self, head: str) -> bool:
        """Return whether ``head`` was the chain's head at some time."""
        return head in self._hashes

    def append(self, entry: Mapping[str, Any]) -> None:
        """Write one line; if the file is durable, it is on the disk when this returns.

        Raises:
            PrivacyError: If the file is closed.
            StorageError: If the line cannot be written; the file is closed then.
        """
        if not self._open:
            raise PrivacyError(f"ledger {self.path}: is closed; nothing may be released any more")
        line = json.dumps({**entry, "previous": self._head}, allow_nan=False)
        if self._handle is not None:
            data = memoryview(f"{line}\n".encode())
            try:
                while data:
                    data = data[os.write(self._handle, data) :]
                if self._durable:
                    os.fsync(self._handle)
            except OSError as error:
                self.close()  # half a line may be there, and nothing may follow it
                raise StorageError.of(f"ledger {self.path}", error) from None
        self._chain(line)

    def close(self) -> None:
        """Let the file go; later appends raise."""
        self._open = False
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None

    def _chain(self, line: str) -> None:
        self._head = hashlib.sha256(line.encode()).hexdigest()
        self._hashes.add(self._head)

    def _read(self, path: Path) -> None:
        content = path.read_bytes()
        whole = content[: content.rfind(b"\n") + 1]
        if len(whole) < len(content):
            assert self._handle is not None  # set before the file is read
            # A crash within a write: that append never returned, so nothing followed from it.
            os.ftruncate(self._handle, len(whole))
        for number, data in enumerate(whole.splitlines(), 1):
            try:
                line = data.decode()
                entry = json.loads(line)
                previous = entry.pop("previous")
            except (ValueError, KeyError, AttributeError, TypeError):
                raise PrivacyError(
                    f"ledger {path}, line {number}: is not a ledger's line"
                ) from None
            if previous != self._head:
                raise PrivacyError(
                    f"ledger {path}, line {number}: does not follow from the line before it; the "
                    f"file was altered, and what was spent cannot be known. Restore it from a copy"
                )
            self._chain(line)
            self.entries.append(entry)


def _open_locked(path: Path) -> int:
    try:
        make_folder(path.parent)
        handle = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, _OWNER_ONLY)
    except OSError as error:
        raise ConfigError(f"ledger {path}: cannot be opened ({error.strerror})") from None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # A new file's name must survive a crash as well as its lines.
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except OSError as error:
        os.close(handle)
        if error.errno in (errno.EAGAIN, errno.EACCES):
            raise ConfigError(
                f"ledger {path}: is in use by another run; wait for it, since two runs at a time "
                f"could spend the same budget twice"
            ) from None
        raise ConfigError(f"ledger {path}: cannot be locked ({error.strerror})") from None
    return handle
