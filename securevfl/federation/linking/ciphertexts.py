"""Ciphertexts as bytes of one width, and back; and Paillier's randomness as it is used up."""

import time
from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np
from jaxtyping import UInt8

from securevfl.core.errors import ProtocolError
from securevfl.linkage.obfuscator_pool import prepared_obfuscators
from securevfl.linkage.on_cores import Progress
from securevfl.linkage.paillier_distances import Lanes, PackedRows

# Obfuscators that are made together: their generators then cost a hundredth of them.
_BATCH: Final = 2**15
# Fewer ciphertexts take less time than it takes to start a process on every core.
_WORTH_ALL_CORES: Final = 2**10


def pack_numbers(rows: Sequence[Sequence[int]], modulus: int) -> UInt8[np.ndarray, "packs n width"]:
    """Return numbers below the modulus' square as bytes, all of one width."""
    width = _width(modulus)
    raw = b"".join(number.to_bytes(width, "big") for row in rows for number in row)
    return np.frombuffer(raw, dtype=np.uint8).reshape(len(rows), -1, width)


def unpack_numbers(raw: UInt8[np.ndarray, "packs n width"], modulus: int) -> list[list[int]]:
    """Return the numbers in received bytes.

    Raises:
        ProtocolError: If one is no ciphertext of that modulus.
    """
    square = modulus**2
    rows = [[int.from_bytes(cell.tobytes(), "big") for cell in row] for row in raw]
    if not all(0 < number < square for row in rows for number in row):
        raise ProtocolError("a ciphertext came that is none of the agreed key")
    return rows


def cipher_bytes(modulus: int) -> int:
    """Return how many bytes a ciphertext takes."""
    return _width(modulus)


def part_of(packed: PackedRows, start: int, end: int) -> PackedRows:
    """Return the packs of the rows from a start, a multiple of the lanes, to an end."""
    lanes: Lanes = packed.lanes
    first = start // lanes.count
    packs = packed.packs[first : first + -(-(end - start) // lanes.count)]
    return PackedRows(modulus=packed.modulus, rows=end - start, packs=packs)


def workers_for(ciphertexts: int) -> int:
    """Return how many processes compute so many ciphertexts; -1 means every core."""
    return -1 if ciphertexts >= _WORTH_ALL_CORES else 1


def fresh_obfuscators(modulus: int, count: int, progress: Progress) -> Iterator[int]:
    """Yield as many obfuscators as will be used, made a batch at a time on all cores."""
    for done in range(0, count, _BATCH):
        size, begin = min(_BATCH, count - done), time.monotonic()

        def tell(
            made: int, _size: int, left: float, *, done: int = done, begin: float = begin
        ) -> None:
            # The other batches take as long as this one, each in its size.
            took = time.monotonic() - begin + left
            later = count - min(done + _BATCH, count)
            progress(done + made, count, left + took * later / min(_BATCH, count - done))

        yield from prepared_obfuscators(modulus, size, workers=workers_for(size), progress=tell)


def _width(modulus: int) -> int:
    return -(-2 * modulus.bit_length() // 8)
