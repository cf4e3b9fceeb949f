"""Every error that securevfl raises on purpose, with the exit code it ends a command with.

SecureVflError                            exit code 1
+-- ConfigError (ValueError)              2   a setting is impossible: fix the file or the argument
+-- DataError (ValueError)                2   a table is not what it should be: fix the table
+-- EncodingRangeError (ValueError)       2   a value does not fit the fixed-point ring
+-- PrivacyError                          4   the guarantee asked for does not hold
|   +-- BudgetExceededError               4   a release would spend more than was granted
+-- ProtocolError (RuntimeError)          3   the parties disagree: the run must stop
    +-- AuthenticationError               3   a party is not who the federation file says
    +-- PartyFailedError                  3   a party raised or died
    +-- PartyTimeoutError                 3   a party was silent past its deadline
"""

import traceback
from pathlib import Path
from typing import ClassVar


class SecureVflError(Exception):
    """Base of every error raised on purpose; a command prints its text and no traceback."""

    exit_code: ClassVar[int] = 1


class ConfigError(SecureVflError, ValueError):
    """A setting is impossible."""

    exit_code: ClassVar[int] = 2


class DataError(SecureVflError, ValueError):
    """A party's table is not what it should be."""

    exit_code: ClassVar[int] = 2


class EncodingRangeError(SecureVflError, ValueError):
    """A value does not fit the fixed-point ring; nothing was sent."""

    exit_code: ClassVar[int] = 2


class PrivacyError(SecureVflError):
    """The guarantee that was asked for does not hold for what would run."""

    exit_code: ClassVar[int] = 4


class BudgetExceededError(PrivacyError):
    """A release would spend more privacy than was granted; nothing was released."""


class ProtocolError(SecureVflError, RuntimeError):
    """The parties disagree about what happens next."""

    exit_code: ClassVar[int] = 3

    party: str | None = None
    """The party where it began, once that is known."""


class AuthenticationError(ProtocolError):
    """A peer's identity is not the one that the federation file pins."""


class PartyFailedError(ProtocolError):
    """Another party raised or died."""


class PartyTimeoutError(ProtocolError):
    """Another party was silent past its deadline."""


def in_one_line(error: Exception) -> str:
    """Return what an error of somebody else's code says, and where it was raised."""
    frames = traceback.extract_tb(error.__traceback__)
    # The innermost place that its author can look into: not Python's import machinery, nor torch.
    *_, last = (
        frame
        for frame in frames
        if not frame.filename.startswith("<frozen") and "torch" not in Path(frame.filename).parts
    )
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text} ({last.filename}:{last.lineno})"
