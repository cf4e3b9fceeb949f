"""Hash-chained file of JSON lines, append only, under a lock.

The head after a line is ``SHA-256(head before it || SHA-256(line))``. Whoever knows a head can be
shown by the hashes of later lines alone that a chain continues it: lines themselves stay at
home. Each line holds a random salt, so that its hash reveals nothing that could be guessed, and the
head before it, so that an edit in the middle shows to every reader of the file.

An edit in the middle shows at once. :attr:`ChainedFile.head`, kept elsewhere, shows a cut at the
end too, and a file that was written anew. Every line is synced to the disk before
:meth:`ChainedFile.append` returns, unless the file is opened otherwise. Opening a file never alters
it: what a crash left is mended by the first append, which comes after its reader has found that the
lines are its own. A file that is made has its first line in it from its first moment on.

Before each line, and once more at the end of a run (:meth:`ChainedFile.require_in_place`), the file
must be the one that lies at its path, as long as this process has left it, and end with the line
that this process knows. Otherwise it was moved, removed, replaced, cut or written to, what follows
could be lost, and nothing is appended any more. Bytes that were altered before the last line show
when the file is next opened.
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

# A chain of lines by their hashes: what a ledger's lines hang together by.

GENESIS: Final = bytes(32)
"""The head of a chain without lines."""
HASH_BYTES: Final = 32

_SALT_BYTES: Final = 16
MOST_LEVELS: Final = 16
"""Most levels of nested lists and objects in a line."""
MOST_LINE_BYTES: Final = 64 * 2**20
"""Bytes of a line: the ids of the rows of a round, or of the records released in it."""
_TORN: Final = re.compile(rb'\{(?:"[ -~]*)?')
"""A line's beginning, which JSON writes in printable ASCII."""


def head_after(head: bytes, line_hashes: Iterable[bytes]) -> bytes:
    """Return the head of a chain that went on from ``head`` by lines of these hashes."""
    for line_hash in line_hashes:
        head = hashlib.sha256(head + line_hash).digest()
    return head


class Chain:
    """The hashes of lines, and the head after each of them: 64 bytes a line."""

    def __init__(self) -> None:
        # In one piece each: a run of many rounds has many lines.
        self._hashes = bytearray()
        self._heads = bytearray(GENESIS)

    @property
    def lines(self) -> int:
        """How many lines there are."""
        return len(self._hashes) // HASH_BYTES

    def hashes_after(self, lines: int) -> list[bytes]:
        """Return the SHA-256 of each line after so many, in order."""
        rest = bytes(self._hashes[lines * HASH_BYTES :])
        return [rest[at : at + HASH_BYTES] for at in range(0, len(rest), HASH_BYTES)]

    @property
    def head(self) -> bytes:
        """The head after the last line."""
        return bytes(self._heads[-HASH_BYTES:])

    def head_at(self, lines: int) -> bytes | None:
        """Return the head after so many lines; None if there are fewer."""
        if not 0 <= lines <= self.lines:
            return None
        return bytes(self._heads[lines * HASH_BYTES : (lines + 1) * HASH_BYTES])

    def contains(self, head: str) -> bool:
        """Return whether ``head``, in hexadecimal digits, was the head at some time."""
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
        """Go on by a line that :meth:`line_of` made."""
        line_hash = hashlib.sha256(line.encode()).digest()
        self._heads += head_after(self.head, [line_hash])
        self._hashes += line_hash

    def take(self, data: bytes, *, where: str) -> dict[str, Any]:
        """Go on by a line that was read; return what it holds, without the chain's own fields.

        Args:
            data: The line, without its end.
            where: The file and the line's number, for messages.

        Raises:
            ConfigError: If an earlier version wrote it.
            PrivacyError: If it is no such line, or does not follow from the one before it.
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
    """Read a file of lines without holding it; return their chain and what they hold.

    A last line without its end is a write that never returned, and not read.

    Raises:
        ConfigError: If the file cannot be read, or an earlier version wrote it.
        PrivacyError: If a line was altered, removed or put in, or there is none.
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


# An append-only file of JSON lines that hang together by a :class:`Chain`.

_OWNER_ONLY: Final = 0o600


Take = Callable[[dict[str, Any], str], None]
"""Takes in what a line holds; the second argument names the file and the line, for messages."""


def now() -> str:
    """Return the time as lines have it: in UTC, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


class ChainedFile:
    """One process's exclusive hold on such a file, or a record in memory without one."""

    def __init__(
        self,
        path: Path | None,
        *,
        durable: bool = True,
        read_only: bool = False,
        take: Take | None = None,
    ) -> None:
        """Open ``path`` and check the whole chain; one that is not there is made by the first line.

        Args:
            path: The file; None keeps the record in memory only.
            durable: Whether a line must outlive a crash of the machine, not only of the process.
            read_only: Whether to look only: a file that is not there is not made.
            take: Gets what each line of the file holds, one after another, and where it stands. A
                file of many lines is many times as large in memory; None keeps all of it.

        Raises:
            ConfigError: If the file cannot be opened, or another process holds it.
            PrivacyError: If a line was altered, removed or put in, or all of them were.
        """
        self.path = path
        self.durable = durable
        """Whether a line outlives a crash of the machine."""
        self.entries: list[dict[str, Any]] = []
        """What the file held when it was opened, in order, without the chain's own fields; empty
        where they were taken."""
        self._taken = take or (lambda entry, _: self.entries.append(entry))
        self.chain = Chain()
        """The hashes of all its lines."""
        self._handle: int | None = None
        self._let_go: Callable[[], None] = lambda: None
        self._open = not read_only
        self._place = None if path is None else path.absolute()
        self._size = 0
        """Bytes of whole lines."""
        self._left = 0
        """Bytes of the file as this process found or left it; a torn line's among them."""
        self._last = b""
        """The last whole line, as it lies in the file."""
        self._unended = False
        if path is None or not (read_only or os.path.lexists(path)):
            return
        self._handle, self._let_go = _open_locked(path, read_only=read_only)
        try:
            self._read(path)
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
        """Write one line; if the file is durable, it is on the disk when this returns.

        Raises:
            ConfigError: If the file was not there, and cannot be made, or another process has made
                it.
            PrivacyError: If the file is closed, or not what this process has left.
            StorageError: If the line cannot be written; it is not in the file then.
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
        """Refuse a file that was moved, removed, replaced, cut or written to under this process.

        Lines that another program has appended are refused too, not cut off: where locks do not
        hold, as on some network folders, they may be another run's charges.

        Raises:
            PrivacyError: Saying what was done; later appends raise too.
            StorageError: If the system cannot say.
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
        """Return what was done to the file since this process last touched it."""
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
        """Let the file go; later appends raise."""
        self._open = False
        if self._handle is None:
            return
        os.close(self._handle)
        self._handle = None
        self._let_go()

    def _make(self, path: Path, data: bytes) -> None:
        """Make the file with its first line in it: it is locked and whole before it has its name.

        Whoever is killed on the way leaves no ledger, and of two that make one at once one does.
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
                # A file system without links: a crash within the next lines leaves an empty file,
                # which is refused.
                self._forget()
                self._begin(path, path, data)
            files.sync_folder(path.parent)
        except (FileExistsError, FileNotFoundError, BlockingIOError):
            self._forget()
            raise _in_use(path) from None
        except OSError as error:
            self._forget()
            raise ConfigError(
                f"ledger {path}: cannot be made ({error.strerror}); let the table's folder be "
                f"written, or name a folder that stays for later runs as HOME (on Linux also as "
                f"XDG_STATE_HOME)"
            ) from None
        except BaseException:
            self._forget()
            raise
        finally:
            with contextlib.suppress(OSError):  # Windows keeps it while it is open
                temporary.unlink()
        files.remove_unfinished_of(path)

    def _begin(self, name: Path, path: Path, data: bytes) -> None:
        """Make a file of that name, with the lock that is the ledger's, and its first line."""
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
        """Let go of a file that was not made."""
        if self._handle is not None:
            os.close(self._handle)
        self._handle, self._size, self._left = None, 0, 0
        self._let_go()
        self._let_go = lambda: None

    def _write(self, handle: int, data: bytes) -> None:
        whole = b"\n" + data if self._unended else data
        try:
            if self._left > self._size:
                # A crash or a full disk within a write: that append never returned, so nothing
                # followed from it.
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

    def _read(self, path: Path) -> None:
        assert self._handle is not None  # set before the file is read
        # A line that was edited shows by the next one: nothing of it is read before that.
        before: tuple[dict[str, Any], str] | None = None
        # Line by line: a long run's file has tens of megabytes, and a process keeps what it had.
        with os.fdopen(os.dup(self._handle), "rb") as file:
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
        self._left = os.fstat(self._handle).st_size


def _require_torn(data: bytes, *, where: str) -> None:
    """Refuse a file's end that no crash leaves of a line which was being written.

    Raises:
        PrivacyError: If it is no beginning of a line, or longer than one is.
    """
    if len(data) > MOST_LINE_BYTES or not _TORN.fullmatch(data):
        raise PrivacyError(
            f"{where}: is no line, and no beginning of one either: {len(data)} bytes of the file "
            f"were overwritten. Restore it from a copy"
        )


def _is_whole(data: bytes) -> bool:
    """Return whether a last line without its newline lacks nothing else."""
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
    """Return a handle that no other process has, and what unlocks it."""
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
