"""A chain of lines by their hashes: what a ledger's lines hang together by.

The head after a line is ``SHA-256(head before it || SHA-256(line))``. Whoever knows a head can be
shown by the hashes of later lines alone that a chain goes on from it: lines themselves stay at
home. Each line holds a random salt, so that its hash tells nothing that could be guessed, and the
head before it, so that an edit in the middle shows to whoever reads the file.
"""

import hashlib
import json
import secrets
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from securevfl.core.errors import ConfigError, PrivacyError
from securevfl.core.strict_json import strict_json

GENESIS: Final = bytes(32)
"""The head of a chain without lines."""
HASH_BYTES: Final = 32

_SALT_BYTES: Final = 16
MOST_LEVELS: Final = 16
"""Of lists and objects within one another, in a line."""


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
        *lines, _ = path.read_bytes().split(b"\n")
    except OSError as error:
        raise ConfigError(f"ledger {path}: cannot be read ({error.strerror})") from None
    if not lines:
        raise PrivacyError(f"ledger {path}: is empty, and a ledger never is")
    chain = Chain()
    entries = [
        chain.take(data, where=f"ledger {path}, line {number}")
        for number, data in enumerate(lines, 1)
    ]
    return chain, entries
