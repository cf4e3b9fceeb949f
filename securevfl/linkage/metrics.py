"""What every kind of key can do: link rows, whatever the keys are and however they are compared.

Caps, samples and quality figures are written against :class:`KeyMetric`, so each of them works with
coordinates, texts, mixed fields and encoded keys alike.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Bool, Float64, Int64, UInt8

from securevfl.linkage.euclidean import check_keys, nearest_records
from securevfl.linkage.great_circle import nearest_on_earth
from securevfl.linkage.hamming import Backend, nearest_codes
from securevfl.linkage.levenshtein import nearest_texts
from securevfl.linkage.links import LinkTable
from securevfl.linkage.mixed import Columns, Field, nearest_mixed


@runtime_checkable
class KeyMetric(Protocol):
    """Two parties' keys and a symmetric distance between them."""

    @property
    def num_rows(self) -> int:
        """Primary rows."""
        ...

    @property
    def num_records(self) -> int:
        """Records of the secondary."""
        ...

    def nearest(
        self,
        rows: Int64[np.ndarray, " chosen"] | None,
        k: int,
        *,
        eligible: Bool[np.ndarray, " records"] | None = None,
    ) -> LinkTable:
        """Link the chosen rows (None: all) to their ``k`` nearest eligible records, exactly."""
        ...

    def swapped(self) -> "KeyMetric":
        """Return the same with the parties' roles exchanged: records link to rows."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class EuclideanKeys:
    """Numeric keys in one common unit; see :mod:`securevfl.linkage.euclidean`."""

    primary: Float64[np.ndarray, "rows key_dim"]
    """The primary's keys."""

    records: Float64[np.ndarray, "records other_dim"]
    """The secondary's keys."""

    workers: int = 1
    """Threads of the tree search; -1 takes every core."""

    def __post_init__(self) -> None:
        check_keys(self.primary, self.records)

    @property
    def num_rows(self) -> int:
        """Primary rows."""
        return len(self.primary)

    @property
    def num_records(self) -> int:
        """Records of the secondary."""
        return len(self.records)

    def nearest(
        self,
        rows: Int64[np.ndarray, " chosen"] | None,
        k: int,
        *,
        eligible: Bool[np.ndarray, " records"] | None = None,
    ) -> LinkTable:
        """Link as :func:`~securevfl.linkage.euclidean.nearest_records` does."""
        keys = self.primary if rows is None else self.primary[rows]
        return nearest_records(keys, self.records, k, eligible=eligible, workers=self.workers)

    def swapped(self) -> "EuclideanKeys":
        """Exchange the parties' roles."""
        return EuclideanKeys(primary=self.records, records=self.primary, workers=self.workers)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class EarthKeys:
    """Longitudes and latitudes in degrees; see :mod:`securevfl.linkage.great_circle`."""

    primary: Float64[np.ndarray, "rows 2"]
    """The primary's keys."""

    records: Float64[np.ndarray, "records 2"]
    """The secondary's keys."""

    workers: int = 1
    """Threads of the tree search; -1 takes every core."""

    @property
    def num_rows(self) -> int:
        """Primary rows."""
        return len(self.primary)

    @property
    def num_records(self) -> int:
        """Records of the secondary."""
        return len(self.records)

    def nearest(
        self,
        rows: Int64[np.ndarray, " chosen"] | None,
        k: int,
        *,
        eligible: Bool[np.ndarray, " records"] | None = None,
    ) -> LinkTable:
        """Link as :func:`~securevfl.linkage.great_circle.nearest_on_earth` does."""
        keys = self.primary if rows is None else self.primary[rows]
        return nearest_on_earth(keys, self.records, k, eligible=eligible, workers=self.workers)

    def swapped(self) -> "EarthKeys":
        """Exchange the parties' roles."""
        return EarthKeys(primary=self.records, records=self.primary, workers=self.workers)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TextKeys:
    """One text a row; see :mod:`securevfl.linkage.levenshtein`."""

    primary: Sequence[str]
    """The primary's texts."""

    records: Sequence[str]
    """The secondary's texts."""

    workers: int = 1
    """Threads; -1 takes every core."""

    @property
    def num_rows(self) -> int:
        """Primary rows."""
        return len(self.primary)

    @property
    def num_records(self) -> int:
        """Records of the secondary."""
        return len(self.records)

    def nearest(
        self,
        rows: Int64[np.ndarray, " chosen"] | None,
        k: int,
        *,
        eligible: Bool[np.ndarray, " records"] | None = None,
    ) -> LinkTable:
        """Link as :func:`~securevfl.linkage.levenshtein.nearest_texts` does."""
        texts = self.primary if rows is None else [self.primary[row] for row in rows]
        return nearest_texts(texts, self.records, k, eligible=eligible, workers=self.workers)

    def swapped(self) -> "TextKeys":
        """Exchange the parties' roles."""
        return TextKeys(primary=self.records, records=self.primary, workers=self.workers)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class MixedKeys:
    """Several fields a row; see :mod:`securevfl.linkage.mixed`."""

    primary: Columns
    """The primary's key columns."""

    records: Columns
    """The secondary's key columns."""

    fields: tuple[Field, ...]
    """Which columns are compared, and how."""

    missing_similarity: float = 0.5
    """Similarity of a field that one of two rows does not have, in [0, 1]."""

    workers: int = 1
    """Threads; -1 takes every core."""

    @property
    def num_rows(self) -> int:
        """Primary rows."""
        return len(self.primary[self.fields[0].name])

    @property
    def num_records(self) -> int:
        """Records of the secondary."""
        return len(self.records[self.fields[0].name])

    def nearest(
        self,
        rows: Int64[np.ndarray, " chosen"] | None,
        k: int,
        *,
        eligible: Bool[np.ndarray, " records"] | None = None,
    ) -> LinkTable:
        """Link as :func:`~securevfl.linkage.mixed.nearest_mixed` does."""
        columns = self.primary
        if rows is not None:
            columns = {name: _rows_of(column, rows) for name, column in self.primary.items()}
        return nearest_mixed(
            columns,
            self.records,
            self.fields,
            k,
            missing_similarity=self.missing_similarity,
            eligible=eligible,
            workers=self.workers,
        )

    def swapped(self) -> "MixedKeys":
        """Exchange the parties' roles."""
        return MixedKeys(
            primary=self.records,
            records=self.primary,
            fields=self.fields,
            missing_similarity=self.missing_similarity,
            workers=self.workers,
        )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class CodeKeys:
    """Bloom-filter codes, as a coordinator sees them; see :mod:`securevfl.linkage.hamming`."""

    primary: UInt8[np.ndarray, "rows code_bytes"]
    """The primary's codes."""

    records: UInt8[np.ndarray, "records other_bytes"]
    """The secondary's codes."""

    backend: Backend = "auto"
    """``auto`` takes faiss where it is installed."""

    @property
    def num_rows(self) -> int:
        """Primary rows."""
        return len(self.primary)

    @property
    def num_records(self) -> int:
        """Records of the secondary."""
        return len(self.records)

    def nearest(
        self,
        rows: Int64[np.ndarray, " chosen"] | None,
        k: int,
        *,
        eligible: Bool[np.ndarray, " records"] | None = None,
    ) -> LinkTable:
        """Link as :func:`~securevfl.linkage.hamming.nearest_codes` does."""
        codes = self.primary if rows is None else self.primary[rows]
        return nearest_codes(codes, self.records, k, eligible=eligible, backend=self.backend)

    def swapped(self) -> "CodeKeys":
        """Exchange the parties' roles."""
        return CodeKeys(primary=self.records, records=self.primary, backend=self.backend)


def _rows_of(column: Any, rows: Int64[np.ndarray, " chosen"]) -> Any:
    if isinstance(column, np.ndarray):
        return column[rows]
    return [column[row] for row in rows]
