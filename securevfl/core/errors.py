"""Every error that securevfl raises on purpose, with the exit code of a command that it ends.

A command ends with code 2 where this party can mend it (settings, tables, disk, memory), 4 where a
guarantee does not hold, 3 where parties disagree or one is lost, and 1 for anything else.

An error's text is for the party where it is raised. Other parties receive
:meth:`SecureVflError.for_others`.
"""

import errno
import importlib.util
import os
import re
import traceback
from pathlib import Path
from typing import Any, ClassVar, Final

_LONGEST: Final = 2000
_SEE_LOG: Final = "its own log says more"
_NO_ROOM: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO)
_NO_MEMORY: Final = re.compile(
    r"allocate memory|out of memory|start new thread|could not create a (primitive|memory)"
)
# Signs that a text names a file or folder of this machine: a path, a file's ending, or a word of
# our messages before a file's name. Public keys may hold a slash and are no paths.
_PUBLIC_KEY: Final = re.compile(r"ed25519:[A-Za-z0-9+/=]+")
_LOCAL: Final = re.compile(
    r"[/\\]"
    r"|\.(arrow|bz2|csv|db|ddb|duckdb|feather|gz|ipc|jsonl?|key|log|npz?|parquet|pem|psv|pt|py)\b"
    r"|\.(sqlite3?|tab|toml|tsv|txt|xz|zip|zst)\b"
    r"|\b(folder|ledger|checkpoint|links|table|file|--out|--data-root|--identity) [^ ]+[:,]"
)


def printable_text(text: str, most: int) -> str:
    """Return text without control characters, cut to ``most`` characters.

    Received text is shown on a terminal, which obeys control characters.
    """
    cut = text if len(text) <= most else f"{text[: most - 1]}\u2026"
    return (
        cut
        if cut.isprintable()
        else "".join(letter if letter.isprintable() else " " for letter in cut)
    )


class SecureVflError(Exception):
    """Base of every error raised on purpose; a command prints its text without a traceback."""

    exit_code: ClassVar[int] = 1

    TOLD: ClassVar[str | None] = ""
    """Text sent to other parties instead of the error's own; None sends that if it names nothing of
    this machine."""

    def __str__(self) -> str:
        """The text as one line that is safe for a terminal or log.

        It may quote a message of another party or a file.
        """
        return printable_text(super().__str__(), _LONGEST)

    def for_others(self) -> str:
        """Return the text about this error that other organisations may read.

        Reveals:
            To the recipients: the kind of error; for errors of settings, privacy and protocol also
            the text, as far as it names no file. Never a record, a path, or spent privacy.
        """
        text, more = self.TOLD, ""
        if text is None:
            text = str(self)
            bare = _PUBLIC_KEY.sub("", text)
            if local := _LOCAL.search(bare):
                # The text before it names the culprit, whose own text may look like a path.
                text, more = bare[: local.start()].rpartition(": ")[0], f" ({_SEE_LOG})"
        name = type(self).__name__
        return f"{name}: {text}{more}" if text else f"{name} ({_SEE_LOG})"


class ConfigError(SecureVflError, ValueError):
    """A setting is invalid.

    To do:
        Change the setting or the option that the line names; ``securevfl check`` finds all of them.
    """

    exit_code: ClassVar[int] = 2
    TOLD: ClassVar[str | None] = None


class DataError(SecureVflError, ValueError):
    """A party's table is invalid.

    To do:
        Mend the column or the cells that the line names, or leave the column out by ``exclude``.
    """

    exit_code: ClassVar[int] = 2


class NoRowsError(DataError):
    """A table of new rows has columns, but no rows.

    To do:
        Give rows; ``predict`` accepts an empty table, and answers it at no cost.
    """


class EncodingRangeError(SecureVflError, ValueError):
    """A value does not fit the fixed-point ring; nothing was sent.

    To do:
        Change what the line names: lower ``privacy.clip_norm``, or change the noise.
    """

    exit_code: ClassVar[int] = 2


class StorageError(SecureVflError):
    """This party cannot write a file; the previous file is unchanged.

    To do:
        Make room or give access, and run again with ``--resume``.
    """

    exit_code: ClassVar[int] = 2
    TOLD: ClassVar[str | None] = "it cannot write to its own disk"

    @staticmethod
    def stands_behind(error: BaseException) -> bool:
        """Return whether an error means that a disk is full, failing or read-only."""
        return isinstance(error, OSError) and error.errno in _NO_ROOM

    @classmethod
    def of(cls, path: str | os.PathLike[str], error: OSError) -> "StorageError":
        """Return an error that names the file, the system's reason and a remedy.

        Args:
            path: The file that could not be written.
            error: The system's error.
        """
        return cls(
            f"{os.fspath(path)}: cannot be written ({error.strerror or error}); "
            f"nothing that was there before is lost. Make room or give access, and run again"
        )


class OutOfMemoryError(SecureVflError):
    """This party's machine has no more memory; its files are intact.

    To do:
        End other programs, take smaller batches or fewer ``model.neighbours``, and ``--resume``.
    """

    exit_code: ClassVar[int] = 2
    TOLD: ClassVar[str | None] = "it has run out of memory"

    @staticmethod
    def stands_behind(error: BaseException | None) -> bool:
        """Return whether an error, or its cause, means that memory is used up.

        The cause counts, since torch reports a write without memory as a file that is too short.
        """
        while error is not None and not isinstance(error, SecureVflError):
            if isinstance(error, MemoryError):
                return True
            if isinstance(error, OSError) and error.errno == errno.ENOMEM:
                return True
            # torch, its kernels and Python's threads say so in the text only.
            if isinstance(error, RuntimeError) and _NO_MEMORY.search(str(error)):
                return True
            error = error.__cause__ or error.__context__
        return False  # or it is about another party's memory


EXTRAS: Final = {
    "matplotlib": "report",
    "pyarrow": "parquet",
    "dp_accounting": "accounting",
    "rbcl": "psi",
    "phe": "paillier",
    "gmpy2": "paillier",
    "faiss": "faiss",
    "duckdb": "sql",
    "sqlalchemy": "sql",
    "openpyxl": "excel",
    "fastapi": "serve",
    "uvicorn": "serve",
    "pytorch_optimizer": "lamb",
    "tensorboard": "tensorboard",
    "mlflow": "mlflow",
}
"""Packages that only some uses need, by the extra of securevfl that brings each."""


def missing_extra(error: BaseException, *, use: str = "this") -> ConfigError | None:
    """Return an error that names the extra to install; None for other failures.

    Args:
        error: The import's error.
        use: Setting, option or table that needs the package.
    """
    package = ((isinstance(error, ImportError) and error.name) or "").partition(".")[0]
    return _not_installed(package, use=use) if package in EXTRAS else None


def of_an_extra(module: str, *, use: str) -> Any:
    """Import and return a module of an optional package.

    Args:
        module: The module's full name.
        use: As in :func:`missing_extra`.

    Raises:
        ConfigError: Naming the extra to install.
    """
    assert module.partition(".")[0] in EXTRAS, f"{module} is of no extra"
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise missing_extra(error, use=use) or error from None


def require_extra(*packages: str, use: str) -> None:
    """Refuse if one of the optional packages is not installed, without loading them.

    Args:
        packages: Import names of the packages.
        use: As in :func:`missing_extra`.

    Raises:
        ConfigError: Naming the extra to install.
    """
    for package in packages:
        if importlib.util.find_spec(package) is None:
            raise _not_installed(package, use=use)


def _not_installed(package: str, *, use: str) -> ConfigError:
    return ConfigError(
        f"{use} needs the package {package}, which is not installed; "
        f"pip install 'securevfl[{EXTRAS[package]}]'"
    )


def of_this_machine(
    error: BaseException, *, place: str | os.PathLike[str] = "a file"
) -> SecureVflError | None:
    """Return an error that says which resource this machine lacks; None for other errors.

    Args:
        error: The error.
        place: The file that could not be written, if the system's error does not name it.
    """
    if isinstance(error, OSError) and StorageError.stands_behind(error):
        return StorageError.of(error.filename or place, error)
    if OutOfMemoryError.stands_behind(error):
        return OutOfMemoryError(
            "this machine has no memory left for it; nothing on its disk is lost. Make room, and "
            "go on with --resume"
        )
    return None


class PrivacyError(SecureVflError):
    """The requested guarantee would not hold.

    To do:
        Change the setting that the line names, or ask for a weaker guarantee.
    """

    exit_code: ClassVar[int] = 4
    TOLD: ClassVar[str | None] = None


class BudgetExceededError(PrivacyError):
    """A release would spend more privacy than was granted; nothing was released.

    To do:
        Ask for less, or let the owner of the table raise the limit or ``prediction.epsilon``.
    """

    TOLD: ClassVar[str | None] = "its privacy budget does not cover this run"


class ProtocolError(SecureVflError, RuntimeError):
    """The parties disagree about the protocol.

    To do:
        Compare files and versions of all parties; the log of the named party says more.
    """

    exit_code: ClassVar[int] = 3
    TOLD: ClassVar[str | None] = None

    party: str | None = None
    """The party where it began, once that is known."""


class AuthenticationError(ProtocolError):
    """A peer's identity is not the one that the federation file pins.

    To do:
        Compare the ``identity`` lines by telephone; do not start before they agree.
    """


class PartyFailedError(ProtocolError):
    """Another party raised or died.

    To do:
        Ask the named party for its log; then start all again with ``--resume``.
    """


class PartyLostError(PartyFailedError):
    """Another party was lost because of its machine or network, and may come back.

    To do:
        Start that party again with ``--resume``, or set ``runtime.on_loss``.
    """


class PartyTwiceError(PartyLostError):
    """A party of this name is already in the session, perhaps this party's earlier connection.

    To do:
        End the other process, or wait ``runtime.silence_timeout_s``, and start again.
    """


class PartyTimeoutError(ProtocolError):
    """Another party was silent past its deadline.

    To do:
        Look at its machine and line; raise ``runtime.round_timeout_s`` if it is only slow.
    """


class PartyAbsentError(PartyTimeoutError):
    """Another party has not joined, or not come back, in time.

    To do:
        Start all within ``runtime.join_timeout_s``; ``runtime.wait_s`` waits longer.
    """


def in_one_line(error: Exception) -> str:
    """Return another package's error in one line, with the place where it was raised."""
    frames = traceback.extract_tb(error.__traceback__)
    # The innermost frame that is neither Python's import machinery nor torch.
    *_, last = (
        frame
        for frame in frames
        if not frame.filename.startswith("<frozen") and "torch" not in Path(frame.filename).parts
    )
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text} ({last.filename}:{last.lineno})"
