"""Hash-chained, append-only file of JSON lines, under a lock.

The head after a line is ``SHA-256(head before it || SHA-256(line))``. To somebody who knows a head,
the hashes of later lines prove that a chain continues it, without the lines themselves. Each line
holds a random salt, so that its content cannot be guessed from its hash, and the head before it, so
that every reader of the file notices an edit in the middle.

A copy of :attr:`ChainedFile.head` elsewhere also reveals a cut at the end, and a rewritten file.
Every line is synced to the disk before :meth:`ChainedFile.append` returns, unless ``durable`` is
False. Opening a file never changes it: the first append repairs an unfinished line, after the
reader has accepted the content. A new file has its first line from the beginning.

Before each append, and at the end of a run (:meth:`ChainedFile.require_in_place`), the open file
must still be the one at its path, have the length that this process has left, and end with the last
line that this process knows. Otherwise it was moved, removed, replaced, cut or written to, later
lines could be lost, and nothing more is appended. Changes before the last line are noticed when the
file is next opened.
"""

import contextlib
import hashlib
import json
import os
import re
import secrets
import stat
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from securevfl.core import files
from securevfl.core.checks import strict_json
from securevfl.core.errors import ConfigError, PrivacyError, StorageError

GENESIS: Final = bytes(32)
"""Head of a chain without lines."""
HASH_BYTES: Final = 32

_SALT_BYTES: Final = 16
MOST_LEVELS: Final = 16
"""Most levels of nested lists and objects in a line."""
MOST_LINE_BYTES: Final = 64 * 2**20
"""Most bytes of a line, which may hold the ids of the rows or records released in a round."""
_TORN: Final = re.compile(rb'\{(?:"[ -~]*)?')
"""A line's beginning, which JSON writes in printable ASCII."""


def head_after(head: bytes, line_hashes: Iterable[bytes]) -> bytes:
    """Return the head of a chain that continues ``head`` by lines with these hashes."""
    for line_hash in line_hashes:
        head = hashlib.sha256(head + line_hash).digest()
    return head


class Chain:
    """A chain of lines: each line's hash, and the head after it."""

    def __init__(self) -> None:
        # Stored in one piece each, since a long run has many lines.
        self._hashes = bytearray()
        self._heads = bytearray(GENESIS)

    @property
    def lines(self) -> int:
        """Number of lines."""
        return len(self._hashes) // HASH_BYTES

    def hashes_after(self, lines: int) -> list[bytes]:
        """Return the SHA-256 of each line after the first ``lines``, in order."""
        rest = bytes(self._hashes[lines * HASH_BYTES :])
        return [rest[at : at + HASH_BYTES] for at in range(0, len(rest), HASH_BYTES)]

    @property
    def head(self) -> bytes:
        """The head after the last line."""
        return bytes(self._heads[-HASH_BYTES:])

    def head_at(self, lines: int) -> bytes | None:
        """Return the head after ``lines`` lines; None if there are fewer."""
        if not 0 <= lines <= self.lines:
            return None
        return bytes(self._heads[lines * HASH_BYTES : (lines + 1) * HASH_BYTES])

    def contains(self, head: str) -> bool:
        """Return whether ``head``, in hexadecimal digits, is the head after some line."""
        try:
            wanted = bytes.fromhex(head)
        except ValueError:
            return False
        return any(wanted == self.head_at(lines) for lines in range(self.lines + 1))

    def line_of(self, entry: Mapping[str, Any]) -> str:
        """Return the text of the next line."""
        salt = secrets.token_hex(_SALT_BYTES)
        return json.dumps({**entry, "salt": salt, "previous": self.head.hex()}, allow_nan=False)

    def add(self, line: str) -> None:
        """Append a line from :meth:`line_of`."""
        line_hash = hashlib.sha256(line.encode()).digest()
        self._heads += head_after(self.head, [line_hash])
        self._hashes += line_hash

    def take(self, data: bytes, *, where: str) -> dict[str, Any]:
        """Append a line that was read; return its content without the chain's own fields.

        Args:
            data: The line, without its end.
            where: The file and the line's number, for messages.

        Raises:
            ConfigError: If an earlier version wrote it.
            PrivacyError: If the line is invalid, or does not follow from the one before it.
        """
        try:
            line = data.decode()
            entry: dict[str, Any] = strict_json(line, depth=MOST_LEVELS)
            previous = entry.pop("previous")
            salt = entry.pop("salt", None)
        except (ValueError, KeyError, AttributeError, TypeError):
            raise PrivacyError(f"{where}: is not a ledger's line") from None
        if salt is None:
            raise ConfigError(
                f"{where}: was written by an earlier version of this program, whose lines hang "
                f"together in another way; finish with that version, or use another ledger"
            )
        if previous != self.head.hex():
            raise PrivacyError(
                f"{where}: does not follow from the line before it; the file was altered, and what "
                f"was spent cannot be known. Restore it from a copy"
            )
        self.add(line)
        return entry


def read_chain(path: Path) -> tuple[Chain, list[dict[str, Any]]]:
    """Read a file without locking it; return its chain and the content of its lines.

    An unfinished last line is ignored.

    Raises:
        ConfigError: If the file cannot be read, or an earlier version wrote it.
        PrivacyError: If a line was changed, removed or inserted, or there is none.
    """
    try:
        *lines, torn = path.read_bytes().split(b"\n")
    except OSError as error:
        raise ConfigError(f"ledger {path}: cannot be read ({error.strerror})") from None
    if not lines:
        raise PrivacyError(f"ledger {path}: is empty, and a ledger never is")
    if torn and not _is_whole(torn):
        _require_torn(torn, where=f"ledger {path}, line {len(lines) + 1}")
    chain = Chain()
    entries = [
        chain.take(data, where=f"ledger {path}, line {number}")
        for number, data in enumerate(lines, 1)
    ]
    return chain, entries


_OWNER_ONLY: Final = 0o600


Take = Callable[[dict[str, Any], str], None]
"""Called with the content of a line, and with the names of file and line for messages."""


def now() -> str:
    """Return the current time as lines have it: in UTC, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


class ChainedFile:
    """A hash-chained file that this process has locked, or a record in memory."""

    def __init__(
        self,
        path: Path | None,
        *,
        durable: bool = True,
        read_only: bool = False,
        take: Take | None = None,
    ) -> None:
        """Open ``path`` and check the whole chain; the first append creates a missing file.

        Args:
            path: The file; None keeps the lines in memory only.
            durable: Whether a line must survive a crash of the machine, not only of the process.
            read_only: Whether to read only, without creating a missing file.
            take: Called with the content of each line of the file and its place. None keeps all of
                them in :attr:`entries`, which takes much more memory than the file.

        Raises:
            ConfigError: If the file cannot be opened, or another process holds it.
            PrivacyError: If a line was changed, removed or inserted, or all were removed.
        """
        self.path = path
        self.durable = durable
        """Whether a line outlives a crash of the machine."""
        self.entries: list[dict[str, Any]] = []
        """Content of the lines when the file was opened, in order, without the chain's own fields;
        empty if ``take`` got them."""
        self._taken = take or (lambda entry, _: self.entries.append(entry))
        self.chain = Chain()
        """The hashes of all its lines."""
        self._handle: int | None = None
        self._let_go: Callable[[], None] = lambda: None
        self._open = not read_only
        self._place = None if path is None else path.absolute()
        self._size = 0
        """Bytes of complete lines."""
        self._left = 0
        """Bytes of the file as this process has left it, including an unfinished line."""
        self._last = b""
        """The last complete line, as bytes of the file."""
        self._unended = False
        if path is None or not (read_only or os.path.lexists(path)):
            return
        handle, self._let_go = _open_locked(path, read_only=read_only)
        self._handle = handle
        try:
            self._read(path, handle)
            if not read_only:
                files.remove_unfinished_of(path)
        except BaseException:
            self.close()
            raise

    @property
    def head(self) -> str:
        """The chain's head after the last line, in hexadecimal digits."""
        return self.chain.head.hex()

    def append(self, entry: Mapping[str, Any]) -> None:
        """Append a line; if the file is durable, it is on the disk when this returns.

        Raises:
            ConfigError: If the file is missing and cannot be created, or another process has
                created it.
            PrivacyError: If the file is closed, or was changed by another process.
            StorageError: If the line cannot be written; the file is then without it.
        """
        if not self._open:
            raise PrivacyError(f"ledger {self.path}: is closed; nothing may be released any more")
        self.require_in_place()
        line = self.chain.line_of(entry)
        data = f"{line}\n".encode()
        if len(data) > MOST_LINE_BYTES:
            raise PrivacyError(f"ledger {self.path}: takes no line of {len(data)} bytes")
        if self._handle is not None:
            self._write(self._handle, data)
        elif self.path is not None:
            self._make(self.path, data)
        self.chain.add(line)

    def require_in_place(self) -> None:
        """Refuse a file that was moved, removed, replaced, cut or written to by another process.

        Lines that another program has appended are not cut off: where locks do not work, as in some
        network folders, they may be another run's charges.

        Raises:
            PrivacyError: Naming the change; later appends raise too.
            StorageError: If the file cannot be checked.
        """
        if self._handle is None or self._place is None:
            return
        try:
            what = self._find_alteration(self._handle, self._place)
        except OSError as error:
            raise StorageError.of(f"ledger {self.path}", error) from None
        if what is not None:
            self.close()
            raise PrivacyError(
                f"ledger {self.path}: {what} while this run was using it, so charges could be "
                f"lost, and nothing more is released. Restore it from the newest copy, and book "
                f"what that may lack: securevfl ledger restored TABLE"
            )

    def _find_alteration(self, handle: int, place: Path) -> str | None:
        """Return the change to the file since this process last wrote it; None if there is none."""
        own = os.fstat(handle)
        try:
            named = place.stat()
        except (FileNotFoundError, NotADirectoryError):
            return "was moved or removed"
        if own.st_nlink == 0 or not os.path.samestat(own, named):
            return "was replaced by another file"
        if own.st_size < self._left:
            return f"was cut by {self._left - own.st_size} bytes"
        if own.st_size > self._left:
            return f"got {own.st_size - self._left} bytes from another program"
        os.lseek(handle, self._size - len(self._last), os.SEEK_SET)
        if os.read(handle, len(self._last)) != self._last:
            return "was overwritten"
        return None

    def close(self) -> None:
        """Close and unlock the file; later appends raise."""
        self._open = False
        if self._handle is None:
            return
        os.close(self._handle)
        self._handle = None
        self._let_go()

    def _make(self, path: Path, data: bytes) -> None:
        """Create the file with its first line; it is locked and complete before it gets its name.

        A process that is killed meanwhile leaves no ledger; of two that create one at once, one
        succeeds.
        """
        temporary = files.beside(path)
        try:
            files.make_folder(path.parent)
            self._begin(temporary, path, data)
            try:
                os.link(temporary, path)
            except (FileExistsError, FileNotFoundError):
                raise
            except OSError:
                # On a file system without links, a crash now would leave an empty file, which is
                # refused.
                self._forget()
                self._begin(path, path, data)
            files.sync_folder(path.parent)
        except (FileExistsError, FileNotFoundError, BlockingIOError):
            self._forget()
            raise _in_use(path) from None
        except OSError as error:
            self._forget()
            raise ConfigError(
                f"ledger {path}: cannot be made ({error.strerror}); it needs a folder that can be "
                f"written and locked: with the table, or in HOME (on Linux also XDG_STATE_HOME), "
                f"which later runs need too; of a simulation, the run folder (--out)"
            ) from None
        except BaseException:
            self._forget()
            raise
        finally:
            with contextlib.suppress(OSError):  # Windows cannot remove an open file
                temporary.unlink()
        files.remove_unfinished_of(path)

    def _begin(self, name: Path, path: Path, data: bytes) -> None:
        """Create the file ``name`` with its first line, and lock the ledger at ``path``."""
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_EXCL | files.BINARY
        self._handle = os.open(name, flags, _OWNER_ONLY)
        try:
            self._let_go = files.lock(self._handle, path, shared=False)
            self._write(self._handle, data)
        except BaseException:
            self._forget()
            name.unlink(missing_ok=True)
            raise

    def _forget(self) -> None:
        """Close and unlock a file that could not be created."""
        if self._handle is not None:
            os.close(self._handle)
        self._handle, self._size, self._left = None, 0, 0
        self._let_go()
        self._let_go = lambda: None

    def _write(self, handle: int, data: bytes) -> None:
        whole = b"\n" + data if self._unended else data
        try:
            if self._left > self._size:
                # An unfinished line of a crash or a full disk: its append never returned, so
                # nothing depends on it.
                os.ftruncate(handle, self._size)
            rest = memoryview(whole)
            while rest:
                rest = rest[os.write(handle, rest) :]
            if self.durable:
                os.fsync(handle)
        except OSError as error:
            with contextlib.suppress(OSError):
                os.ftruncate(handle, self._size)
            self._left = os.fstat(handle).st_size
            raise StorageError.of(f"ledger {self.path}", error) from None
        self._size += len(whole)
        self._left, self._last = self._size, data
        self._unended = False

    def _read(self, path: Path, handle: int) -> None:
        # The next line reveals an edit of a line, so a line is used only after the next one is
        # checked.
        before: tuple[dict[str, Any], str] | None = None
        # Read line by line, since a long run's file has tens of megabytes.
        with os.fdopen(os.dup(handle), "rb") as file:
            for number, data in enumerate(file, 1):
                ended = data.endswith(b"\n")
                where = f"ledger {path}, line {number}"
                if not (ended or number == 1 or _is_whole(data)):
                    _require_torn(data, where=where)
                    break
                entry = self.chain.take(data.removesuffix(b"\n"), where=where)
                if before is not None:
                    self._taken(*before)
                before = entry, where
                self._size += len(data)
                self._last = data
                self._unended = not ended
        if before is None:
            raise PrivacyError(
                f"ledger {path}: is empty, and a ledger never is; what was spent cannot be known. "
                f"Restore it from a copy, or remove the file if nothing was ever released"
            )
        self._taken(*before)
        self._left = os.fstat(handle).st_size


def _require_torn(data: bytes, *, where: str) -> None:
    """Refuse a file's end that cannot be an unfinished line.

    Raises:
        PrivacyError: If it is not the beginning of a line, or too long.
    """
    if len(data) > MOST_LINE_BYTES or not _TORN.fullmatch(data):
        raise PrivacyError(
            f"{where}: is no line, and no beginning of one either: {len(data)} bytes of the file "
            f"were overwritten. Restore it from a copy"
        )


def _is_whole(data: bytes) -> bool:
    """Return whether a last line without newline is complete otherwise."""
    try:
        json.loads(data)
    except (ValueError, RecursionError):
        return False
    return True


def _in_use(path: Path) -> ConfigError:
    return ConfigError(
        f"ledger {path}: is in use by another run; wait for it, since two runs at a time "
        f"could spend the same budget twice"
    )


def _open_locked(path: Path, *, read_only: bool) -> tuple[int, Callable[[], None]]:
    """Return a locked file's descriptor, and a function that unlocks it."""
    flags = os.O_RDONLY if read_only else os.O_RDWR | os.O_APPEND
    try:
        handle = os.open(path, flags | files.BINARY)
    except OSError as error:
        raise ConfigError(f"ledger {path}: cannot be opened ({error.strerror})") from None
    try:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise ConfigError(f"ledger {path}: is not a file")
        return handle, files.lock(handle, path, shared=read_only)
    except (BlockingIOError, PermissionError):
        os.close(handle)
        raise _in_use(path) from None
    except OSError as error:
        os.close(handle)
        raise ConfigError(f"ledger {path}: cannot be locked ({error.strerror})") from None
    except BaseException:
        os.close(handle)
        raise
