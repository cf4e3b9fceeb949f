"""Links by cell equal the links of all pairs, and take fewer of them."""

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import pytest
from helpers.nearest import nearest_records
from hypothesis import given, settings
from hypothesis import strategies as st

from securevfl.core.errors import ConfigError, DataError
from securevfl.linkage.links import LinkTable
from securevfl.linkage.metrics.metric import LARGEST_UNIT
from securevfl.stages.encrypted_linkage.block_search import (
    CellBlock,
    PassLinker,
    cells_of,
    links_by_cell,
    links_from_shares,
)
from securevfl.stages.encrypted_linkage.shares import (
    deal,
    masked_keys,
    primary_share,
    secondary_share,
)


def plain(rows: np.ndarray, records: np.ndarray, k: int) -> LinkTable:
    return nearest_records(rows.astype(np.float64), records.astype(np.float64), k)


def by_shares(rows: np.ndarray, records: np.ndarray) -> PassLinker:
    """The whole protocol for each block, the dealer and the coordinator included."""

    def link(mine: np.ndarray, theirs: np.ndarray, k: int) -> LinkTable:
        first, second = deal(len(mine), len(theirs), rows.shape[1])
        one = primary_share(rows[mine], first, masked_keys(records[theirs], second))
        other = secondary_share(records[theirs], second, masked_keys(rows[mine], first))
        return links_from_shares(one, other, k, key_dim=rows.shape[1])

    def link_blocks(blocks: Sequence[CellBlock], k: int) -> Iterator[LinkTable]:
        return (link(b.rows, b.records, min(k, len(b.records))) for b in blocks)

    return link_blocks


@settings(deadline=None, max_examples=80)
@given(
    st.integers(0, 2**32 - 1),
    st.integers(1, 60),
    st.integers(1, 60),
    st.integers(1, 3),
    st.sampled_from([1, 700, 5_000, 40_000, 65_536]),
    st.sampled_from([1, 8192, 65_536]),
    st.data(),
)
def test_links_equal_those_of_all_pairs(
    seed: int, rows: int, records: int, key_dim: int, width: int, grid: int, data: st.DataObject
) -> None:
    """To the last bit, for any width, with keys anywhere, on a coarse grid, or all in corners."""
    rng = np.random.default_rng(seed)
    mine, theirs = (
        np.minimum(rng.integers(0, 65_536 // grid + 1, (count, key_dim)) * grid, LARGEST_UNIT)
        for count in (rows, records)
    )
    k = data.draw(st.integers(1, records))
    found = links_by_cell(
        cells_of(mine, width), cells_of(theirs, width), k, width=width, link=by_shares(mine, theirs)
    )
    expected = plain(mine, theirs, k)

    assert np.array_equal(found.indices, expected.indices)
    assert np.array_equal(found.distances, expected.distances)


@pytest.mark.parametrize("width", [300, 1_500])
def test_few_pairs_are_computed(width: int) -> None:
    """10 nearest of 2,000: also for rows that are far from all records, whatever the width."""
    rng = np.random.default_rng(0)
    mine = rng.integers(0, 65_536, (500, 2))
    theirs = rng.integers(0, 16_384, (2000, 2))
    tried = 0
    link = by_shares(mine, theirs)

    def counting(blocks: Sequence[CellBlock], k: int) -> Iterable[LinkTable]:
        nonlocal tried
        tried += sum(len(block.rows) * len(block.records) for block in blocks)
        return link(blocks, k)

    found = links_by_cell(
        cells_of(mine, width), cells_of(theirs, width), 10, width=width, link=counting
    )

    assert tried < 0.4 * 500 * 2000
    assert np.array_equal(found.indices, plain(mine, theirs, 10).indices)


def test_bad_input_is_refused() -> None:
    """Too many links, no width."""
    cells, link = np.zeros((3, 2), dtype=np.int64), by_shares(np.zeros((3, 2)), np.zeros((3, 2)))
    with pytest.raises(DataError, match="K = 4 links"):
        links_by_cell(cells, cells, 4, width=1, link=link)
    with pytest.raises(ConfigError, match="width must be at least 1"):
        cells_of(cells, 0)
