"""Classes of a label that is a number: how far one label reaches, and how many rows each has."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from securevfl.stages.class_means.class_labels import classes_among_alike, classes_by_rank


@settings(max_examples=200, deadline=None)
@given(
    labels=st.lists(st.integers(-3, 3).map(float), min_size=3, max_size=14),
    classes=st.integers(2, 4),
    changed=st.integers(0, 2),
    other=st.integers(-3, 3),
)
def test_one_number_moves_no_more_rows_than_is_charged(
    labels: list[float], classes: int, changed: int, other: int
) -> None:
    """Many rows have equal labels here: a threshold would take all of them along."""
    exchanged = [*labels[:changed], float(other), *labels[changed + 1 :]]
    before = classes_by_rank(np.array(labels), classes)
    after = classes_by_rank(np.array(exchanged), classes)
    assert (before != after).sum() <= classes


@pytest.mark.parametrize("classes", [2, 3, 5])
def test_classes_of_numbers_have_equally_many_rows(classes: int) -> None:
    """And the highest labels are of the last one."""
    labels = np.random.default_rng(0).normal(size=31)
    found = classes_by_rank(labels, classes)
    counts = np.bincount(found, minlength=classes)
    assert counts.max() - counts.min() <= 1
    assert found[labels.argmax()] == classes - 1
    assert found[labels.argmin()] == 0


@settings(max_examples=100, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    rows=st.integers(1, 300),
    columns=st.integers(0, 3),
    classes=st.integers(2, 4),
)
def test_one_number_moves_no_more_rows_among_those_alike(
    seed: int, rows: int, columns: int, classes: int
) -> None:
    """Who is alike does not depend on labels; many labels and many columns' values are equal."""
    rng = np.random.default_rng(seed)
    own = rng.integers(0, 20, (rows, columns)).astype(float)
    labels = rng.integers(-3, 4, rows).astype(float)
    exchanged = labels.copy()
    exchanged[rng.integers(rows)] = rng.integers(-3, 4)
    before = classes_among_alike(labels, own, classes)
    assert (before != classes_among_alike(exchanged, own, classes)).sum() <= classes


def test_a_class_tells_what_own_columns_do_not() -> None:
    """A label that follows an own column: its class follows what is left of it."""
    rng = np.random.default_rng(0)
    own, rest = rng.normal(size=(2, 4_000))
    found = classes_among_alike(3 * own + rest, own[:, None], 2)
    assert np.ptp(np.bincount(found)) < 200
    assert abs(np.corrcoef(found, own)[0, 1]) < 0.05
    assert np.corrcoef(found, rest)[0, 1] > 0.7
