"""A party's event log: one JSON object a line, never a tensor, a key or a record."""

import json
import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from securevfl.core.errors import SecureVflError, StorageError
from securevfl.core.files import open_to_append

# A log line holds figures about a run, not data: longer lists are data in disguise.
_MAX_LIST = 64


def plain(value: Any, *, where: str = "event") -> Any:
    """Return ``value`` if it is plain data that may be logged, else raise.

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


class EventLog:
    """Append JSON lines to a private file; every line carries seconds since the log was opened."""

    def __init__(self, path: Path, *, party: str) -> None:
        self.path = path
        self.party = party
        self._start = time.monotonic()
        try:
            self._handle: int | None = open_to_append(path)
        except OSError as error:
            raise StorageError.of(path, error) from None

    def write(self, event: str, **fields: object) -> None:
        """Write one event.

        Raises:
            SecureVflError: If a field is anything but plain figures and words.
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
