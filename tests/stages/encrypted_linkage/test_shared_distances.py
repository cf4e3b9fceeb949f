"""Linking by secret shares gives the plain links, and no share alone tells anything."""

import numpy as np
import pytest
from helpers.nearest import nearest_records
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chi2

from securevfl.core.errors import ConfigError, DataError
from securevfl.linkage.metrics.metric import LARGEST_UNIT, KeyRange
from securevfl.stages.encrypted_linkage.block_search import links_from_shares
from securevfl.stages.encrypted_linkage.shares import (
    Dealing,
    deal,
    masked_keys,
    primary_share,
    secondary_share,
)

UNIT_SQUARE = KeyRange(low=(0.0, 0.0), high=(1.0, 1.0))


def shares(rows: np.ndarray, records: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Run the protocol on quantised keys, each role with what it may know."""
    mine, theirs = deal(len(rows), len(records), rows.shape[1])
    masked_rows, masked_records = masked_keys(rows, mine), masked_keys(records, theirs)
    return (
        primary_share(rows, mine, masked_records),
        secondary_share(records, theirs, masked_rows),
    )


@settings(deadline=None, max_examples=80)
@given(st.integers(0, 2**32 - 1), st.integers(1, 4), st.booleans())
def test_links_equal_the_unprotected_ones(seed: int, key_dim: int, extreme: bool) -> None:
    """To the last bit after quantising, for random keys and for the corners of the range."""
    rng = np.random.default_rng(seed)
    rows, records, k = (int(rng.integers(1, most)) for most in (20, 30, 10))
    k = min(k, records)
    tables = [rng.integers(0, LARGEST_UNIT + 1, size=(count, key_dim)) for count in (rows, records)]
    if extreme:
        tables = [LARGEST_UNIT * (table % 2) for table in tables]
    links = links_from_shares(*shares(*tables), k, key_dim=key_dim)
    plain = nearest_records(*(table.astype(np.float64) for table in tables), k)

    assert np.array_equal(links.indices, plain.indices)
    assert np.array_equal(links.distances, plain.distances)


def uniform(words: np.ndarray) -> bool:
    """Chi-square tests of the lowest and the highest byte, each with a false alarm once in 1e9.

    800 words are three a class: there chi-square's tail of 1e-10 is one of 4e-10 (counted exactly).
    """
    for shift in (0, 56):
        counts = np.bincount((words >> np.uint64(shift)).ravel() & np.uint64(255), minlength=256)
        statistic = ((counts - words.size / 256) ** 2 / (words.size / 256)).sum()
        if not chi2.ppf(5e-11, 255) <= statistic <= chi2.isf(5e-11, 255):
            return False
    return True


@pytest.mark.statistical
def test_each_message_alone_is_uniform() -> None:
    """Masked keys and single shares of constant keys look like noise; eight tests at 1e-9."""
    rows, records = np.full((500, 2), 3), np.full((400, 2), 5)
    mine, theirs = deal(500, 400, 2)
    masked_rows, masked_records = masked_keys(rows, mine), masked_keys(records, theirs)

    assert uniform(masked_rows)
    assert uniform(masked_records)
    assert uniform(primary_share(rows, mine, masked_records))
    assert uniform(secondary_share(records, theirs, masked_rows))


@pytest.mark.statistical
def test_the_test_itself_sees_an_unmasked_lowest_bit() -> None:
    """Negative control: a share of the product that is doubled afterwards is always even."""
    mine, _ = deal(500, 400, 2)

    assert not uniform(np.uint64(2) * mine.product)


def test_shares_of_two_dealings_are_noticed() -> None:
    """Sums that are no distances are refused instead of linked; chance 2^-31 a pair."""
    rows, records = np.ones((5, 2), dtype=np.int64), np.zeros((6, 2), dtype=np.int64)
    one, other = shares(rows, records), shares(rows, records)

    with pytest.raises(DataError, match="do not belong together"):
        links_from_shares(one[0], other[1], 2, key_dim=2)


def test_bad_keys_are_refused() -> None:
    """Keys of another size than the mask, or that were not quantised."""
    mine, _ = deal(3, 4, 2)

    with pytest.raises(DataError, match="differ in size"):
        masked_keys(np.zeros((4, 2), dtype=np.int64), mine)
    with pytest.raises(DataError, match="whole numbers of 0 to 65535"):
        masked_keys(np.full((3, 2), -1), mine)
    assert repr(mine) == "Dealing((3, 2), (3, 4))"
    assert isinstance(mine, Dealing)


def test_quantised_keys_keep_distances() -> None:
    """To half a step a dimension at each end; all dimensions share one step."""
    region = KeyRange(low=(100.0, 0.0), high=(104.0, 2.0))
    rng = np.random.default_rng(0)
    keys = np.column_stack([rng.uniform(100, 104, 50), rng.uniform(0, 2, 50)])
    units = region.quantise(keys)
    plain = np.sqrt(((keys[:, None] - keys[None]) ** 2).sum(axis=2))
    rounded = region.step * np.sqrt(((units[:, None] - units[None]) ** 2).sum(axis=2))

    assert units.min() >= 0
    assert units.max() <= LARGEST_UNIT
    assert units[:, 1].max() <= LARGEST_UNIT / 2 + 1
    assert np.abs(plain - rounded).max() <= np.sqrt(2) * region.step


@pytest.mark.parametrize("value", [-0.1, 1.1, np.nan])
def test_keys_outside_the_agreed_range_are_refused(value: float) -> None:
    """Row, dimension and range are named."""
    with pytest.raises(DataError, match=r"row 2, dimension 1 .* agreed range \[0.0, 1.0\]"):
        UNIT_SQUARE.quantise(np.array([[0.5, 0.5], [value, 0.5]]))


def test_impossible_ranges_are_refused() -> None:
    """Finite, ascending, one pair a dimension."""
    with pytest.raises(ConfigError, match="one value for each key dimension"):
        KeyRange(low=(0.0,), high=(1.0, 2.0))
    with pytest.raises(ConfigError, match="finite and ascend"):
        KeyRange(low=(1.0,), high=(1.0,))
    with pytest.raises(DataError, match="have 1 dimensions, the agreed range 2"):
        UNIT_SQUARE.quantise(np.zeros((2, 1)))
