"""A run's events for Python's ``logging``: figures and words, never a row or a record.

The logger ``securevfl`` has only a null handler. A program that sets up ``logging`` receives a line
for each stage, epoch, link count, warning and refusal, and with ``DEBUG`` one for each round.
``record.event`` and ``record.figures`` hold the line's content, for OpenTelemetry's
``LoggingHandler`` or any other handler.
"""

import datetime
import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from securevfl.core import progress
from securevfl.core.errors import SecureVflError, StorageError

LOGGER: Final = logging.getLogger("securevfl")
"""Logger that programs attach handlers to."""

LOGGER.addHandler(logging.NullHandler())

_LOUD: Final = (progress.Warned, progress.SessionLost, progress.PresenceChanged)
_FREQUENT: Final = (
    *(progress.LinksMade, progress.CiphertextsMade, progress.RowsReleased, progress.RoundDone),
    *(progress.PretrainingRound, progress.CoalitionsValued),
)


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
        from securevfl.core import files  # it brings numpy, which --help does not wait for

        plain = files.plain(figures)
        words = " ".join(f"{name}={value}" for name, value in plain.items())
        LOGGER.log(level, "%s %s", event, words, extra={"event": event, "figures": plain})


def log_event(event: progress.ProgressEvent) -> None:
    """Log a run's progress."""
    level = logging.DEBUG if isinstance(event, _FREQUENT) else logging.INFO
    level = logging.WARNING if isinstance(event, _LOUD) else level
    log(event.EVENT, progress.event_fields(event), level=level)


def log_refusal(error: SecureVflError) -> None:
    """Log the error that ends a command, by the text for other parties: no cell and no path."""
    refused = {"error": type(error).__name__, "reason": error.for_others()}
    log("refused", {**refused, "exit_code": error.exit_code}, level=logging.ERROR)


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
        StorageError: If the file cannot be written.
    """
    from securevfl.core import files  # as above

    try:
        os.close(files.open_to_append(path))  # for its owner alone
        handler = logging.FileHandler(path, encoding="utf-8")
    except OSError as error:
        raise StorageError.of(path, error) from None
    handler.setFormatter(JsonLines())
    LOGGER.addHandler(handler)
    LOGGER.setLevel(logging.DEBUG)
