import random

import mpmath
import numpy as np
import numpy.typing as npt
import pytest

from securevfl.dp.ring_noise import EXTENSION_BITS, NoiseTables

STDS = [64.0, 100.3, 12_345.678, 2.0**26]


def parts(tables: NoiseTables) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Each cell's block, and the coins that are surely accepted."""
    cells = tables.cells.astype(np.int64)
    return cells >> 16, cells & 0xFFFF


@pytest.mark.parametrize("std", STDS)
def test_the_cumulative_table_is_right_to_its_last_bit(std: float) -> None:
    """Each entry holds the first 64 bits of mpmath's value at 100 digits."""
    tables = NoiseTables(std)
    z = range(-tables.reach, tables.reach + 1)
    with mpmath.workdps(100):
        nearest = [tables.block * i if i >= 0 else tables.block * (i + 1) - 1 for i in z]
        weights = [mpmath.exp(-(mpmath.mpf(m) ** 2) / (2 * mpmath.mpf(std) ** 2)) for m in nearest]
        total, partial = mpmath.fsum(weights), mpmath.mpf(0)
        for entry, weight in zip(tables.cumulative, weights, strict=True):
            partial += weight
            exact = min(int(mpmath.floor(partial / total * 2**64)), 2**64 - 1)
            assert int(entry) == exact


@pytest.mark.parametrize("std", STDS)
def test_what_sixteen_bits_accept_every_longer_number_accepts(std: float) -> None:
    """At every settled cell and the ends of its block: the next coin keeps below exp(-t)."""
    tables = NoiseTables(std)
    z, sure = parts(tables)
    z, last_sure = z[sure > 0], sure[sure > 0] - 1.0
    for offset in {0, tables.block // 3, tables.block // 2, tables.block - 1}:
        wide = tables.block * z + offset
        nearest = tables.nearest_to_zero(wide)
        t = ((wide - nearest) * (wide + nearest)) / (2 * std**2)
        # Whatever follows the largest coin that is surely accepted, it is below the next coin.
        assert bool(((last_sure + 1) * 2.0**-16 <= np.exp(-t)).all())


@pytest.mark.parametrize("std", STDS)
def test_settled_cells_pick_the_block_that_64_bits_pick(std: float) -> None:
    """The first and the last number of a settled cell fall into the same block."""
    tables = NoiseTables(std)
    z, sure = parts(tables)
    cells = np.flatnonzero(sure)
    first = cells.astype(np.uint64) << np.uint64(48)
    last = first + np.uint64(2**48 - 1)

    for pick in (first, last):
        index = np.searchsorted(tables.cumulative, pick, side="right")
        assert np.array_equal(index - tables.reach, z[cells])
        assert not tables.is_tie(pick, index).any()


@pytest.mark.parametrize("std", STDS)
def test_every_cell_finds_the_block_that_a_search_finds(std: float) -> None:
    """At both ends of every cell, in its middle, and at every boundary and one step before it."""
    tables = NoiseTables(std)
    edges = np.arange(2**16, dtype=np.uint64) << np.uint64(48)
    within = [np.uint64(0), np.uint64(2**47), np.uint64(2**48 - 1)]
    boundaries = tables.cumulative[tables.cumulative > 0]
    pick = np.concatenate([*(edges + more for more in within), boundaries - 1, boundaries])
    cell = (pick >> np.uint64(48)).astype(np.uint16)

    found = tables.find(cell, pick)
    assert np.array_equal(found, np.searchsorted(tables.cumulative, pick, side="right"))


def test_nearly_all_candidates_are_settled_by_their_first_bits() -> None:
    """Speed rests on it: at most 1.5 % need more bits for their block, 3 % for it or their coin."""
    for std in STDS:
        tables = NoiseTables(std)
        _, sure = parts(tables)
        assert (sure == 0).mean() < 0.015
        assert 1 - sure.mean() / 2**16 < 0.03


def test_a_tie_is_seen_and_settled_by_the_extension() -> None:
    """64 bits that equal a boundary's are open; 192 more put them on one side or the other."""
    tables = NoiseTables(100.3)
    middle = len(tables.cumulative) // 2
    pick = tables.cumulative[middle : middle + 1]
    index = np.searchsorted(tables.cumulative, pick, side="right")

    assert tables.is_tie(pick, index).all()
    assert tables.exact_index(int(pick[0]), 0) == middle
    assert tables.exact_index(int(pick[0]), 2**EXTENSION_BITS - 1) == middle + 1


def test_the_ends_of_the_unit_interval_pick_a_block() -> None:
    """Zero and almost one do not fall off the table."""
    tables = NoiseTables(64.0)

    assert 0 <= tables.exact_index(0, 0) <= tables.exact_index(0, 2**EXTENSION_BITS - 1)
    last = tables.exact_index(2**64 - 1, 2**EXTENSION_BITS - 1)
    assert last == len(tables.cumulative) - 1


def test_the_exact_toss_agrees_with_mpmath_at_the_threshold() -> None:
    """One step of 2^-256 below exp(-t) accepts; one step above does not."""
    source = random.Random(1)
    std = 12_345.678
    tables = NoiseTables(std)
    for _ in range(50):
        x = tables.block * source.randrange(-200, 200) + source.randrange(tables.block)
        nearest = int(tables.nearest_to_zero(np.array([x]))[0])
        with mpmath.workdps(120):
            t = mpmath.mpf(x * x - nearest * nearest) / (2 * mpmath.mpf(std) ** 2)
            threshold = int(mpmath.floor(mpmath.exp(-t) * 2**256))
        for uniform, accepted in ((threshold - 1, True), (threshold + 1, False)):
            if uniform < 2**256:
                toss, extension = divmod(uniform, 2**EXTENSION_BITS)
                assert tables.exact_toss(x, nearest, toss, extension) == accepted
