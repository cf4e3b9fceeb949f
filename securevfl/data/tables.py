"""A party's table in memory, and the primary's rows: their parts, and the order of batches."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np
from jaxtyping import Bool, Float32, Float64, Int64

from securevfl.core import checks
from securevfl.core.conventions import derive_seed, stream
from securevfl.core.errors import ConfigError, DataError
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

    notes: tuple[str, ...] = ()
    """Doubts about these columns for their owner, where they were read without the others."""

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
    def known_labels(self) -> Labels:
        """Its labels, which every primary's table has.

        Raises:
            DataError: If it has none.
        """
        if self.labels is None:
            raise DataError(f"table of {self.name!r}: has no labels")
        return self.labels

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


SplitKind = Literal["stratified", "random", "group", "time"]
"""Kind of split."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RowSplit:
    """Disjoint row numbers of the primary's table, each part ascending."""

    train: Int64[np.ndarray, " train"]
    """Rows that the model learns from."""

    validation: Int64[np.ndarray, " validation"]
    """Rows that choose the best epoch."""

    test: Int64[np.ndarray, " test"]
    """Rows that are looked at once, at the end."""

    unlabelled: Int64[np.ndarray, " unlabelled"] = field(
        default_factory=lambda: np.empty(0, dtype=np.int64)
    )
    """Training rows whose labels supervised learning does not use; pretraining may see them."""


_VALIDATED: Final = 160
_SHARES: Final = 0.1, 0.2
"""Smallest and largest share of validation rows that is chosen for a table."""


def default_validation_fraction(num_rows: int, *, test_fraction: float) -> float:
    """Return the share of :data:`_VALIDATED` rows, a tenth at least and a fifth at most.

    With fewer rows clear gains of network families are refused; with more too few rows train
    (research/local_baseline/README.md).
    """
    least, most = _SHARES
    share = min(most, max(least, _VALIDATED / max(1, num_rows)))
    return min(share, (1 - test_fraction) / 2)


def split_rows(
    num_rows: int,
    *,
    validation_fraction: float | None,
    test_fraction: float,
    seed: int,
    kind: SplitKind = "random",
    by: Int64[np.ndarray, " rows"] | None = None,
    labelled_rows: int | None = None,
    labelled: Bool[np.ndarray, " rows"] | None = None,
) -> RowSplit:
    """Draw validation and test rows; tables may be sorted, so their order never decides.

    Args:
        num_rows: Rows of the primary's table.
        validation_fraction: Share of all rows, in (0, 1); None:
            :func:`default_validation_fraction`.
        test_fraction: Share of all rows, in (0, 1); the two together leave rows to train on.
        seed: Run seed; the split uses its stream ``"rows"``.
        kind: ``random``; ``stratified``: each class has its share of every part, and at least a row
            of training, test and validation, in this order, as far as its rows go; ``group``: all
            rows of a group are in one part, and fractions are shares of the groups; ``time``: the
            newest rows are for testing, those before them for validation.
        by: Class numbers, group numbers or places in time; None for a random split.
        labelled_rows: How many training rows keep their labels, drawn by class where the split is
            stratified; None keeps all.
        labelled: Which rows have a label; None: all. The others are for training without one,
            for any group or time, and the fractions are shares of the labelled rows.

    Raises:
        ConfigError: If the fractions are out of range.
        DataError: If a part would be empty.
    """
    if labelled is not None:
        split = split_rows(
            int(labelled.sum()),
            validation_fraction=validation_fraction,
            test_fraction=test_fraction,
            seed=seed,
            kind=kind,
            by=None if by is None else by[labelled],
            labelled_rows=labelled_rows,
        )
        there = np.flatnonzero(labelled)
        return RowSplit(
            train=there[split.train],
            validation=there[split.validation],
            test=there[split.test],
            unlabelled=np.sort(
                np.concatenate([there[split.unlabelled], np.flatnonzero(~labelled)])
            ),
        )
    if validation_fraction is None:
        validation_fraction = default_validation_fraction(num_rows, test_fraction=test_fraction)
    checks.open_unit(test_fraction=test_fraction, validation_fraction=validation_fraction)
    if not validation_fraction + test_fraction < 1:
        raise ConfigError("test_fraction plus validation_fraction must be below 1")
    num_validation = round(num_rows * validation_fraction)
    num_test = round(num_rows * test_fraction)
    if min(num_validation, num_test, num_rows - num_validation - num_test) < 1:
        raise DataError(
            f"{num_rows} rows are too few to split: {num_rows - num_validation - num_test} for "
            f"training, {num_validation} for validation, {num_test} for testing"
        )
    shuffled = stream(seed, "rows").permutation(num_rows)
    if kind == "stratified":
        assert by is not None, "classes go with this kind"
        shuffled = _by_class(shuffled, by, sizes=(num_validation, num_test))
    elif kind == "time":
        assert by is not None, "places in time go with this kind"
        # Rows of one time are in random order; the newest come first, to be held out.
        shuffled = shuffled[np.argsort(-by[shuffled], kind="stable")]
        held_out = shuffled[: num_validation + num_test]
        shuffled[: num_validation + num_test] = np.roll(held_out, -num_test)
    elif kind == "group":
        assert by is not None, "group numbers go with this kind"
        shuffled, num_validation, num_test = _by_group(
            shuffled, by, fractions=(validation_fraction, test_fraction), seed=seed
        )
    training = shuffled[num_validation + num_test :]
    kept = len(training) if labelled_rows is None else labelled_rows
    if not 1 <= kept <= len(training):
        raise DataError(
            f"labelled_rows must lie between 1 and the {len(training)} training rows, got {kept}"
        )
    if kind == "stratified" and by is not None and kept < len(training):
        training = _by_class(training, by, sizes=(kept,), leave=0)
    return RowSplit(
        train=np.sort(training[:kept]),
        unlabelled=np.sort(training[kept:]),
        validation=np.sort(shuffled[:num_validation]),
        test=np.sort(shuffled[num_validation : num_validation + num_test]),
    )


def _by_class(
    rows: Int64[np.ndarray, " chosen"],
    classes: Int64[np.ndarray, " rows"],
    *,
    sizes: tuple[int, ...],
    leave: int = 1,
) -> Int64[np.ndarray, " chosen"]:
    """Return rows so ordered that parts of these sizes, and the rest, have each class's share.

    scikit-learn's stratified splitters refuse a class of one row, and leave small classes out of a
    part that they could reach.

    Args:
        rows: In random order.
        classes: Of all rows of the table.
        sizes: Rows of the parts, in their order; a class of few rows reaches the last part first.
        leave: How many rows of a class the parts leave to the rest, where there is a choice.
    """
    _, numbers, counts = np.unique(classes[rows], return_inverse=True, return_counts=True)
    left = counts.copy()
    taken: list[np.ndarray] = []
    for size in sizes[::-1]:
        share = _shares(left - leave, counts * size / len(rows), size)
        # Too many classes of one row: then the rest goes without some.
        share = share if share.sum() == size else _shares(left, counts * size / len(rows), size)
        left = left - share
        taken.insert(0, share)
    ends = np.cumsum(taken, axis=0)
    order = np.argsort(numbers, kind="stable")
    rank = np.empty(len(rows), dtype=np.int64)
    rank[order] = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
    part = (rank[None] >= ends[:, numbers]).sum(axis=0)
    return rows[np.argsort(part, kind="stable")]


def _shares(
    most: Int64[np.ndarray, " classes"], ideal: Float64[np.ndarray, " classes"], total: int
) -> Int64[np.ndarray, " classes"]:
    """Return whole numbers near to ``ideal`` that add up to ``total``, if ``most`` allows that.

    Each class that may have a row has one, if there are enough.
    """
    chosen = np.clip(np.floor(ideal).astype(np.int64), np.minimum(most, 1), most)
    while chosen.sum() < total and (chosen < most).any():
        chosen[np.argmax(np.where(chosen < most, ideal - chosen, -np.inf))] += 1
    while chosen.sum() > total:
        least = 1 if (chosen > 1).any() else 0
        chosen[np.argmax(np.where(chosen > least, chosen - ideal, -np.inf))] -= 1
    return chosen


def _by_group(
    rows: Int64[np.ndarray, " rows"],
    groups: Int64[np.ndarray, " rows"],
    *,
    fractions: tuple[float, float],
    seed: int,
) -> tuple[Int64[np.ndarray, " rows"], int, int]:
    """Return rows in the order validation, test, training, and the sizes of the first two parts.

    Raises:
        DataError: If there are fewer than three groups.
    """
    from sklearn.model_selection import GroupShuffleSplit

    group_count = len(np.unique(groups))
    if group_count < 3:
        raise DataError(f"{group_count} groups are too few to split; each of three parts needs one")
    tested = min(max(1, round(group_count * fractions[1])), group_count - 2)
    validated = min(max(1, round(group_count * fractions[0])), group_count - 1 - tested)

    def cut(chosen: np.ndarray, size: int, what: str) -> tuple[np.ndarray, np.ndarray]:
        state = derive_seed(seed, "rows", what) % 2**32
        splitter = GroupShuffleSplit(n_splits=1, test_size=size, random_state=state)
        rest, part = next(splitter.split(chosen, groups=groups[chosen]))
        return chosen[rest], chosen[part]

    rest, test = cut(rows, tested, "test")
    training, validation = cut(rest, validated, "validation")
    return np.concatenate([validation, test, training]), len(validation), len(test)


def training_batches(
    rows: Int64[np.ndarray, " train"], *, batch_size: int, seed: int, epoch: int
) -> list[np.ndarray]:
    """Return an epoch's batches: every row once, in an order of its own; the last may be short.

    Args:
        rows: Training rows.
        batch_size: Rows a batch, >= 1.
        seed: Run seed; the order uses its stream ``("batches", epoch)``.
        epoch: Counts from 0; a resumed run gets the same order again.
    """
    checks.at_least(1, batch_size=batch_size)
    order = stream(seed, "batches", epoch).permutation(len(rows))
    return consecutive_batches(rows[order], batch_size=batch_size)


def consecutive_batches(rows: Int64[np.ndarray, " chosen"], *, batch_size: int) -> list[np.ndarray]:
    """Cut rows into batches in the order given, as evaluation does; the last may be short."""
    checks.at_least(1, batch_size=batch_size)
    return [rows[start : start + batch_size] for start in range(0, len(rows), batch_size)]
