"""Ciphertexts as bytes of one width, and back; and Paillier's randomness as it is used up."""

import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np
from jaxtyping import UInt8

from securevfl.core.errors import ProtocolError
from securevfl.linkage.obfuscator_pool import prepared_obfuscators
from securevfl.linkage.on_cores import Apply, Progress

# Obfuscators that are made together: their generators then cost a fifteenth of them.
_BATCH: Final = 2**15
# Tasks of about 0.2 s that take less time than it takes to start a process on every core.
IN_PLACE_TASKS: Final = 32
"""How much of Paillier's work is done before processes are started for it."""


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


class FreshObfuscators:
    """Paillier's randomness of one key as it is used up, made a batch at a time.

    Args:
        modulus: n, the public key.
        apply: Does the work, perhaps on several cores.
        progress: Hears of every batch while it is made.
    """

    def __init__(self, modulus: int, apply: Apply, progress: Progress) -> None:
        self._modulus = modulus
        self._apply = apply
        self._progress = progress
        self._stock: deque[int] = deque()
        self._made = 0

    def take(self, count: int, *, due: int) -> Iterator[int]:
        """Yield as many obfuscators as are wanted; nobody gets one of them again.

        Args:
            count: How many.
            due: How many will be wanted from now on, as far as is known.
        """
        if len(self._stock) < count:
            # A large batch costs less each: its generators cost as much as 2,000 of them.
            missing = max(count, due) - len(self._stock)
            size = max(count - len(self._stock), min(missing, _BATCH))
            self._stock += self._batch(size, missing)
        return (self._stock.popleft() for _ in range(count))

    def _batch(self, size: int, missing: int) -> list[int]:
        begin, before = time.monotonic(), self._made

        def tell(made: int, _size: int, left: float) -> None:
            # Later batches take as long as this one, each in its size.
            took = time.monotonic() - begin + left
            later = took * (missing - size) / size
            self._progress(before + made, before + missing, left + later)

        self._made += size
        return prepared_obfuscators(self._modulus, size, apply=self._apply, progress=tell)


def _width(modulus: int) -> int:
    return -(-2 * modulus.bit_length() // 8)
