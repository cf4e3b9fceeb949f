"""Classes of a label that is a number: how far one label reaches, and how many rows each has."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from securevfl.federation.class_means.class_labels import classes_by_rank


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
