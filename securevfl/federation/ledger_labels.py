"""The ledger's line for what secondaries are told of labels, and how it is read."""

from collections.abc import Mapping
from typing import Any, Final

from securevfl.dp.label_release import LabelRelease

LABELS: Final = "labels"
"""Kind of the line."""

_FIELDS: Final = ("mechanism", "epsilon", "delta", "parties", "digest")


def labels_from(entry: Mapping[str, Any]) -> LabelRelease:
    """Read a line.

    Raises:
        ConfigError: If a field is out of range.
        KeyError: If one is missing.
    """
    return LabelRelease(**{name: entry[name] for name in _FIELDS})
