"""Class sums: what one record and one label can change in them, in the integers that are summed."""

import itertools
import math

import numpy as np
import pytest
import torch
from helpers.alarms import require_noise
from hypothesis import given, settings
from hypothesis import strategies as st

from securevfl.core.errors import PrivacyError
from securevfl.dp.class_sums import SumFormat, cell_counts, noised_ranks, symmetric_noise
from securevfl.stages.class_means.class_labels import classes_by_rank

BINS = 4


def sum_format_of(
    found: SumFormat, records: np.ndarray, rows_of: np.ndarray, bins: np.ndarray
) -> np.ndarray:
    """Return class sums of records that each picked the rows given, -1 for none."""
    picked = [(row, record) for record, rows in enumerate(rows_of) for row in rows if row >= 0]
    slots = [[record for row, record in picked if row == one] for one in range(len(bins))]
    width = max(1, *map(len, slots))
    links = np.full((len(bins), width), -1)
    for row, found_there in enumerate(slots):
        links[row, : len(found_there)] = found_there
    return found.by_bins(found.row_vectors(records, links), bins)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    features=st.integers(1, 9),
    cap=st.integers(1, 3),
    scale=st.sampled_from([0.01, 1.0, 100.0]),
)
def test_no_record_and_no_label_moves_the_sums_by_more_than_the_bound(
    seed: int, features: int, cap: int, scale: float
) -> None:
    """Every record of a small table is taken away, and every row's label exchanged for another."""
    draw = np.random.default_rng(seed)
    records = (scale * draw.normal(size=(8, features))).astype(np.float32)
    rows_of = np.stack([draw.permutation(5)[:cap] for _ in records])
    bins = draw.integers(0, BINS, 5)
    found = SumFormat.choose(
        features=features, bins=BINS, links_per_record=cap, noise_multiplier=3.0
    )
    whole = sum_format_of(found, records, rows_of, bins)
    for gone in range(len(records)):
        without = np.where(np.arange(len(records))[:, None] == gone, -1, rows_of)
        change = np.linalg.norm(whole - sum_format_of(found, records, without, bins))
        assert change <= found.change_of_record
    for row in range(len(bins)):
        other = bins.copy()
        other[row] = (other[row] + 1) % BINS
        change = np.linalg.norm(whole - sum_format_of(found, records, rows_of, other))
        assert change <= found.change_of_label()


def test_the_bounds_are_reached() -> None:
    """A looser one would be noise for nothing: a record of full length, and a full row's label."""
    found = SumFormat.choose(features=4, bins=BINS, links_per_record=1, noise_multiplier=None)
    long = np.full((1, 4), 50.0, np.float32)
    whole = sum_format_of(found, long, np.array([[0]]), np.array([0, 1]))
    moved = sum_format_of(found, long, np.array([[0]]), np.array([2, 1]))
    assert np.linalg.norm(whole) > 0.999 * found.change_of_record
    assert np.linalg.norm(whole - moved) > 0.999 * found.change_of_label()


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    features=st.integers(1, 9),
    classes=st.integers(2, 4),
    scale=st.sampled_from([0.01, 1.0, 100.0]),
    noise=st.sampled_from([3.0, 1e6]),
)
def test_no_number_moves_the_sums_of_ranks_by_more_than_the_bound(
    seed: int, features: int, classes: int, scale: float, noise: float
) -> None:
    """Every row's number is exchanged for one below all and above all others; units are coarse."""
    draw = np.random.default_rng(seed)
    records = (scale * draw.normal(size=(9, features))).astype(np.float32)
    rows_of, values = np.arange(9)[:, None], draw.normal(size=9)
    rows_of[:3] = draw.integers(0, 9, size=(3, 1))
    found = SumFormat.choose(
        features=features, bins=classes + 1, links_per_record=1, noise_multiplier=noise
    )
    whole = sum_format_of(found, records, rows_of, classes_by_rank(values, classes))
    for row, value in itertools.product(range(9), (-9.0, 9.0)):
        other = np.where(np.arange(9) == row, value, values)
        there = sum_format_of(found, records, rows_of, classes_by_rank(other, classes))
        assert np.linalg.norm(whole - there) <= found.change_of_label(classes)


@pytest.mark.parametrize("classes", [2, 3])
def test_the_bound_of_a_number_is_reached(classes: int) -> None:
    """Noise for more is waste: rows of opposite records go round all classes."""
    found = SumFormat.choose(features=4, bins=classes + 1, links_per_record=1, noise_multiplier=3.0)
    records = np.full((3 * classes, 4), 50.0, np.float32)
    values = np.arange(3.0 * classes)
    # The row that goes round is opposite to those that the two outermost borders move.
    records[0] *= -1
    other = np.where(values == 0, 99.0, values)
    rows_of = np.arange(len(records))[:, None]
    sums = [
        sum_format_of(found, records, rows_of, classes_by_rank(labels, classes))
        for labels in (values, other)
    ]
    change = np.linalg.norm(sums[0] - sums[1])
    # Between the first and the last class equal vectors take each other's place.
    assert change > 0.999 * found.change_of_label(classes) * (2 / classes) ** 0.5


def test_means_are_those_of_the_rows_records() -> None:
    """To the rounding of a unit, where every row has one record inside the ball."""
    draw = np.random.default_rng(0)
    records = draw.uniform(-0.5, 0.5, (40, 3)).astype(np.float32)
    bins = np.arange(40) % BINS
    found = SumFormat.choose(features=3, bins=BINS, links_per_record=1, noise_multiplier=None)
    sums = sum_format_of(found, records, np.arange(40)[:, None], bins)
    counts, means = found.means(sums.astype(np.float64))
    np.testing.assert_allclose(counts, 10)
    for one in range(BINS):
        np.testing.assert_allclose(means[one], records[bins == one].mean(axis=0), atol=1e-3)


def test_a_record_that_is_linked_too_often_is_refused() -> None:
    """Then the bound would not hold."""
    found = SumFormat.choose(features=2, bins=BINS, links_per_record=1, noise_multiplier=None)
    with pytest.raises(PrivacyError, match="linked to 2 rows"):
        found.row_vectors(np.ones((1, 2), np.float32), np.array([[0], [0]]))


def test_a_record_that_is_not_finite_counts_as_none() -> None:
    """Neither NaN nor infinity becomes a number that says so."""
    found = SumFormat.choose(features=2, bins=BINS, links_per_record=1, noise_multiplier=None)
    records = np.array([[np.nan, 0], [np.inf, 1], [0.5, 0.5]], np.float32)
    vectors = found.row_vectors(records, np.array([[0], [1], [2]]))
    assert not vectors[:2].any()
    assert vectors[2].any()


def test_noise_that_leaves_nothing_is_refused() -> None:
    """And noise that is asked for has a unit fine enough to be drawn."""
    with pytest.raises(PrivacyError, match="raise the share"):
        SumFormat.choose(features=30, bins=3, links_per_record=1, noise_multiplier=1e7)
    small = SumFormat.choose(features=1, bins=3, links_per_record=1, noise_multiplier=0.05)
    assert small.noise(0.05 * small.change_of_record).any()
    assert not small.noise(0.0).any()


@pytest.mark.parametrize("columns", [1, 4])
def test_no_record_moves_counts_of_cells_further_than_the_bound(columns: int) -> None:
    """Each of a table's records is taken away, some far out, some equal, one not finite."""
    values = np.random.default_rng(5).normal(size=(30, columns)) * 2
    values[3:8], values[8] = values[3], np.nan
    edges = np.linspace(-1, 1, 9)
    whole = cell_counts(values, edges)
    assert whole.sum(axis=1).tolist() == [29] * columns
    moved = [
        np.linalg.norm(whole - cell_counts(np.delete(values, gone, axis=0), edges))
        for gone in range(len(values))
    ]
    assert max(moved) == pytest.approx(math.sqrt(columns))
    assert moved[8] == 0


def test_ranks_without_noise_are_those_of_the_middle_of_each_cell() -> None:
    """With many equal values: half of a cell's share, and all that lies below it."""
    values = np.array([[-1.0]] * 6 + [[0.1]] * 3 + [[5.0]])
    ranks = noised_ranks(values, np.array([-1.0, 0.0, 1.0, 2.0]), noise_multiplier=None)
    np.testing.assert_allclose(ranks, [[0.3, 0.75, 0.95]])


@pytest.mark.statistical
@pytest.mark.parametrize("multiplier", [0.5, 20.0])
def test_noise_on_ranks_has_the_deviation_that_the_accounting_assumes(multiplier: float) -> None:
    """Two cells of 5,000 records, 4 columns: each comparison fails by chance once in 1e11."""
    values = np.repeat([[-0.5] * 4, [0.5] * 4], 5000, axis=0)
    edges = np.array([-1.0, 0.0, 1.0])
    first = np.concatenate(
        [noised_ranks(values, edges, noise_multiplier=multiplier)[:, 0] for _ in range(300)]
    )
    # A share is 1/2 + (n1 - n2) / (4 N) to first order, with N = 5,000, and a rank half of that.
    deviation = multiplier * math.sqrt(4) * math.sqrt(2) / (4 * 5000) / 2
    require_noise(torch.from_numpy(first - 0.25), deviation, slack=0.02)


@pytest.mark.statistical
def test_every_number_of_every_line_of_class_sums_has_the_whole_noise() -> None:
    """By itself, and unrelated to its neighbours: 36 comparisons, each by chance once in 1e11."""
    found = SumFormat(features=7, bins=4, links_per_record=1, bits=10)
    drawn = torch.from_numpy(np.stack([found.noise(100.0) for _ in range(1500)]))
    require_noise(drawn, 100.0)
    for line in range(4):
        for number in range(8):
            require_noise(drawn[:, line, number], 100.0)


@pytest.mark.statistical
def test_every_number_of_moments_has_noise_of_its_own() -> None:
    """Less off the diagonal, where a number stands twice: 15 comparisons, once in 1e11 each."""
    drawn = torch.from_numpy(np.stack([symmetric_noise(5, std=200.0) for _ in range(1500)]))
    assert torch.equal(drawn, drawn.mT)
    for line in range(5):
        for number in range(line + 1):
            deviation = 200.0 if line == number else 200.0 / math.sqrt(2)
            require_noise(drawn[:, line, number], deviation)
