"""The token that a client shows: from a file or a variable, never from a command line."""

import hashlib
import hmac
import os
import secrets
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from securevfl.core import files
from securevfl.core.errors import ConfigError

VARIABLE: Final = "SECUREVFL_TOKEN"
FILE: Final = "serve.token"

_FEWEST: Final = 16
_FRESH_BYTES: Final = 32


@dataclass(frozen=True, slots=True)
class Token:
    """A token's digest; the token itself is forgotten."""

    digest: bytes
    source: str
    """Where it was found, to be told to the operator."""

    def fits(self, authorization: bytes | None) -> bool:
        """Return whether a header shows it, in a time that does not depend on how wrong it is.

        Args:
            authorization: The value of ``Authorization``; None without one.
        """
        scheme, _, shown = (authorization or b"").partition(b" ")
        same = hmac.compare_digest(_digest(shown.strip()), self.digest)
        return same and scheme.lower() == b"bearer"


def token_of(path: Path | None, *, folder: Path) -> Token:
    """Return the token that clients must show.

    Args:
        path: Its file; None takes the variable ``SECUREVFL_TOKEN`` and, without it, the file
            ``serve.token`` in ``folder``, which is made if it is not there.
        folder: The run's.

    Raises:
        ConfigError: If the file cannot be read, others can read it, or the token is too short.
        StorageError: If a new one cannot be written.
    """
    if path is None and os.environ.get(VARIABLE):
        return _checked(os.environ[VARIABLE], source=f"the variable {VARIABLE}")
    place = folder / FILE if path is None else path
    if path is None and not place.exists():
        fresh = secrets.token_urlsafe(_FRESH_BYTES)
        files.write_text(place, f"{fresh}\n")
        return _checked(fresh, source=f"{place} (made now)")
    try:
        mode, text = place.stat().st_mode, place.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--token-file {place}: cannot be read ({error})") from None
    if os.name == "posix" and mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise ConfigError(f"--token-file {place}: others can read it; run chmod 600 {place}")
    return _checked(text.strip(), source=str(place))


def _checked(text: str, *, source: str) -> Token:
    if len(text) < _FEWEST or not text.isascii() or not text.isprintable() or " " in text:
        raise ConfigError(
            f"token of {source}: must be at least {_FEWEST} printable ASCII characters without "
            f"spaces; 'openssl rand -hex 32' makes one"
        )
    return Token(_digest(text.encode()), source)


def _digest(shown: bytes) -> bytes:
    # Digests are equally long, whatever was shown.
    return hashlib.sha256(shown).digest()
