"""Every error that securevfl raises on purpose, with the exit code it ends a command with.

SecureVflError                            exit code 1
+-- ConfigError (ValueError)              2   a setting is impossible: fix the file or the argument
+-- DataError (ValueError)                2   a table is not what it should be: fix the table
+-- EncodingRangeError (ValueError)       2   a value does not fit the fixed-point ring
+-- StorageError                          2   a file cannot be written: make room, and resume
+-- OutOfMemoryError                      2   this machine has no memory left: make room, and resume
+-- PrivacyError                          4   the guarantee asked for does not hold
|   +-- BudgetExceededError               4   a release would spend more than was granted
+-- ProtocolError (RuntimeError)          3   the parties disagree: the run must stop
    +-- AuthenticationError               3   a party is not who the federation file says
    +-- PartyFailedError                  3   a party raised or died
    +-- PartyTimeoutError                 3   a party was silent past its deadline

An error's text is for the party that it happens to. What the others are sent is
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
# A text that names a file or a folder of this machine: a path of any system, a file by its ending,
# or what our own messages call a file's name by. Public keys may hold a slash and are no paths.
_PUBLIC_KEY: Final = re.compile(r"ed25519:[A-Za-z0-9+/=]+")
_LOCAL: Final = re.compile(
    r"[/\\]"
    r"|\.(arrow|bz2|csv|db|ddb|duckdb|feather|gz|ipc|jsonl?|key|log|npz?|parquet|pem|psv|pt|py)\b"
    r"|\.(sqlite3?|tab|toml|tsv|txt|xz|zip|zst)\b"
    r"|\b(folder|ledger|checkpoint|links|table|file|--out|--data-root|--identity) [^ ]+[:,]"
)


def printable_text(text: str, most: int) -> str:
    """Return text of another program without control characters, cut to ``most`` characters.

    What arrives is shown on a terminal, and a terminal obeys control characters.
    """
    cut = text if len(text) <= most else f"{text[: most - 1]}\u2026"
    return (
        cut
        if cut.isprintable()
        else "".join(letter if letter.isprintable() else " " for letter in cut)
    )


class SecureVflError(Exception):
    """Base of every error raised on purpose; a command prints its text and no traceback."""

    exit_code: ClassVar[int] = 1

    TOLD: ClassVar[str | None] = ""
    """Text sent to other parties instead of the error's own; None sends that if it names nothing of
    this machine."""

    def __str__(self) -> str:
        """The text, as one line that a terminal or a log may show.

        A message of another party or a file may have put words of its own into it.
        """
        return printable_text(super().__str__(), _LONGEST)

    def for_others(self) -> str:
        """Return what other organisations may read about this error.

        Reveals:
            To the recipients: the kind of error, and for settings, for promises and for the
            protocol the text, as far as it names no file. Never a record, a path, or what was
            spent.
        """
        text, more = self.TOLD, ""
        if text is None:
            text = str(self)
            bare = _PUBLIC_KEY.sub("", text)
            if local := _LOCAL.search(bare):
                # What stands before it names the culprit, whose own text may look like a path.
                text, more = bare[: local.start()].rpartition(": ")[0], f" ({_SEE_LOG})"
        name = type(self).__name__
        return f"{name}: {text}{more}" if text else f"{name} ({_SEE_LOG})"


class ConfigError(SecureVflError, ValueError):
    """A setting is impossible.

    To do:
        Change the setting or the option that the line names; ``securevfl check`` finds all of them.
    """

    exit_code: ClassVar[int] = 2
    TOLD: ClassVar[str | None] = None


class DataError(SecureVflError, ValueError):
    """A party's table is not what it should be.

    To do:
        Mend the column or the cells that the line names, or leave the column out by ``exclude``.
    """

    exit_code: ClassVar[int] = 2


class NoRowsError(DataError):
    """A table of new rows has its columns, and no row.

    To do:
        Give rows; ``predict`` takes such a table, and answers it at no cost.
    """


class EncodingRangeError(SecureVflError, ValueError):
    """A value does not fit the fixed-point ring; nothing was sent.

    To do:
        Change what the line names: lower ``privacy.clip_norm``, or change the noise.
    """

    exit_code: ClassVar[int] = 2


class StorageError(SecureVflError):
    """A file of this party's own cannot be written; what was there before is still there.

    To do:
        Make room or give access, and run again with ``--resume``.
    """

    exit_code: ClassVar[int] = 2
    TOLD: ClassVar[str | None] = "it cannot write to its own disk"

    @staticmethod
    def stands_behind(error: BaseException) -> bool:
        """Return whether an error says that a disk is full, at its end or read-only."""
        return isinstance(error, OSError) and error.errno in _NO_ROOM

    @classmethod
    def of(cls, path: str | os.PathLike[str], error: OSError) -> "StorageError":
        """Return the error that names the file, the system's reason and what to do.

        Args:
            path: What could not be written.
            error: What the system said.
        """
        return cls(
            f"{os.fspath(path)}: cannot be written ({error.strerror or error}); "
            f"nothing that was there before is lost. Make room or give access, and run again"
        )


class OutOfMemoryError(SecureVflError):
    """This party's machine gives it no more memory; what is on its disk is whole.

    To do:
        End other programs, take smaller batches or fewer ``model.neighbours``, and ``--resume``.
    """

    exit_code: ClassVar[int] = 2
    TOLD: ClassVar[str | None] = "it has run out of memory"

    @staticmethod
    def stands_behind(error: BaseException | None) -> bool:
        """Return whether an error of Python, torch or the system says that memory is used up.

        Or the one that it came of: torch, out of memory in a write, says that the file is too
        short.
        """
        while error is not None and not isinstance(error, SecureVflError):
            if isinstance(error, MemoryError):
                return True
            if isinstance(error, OSError) and error.errno == errno.ENOMEM:
                return True
            # torch, its kernels and Python's threads say it in words.
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
    "prometheus_client": "serve",
    "onnx": "export",
    "onnxruntime": "export",
    "pytorch_optimizer": "lamb",
    "tensorboard": "tensorboard",
    "mlflow": "mlflow",
}
"""Packages that only some uses need, by the extra of securevfl that brings each."""


def missing_extra(error: BaseException, *, use: str = "this") -> ConfigError | None:
    """Return the error that says what to install, or None if that is not what is wrong.

    Args:
        error: What an import raised.
        use: The setting, option or table that needs the package.
    """
    package = ((isinstance(error, ImportError) and error.name) or "").partition(".")[0]
    if package not in EXTRAS:
        return None
    return ConfigError(
        f"{use} needs the package {package}, which is not installed; "
        f"pip install 'securevfl[{EXTRAS[package]}]'"
    )


def of_an_extra(module: str, *, use: str) -> Any:
    """Import a module of a package that only some uses need, and return it.

    Args:
        module: Its full name.
        use: As in :func:`missing_extra`.

    Raises:
        ConfigError: Saying what to install.
    """
    assert module.partition(".")[0] in EXTRAS, f"{module} is of no extra"
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise missing_extra(error, use=use) or error from None


def require_extra(*packages: str, use: str) -> None:
    """Refuse where one of the packages is not installed; none is loaded.

    Args:
        packages: Names under which they are imported.
        use: As in :func:`missing_extra`.

    Raises:
        ConfigError: Saying what to install.
    """
    for package in packages:
        if importlib.util.find_spec(package) is None:
            lacks = missing_extra(ImportError(name=package), use=use)
            assert lacks is not None, f"{package} is of no extra"
            raise lacks


def of_this_machine(
    error: BaseException, *, place: str | os.PathLike[str] = "a file"
) -> SecureVflError | None:
    """Return the error that says what this machine lacks, or None if that is not what is wrong.

    Args:
        error: What was raised.
        place: What could not be written, where the system does not say.
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
    """The guarantee that was asked for does not hold for what would run.

    To do:
        Change what the line names, or promise less.
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
    """The parties disagree about what happens next.

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
    """Another party is gone for a reason of its machine or its line, and may come back.

    To do:
        Start that party again with ``--resume``, or set ``runtime.on_loss``.
    """


class PartyTwiceError(PartyLostError):
    """A party of this name is in the session: another one, or what is left of this very one.

    To do:
        End the other process, or wait ``runtime.silence_timeout_s``, and start again.
    """


class PartyTimeoutError(ProtocolError):
    """Another party was silent past its deadline.

    To do:
        Look at its machine and line; raise ``runtime.round_timeout_s`` if it is only slow.
    """


class PartyAbsentError(PartyTimeoutError):
    """Another party has not come, or not come back, within the time for that.

    To do:
        Start all within ``runtime.join_timeout_s``; ``runtime.wait_s`` waits longer.
    """


def in_one_line(error: Exception) -> str:
    """Return what an error of another package says, and where it was raised."""
    frames = traceback.extract_tb(error.__traceback__)
    # The innermost place that its author can look into: not Python's import machinery, nor torch.
    *_, last = (
        frame
        for frame in frames
        if not frame.filename.startswith("<frozen") and "torch" not in Path(frame.filename).parts
    )
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text} ({last.filename}:{last.lineno})"
