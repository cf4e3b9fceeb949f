"""Sums by bins under a dealer's masks: exact, uniform to whoever looks, and one bin a row."""

import dataclasses

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis.extra.numpy import arrays

from securevfl.core.errors import ProtocolError
from securevfl.mpc import dealt_sums
from securevfl.mpc.dealt_sums import (
    DealtFor,
    deal,
    mask_vectors,
    masked_noise,
    open_sums,
    rows_of_piece,
    shift_bins,
)

WORDS = st.integers(-(2**63), 2**63 - 1)


def sum_format_of(rows, bins, numbers):
    return DealtFor(run="a run", secondary=1, rows=rows, bins=bins, numbers=numbers)


def plain(bins_of_rows, vectors, noise):
    """Add up as int64 does, which is modulo 2^64."""
    sums = noise.copy()
    np.add.at(sums, bins_of_rows, vectors)
    return sums


def summed(bins_of_rows, vectors, noise, *, said=None):
    """Take every party's part; ``said`` is what a lying primary says."""
    bins = len(noise)
    what = sum_format_of(len(vectors), *noise.shape)
    dealing, seed = deal(what)
    if said is None:
        said = shift_bins(bins_of_rows, dealing.shifts, bins=bins)
    pieces = list(mask_vectors(vectors, said, seed, what))
    return open_sums(pieces, masked_noise(noise, seed, what), dealing), dealing, seed, pieces


def drawn(rows, bins, numbers, seed=3):
    random = np.random.default_rng(seed)
    vectors = random.integers(-(10**6), 10**6, (rows, numbers))
    vectors[::4] = 0  # rows without records
    return random.integers(0, bins, rows), vectors, random.integers(-99, 99, (bins, numbers))


@pytest.fixture
def small_pieces(monkeypatch):
    """Several pieces, the last one short."""
    monkeypatch.setattr(dealt_sums, "_PIECE_WORDS", 40)


@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_the_sum_is_that_of_the_classes(data) -> None:
    """Any vectors, bins and noise of 64 bits: equal to the plain sum modulo 2^64."""
    rows, bins, numbers = (data.draw(st.integers(1, most)) for most in (40, 6, 5))
    vectors = data.draw(arrays(np.int64, (rows, numbers), elements=WORDS))
    noise = data.draw(arrays(np.int64, (bins, numbers), elements=WORDS))
    bins_of_rows = data.draw(arrays(np.int64, rows, elements=st.integers(0, bins - 1)))
    found, *_ = summed(bins_of_rows, vectors, noise)
    np.testing.assert_array_equal(found, plain(bins_of_rows, vectors, noise))


def test_the_sum_is_exact_in_pieces(small_pieces) -> None:
    """Of 41 rows of 3 bins and 4 numbers, 3 rows at a time; some rows have no record."""
    assert rows_of_piece(3, 4) == 3
    bins_of_rows, vectors, noise = drawn(41, 3, 4)
    found, _, _, pieces = summed(bins_of_rows, vectors, noise)
    assert [len(piece) for piece in pieces] == [3] * 13 + [2]
    np.testing.assert_array_equal(found, plain(bins_of_rows, vectors, noise))


def test_what_the_primary_sees_is_a_mask_and_one_line_a_row(small_pieces) -> None:
    """Masked words without the mask are the vector in the line that was said, and zeros elsewhere.

    The mask is a key stream under the secondary's seed alone, so to whoever lacks it the words are
    uniform, whatever the vectors.
    """
    bins_of_rows, vectors, noise = drawn(50, 4, 3)
    _, dealing, seed, pieces = summed(bins_of_rows, vectors, noise)
    said = shift_bins(bins_of_rows, dealing.shifts, bins=4)
    masks = np.concatenate(
        list(mask_vectors(np.zeros_like(vectors), said, seed, sum_format_of(50, 4, 3)))
    )
    seen = (np.concatenate(pieces) - masks).view(np.int64)
    expected = np.zeros((50, 4, 3), dtype=np.int64)
    expected[np.arange(50), said] = vectors
    np.testing.assert_array_equal(seen, expected)
    # No mask is used twice: neither between rows, nor between the rows and the noise.
    noise_mask = masked_noise(np.zeros_like(noise), seed, sum_format_of(50, 4, 3))
    assert len(np.unique(np.concatenate([masks.ravel(), noise_mask.ravel()]))) == 51 * 12


def test_one_view_fits_any_vectors_with_the_same_sums() -> None:
    """What the primary sees is as likely under other vectors whose noised sums are the same.

    For every view there is exactly one mask that explains it, and masks are uniform. So no view
    tells two inputs of equal sums apart: the masks that explain the other input are built here, and
    the dealer's correction fits them.
    """
    bins_of_rows, vectors, noise = drawn(30, 3, 2)
    found, dealing, seed, pieces = summed(bins_of_rows, vectors, noise)
    said = shift_bins(bins_of_rows, dealing.shifts, bins=3)
    words = np.concatenate(pieces)

    others = np.random.default_rng(5).integers(-(10**6), 10**6, vectors.shape)
    other_noise = found - plain(bins_of_rows, others, np.zeros_like(noise))
    placed = np.zeros_like(words)
    placed[np.arange(30), said] = others.view(np.uint64)
    other_masks = words - placed
    rolled = sum(
        np.roll(mask, shift, axis=0)
        for mask, shift in zip(other_masks, dealing.shifts, strict=True)
    )
    other_noise_mask = masked_noise(noise, seed, sum_format_of(30, 3, 2)) - other_noise.view(
        np.uint64
    )
    np.testing.assert_array_equal(rolled + other_noise_mask, dealing.correction)


def test_shifts_are_uniform_and_drawn_afresh() -> None:
    """Each of 5 shifts about 8,000 times in 40,000: off by ten deviations once in 10^21."""
    first, second = (deal(sum_format_of(40_000, 5, 1)) for _ in range(2))
    counts = np.bincount(first[0].shifts, minlength=5)
    assert len(counts) == 5
    assert np.abs(counts - 8_000).max() < 10 * np.sqrt(40_000 * 0.2 * 0.8)
    assert first[1] != second[1]
    assert not np.array_equal(first[0].shifts, second[0].shifts)
    # What the primary says of rows of one class takes every value in range.
    said = shift_bins(np.full(40_000, 4), first[0].shifts, bins=5)
    assert set(np.unique(said)) == set(range(5))


def test_a_lying_primary_moves_rows_and_multiplies_none() -> None:
    """Whatever is said in range, each row's vector enters exactly one bin."""
    _, vectors, noise = drawn(60, 4, 3)
    lies = np.random.default_rng(9).integers(0, 4, 60)
    found, dealing, *_ = summed(None, vectors, noise, said=lies)
    entered = (lies + dealing.shifts) % 4
    np.testing.assert_array_equal(found, plain(entered, vectors, noise))
    np.testing.assert_array_equal((found - noise).sum(axis=0), vectors.sum(axis=0))


@pytest.mark.parametrize("lie", [4, -1, 2**62])
def test_what_is_out_of_range_is_refused_before_anything_is_sent(lie) -> None:
    """A negative index would count from the end, a large one would miss."""
    bins_of_rows, vectors, noise = drawn(10, 4, 3)
    what = sum_format_of(10, *noise.shape)
    dealing, seed = deal(what)
    said = shift_bins(bins_of_rows, dealing.shifts, bins=4)
    said[7] = lie
    with pytest.raises(ProtocolError, match="shifts: must lie in 0 to 3"):
        mask_vectors(vectors, said, seed, what)
    bins_of_rows[2] = lie
    with pytest.raises(ProtocolError, match="bins: must lie in 0 to 3"):
        shift_bins(bins_of_rows, dealing.shifts, bins=4)


def test_pieces_of_other_rows_are_refused(small_pieces) -> None:
    """Of 10 rows, pieces of fewer or of more."""
    bins_of_rows, vectors, noise = drawn(10, 4, 3)
    _, dealing, seed, pieces = summed(bins_of_rows, vectors, noise)
    for wrong in (pieces[:-1], [*pieces, pieces[0]]):
        with pytest.raises(ProtocolError, match="not of the 10 rows that masks were dealt for"):
            open_sums(wrong, masked_noise(noise, seed, sum_format_of(10, 4, 3)), dealing)


@pytest.mark.parametrize(
    "changed",
    [{"run": "another"}, {"secondary": 2}, {"rows": 59}, {"bins": 3, "numbers": 4}, {"numbers": 2}],
    ids=str,
)
def test_masks_of_other_sums_do_not_cancel(changed) -> None:
    """A dealer that was told other sizes, run or party deals masks under another key.

    Under one key stream a dealing of twice as few numbers cancelled in sums of other groups of the
    secondary's words, of which one record changes several. Now all that the primary gets is
    uniform: no word is zero although every vector and the noise are.
    """
    what = sum_format_of(60, 4, 3)
    seed_for = dealt_sums.DealtFor(**{**dataclasses.asdict(what), **changed})
    dealing, seed = deal(seed_for)
    vectors, noise = np.zeros((60, 3), dtype=np.int64), np.zeros((4, 3), dtype=np.int64)
    pieces = list(mask_vectors(vectors, np.zeros(60, dtype=np.int64), seed, what))
    hidden = masked_noise(noise, seed, what)
    words = np.concatenate([hidden.ravel(), *(piece.ravel() for piece in pieces)])
    dealt = np.concatenate(
        [
            dealt_sums.uniform(seed_for.key(seed), 0, seed_for.shape).ravel(),
            *(masks.ravel() for _, masks in dealt_sums._row_masks(seed_for.key(seed), seed_for)),
        ]
    )
    assert not np.intersect1d(words, dealt).size
    assert dealing.correction.shape == seed_for.shape


def test_masks_of_the_same_sums_cancel() -> None:
    """The negative control: with nothing changed, zero vectors and noise give zero sums."""
    what = sum_format_of(60, 4, 3)
    zeros = np.zeros((60, 3), dtype=np.int64), np.zeros((4, 3), dtype=np.int64)
    found, *_ = summed(np.zeros(60, dtype=np.int64), *zeros)
    assert what.shape == found.shape
    assert not found.any()
