"""The primary's rows: training, validation and test parts, and the order of batches."""

from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Bool, Int64

from securevfl.core import checks
from securevfl.core.errors import ConfigError, DataError
from securevfl.core.seeds import stream


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


def split_rows(
    num_rows: int,
    *,
    validation_fraction: float,
    test_fraction: float,
    seed: int,
    labelled_rows: int | None = None,
    labelled: Bool[np.ndarray, " rows"] | None = None,
) -> RowSplit:
    """Draw validation and test rows at random; tables may be sorted, so order never decides.

    Args:
        num_rows: Rows of the primary's table.
        validation_fraction: Share of all rows, in (0, 1).
        test_fraction: Share of all rows, in (0, 1); the two together leave rows to train on.
        seed: Run seed; the split uses its stream ``"rows"``.
        labelled_rows: How many training rows keep their labels; None keeps all.
        labelled: Which rows have a label; None: all. The others are for training without one, and
            the fractions are shares of those that have one.

    Raises:
        ConfigError: If the fractions are out of range.
        DataError: If a part would be empty.
    """
    checks.open_unit(validation_fraction=validation_fraction, test_fraction=test_fraction)
    if not validation_fraction + test_fraction < 1:
        raise ConfigError("test_fraction plus validation_fraction must be below 1")
    if labelled is not None:
        split = split_rows(
            int(labelled.sum()),
            validation_fraction=validation_fraction,
            test_fraction=test_fraction,
            seed=seed,
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
    num_validation = round(num_rows * validation_fraction)
    num_test = round(num_rows * test_fraction)
    if min(num_validation, num_test, num_rows - num_validation - num_test) < 1:
        raise DataError(
            f"{num_rows} rows are too few to split: {num_rows - num_validation - num_test} for "
            f"training, {num_validation} for validation, {num_test} for testing"
        )
    shuffled = stream(seed, "rows").permutation(num_rows)
    training = shuffled[num_validation + num_test :]
    kept = len(training) if labelled_rows is None else labelled_rows
    if not 1 <= kept <= len(training):
        raise DataError(
            f"labelled_rows must lie between 1 and the {len(training)} training rows, got {kept}"
        )
    return RowSplit(
        train=np.sort(training[:kept]),
        unlabelled=np.sort(training[kept:]),
        validation=np.sort(shuffled[:num_validation]),
        test=np.sort(shuffled[num_validation : num_validation + num_test]),
    )


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
