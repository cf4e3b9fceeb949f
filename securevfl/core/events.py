"""A party's event log: one JSON object a line, never a tensor, a key or a record."""

import json
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from securevfl.core.errors import SecureVflError

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
    """Append JSON lines to a file; every line carries seconds since the log was opened."""

    def __init__(self, path: Path, *, party: str) -> None:
        self.path = path
        self.party = party
        self._start = time.monotonic()
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a", encoding="utf-8", buffering=1)

    def write(self, event: str, **fields: object) -> None:
        """Write one event.

        Raises:
            SecureVflError: If a field is anything but plain figures and words.
        """
        line = {"seconds": round(time.monotonic() - self._start, 3), "party": self.party}
        line["event"] = event
        line.update(plain(fields))
        self._file.write(json.dumps(line) + "\n")

    def close(self) -> None:
        """Close the file; later writes raise."""
        self._file.close()
