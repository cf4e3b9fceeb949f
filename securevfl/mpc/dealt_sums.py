"""Sums of one party's vectors by another party's bins, under a dealer's masks, mod 2^64.

The primary has a bin for each of its rows, the secondary a vector for each row. The primary is to
get the sum of vectors in each bin, with noise that the secondary adds; neither may see the other's
input. A third party, the *dealer*, draws masks, sees neither input, and must not collude with
either. This is oblivious transfer, row by row, from correlated randomness ([Beaver97], [Rivest99]):

1. The dealer draws for each row a shift ``d_i`` in [0, bins) and a matrix ``A_i`` (bins x numbers),
   and one matrix P of that shape. The primary gets the shifts and ``Q = sum_i roll(A_i, d_i) + P``,
   where ``roll(., d)`` moves line j to line (j + d) mod bins; the secondary the seed of A and P.
2. The primary sends ``s_i = (bin_i - d_i) mod bins``: uniform, as d_i is.
3. The secondary answers with ``Z_i = e_(s_i) (x) r_i + A_i``, uniform as A_i is, and with
   ``P + N``, where N is its noise.
4. The primary has ``sum_i roll(Z_i, d_i) - Q + (P + N) = sum_i e_(bin_i) (x) r_i + N``, and no
   other function of the vectors: given that sum, everything else that it has seen is uniform.

Whatever the primary sends in step 2, each row's vector enters exactly one line, once. A secondary
that does not follow the protocol can send anything in step 3, as in any sum.

Every mask hides one matrix, once: a repeated sum needs a new dealing.

All masks are key streams of AES-256 under one key: HMAC-SHA256 of the seed and of the dealing's
purpose (:class:`DealtFor`): run, secondary, and numbers of rows, bins and numbers. The dealer gets
some of these from the primary, the secondary from its plan. With one key for different shapes, a
stream would cancel in sums of other groups of numbers, several of which depend on one vector; with
different keys nothing cancels.
"""

import hmac
import json
import math
import os
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Final

import numpy as np
from jaxtyping import Int64, UInt64

from securevfl.core.errors import ProtocolError
from securevfl.mpc.masks import key_stream

SEED_BYTES: Final = 32
MOST_WORDS: Final = 1 << 27
"""Most random numbers that a dealer draws for one request: 1 GiB."""

_KEY_LABEL: Final = b"securevfl/mpc/dealt-sums/v2"

# Words of one piece of masked vectors: 16 MiB.
_PIECE_WORDS: Final = 1 << 21


@dataclass(frozen=True, kw_only=True, slots=True)
class DealtFor:
    """The purpose of a dealing, in which dealer and secondary must agree."""

    run: str
    """Id of the run."""

    secondary: int
    """Rank of the party that brings the vectors."""

    rows: int
    """Rows of the primary."""

    bins: int
    """Number of bins of the rows, >= 1."""

    numbers: int
    """Numbers in a vector, >= 1."""

    @property
    def shape(self) -> tuple[int, int]:
        """Of the sums: bins and numbers."""
        return self.bins, self.numbers

    def key(self, seed: bytes) -> bytes:
        """Return the key of all masks for a seed and this purpose."""
        agreed = json.dumps(asdict(self), sort_keys=True).encode()
        return hmac.digest(seed, _KEY_LABEL + agreed, "sha256")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False, repr=False)
class SumDealing:
    """The primary's part of a dealing."""

    shifts: Int64[np.ndarray, " rows"]
    """d: uniform in [0, bins)."""

    correction: UInt64[np.ndarray, "bins numbers"]
    """Q: takes all masks out of the sum at once."""


def deal(what: DealtFor) -> tuple[SumDealing, bytes]:
    """Draw fresh masks for one sum.

    Args:
        what: Purpose of the dealing.

    Returns:
        The primary's dealing, and the secondary's seed.

    Reveals:
        To the primary and the secondary: uniform numbers. The dealer learns only the sizes, and
        must see no message between the other two.
    """
    seed = os.urandom(SEED_BYTES)
    # The remainder of 64 uniform bits is within bins / 2^64 of uniform.
    words = np.frombuffer(os.urandom(8 * what.rows), dtype=np.uint64)
    shifts = (words % np.uint64(what.bins)).astype(np.int64)
    key = what.key(seed)
    correction = uniform(key, 0, what.shape)  # P
    for piece, masks in _row_masks(key, what):
        correction += _rolled_sum(masks, shifts[piece])
    return SumDealing(shifts=shifts, correction=correction), seed


def shift_bins(
    bins_of_rows: Int64[np.ndarray, " rows"], shifts: Int64[np.ndarray, " rows"], *, bins: int
) -> Int64[np.ndarray, " rows"]:
    """Return the shifted bins of the primary's rows, which it sends to the secondary.

    Raises:
        ProtocolError: If a bin or a shift is not in [0, bins).

    Reveals:
        To the secondary, which must not know the shifts: nothing, since the numbers are uniform.
    """
    require_bins(bins_of_rows, bins, whose="bins")
    require_bins(shifts, bins, whose="shifts")
    return (bins_of_rows - shifts) % bins


def mask_vectors(
    vectors: Int64[np.ndarray, "rows numbers"],
    shifted_bins: Int64[np.ndarray, " rows"],
    seed: bytes,
    what: DealtFor,
) -> Iterator[UInt64[np.ndarray, "some bins numbers"]]:
    """Yield the secondary's vectors under the dealer's masks, piece by piece.

    Each piece has :func:`rows_of_piece` rows, the last one possibly fewer.

    Args:
        vectors: r: a vector for each of the primary's rows.
        shifted_bins: s: the primary's shifted bin of each row, from :func:`shift_bins`.
        seed: The dealer's.
        what: Purpose of the dealing, as this party knows it.

    Raises:
        ProtocolError: If one of the primary's numbers is not in [0, bins); nothing is yielded then.

    Reveals:
        To the primary, which must not know the seed: together with :func:`masked_noise`, each bin's
        noised sum, where the primary decides each row's one bin. Nothing else.
    """
    require_bins(shifted_bins, what.bins, whose="shifts")
    own = vectors.view(np.uint64)
    return _mask_pieces(own, shifted_bins, _row_masks(what.key(seed), what))


def masked_noise(
    noise: Int64[np.ndarray, "bins numbers"], seed: bytes, what: DealtFor
) -> UInt64[np.ndarray, "bins numbers"]:
    """Return the secondary's noise under the dealer's mask.

    Reveals:
        To the primary: nothing alone; see :func:`mask_vectors`.
    """
    return noise.view(np.uint64) + uniform(what.key(seed), 0, what.shape)


def open_sums(
    pieces: Iterable[UInt64[np.ndarray, "_ bins numbers"]],
    noise: UInt64[np.ndarray, "bins numbers"],
    dealing: SumDealing,
) -> Int64[np.ndarray, "bins numbers"]:
    """Return each bin's sum with the secondary's noise, unmasked by the primary.

    Args:
        pieces: From :func:`mask_vectors`, in their order.
        noise: From :func:`masked_noise`.
        dealing: The primary's dealing.

    Raises:
        ProtocolError: If the number of rows differs from the number of dealt shifts.
    """
    total, rows, done = noise - dealing.correction, len(dealing.shifts), 0
    for words in pieces:
        done += len(words)
        if done > rows:
            break
        total += _rolled_sum(words, dealing.shifts[done - len(words) : done])
    if done != rows:
        raise ProtocolError(f"masked vectors: are not of the {rows} rows that masks were dealt for")
    return total.view(np.int64)


def rows_of_piece(bins: int, numbers: int) -> int:
    """Return the number of rows whose masked vectors are computed and sent at a time."""
    return max(1, _PIECE_WORDS // (bins * numbers))


def require_bins(values: Int64[np.ndarray, " rows"], bins: int, *, whose: str) -> None:
    """Refuse numbers that are no bin.

    Raises:
        ProtocolError: If one is not in [0, bins).
    """
    if values.size and not 0 <= values.min() <= values.max() < bins:
        raise ProtocolError(f"{whose}: must lie in 0 to {bins - 1}")


def _mask_pieces(
    own: UInt64[np.ndarray, "rows numbers"],
    shifted_bins: Int64[np.ndarray, " rows"],
    row_masks: Iterator[tuple[slice, UInt64[np.ndarray, "some bins numbers"]]],
) -> Iterator[UInt64[np.ndarray, "some bins numbers"]]:
    for piece, words in row_masks:
        words[np.arange(len(words)), shifted_bins[piece]] += own[piece]
        yield words


def _rolled_sum(
    words: UInt64[np.ndarray, "some bins numbers"], shifts: Int64[np.ndarray, " some"]
) -> UInt64[np.ndarray, "bins numbers"]:
    """Return the sum of matrices after rolling each one's lines by its shift."""
    total = np.zeros(words.shape[1:], dtype=np.uint64)
    for shift in np.unique(shifts):
        total += np.roll(words[shifts == shift].sum(axis=0, dtype=np.uint64), shift, axis=0)
    return total


def _row_masks(
    key: bytes, what: DealtFor
) -> Iterator[tuple[slice, UInt64[np.ndarray, "some bins numbers"]]]:
    """Yield the masks A of some rows at a time, with the rows' slice."""
    size = rows_of_piece(*what.shape)
    for number, start in enumerate(range(0, what.rows, size), 1):
        count = min(size, what.rows - start)
        yield slice(start, start + count), uniform(key, number, (count, *what.shape))


def uniform(key: bytes, number: int, shape: tuple[int, ...]) -> UInt64[np.ndarray, "..."]:
    """Return uniform numbers from the AES-256 key stream ``number`` of a key."""
    stream = key_stream(key, number).update(bytes(8 * math.prod(shape)))
    return np.frombuffer(bytearray(stream), np.uint64).reshape(shape)
