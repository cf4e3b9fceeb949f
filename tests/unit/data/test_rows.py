"""Row split and batch order."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from securevfl.core.errors import ConfigError, DataError
from securevfl.data.tables import RowSplit, consecutive_batches, split_rows, training_batches


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


@pytest.mark.parametrize(
    ("rows", "test", "validation"),
    [(50, 0.2, 10), (360, 0.2, 72), (1_000, 0.2, 160), (5_000, 0.2, 500), (360, 0.9, 18)],
)
def test_small_tables_validate_on_a_larger_share(rows: int, test: float, validation: int) -> None:
    """160 rows by default, from a tenth to a fifth of all; at most half of what does not test."""
    split = split_rows(rows, validation_fraction=None, test_fraction=test, seed=0)
    assert len(split.validation) == validation


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


def parts_of(split: RowSplit) -> list[np.ndarray]:
    """Return training, validation and test rows."""
    return [split.train, split.validation, split.test]


@pytest.mark.parametrize(
    ("counts", "expected"),
    [
        ((160, 40), [(112, 28), (16, 4), (32, 8)]),
        ((199, 1), [(139, 1), (20, 0), (40, 0)]),
        ((198, 2), [(139, 1), (20, 0), (39, 1)]),
        ((197, 3), [(139, 1), (19, 1), (39, 1)]),
        ((10, 90, 100), [(7, 63, 70), (1, 9, 10), (2, 18, 20)]),
    ],
)
@pytest.mark.parametrize("seed", [0, 1])
def test_classes_have_their_share_of_every_part(
    counts: tuple[int, ...], expected: list[tuple[int, ...]], seed: int
) -> None:
    """A class of few rows reaches training, then testing, then validation."""
    classes = np.random.default_rng(seed).permutation(np.repeat(np.arange(len(counts)), counts))
    split = split_rows(
        200, validation_fraction=0.1, test_fraction=0.2, seed=seed, kind="stratified", by=classes
    )

    found = [tuple(np.bincount(classes[part], minlength=len(counts))) for part in parts_of(split)]
    assert found == expected
    assert np.array_equal(np.sort(np.concatenate(parts_of(split))), np.arange(200))


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_any_classes_can_be_stratified(data: st.DataObject) -> None:
    """Parts keep their sizes whatever the classes, and each class is as near as it can be."""
    classes = np.array(data.draw(st.lists(st.integers(0, 9), min_size=20, max_size=60)))
    kept = data.draw(st.integers(1, len(classes) // 2))
    plan: dict[str, Any] = {"validation_fraction": 0.15, "test_fraction": 0.25, "seed": 4}
    plain = split_rows(len(classes), **plan)
    split = split_rows(len(classes), **plan, kind="stratified", by=classes, labelled_rows=kept)

    assert [len(part) for part in parts_of(split)[1:]] == [
        len(part) for part in parts_of(plain)[1:]
    ]
    assert len(split.train) == kept
    together = np.concatenate([*parts_of(split), split.unlabelled])
    assert np.array_equal(np.sort(together), np.arange(len(classes)))
    largest = np.bincount(classes).argmax()
    share = (classes[split.test] == largest).mean() - (classes == largest).mean()
    assert abs(share) <= 9 / len(split.test)


def test_labels_that_are_kept_are_of_every_class() -> None:
    """Ten labelled rows of two classes, one of which is one row in ten."""
    classes = np.repeat([0, 1], [180, 20])
    split = split_rows(
        200,
        validation_fraction=0.1,
        test_fraction=0.2,
        seed=0,
        kind="stratified",
        by=classes,
        labelled_rows=10,
    )

    assert np.bincount(classes[split.train]).tolist() == [9, 1]


def test_a_group_is_on_one_side() -> None:
    """Every group in one part, every part with groups, other groups by another seed."""
    groups = np.random.default_rng(0).integers(0, 30, 300)
    drawn = []
    for seed in (1, 2):
        split = split_rows(
            300, validation_fraction=0.1, test_fraction=0.2, seed=seed, kind="group", by=groups
        )
        sides = [set(groups[part].tolist()) for part in parts_of(split)]
        assert [len(side) for side in sides] == [21, 3, 6]
        assert set.union(*sides) == set(range(30))
        assert np.array_equal(np.sort(np.concatenate(parts_of(split))), np.arange(300))
        drawn.append(sides[2])
    assert drawn[0] != drawn[1]
    with pytest.raises(DataError, match="2 groups are too few"):
        split_rows(
            10,
            validation_fraction=0.1,
            test_fraction=0.2,
            seed=0,
            kind="group",
            by=np.arange(10) % 2,
        )


def test_the_newest_rows_are_for_testing() -> None:
    """Training rows are the oldest; rows without a label do not count."""
    times = np.random.default_rng(3).permutation(np.arange(100) // 2)
    labelled = np.arange(100) % 5 > 0
    split = split_rows(
        100,
        validation_fraction=0.1,
        test_fraction=0.2,
        seed=0,
        kind="time",
        by=times,
        labelled=labelled,
    )
    train, validation, test = (times[part] for part in parts_of(split))

    assert [len(train), len(validation), len(test)] == [56, 8, 16]
    assert train.max() <= validation.min() <= validation.max() <= test.min()
    assert np.array_equal(split.unlabelled, np.flatnonzero(~labelled))
