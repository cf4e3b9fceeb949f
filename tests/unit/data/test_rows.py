"""Row split and batch order."""

import numpy as np
import pytest

from securevfl.core.errors import ConfigError, DataError
from securevfl.data.rows import consecutive_batches, split_rows, training_batches


def test_every_row_is_in_one_part() -> None:
    """Training, validation and test rows are disjoint, complete and of the sizes asked for."""
    split = split_rows(100, validation_fraction=0.1, test_fraction=0.2, seed=3)

    assert [len(split.train), len(split.validation), len(split.test)] == [70, 10, 20]
    together = np.concatenate([split.train, split.validation, split.test])
    assert np.array_equal(np.sort(together), np.arange(100))


def test_sorted_tables_are_shuffled() -> None:
    """The test part is no block of rows: of 2,000 rows in ten classes, each class is in it."""
    split = split_rows(2000, validation_fraction=0.1, test_fraction=0.2, seed=0)

    assert set(split.test // 200) == set(range(10))


def test_the_split_follows_the_seed() -> None:
    """One seed, one split."""
    one, same, other = (
        split_rows(50, validation_fraction=0.1, test_fraction=0.2, seed=seed) for seed in (1, 1, 2)
    )

    assert np.array_equal(one.test, same.test)
    assert not np.array_equal(one.test, other.test)


@pytest.mark.parametrize(
    ("validation", "test", "error"),
    [(0.0, 0.2, ConfigError), (0.5, 0.5, ConfigError), (0.01, 0.2, DataError)],
)
def test_empty_parts_are_refused(validation: float, test: float, error: type[Exception]) -> None:
    """Every part must hold a row."""
    with pytest.raises(error):
        split_rows(20, validation_fraction=validation, test_fraction=test, seed=0)


def test_an_epoch_uses_every_row_once() -> None:
    """Batches are full but for the last, and epochs differ in order."""
    rows = np.arange(100, 110)
    first = training_batches(rows, batch_size=4, seed=0, epoch=0)
    second = training_batches(rows, batch_size=4, seed=0, epoch=1)

    assert [len(batch) for batch in first] == [4, 4, 2]
    assert np.array_equal(np.sort(np.concatenate(first)), rows)
    assert not np.array_equal(np.concatenate(first), np.concatenate(second))


def test_a_resumed_epoch_has_the_same_order() -> None:
    """The order depends on seed and epoch alone."""
    rows = np.arange(10)
    again = training_batches(rows, batch_size=3, seed=4, epoch=7)

    for batch, expected in zip(
        training_batches(rows, batch_size=3, seed=4, epoch=7), again, strict=True
    ):
        assert np.array_equal(batch, expected)


def test_evaluation_keeps_the_order() -> None:
    """Consecutive batches are slices."""
    batches = consecutive_batches(np.array([5, 3, 9]), batch_size=2)

    assert [batch.tolist() for batch in batches] == [[5, 3], [9]]
