"""Sums of one party's vectors by another party's bins, under the masks of a dealer, mod 2^64.

The primary has a bin for each of its rows, the secondary a vector for each; the primary is to get
one sum of vectors for each bin, with noise that the secondary adds, and neither may see what the
other brings. A third party, the *dealer*, draws masks, sees neither, and must collude with nobody.
This is oblivious transfer, row by row, from correlated randomness ([Beaver97], [Rivest99]):

1. The dealer draws for each row a shift ``d_i`` in [0, bins) and a matrix ``A_i`` (bins x numbers),
   and one matrix P of that shape. The primary gets the shifts and ``Q = sum_i roll(A_i, d_i) + P``,
   where ``roll(., d)`` moves line j to line (j + d) mod bins; the secondary the seed of A and P.
2. The primary says ``s_i = (bin_i - d_i) mod bins``: uniform, as d_i is.
3. The secondary answers with ``Z_i = e_(s_i) (x) r_i + A_i``, uniform as A_i is, and with
   ``P + N``, where N is its noise.
4. The primary has ``sum_i roll(Z_i, d_i) - Q + (P + N) = sum_i e_(bin_i) (x) r_i + N``, and no
   other function of the vectors: given that sum, all else that it has seen is uniform.

Whatever the primary says in step 2, each row's vector enters exactly one line, once. A secondary
that does not follow the protocol can send anything in step 3, as it can with sums of any kind.

Every mask hides one matrix, once: whoever starts again needs a new dealing.

All masks are key streams of AES-256 under one key, HMAC-SHA256 of the seed and of what the dealing
is for (:class:`DealtFor`): whose vectors, in which run, of how many rows, bins and numbers. The
dealer has some of these from the primary, and the secondary from its own plan. A stream that both
read in matrices of different shapes would cancel in sums of other groups of numbers, of which one
vector changes several; under two keys nothing cancels.
"""

import hmac
import json
import os
import struct
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Final

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES256
from cryptography.hazmat.primitives.ciphers.modes import GCM
from jaxtyping import Int64, UInt64

from securevfl.core.errors import ProtocolError

SEED_BYTES: Final = 32
MOST_WORDS: Final = 1 << 27
"""Most random numbers that a dealer makes at a member's word: 1 GiB."""

_KEY_LABEL: Final = b"securevfl/mpc/dealt-sums/v2"

# Words of one piece of masked vectors: 16 MiB.
_PIECE_WORDS: Final = 1 << 21


@dataclass(frozen=True, kw_only=True, slots=True)
class DealtFor:
    """What one dealing is for; dealer and secondary must agree in all of it."""

    run: str
    """Id of the run."""

    secondary: int
    """Rank of the party that brings the vectors."""

    rows: int
    """Rows of the primary."""

    bins: int
    """That its rows fall into, >= 1."""

    numbers: int
    """Numbers in a vector, >= 1."""

    @property
    def shape(self) -> tuple[int, int]:
        """Of the sums: bins and numbers."""
        return self.bins, self.numbers

    def key(self, seed: bytes) -> bytes:
        """Return the key of all masks that a seed makes for it."""
        agreed = json.dumps(asdict(self), sort_keys=True).encode()
        return hmac.digest(seed, _KEY_LABEL + agreed, "sha256")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False, repr=False)
class SumDealing:
    """What the dealer gives to the primary."""

    shifts: Int64[np.ndarray, " rows"]
    """d: uniform in [0, bins)."""

    correction: UInt64[np.ndarray, "bins numbers"]
    """Q: takes all masks out of the sum at once."""


def deal(what: DealtFor) -> tuple[SumDealing, bytes]:
    """Draw fresh masks.

    Args:
        what: What they are for.

    Returns:
        The primary's dealing, and the secondary's seed.

    Reveals:
        To the primary and to the secondary: uniform numbers. The dealer learns nothing but the
        sizes, and must see no message of the other two.
    """
    seed = os.urandom(SEED_BYTES)
    # The remainder of 64 uniform bits is within bins / 2^64 of uniform.
    words = np.frombuffer(os.urandom(8 * what.rows), dtype=np.uint64)
    shifts = (words % np.uint64(what.bins)).astype(np.int64)
    key = what.key(seed)
    correction = _noise_mask(key, what)
    for piece, masks in _row_masks(key, what):
        correction += _rolled_sum(masks, shifts[piece])
    return SumDealing(shifts=shifts, correction=correction), seed


def shift_bins(
    bins_of_rows: Int64[np.ndarray, " rows"], shifts: Int64[np.ndarray, " rows"], *, bins: int
) -> Int64[np.ndarray, " rows"]:
    """Return the shifted bins that the primary sends of its rows.

    Raises:
        ProtocolError: If a bin or a shift is not in [0, bins).

    Reveals:
        To the secondary, which must not know the shifts: nothing; the numbers are uniform.
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

    Each piece has :func:`rows_of_piece` rows, the last one what is left.

    Args:
        vectors: r: one for each of the primary's rows.
        shifted_bins: s: the primary's word on each row, from :func:`shift_bins`.
        seed: The dealer's.
        what: What the vectors are, as this party has it.

    Raises:
        ProtocolError: If one of the primary's numbers is not in [0, bins); nothing was yielded
            then.

    Reveals:
        To the primary, which must not know the seed: together with :func:`masked_noise`, each bin's
        sum with the noise, where the primary decides which one bin each row is in. Nothing else.
    """
    require_bins(shifted_bins, what.bins, whose="shifts")
    own = vectors.view(np.uint64)
    return _mask_pieces(own, shifted_bins, _row_masks(what.key(seed), what))


def masked_noise(
    noise: Int64[np.ndarray, "bins numbers"], seed: bytes, what: DealtFor
) -> UInt64[np.ndarray, "bins numbers"]:
    """Return the secondary's noise under the dealer's mask of it.

    Reveals:
        To the primary: nothing by itself; see :func:`mask_vectors`.
    """
    return noise.view(np.uint64) + _noise_mask(what.key(seed), what)


def open_sums(
    pieces: Iterable[UInt64[np.ndarray, "_ bins numbers"]],
    noise: UInt64[np.ndarray, "bins numbers"],
    dealing: SumDealing,
) -> Int64[np.ndarray, "bins numbers"]:
    """Return each bin's sum with the secondary's noise, as the primary reads it.

    Args:
        pieces: From :func:`mask_vectors`, in their order.
        noise: From :func:`masked_noise`.
        dealing: The primary's.

    Raises:
        ProtocolError: If there are more rows or fewer than shifts were dealt for.
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
    """Return how many rows' masked vectors are made, sent and read at a time."""
    return max(1, _PIECE_WORDS // (bins * numbers))


def require_bins(values: Int64[np.ndarray, " rows"], bins: int, *, whose: str) -> None:
    """Refuse numbers that name no bin.

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
    """Return the sum of matrices whose lines are moved on by a shift each."""
    total = np.zeros(words.shape[1:], dtype=np.uint64)
    for shift in np.unique(shifts):
        total += np.roll(words[shifts == shift].sum(axis=0, dtype=np.uint64), shift, axis=0)
    return total


def _row_masks(
    key: bytes, what: DealtFor
) -> Iterator[tuple[slice, UInt64[np.ndarray, "some bins numbers"]]]:
    """Yield the masks A of some rows at a time, with the rows' place."""
    size = rows_of_piece(*what.shape)
    for number, start in enumerate(range(0, what.rows, size), 1):
        count = min(size, what.rows - start)
        yield slice(start, start + count), uniform(key, number, (count, *what.shape))


def _noise_mask(key: bytes, what: DealtFor) -> UInt64[np.ndarray, "bins numbers"]:
    """Return the mask P."""
    return uniform(key, 0, what.shape)


def uniform(key: bytes, number: int, shape: tuple[int, ...]) -> UInt64[np.ndarray, "..."]:
    """Return a key stream of AES-256, one for each number: GCM without its tag, as for masks."""
    words = int(np.prod(shape))
    stream = Cipher(AES256(key), GCM(struct.pack(">IQ", 0, number))).encryptor()
    return np.frombuffer(bytearray(stream.update(bytes(8 * words))), np.uint64).reshape(shape)
