"""A party's table in memory: keys, features and, at the primary, labels."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Bool, Float32, Float64, Int64

from securevfl.core.errors import DataError
from securevfl.data.scaling import Dependence

if TYPE_CHECKING:
    # It brings pandas, and a party that only helps has no table.
    from securevfl.data.schema import TableSchema


Labels = Float64[np.ndarray, " rows"] | Int64[np.ndarray, " rows"]
"""Labels as read: float64 for regression, int64 class numbers otherwise.

float32 rounds large labels together; losses take them centred, by
:class:`securevfl.data.scaling.LabelScaler`."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False, repr=False)
class KeyTable:
    """One party's key columns, row by row in the order of its table."""

    name: str
    """The party's name."""

    columns: Mapping[str, np.ndarray]
    """Texts (object arrays with None for missing) or float64 numbers (NaN for missing)."""

    entities: Int64[np.ndarray, " rows"] | None = None
    """Ground truth of linkage, for quality figures only."""

    @property
    def num_rows(self) -> int:
        """Rows of the table."""
        return len(next(iter(self.columns.values())))

    def take(self, rows: Int64[np.ndarray, " chosen"]) -> "KeyTable":
        """Return the keys of the chosen rows, in that order."""
        return KeyTable(
            name=self.name,
            columns={name: column[rows] for name, column in self.columns.items()},
            entities=None if self.entities is None else self.entities[rows],
        )

    def __repr__(self) -> str:
        return f"KeyTable({self.name!r}, {self.num_rows} rows, {len(self.columns)} key columns)"


@dataclass(frozen=True, kw_only=True, slots=True, eq=False, repr=False)
class PartyTable:
    """One party's private table, checked: every value is finite, all columns equally long."""

    name: str
    """The party's name."""

    key_names: tuple[str, ...]
    """Columns that parties link by."""

    keys: Float64[np.ndarray, "rows key_dim"]
    """Keys in their own units. float64, as float32 loses neighbours on raw coordinates."""

    feature_names: tuple[str, ...]
    """Names of the features; one-hot columns are called ``column=value``."""

    features: Float32[np.ndarray, "rows features"]
    """Input of this party's bottom model."""

    labels: Labels | None = None
    """float64 for regression, class numbers from 0 otherwise; None at a secondary."""

    labelled: Bool[np.ndarray, " rows"] | None = None
    """Mask of rows with a label (others hold a placeholder that must not be read); None: all."""

    split_by: Int64[np.ndarray, " rows"] | None = None
    """Numbers of groups or places in time, where the primary's rows are split by a column."""

    classes: tuple[Any, ...] | None = None
    """The original label value of each class number; None for regression."""

    schema: "TableSchema | None" = None
    """Encoding of its columns as keys, features and labels; None for a table made of arrays.
    """

    entities: Int64[np.ndarray, " rows"] | None = None
    """Ground truth of linkage: equal numbers at two parties are one entity. Never a feature."""

    link_columns: KeyTable | None = None
    """Key columns that are not all numbers without gaps, for linkage alone; ``keys`` then has no
    columns. None: parties link by ``keys``."""

    unknown_words: Mapping[str, int] = field(default_factory=dict)
    """Number of cells in new rows with words that the schema does not know, by column."""

    notes: tuple[str, ...] = ()
    """Remarks on its columns for its owner, one sentence each."""

    def __post_init__(self) -> None:
        rows = len(self.keys)
        if rows == 0:
            raise DataError(f"table of {self.name!r}: has no rows")
        for what, values, names in (
            ("keys", self.keys, self.key_names),
            ("features", self.features, self.feature_names),
        ):
            if values.shape != (rows, len(names)):
                raise DataError(
                    f"table of {self.name!r}: {what} have the shape {values.shape}, expected "
                    f"{(rows, len(names))}: {rows} rows and {len(names)} names"
                )
            require_finite(values, names, where=f"table of {self.name!r}")
        for what, column in (
            ("labels", self.labels),
            ("labelled", self.labelled),
            ("split_by", self.split_by),
            ("entities", self.entities),
        ):
            if column is not None and column.shape != (rows,):
                raise DataError(
                    f"table of {self.name!r}: {what} have the shape {column.shape}, "
                    f"expected {(rows,)}"
                )
        if self.link_columns is not None and self.link_columns.num_rows != rows:
            raise DataError(
                f"table of {self.name!r}: key columns have {self.link_columns.num_rows} rows, "
                f"the others {rows}"
            )
        if self.labels is not None:
            require_finite(self.labels[:, None], ("label",), where=f"table of {self.name!r}")

    @property
    def num_rows(self) -> int:
        """Rows of the table."""
        return len(self.keys)

    @property
    def num_features(self) -> int:
        """Number of features after one-hot encoding."""
        return len(self.feature_names)

    @property
    def data_dependent(self) -> tuple[Dependence, ...]:
        """Statistics of the records that features depend on; none may be, under a promise."""
        return () if self.schema is None else self.schema.data_dependent

    @property
    def key_dim(self) -> int:
        """Numeric key columns."""
        return len(self.key_names)

    def take(self, rows: Int64[np.ndarray, " chosen"]) -> "PartyTable":
        """Return the table of the chosen rows, in that order; a row may be chosen twice."""
        by_row = ("keys", "features", "labels", "labelled", "split_by", "entities")
        columns = {name: getattr(self, name) for name in by_row}
        taken: dict[str, Any] = {
            name: None if values is None else values[rows] for name, values in columns.items()
        }
        links = None if self.link_columns is None else self.link_columns.take(rows)
        return replace(self, **taken, link_columns=links, unknown_words={}, notes=())

    def __repr__(self) -> str:
        return (
            f"PartyTable({self.name!r}, {self.num_rows} rows, {self.key_dim} key columns, "
            f"{self.num_features} features, labels: {'yes' if self.labels is not None else 'no'})"
        )


def require_finite(values: np.ndarray, names: Sequence[str], *, where: str) -> None:
    """Check that no value is NaN or infinite.

    Raises:
        DataError: Naming the first such row (counted from 1) and its column.
    """
    finite = np.isfinite(values)
    if finite.all():
        return
    row, column = (int(axis[0]) for axis in np.nonzero(~finite))
    value = values[row, column]
    problem = "a missing value (NaN)" if np.isnan(value) else f"an infinite value ({value})"
    raise DataError(
        f"{where}: column {names[column]!r}, row {row + 1}: is {problem}; "
        f"fill it in or drop the row ({int((~finite).sum())} such values in all)"
    )
