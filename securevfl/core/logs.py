"""Logs of a run: its events for Python's ``logging``, and a party's file of events.

Both hold figures and words, never a row or a record.

The logger ``securevfl`` has only a null handler. A program that sets up ``logging`` receives a line
for each stage, epoch, link count, warning and refusal, and with ``DEBUG`` one for each round.
``record.event`` and ``record.figures`` hold the line's content, for OpenTelemetry's
``LoggingHandler`` or any other handler.
"""

import datetime
import json
import logging
import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from securevfl.core import progress
from securevfl.core.errors import ConfigError, SecureVflError, StorageError

LOGGER: Final = logging.getLogger("securevfl")
"""Logger that programs attach handlers to."""

LOGGER.addHandler(logging.NullHandler())

_LOUD: Final = (progress.Warned, progress.SessionLost)
_FREQUENT: Final = (
    *(progress.LinksMade, progress.CiphertextsMade, progress.RowsReleased, progress.RoundDone),
    *(progress.PretrainingRound, progress.CoalitionsValued),
)


# A log line holds figures about a run, not data; a longer list would be data.
_MAX_LIST = 64


def plain(value: Any, *, where: str = "event") -> Any:
    """Return ``value`` as plain data that may be logged; raise if it is something else.

    Raises:
        SecureVflError: For tensors, arrays, bytes, long lists and any other object.
    """
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        return {str(key): plain(item, where=f"{where}.{key}") for key, item in value.items()}
    if isinstance(value, list | tuple):
        if len(value) > _MAX_LIST:
            raise SecureVflError(f"{where}: a list of {len(value)} items may not be logged")
        return [plain(item, where=where) for item in value]
    raise SecureVflError(f"{where}: {type(value).__name__} objects may not be logged")


def log(event: str, figures: Mapping[str, Any], *, level: int = logging.INFO) -> None:
    """Log an event.

    Args:
        event: The event, in one word.
        figures: Figures and words, by name.
        level: Level of ``logging``.

    Raises:
        SecureVflError: If a figure is not plain data, for example an array.
    """
    if LOGGER.isEnabledFor(level):
        known = plain(figures)
        words = " ".join(f"{name}={value}" for name, value in known.items())
        LOGGER.log(level, "%s %s", event, words, extra={"event": event, "figures": known})


def log_event(event: progress.ProgressEvent) -> None:
    """Log a run's progress."""
    level = logging.DEBUG if isinstance(event, _FREQUENT) else logging.INFO
    level = logging.WARNING if isinstance(event, _LOUD) else level
    log(event.EVENT, progress.event_fields(event), level=level)


def log_refusal(error: SecureVflError) -> None:
    """Log the error that ends a command, by the text for other parties: no cell and no path."""
    refused = {"error": type(error).__name__, "reason": error.for_others()}
    log("refused", {**refused, "exit_code": error.exit_code}, level=logging.ERROR)


_BEGINNING: Final = b'{"time": "'
"""First bytes of a line."""


class JsonLines(logging.Formatter):
    """Formats each record as a JSON object: time, level, event, figures."""

    def format(self, record: logging.LogRecord) -> str:
        """Return a record as one line."""
        at = datetime.datetime.fromtimestamp(record.created, datetime.UTC)
        line = {
            "time": at.isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "event": getattr(record, "event", record.getMessage()),
            **getattr(record, "figures", {}),
        }
        return json.dumps(line)


def write_json_lines(path: Path) -> None:
    """Append everything that is logged, rounds included, to a private file.

    Raises:
        ConfigError: If the file holds something else than such lines, as a table does.
        StorageError: If the file cannot be written.
    """
    from securevfl.core import files  # it brings numpy, which --help does not wait for

    try:
        if path.is_file() and path.stat().st_size:
            with path.open("rb") as content:
                if content.read(len(_BEGINNING)) != _BEGINNING:
                    raise ConfigError(
                        f"--log-json {path}: is no log of securevfl; name another file"
                    )
        os.close(files.open_to_append(path))  # for its owner alone
        handler = logging.FileHandler(path, encoding="utf-8")
    except OSError as error:
        raise StorageError.of(path, error) from None
    handler.setFormatter(JsonLines())
    LOGGER.addHandler(handler)
    LOGGER.setLevel(logging.DEBUG)


class EventLog:
    """A party's event log: JSON lines in a private file, each with seconds since it was opened."""

    def __init__(self, path: Path, *, party: str) -> None:
        from securevfl.core import files  # as above

        self.path = path
        self.party = party
        self._start = time.monotonic()
        try:
            self._handle: int | None = files.open_to_append(path)
        except OSError as error:
            raise StorageError.of(path, error) from None

    def write(self, event: str, **fields: object) -> None:
        """Write one event.

        Raises:
            SecureVflError: If a field is not plain figures and words.
            StorageError: If the file cannot be written, or is closed.
        """
        line = {"seconds": round(time.monotonic() - self._start, 3), "party": self.party}
        line["event"] = event
        line.update(plain(fields))
        rest = f"{json.dumps(line)}\n".encode()
        try:
            while rest:
                rest = rest[os.write(self._open(), rest) :]
        except OSError as error:
            raise StorageError.of(self.path, error) from None

    def close(self) -> None:
        """Close the file; later writes raise."""
        if self._handle is not None:
            os.close(self._handle)
        self._handle = None

    def _open(self) -> int:
        if self._handle is None:
            raise StorageError(f"{self.path}: is closed")
        return self._handle
