"""An append-only file of JSON lines that hang together by a :class:`Chain`.

An edit in the middle shows at once. :attr:`ChainedFile.head`, kept elsewhere, shows a cut at the
end too, and a file that was written anew. Every line is synced to the disk before
:meth:`ChainedFile.append` returns, unless the file is opened otherwise.
"""

import errno
import fcntl
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from securevfl.core.errors import ConfigError, PrivacyError
from securevfl.federation.chain import Chain

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
        """What the file held when it was opened, in order, without the chain's own fields."""
        self.chain = Chain()
        """The hashes of all its lines."""
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
        """The chain's head after the last line, in hexadecimal digits."""
        return self.chain.head.hex()

    def append(self, entry: Mapping[str, Any]) -> None:
        """Write one line; if the file is durable, it is on the disk when this returns.

        Raises:
            PrivacyError: If the file is closed.
        """
        if not self._open:
            raise PrivacyError(f"ledger {self.path}: is closed; nothing may be released any more")
        line = self.chain.line_of(entry)
        if self._handle is not None:
            data = memoryview(f"{line}\n".encode())
            while data:
                data = data[os.write(self._handle, data) :]
            if self._durable:
                os.fsync(self._handle)
        self.chain.add(line)

    def close(self) -> None:
        """Let the file go; later appends raise."""
        self._open = False
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None

    def _read(self, path: Path) -> None:
        content = path.read_bytes()
        whole = content[: content.rfind(b"\n") + 1]
        if len(whole) < len(content):
            assert self._handle is not None  # set before the file is read
            # A crash within a write: that append never returned, so nothing followed from it.
            os.ftruncate(self._handle, len(whole))
        for number, data in enumerate(whole.splitlines(), 1):
            self.entries.append(self.chain.take(data, where=f"ledger {path}, line {number}"))


def _open_locked(path: Path) -> int:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
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
