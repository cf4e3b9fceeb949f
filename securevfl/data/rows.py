"""The primary's rows: training, validation and test parts, and the order of batches."""

from dataclasses import dataclass, field
from typing import Final, Literal

import numpy as np
from jaxtyping import Bool, Float64, Int64

from securevfl.core import checks
from securevfl.core.conventions import derive_seed, stream
from securevfl.core.errors import ConfigError, DataError

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
