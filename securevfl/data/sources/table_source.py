"""Interface of a source of tables, and the sources that stages bring."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol, runtime_checkable

import pandas as pd

from securevfl.core.stages import Parts
from securevfl.data.sources.settings import Reading, Wanted

IN_ROWS: Final = ("skip_lines", "header", "empty", "dates")
"""Settings of sources that hold cells as users wrote them, row by row."""


@runtime_checkable
class ReadTable(Protocol):
    """Reads a table or a part of one."""

    def __call__(self, path: Path, reading: Reading, wanted: Wanted, *, where: str) -> pd.DataFrame:
        """Return the wanted columns.

        Args:
            path: The table's file; of a table at an address, the ``NAME.source.toml`` with it.
            reading: Settings of the source.
            wanted: Which columns.
            where: Name of the source in messages.

        Raises:
            DataError: If it cannot be read, or a column is missing or named twice.
            OSError: If there is no such file.
        """


@dataclass(frozen=True, kw_only=True, slots=True)
class TableSource:
    """One kind of source."""

    kind: str
    """Noun for messages."""

    settings: tuple[str, ...]
    """Settings of ``reading`` that go with it."""

    read: ReadTable
    """Reader of its tables."""


SOURCES: Final = Parts[TableSource]("sources", {})
"""Sources by the suffix of a file; ``"url"``: the address in a ``NAME.source.toml``."""

FRAMES_OF_ROWS: Final = Parts[Callable[..., pd.DataFrame | None]]("rows", {})
"""Functions that return rows in memory of a library, which are no frame, as one."""
