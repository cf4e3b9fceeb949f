"""The linkage secret of the data parties, from which every key of an encoding follows."""

import hashlib
import os
from pathlib import Path
from typing import Final

from securevfl.core.errors import ConfigError

SECRET_FILE: Final = "linkage.secret"  # noqa: S105 - a file's name
"""File of the linkage secret in a data party's own data root: no partner's file says where."""

_FEWEST_BYTES: Final = 16
_FRESH_BYTES: Final = 32
_MOST_BYTES: Final = hashlib.blake2b.MAX_KEY_SIZE


class LinkageSecret:
    """A key of at least 128 bits; everything that encodings depend on is derived from it.

    A holder can encode guesses and compare them with encodings. Data parties share it outside the
    federation, and the coordinator must not have it.
    """

    __slots__ = ("_key",)

    def __init__(self, key: bytes) -> None:
        """Take a key of 16 to 64 random bytes.

        Raises:
            ConfigError: If it is shorter or longer.
        """
        if not _FEWEST_BYTES <= len(key) <= _MOST_BYTES:
            raise ConfigError(
                f"linkage secret: must have {_FEWEST_BYTES} to {_MOST_BYTES} bytes, got {len(key)}"
            )
        self._key = key

    @classmethod
    def fresh(cls) -> "LinkageSecret":
        """Draw a new secret of 256 bits from the operating system."""
        return cls(os.urandom(_FRESH_BYTES))

    @classmethod
    def from_file(cls, path: Path) -> "LinkageSecret":
        """Read a secret that is written as hexadecimal digits.

        Raises:
            ConfigError: If the file cannot be read or holds something else.
        """
        try:
            return cls(bytes.fromhex(path.read_text(encoding="ascii").strip()))
        except OSError as error:
            raise ConfigError(
                f"linkage secret {path}: {error.strerror}; one of the data parties makes it "
                f"(openssl rand -hex 32 > {SECRET_FILE}), and each saves a copy in its --data-root"
            ) from None
        except UnicodeDecodeError:
            raise ConfigError(f"linkage secret {path}: must be hexadecimal digits") from None
        except ConfigError:
            raise
        except ValueError:
            raise ConfigError(f"linkage secret {path}: must be hexadecimal digits") from None

    def subkey(self, *purpose: str) -> bytes:
        """Return the 32-byte key of one purpose; other purposes' keys reveal nothing about it."""
        return self._hash("subkey", *purpose)

    def check_value(self, session: str) -> str:
        """Return what parties compare before linking: equal if and only if their secrets are.

        Args:
            session: Differs from run to run, so that values cannot be recognised or replayed.

        Reveals:
            To the receiver: nothing but whether two secrets are equal.
        """
        return self._hash("check", session).hex()

    def _hash(self, *words: str) -> bytes:
        text = "\x1f".join(("securevfl-linkage", *words))
        return hashlib.blake2b(text.encode(), key=self._key, digest_size=32).digest()

    def __repr__(self) -> str:
        return f"LinkageSecret({8 * len(self._key)} bits)"
