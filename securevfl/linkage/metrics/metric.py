"""Interface of a metric: how keys are compared, and keys in quantised units.

All dimensions share one step, so that the distance of quantised keys is the Euclidean one, rounded.

Caps, samples and quality figures are written against :class:`ComparedKeys`, so each of them works
with coordinates, texts, mixed fields and encoded keys alike.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Final, Literal, TypeVar

import numpy as np
from jaxtyping import Bool, Float64, Int64

from securevfl.core import checks
from securevfl.core.errors import ConfigError, DataError
from securevfl.data.tables import KeyTable
from securevfl.linkage.links import Chosen, LinkTable, Sample, eligible_ids
from securevfl.linkage.text import Spelling, normalise_text

LARGEST_UNIT: Final = 2**16 - 1
"""Quantised keys lie in 0 to this."""

# Squared distances then stay below 2^53, and float64 holds them exactly.
_MOST_DIMENSIONS: Final = 2**20


@dataclass(frozen=True, kw_only=True, slots=True)
class KeyRange:
    """The range of each key dimension that the parties agreed on."""

    low: tuple[float, ...]
    """Smallest value of each dimension."""

    high: tuple[float, ...]
    """Largest value of each dimension, above ``low``."""

    def __post_init__(self) -> None:
        if len(self.low) != len(self.high) or not 1 <= len(self.low) <= _MOST_DIMENSIONS:
            raise ConfigError("low and high must have one value for each key dimension")
        for low, high in zip(self.low, self.high, strict=True):
            if not -np.inf < low < high < np.inf:
                raise ConfigError(f"low and high must be finite and ascend: {low}, {high}")

    @property
    def step(self) -> float:
        """Width of a unit, in the keys' unit: the widest dimension takes all 16 bits."""
        widths = np.subtract(self.high, self.low)
        return float(widths.max()) / LARGEST_UNIT

    def require_inside(self, keys: Float64[np.ndarray, "rows key_dim"], *, where: str) -> None:
        """Refuse keys outside the range, and missing ones (NaN).

        Raises:
            DataError: Naming the first.
        """
        outside = ~((keys >= self.low) & (keys <= self.high))
        if outside.any():
            row, axis = (int(places[0]) for places in np.nonzero(outside))
            dimension = f", dimension {axis + 1}" if len(self.low) > 1 else ""
            raise DataError(
                f"keys of {where}: row {row + 1}{dimension} is {keys[row, axis]}, "
                f"outside the agreed range [{self.low[axis]}, {self.high[axis]}]; "
                f"agree on a wider one"
            )

    def quantise(
        self, keys: Float64[np.ndarray, "rows key_dim"], *, whose: str = "a party"
    ) -> Int64[np.ndarray, "rows key_dim"]:
        """Round keys to units; distances change by at most sqrt(key_dim) steps.

        Raises:
            DataError: If keys have another dimension, or one leaves its range (NaN does).
        """
        if keys.shape[1] != len(self.low):
            raise DataError(
                f"keys of {whose}: have {keys.shape[1]} dimensions, the agreed range "
                f"{len(self.low)}"
            )
        self.require_inside(keys, where=whose)
        units = np.rint((keys - np.array(self.low)) / self.step)
        return np.minimum(units, LARGEST_UNIT).astype(np.int64)


KeyKind = Literal["text", "number"]
Own = TypeVar("Own", bound="ComparedKeys")

Columns = Mapping[str, "np.ndarray | Sequence[Any]"]
"""Key columns: texts with None for missing, or float64 numbers with NaN for missing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Field:
    """How one key column is compared."""

    name: str
    """Column name, the same at both parties."""

    kind: Literal["text", "number", "exact"]
    """``text``: 1 - edits / length of the longer; ``number``: 1 - difference / scale, dates in
    days; ``exact``: 1 for equal texts, else 0."""

    weight: checks.Positive = 1.0
    """Share of the mean."""

    scale: checks.Positive | None = None
    """Difference from which two numbers have nothing in common."""

    def __post_init__(self) -> None:
        checks.require_limits(self)
        if (self.kind == "number") != (self.scale is not None):
            raise ConfigError(f"field {self.name!r}: scale goes with kind number, and only with it")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ComparedKeys(ABC):
    """Two parties' keys and a symmetric distance; a subclass says which records are nearest."""

    primary: Any
    """The primary's keys, one a row."""

    records: Any
    """The secondary's keys, one a record."""

    @property
    def num_rows(self) -> int:
        """Primary rows."""
        return len(self.primary)

    @property
    def num_records(self) -> int:
        """Records of the secondary."""
        return len(self.records)

    def nearest(self, rows: Chosen | None, k: int, *, eligible: Sample | None = None) -> LinkTable:
        """Link the chosen rows (None: all) to their ``k`` nearest eligible records, exactly.

        Returns:
            Links, ascending by (distance, record number). Rows are left with fewer than ``k`` if
            fewer records are eligible (None: all are).

        Raises:
            ConfigError: If ``k`` is below 1, or ``eligible`` has another length.
            DataError: If there are fewer than ``k`` records.
        """
        ids, keys = eligible_ids(self.num_records, k, eligible), self.primary
        if rows is not None:
            keys = [keys[row] for row in rows] if isinstance(keys, list) else keys[rows]
        return self.nearest_of(keys, ids, k)

    @abstractmethod
    def nearest_of(self, keys: Any, ids: Chosen, k: int) -> LinkTable:
        """Link each of some rows' keys to the ``k`` nearest of the records with these numbers."""

    def swap_roles(self: Own) -> Own:
        """Exchange the parties' roles."""
        return replace(self, primary=self.records, records=self.primary)

    def figures(self) -> Mapping[str, Any]:
        """Return nothing: every pair is compared."""
        return {}


class Metric(ABC):
    """Distance between two keys: stateless, named by a federation file."""

    name: ClassVar[str]
    """Name in a federation file."""

    unit: ClassVar[str]
    """Unit of the distances, for figures."""

    whole: ClassVar[bool] = False
    """True if distances are whole numbers."""

    largest: ClassVar[float] = math.inf
    """No distance is larger."""

    quick: ClassVar[bool] = False
    """True if computing links is faster than reading them from a file."""

    reads: ClassVar[frozenset[str]] = frozenset()
    """Settings of the ``[linkage]`` table that go with few metrics, this one among them:
    ``fields``, ``blocking``, ``fold``, ``spelling`` of texts."""

    quantised: ClassVar[bool] = False
    """True for Euclidean distances of numbers that 16-bit integers can represent."""

    coded: ClassVar[bool] = True
    """True if near keys have near codes, where a protection compares codes."""

    equal_only: ClassVar[bool] = False
    """True if only equal keys are linked, all at distance 0."""

    def kind(self, spec: "KeySpec") -> KeyKind:
        """Return what every key column holds, where no field says it of its own."""
        return "number"

    def check(self, spec: "KeySpec") -> None:  # noqa: B027 - most metrics take all keys
        """Refuse keys that this metric cannot compare.

        Raises:
            ConfigError: Naming the field, the rule and the value.
        """

    def check_names(self, names: Sequence[str]) -> None:  # noqa: B027 - few metrics need an order
        """Refuse a party's key columns whose names say that they are in the wrong order.

        Args:
            names: Its own names.

        Raises:
            ConfigError: Saying in which order they must be.
        """

    def normal(self, columns: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return key columns with one number for what is one place, value by value."""
        return dict(columns)

    def far_distance(self, keys: KeyTable) -> float:
        """Return the distance beyond which nearest keys are mostly those of different people."""
        return math.inf

    def check_distance(self, distance: float) -> None:
        """Refuse a largest distance that was meant in another unit.

        Raises:
            ConfigError: If this metric's distances are whole numbers and it is not one, or all of
                them are smaller.
        """
        if distance > self.largest or (self.whole and distance != int(distance)):
            numbers = f"at most {self.largest:g}" if self.largest < math.inf else "whole numbers"
            raise ConfigError(
                f"linkage.max_distance: distances are {numbers} here (unit: {self.unit}), got "
                f"{distance:g}"
            )

    @abstractmethod
    def compare(
        self, spec: "KeySpec", primary: KeyTable, records: KeyTable, *, neighbours: int
    ) -> ComparedKeys:
        """Return two parties' keys with the distance between them.

        Args:
            spec: Which keys are compared, and how.
            primary: The primary's keys.
            records: The secondary's.
            neighbours: K, for metrics that measure how many links they lose.

        Raises:
            DataError: If keys are not what the metric needs.
        """


@dataclass(frozen=True, kw_only=True)
class KeySpec:
    """Which keys are compared, and how."""

    columns: tuple[str, ...]
    """Key columns, by the primary's names and in its order."""

    metric: Metric
    """Distance of two keys."""

    fields: tuple[Field, ...] | None = None
    """Comparison of each column, where columns are compared one by one."""

    missing_similarity: float = 0.5
    """Similarity of a field that one of two rows does not have, in [0, 1]."""

    ranges: tuple[tuple[float, ...], ...] | None = None
    """``[low, high]`` of every numeric column, agreed without looking at the data."""

    blocking: tuple[str, ...] | None = None
    """Rules for the pairs to compare: a pair must keep one; None compares all."""

    fold: bool = False
    """True if equal keys may differ in case, in full-width letters and in runs of blanks."""

    spelling: Spelling = field(default_factory=Spelling)
    """Spelling of texts as they are read."""

    code_bits: int | None = None
    """Bits of a code; None takes those of its kind."""

    code_concentration: float | None = None
    """Share of a code's bits that are set; None takes that of its kind."""

    @property
    def kinds(self) -> Mapping[str, KeyKind]:
        """What each key column holds, in order."""
        if self.fields is None:
            return dict.fromkeys(self.columns, self.metric.kind(self))
        kinds = {field.name: field.kind for field in self.fields}
        return {name: "number" if kinds.get(name) == "number" else "text" for name in self.columns}

    @property
    def are_numbers(self) -> bool:
        """Whether keys are numbers without gaps, so that a model may take them as inputs."""
        return self.fields is None and set(self.kinds.values()) == {"number"}

    def normal(self, columns: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return a party's key columns as the federation file has them compared, value by value.

        All readers of keys use this; a second call changes nothing.
        """
        return self.metric.normal(self.spelling.of_columns(columns))

    def key_range(self) -> KeyRange:
        """Return the agreed range of numeric keys.

        Raises:
            ConfigError: If none was agreed on.
        """
        if self.ranges is None:
            raise ConfigError("linkage.ranges: is missing; agree on the range of every key column")
        low, high = zip(*self.ranges, strict=True)
        return KeyRange(low=low, high=high)


def numbers_of(keys: KeyTable) -> Float64[np.ndarray, "rows key_dim"]:
    """Return numeric key columns side by side."""
    return np.column_stack(list(keys.columns.values()))


_NO_KEY: Final = -1


def compare_present(
    spec: KeySpec, primary: KeyTable, records: KeyTable, *, neighbours: int
) -> ComparedKeys:
    """Compare two parties' keys by the file's metric; rows and records without a key link nowhere.

    Args:
        spec: Which keys are compared, and how.
        primary: The primary's keys.
        records: The secondary's.
        neighbours: K.

    Raises:
        DataError: If keys are not what the metric needs.
    """
    metric = spec.metric.compare(spec, primary, records, neighbours=neighbours)
    mine, theirs = have_keys(primary), have_keys(records)
    if mine.all() and theirs.all():
        return metric
    rows, numbers = (
        np.where(present, np.arange(len(present)), _NO_KEY) for present in (mine, theirs)
    )
    return PresentKeys(metric=metric, primary=rows, records=numbers)


def have_keys(keys: KeyTable) -> Bool[np.ndarray, " rows"]:
    """Return which rows have a value in some key column; a blank text counts as missing."""
    columns = [
        ~np.isnan(column)
        if isinstance(column, np.ndarray) and column.dtype != object
        else np.array([text is not None and _says_something(text) for text in column])
        for column in keys.columns.values()
    ]
    return np.asarray(np.any(columns, axis=0))


def _says_something(text: str) -> bool:
    # Most texts are plain, and normalising a million of them takes seconds.
    return bool(text.strip()) and (text.isascii() or normalise_text(text) != "")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PresentKeys(ComparedKeys):
    """Keys where some rows or records are missing: these are linked to nothing."""

    primary: Int64[np.ndarray, " rows"]
    """Each row's number; -1 where it has no key."""

    records: Int64[np.ndarray, " records"]
    """Each record's number; -1 where it has no key."""

    metric: ComparedKeys
    """Distances of all keys, in which a missing one is some text or number."""

    def nearest_of(self, keys: Int64[np.ndarray, " rows"], ids: Chosen, k: int) -> LinkTable:
        """Link the rows that have a key to the nearest of those records that have one."""
        links, there = LinkTable.empty(len(keys), k), keys >= 0
        if there.any():
            eligible = np.zeros(self.num_records, dtype=np.bool_)
            eligible[ids] = self.records[ids] >= 0
            links.put(there, self.metric.nearest(keys[there], k, eligible=eligible))
        return links

    def swap_roles(self) -> "PresentKeys":
        """Exchange the parties' roles."""
        return PresentKeys(
            metric=self.metric.swap_roles(), primary=self.records, records=self.primary
        )

    def figures(self) -> Mapping[str, Any]:
        """Return figures for the log on how keys were compared."""
        return self.metric.figures()
