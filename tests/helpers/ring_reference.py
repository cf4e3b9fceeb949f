"""The sum of masked contributions in plain Python integers: the tests' oracle.

Slow, obvious and sharing no code with the fast path but the format's numbers. Not secure by
itself.
"""

import hashlib
import hmac
import math
import struct
from collections.abc import Iterable, Mapping, Sequence

from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES256
from cryptography.hazmat.primitives.ciphers.modes import ECB

from securevfl.core.errors import EncodingRangeError
from securevfl.mpc.codec import RingFormat

RING = 2**64


def quantise(values: Iterable[float], fmt: RingFormat) -> list[int]:
    """Round ``value * 2^p`` towards zero."""
    return [math.trunc(value * 2**fmt.precision_bits) for value in values]


def encode(units: Sequence[int], fmt: RingFormat) -> list[int]:
    """Pack units into ring elements in [0, 2^64), the first number in the lowest lane."""
    if any(abs(unit) > fmt.bound_units for unit in units):
        raise EncodingRangeError("a value leaves the ring")
    padded = [*units, *[0] * (-len(units) % fmt.lanes)]
    count = len(padded) // fmt.lanes
    return [
        sum(
            (padded[place] + fmt.bound_units) << (fmt.lane_bits * lane)
            for lane, place in enumerate(_places(word, count, fmt.lanes))
        )
        for word in range(count)
    ]


def _places(word: int, count: int, lanes: int) -> list[int]:
    """Return which numbers a word has: a number of each third in three lanes, else neighbours."""
    if lanes == 3:
        return [word, word + count, word + 2 * count]
    return [lanes * word + lane for lane in range(lanes)]


def mask(
    count: int,
    *,
    rank: int,
    pair_keys: Mapping[int, bytes],
    round_number: int,
    active: Sequence[int],
) -> list[int]:
    """Return one party's mask, block by block from the definition of counter mode.

    Of a pair that was told nothing yet, and of masks that all share with all.
    """
    total = [0] * count
    agreed = b"securevfl/mpc/round-key/v2" + b"".join(
        number.to_bytes(8, "big") for number in (round_number, count, 0, *sorted(active))
    )
    for peer in active:
        if peer == rank:
            continue
        key = hmac.new(pair_keys[peer], agreed + bytes(32), hashlib.sha256).digest()
        block_cipher = Cipher(AES256(key), ECB()).encryptor()
        stream = b"".join(
            block_cipher.update(struct.pack(">IQI", 0, round_number, block + 2))
            for block in range((count + 1) // 2)
        )
        sign = 1 if rank < peer else -1
        for i, word in enumerate(struct.unpack(f"<{count}Q", stream[: 8 * count])):
            total[i] = (total[i] + sign * word) % RING
    return total


def add(contributions: Sequence[Sequence[int]]) -> list[int]:
    """Add ring elements modulo 2^64."""
    return [sum(words) % RING for words in zip(*contributions, strict=True)]


def decode_sum(
    words: Sequence[int], fmt: RingFormat, *, elements: int, parties_active: int
) -> list[int]:
    """Unpack a sum of ``parties_active`` contributions into units."""
    size = 2**fmt.lane_bits
    units = [0] * (fmt.lanes * len(words))
    for number, word in enumerate(words):
        for lane, place in enumerate(_places(number, len(words), fmt.lanes)):
            own = (word >> (fmt.lane_bits * lane)) % size
            units[place] = own - parties_active * fmt.bound_units
    return units[:elements]


def as_signed(words: Sequence[int]) -> list[int]:
    """Return ring elements as int64 values, as the fast path holds them."""
    return [word - RING if word >= RING // 2 else word for word in words]
