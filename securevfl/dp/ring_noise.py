"""Discrete Gaussian noise in ring units: exact samples from a cryptographic source.

``P(x) = exp(-x^2 / (2 s^2)) / sum_y exp(-y^2 / (2 s^2))`` over all integers x, for a real s.

Rejection sampling: write x = k z + y with k a power of two, z any integer (the block) and
0 <= y < k. Draw z with probability proportional to the largest weight in its block,
``exp(-m_z^2 / (2 s^2))``, where m_z is the block's number nearest to zero; draw y uniformly, and
accept with probability ``exp(-(x^2 - m_z^2) / (2 s^2))``. With k near s/64 some 99 % are accepted.

Nearly all of that is decided by integers of few bits: 16 bits pick z by a table unless a boundary
of its distribution lies inside their cell, and 16 bits decide the acceptance where they are below
the least probability of the whole block. What they leave open (some 2 %) is decided with 48 more
bits of the same uniform numbers and float64, and what these leave open (2^-40) with 256 bits and
exact decimals.
The result is therefore exact but for the tables' last digit, 2^-250: no rounding of floats, no cut
tail, nothing to charge. One core makes over 100 million samples a second.
"""

import bisect
import hashlib
import math
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from decimal import Decimal, localcontext
from functools import lru_cache
from itertools import accumulate
from typing import Final, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES256
from cryptography.hazmat.primitives.ciphers.modes import GCM
from jaxtyping import Int32
from torch import Tensor

from securevfl.core.devices import to_device
from securevfl.core.errors import ConfigError

# 64 to 128 blocks per standard deviation: more make more undecided cells and larger tables, fewer
# more coins that do not settle a candidate.
_LOG2_BLOCKS: Final = 6


# P(|x| > 20 s) < 2^-288, below the tables' own precision.
_TAIL: Final = 20
_PICK_BITS: Final = 64
_EXACT_BITS: Final = 256
EXACT_DIGITS: Final = 90
"""Digits of a table's decimals."""
EXTENSION_BITS: Final = _EXACT_BITS - _PICK_BITS
"""Random bits that extend a 64-bit uniform number to the tables' full precision."""


class CumulativeTable:
    """Exact distribution function of a table of weights, which 256 uniform bits invert.

    Args:
        weights: Weight of each place, as decimals of 90 digits.

    Attributes:
        cumulative: First 64 bits of the probability of each place and those before it.
    """

    def __init__(self, weights: Sequence[Decimal]) -> None:
        with localcontext() as context:
            context.prec = EXACT_DIGITS
            total = sum(weights)
            self._exact_cumulative = [
                int(partial / total * 2**_EXACT_BITS) for partial in accumulate(weights)
            ]
        # A probability of exactly 1 would need one bit more than there are.
        top = 2**_PICK_BITS - 1
        self.cumulative = np.array(
            [min(bits >> EXTENSION_BITS, top) for bits in self._exact_cumulative], np.uint64
        )

    def is_tie(
        self, pick: npt.NDArray[np.uint64], index: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.bool_]:
        """Say where 64 bits equal a boundary's first 64, so that more bits must decide."""
        tie: npt.NDArray[np.bool_] = self.cumulative[np.maximum(index - 1, 0)] == pick
        return tie

    def exact_index(self, pick: int, extension: int) -> int:
        """Return the place that a uniform number of 256 bits picks.

        Args:
            pick: Its first 64 bits.
            extension: The others.
        """
        uniform = pick << EXTENSION_BITS | extension
        last = len(self._exact_cumulative) - 1
        return min(bisect.bisect_right(self._exact_cumulative, uniform), last)


class NoiseTables(CumulativeTable):
    """Sampling tables of one standard deviation, computed with exact decimals.

    Args:
        std_units: s, the standard deviation in ring units, taken as the exact float64.

    Attributes:
        block: k, a power of two near s / 64.
        reach: Blocks -reach to reach are in the tables.
        cumulative: First 64 bits of ``P(Z <= z)``, for z from -reach on.
        cells: For each 16-bit cell of the uniform number that picks z, ``z * 2^16 + sure``, so that
            one look-up finds both: z is the first block that the cell can pick, and a candidate
            whose 16-bit coin is below ``sure`` is accepted, wherever it lies in the block and
            with any bits that follow. ``sure`` is 0 where the cell does not settle z.
    """

    def __init__(self, std_units: float) -> None:
        self.block = 1 << max(0, math.floor(math.log2(std_units)) - _LOG2_BLOCKS)
        self.reach = math.ceil(_TAIL * std_units / self.block) + 1
        with localcontext() as context:
            context.prec = EXACT_DIGITS
            self._two_variance = 2 * Decimal(std_units) ** 2
            negative, others = self._falling(1, self.reach), self._falling(0, self.reach + 1)
        super().__init__([*reversed(negative), *others])
        edges = np.arange(2**16, dtype=np.uint64) << np.uint64(48)
        index = np.searchsorted(self.cumulative, edges, side="left")
        unsettled = self.cumulative[index] - edges < np.uint64(2**48)
        z = index - self.reach
        nearest = self.nearest_to_zero(self.block * z)
        # The ends of a block add up to this.
        farthest = 2 * self.block * z + self.block - 1 - nearest
        least = np.exp(-((farthest - nearest) * (farthest + nearest)) / (2 * std_units**2))
        # A coin c is surely below it if (c + 1) / 2^16 is; one step less, for float64's rounding.
        sure = np.maximum(np.floor(least * 2**16) - 1, 0)
        self.cells = (z << 16 | np.where(unsettled, 0, sure).astype(np.int64)).astype(np.int32)

    def nearest_to_zero(self, x: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return m_z for each x: the number in its block that is nearest to zero."""
        nearest: npt.NDArray[np.int64] = np.where(x >= 0, x & -self.block, x | self.block - 1)
        return nearest

    def find(
        self, cell: npt.NDArray[np.uint16], pick: npt.NDArray[np.uint64]
    ) -> npt.NDArray[np.int64]:
        """Return the places in ``cumulative`` of the blocks that 64 bits pick.

        Args:
            cell: The first 16 of them.
            pick: All of them.
        """
        index = (self.cells[cell] >> 16) + np.int64(self.reach)
        # Most cells that do not settle it hold one boundary, and a search takes five times this.
        index += self.cumulative[index] <= pick
        beyond = np.flatnonzero(self.cumulative[index] <= pick)
        index[beyond] = np.searchsorted(self.cumulative, pick[beyond], side="right")
        return index

    def exact_toss(self, x: int, nearest: int, toss: int, extension: int) -> bool:
        """Say whether a uniform number of 256 bits is below ``exp(-(x^2 - m_z^2) / (2 s^2))``.

        Args:
            x: The candidate.
            nearest: m_z of its block.
            toss: The first 64 bits of the uniform number.
            extension: The others.
        """
        with localcontext() as context:
            context.prec = EXACT_DIGITS
            exponent = Decimal(x * x - nearest * nearest) / self._two_variance
            threshold = (-exponent).exp() * 2**_EXACT_BITS
            return Decimal(toss << EXTENSION_BITS | extension) < threshold

    def _falling(self, first: int, count: int) -> list[Decimal]:
        """Return the weights of ``first``, ``first + k`` and so on.

        Squares of equal steps have equal second differences, so each weight is the one before it
        times a factor, and each factor the one before it times another: three exponentials in all.
        Their errors grow to some 10^-83 over thousands of steps, far below the tables' 2^-256.
        """
        step = self.block
        weight = (-(Decimal(first) ** 2) / self._two_variance).exp()
        factor = (-Decimal(step * step + 2 * first * step) / self._two_variance).exp()
        change = (-Decimal(2 * step * step) / self._two_variance).exp()
        weights = []
        for _ in range(count):
            weights.append(weight)
            weight *= factor
            factor *= change
        return weights


MIN_STD_UNITS: Final = 64.0
"""Below it, sums of discrete Gaussians are no longer as good as one.

The log-density ratio of a sum of n of them, each of deviation s, to one discrete Gaussian is
pointwise at most ``10 sum_(j=1)^(n-1) exp(-2 pi^2 s^2 j / (j + 1))`` ([KLS21] Theorem 1): below
1e-300 from 64 units on, and then nothing is charged for it.
"""

# int32 holds every value of the table, 20 standard deviations, and the row it is added to.
_MAX_STD_UNITS: Final = 2.0**26

# Samples drawn at a time: fewer leave the scratch in a smaller cache, but call numpy more often;
# 2^17 measured best of 2^13 to 2^20.
PIECE: Final = 1 << 17
_CANDIDATE_BYTES: Final = 8

_AES_BLOCK_BYTES: Final = 16
_BYTES_PER_NONCE: Final = 1 << 35

# Float64 errs by less than 2^-49 in exp(-t) for 0 <= t < 1; closer cases are decided exactly.
_EXACT_BAND: Final = 2.0**-44


@runtime_checkable
class RingNoise(Protocol):
    """Source of one party's noise share, in ring units."""

    @property
    def std_units(self) -> float:
        """Standard deviation in ring units, s = tau / gamma."""
        ...

    def sample(
        self, shape: Sequence[int], device: torch.device | str = "cpu"
    ) -> Int32[Tensor, "..."]:
        """Return fresh, independent samples; none is ever returned twice."""
        ...


class KeyedNoise(ABC):
    """Noise that is drawn from an AES-256 key stream.

    The key comes from the operating system and is stored nowhere else; a forked child draws a new
    one, since two processes that add the same noise would let it be subtracted. Safe to share
    between threads.

    Args:
        insecure_seed: For tests only: makes the samples repeatable, and worthless as noise.
    """

    def __init__(self, *, insecure_seed: int | None = None) -> None:
        self._insecure_seed = insecure_seed
        self._begin()

    def _begin(self) -> None:
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._bits = _KeyStream(self._new_key())

    def _new_key(self) -> bytes:
        if self._insecure_seed is None:
            return os.urandom(32)
        return hashlib.sha256(f"insecure {self._insecure_seed}".encode()).digest()

    def sample(
        self, shape: Sequence[int], device: torch.device | str = "cpu"
    ) -> Int32[Tensor, "..."]:
        """Return fresh, independent samples.

        They are drawn on the CPU, and copied if ``device`` is another.
        """
        out = np.empty(math.prod(shape), np.int32)
        if self._process != os.getpid():
            # A forked child: another thread of its parent may have held the lock at the fork.
            self._begin()
        with self._lock:
            self._fill(out)
        return to_device(torch.from_numpy(out).view(tuple(shape)), torch.device(device))

    @abstractmethod
    def _fill(self, out: npt.NDArray[np.int32]) -> None:
        """Fill ``out`` with samples."""


class ExactDiscreteGaussian(KeyedNoise):
    """Draws exact discrete Gaussian samples.

    Args:
        std_units: s, from 64 to 2^26 ring units; real-valued, taken as the exact float64.
        insecure_seed: For tests only: makes the samples repeatable, and worthless as noise.

    Raises:
        ConfigError: If ``std_units`` is outside that range.
    """

    def __init__(self, std_units: float, *, insecure_seed: int | None = None) -> None:
        if not MIN_STD_UNITS <= std_units <= _MAX_STD_UNITS:
            raise ConfigError(
                f"noise must have a standard deviation of {MIN_STD_UNITS:g} to "
                f"{_MAX_STD_UNITS:g} ring units, got {std_units!r}"
            )
        super().__init__(insecure_seed=insecure_seed)
        self._std_units = float(std_units)
        self._tables = _tables_for(self._std_units)
        # Kept, because blocks of this size are costly to allocate anew for each piece.
        self._index = np.empty(PIECE, np.int32)
        self._found = np.empty(PIECE, np.int32)
        self._offset = np.min_scalar_type(self._tables.block - 1)

    @property
    def std_units(self) -> float:
        """Standard deviation s in ring units."""
        return self._std_units

    def __repr__(self) -> str:
        return f"ExactDiscreteGaussian(std_units={self._std_units!r})"

    def _fill(self, out: npt.NDArray[np.int32]) -> None:
        rejected = self._draw(out)
        while len(rejected):
            # Some more than are needed: a third batch, however small, costs as many calls.
            spare = np.empty(len(rejected) + len(rejected) // 32 + 16, np.int32)
            accepted = np.delete(spare, self._draw(spare))[: len(rejected)]
            out[rejected[: len(accepted)]] = accepted
            rejected = rejected[len(accepted) :]

    def _draw(self, out: npt.NDArray[np.int32]) -> npt.NDArray[np.intp]:
        """Fill ``out`` with candidates; return the places of those that are rejected."""
        if not len(out):
            return np.empty(0, np.intp)
        undecided = [
            self._propose(out[start : start + PIECE], start) for start in range(0, len(out), PIECE)
        ]
        # All at once: some thirty calls of numpy on few numbers would cost more than the rest.
        places, cell, coin, settled = (np.concatenate(p) for p in zip(*undecided, strict=True))
        return places[~self._decide(out, places, cell, coin, settled)]

    def _propose(
        self, out: npt.NDArray[np.int32], start: int
    ) -> tuple[
        npt.NDArray[np.intp],
        npt.NDArray[np.uint16],
        npt.NDArray[np.uint16],
        npt.NDArray[np.bool_],
    ]:
        """Draw one candidate a place.

        Returns:
            The places that 16 bits leave open, their cells and coins, and whether the cell settles
            the block, so that the coin alone is open.
        """
        tables = self._tables
        n = len(out)
        raw = self._bits.take((4 + self._offset.itemsize) * n)
        cell, coin = raw[: 4 * n].view(np.uint16).reshape(2, n)
        offset = raw[4 * n :].view(self._offset)
        index, entries = self._index[:n], self._found[:n]
        index[:] = cell
        # Torch takes half of numpy's time for this.
        torch.index_select(
            torch.from_numpy(tables.cells),
            0,
            torch.from_numpy(index),
            out=torch.from_numpy(entries),
        )
        np.right_shift(entries, 16, out=out)
        np.multiply(out, tables.block, out=out)
        offset &= self._offset.type(tables.block - 1)
        np.add(out, offset, out=out, casting="unsafe")
        # Compared in one type, which is faster than in two.
        sure, toss = np.bitwise_and(entries, 0xFFFF, out=entries), index
        toss[:] = coin
        places = np.flatnonzero(toss >= sure)
        return places + start, cell[places], coin[places], sure[places] > 0

    def _decide(
        self,
        out: npt.NDArray[np.int32],
        places: npt.NDArray[np.intp],
        cell: npt.NDArray[np.uint16],
        coin: npt.NDArray[np.uint16],
        settled: npt.NDArray[np.bool_],
    ) -> npt.NDArray[np.bool_]:
        """Settle the candidates that 16 bits left open; return which of them are accepted."""
        tables = self._tables
        more = self._bits.take(16 * len(places)).view(np.uint64)
        low_bits = np.uint64(2**48 - 1)
        toss = coin.astype(np.uint64) << np.uint64(48) | more[1::2] & low_bits
        x = out[places].astype(np.int64)
        unsettled = np.flatnonzero(~settled)
        pick = cell[unsettled].astype(np.uint64) << np.uint64(48) | more[2 * unsettled] & low_bits
        index = tables.find(cell[unsettled], pick)
        for i in np.flatnonzero(tables.is_tie(pick, index)):
            index[i] = tables.exact_index(int(pick[i]), self._bits.integer(EXTENSION_BITS))
        offset = x[unsettled] & tables.block - 1
        x[unsettled] = tables.block * (index - tables.reach) + offset
        out[places[unsettled]] = x[unsettled]
        least = tables.nearest_to_zero(x)
        # Integers below 2^62; the quotient is the only rounding before exp.
        t = ((x - least) * (x + least)) / (2 * self._std_units**2)
        accept_probability = np.exp(-t)
        uniform = toss * 2.0**-64
        accepted: npt.NDArray[np.bool_] = uniform < accept_probability
        for i in np.flatnonzero(np.abs(uniform - accept_probability) < _EXACT_BAND):
            accepted[i] = tables.exact_toss(
                int(x[i]), int(least[i]), int(toss[i]), self._bits.integer(EXTENSION_BITS)
            )
        return accepted


@lru_cache(maxsize=4)
def _tables_for(std_units: float) -> NoiseTables:
    """Return tables that are read only: a simulation's parties share them."""
    return NoiseTables(std_units)


class NoiseBuffer:
    """Draws the next noise in the background while the model computes.

    Noise depends on no data. A request of the size asked for last time is answered from what was
    drawn ahead; another size is drawn anew, and what was drawn ahead for the old size is dropped.
    """

    def __init__(self, noise: RingNoise) -> None:
        self._noise = noise
        self._start()

    def _start(self) -> None:
        self._process = os.getpid()
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="securevfl-noise")
        self._ahead: tuple[tuple[int, ...], str, Future[Tensor]] | None = None

    @property
    def std_units(self) -> float:
        """Standard deviation in ring units."""
        return self._noise.std_units

    def sample(
        self, shape: Sequence[int], device: torch.device | str = "cpu"
    ) -> Int32[Tensor, "..."]:
        """Return fresh samples, drawn ahead if the last request was alike."""
        if self._process != os.getpid():
            # A forked child must not hand out what its parent drew ahead.
            self._start()
        request = (tuple(shape), str(device))
        if self._ahead is not None and self._ahead[:2] == request:
            samples = self._ahead[2].result()
        else:
            samples = self._noise.sample(shape, device)
        self._ahead = (*request, self._worker.submit(self._noise.sample, shape, device))
        return samples

    def close(self) -> None:
        """Stop the background thread."""
        self._worker.shutdown(wait=True, cancel_futures=True)


class _KeyStream:
    """The bytes of AES-256 in counter mode under one key."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._zeros = memoryview(bytes(PIECE * _CANDIDATE_BYTES))
        self._buffer = bytearray(PIECE * _CANDIDATE_BYTES + _AES_BLOCK_BYTES)
        self._nonce = -1
        self._begin()

    def _begin(self) -> None:
        """Take the next nonce, which is good for 64 GiB: the one after it starts well before."""
        self._nonce += 1
        # GCM without its tag is counter mode, and faster than OpenSSL's plain one.
        gcm = GCM(self._nonce.to_bytes(12, "big"))
        self._context = Cipher(AES256(self._key), gcm).encryptor()
        self._left = _BYTES_PER_NONCE

    def take(self, count: int) -> npt.NDArray[np.uint8]:
        """Return the next ``count`` bytes, writable; the next call may overwrite them."""
        if count > self._left:
            self._begin()
        self._left -= count
        if count <= len(self._zeros):
            self._context.update_into(self._zeros[:count], self._buffer)
            return np.frombuffer(self._buffer, np.uint8, count)
        return np.frombuffer(bytearray(self._context.update(bytes(count))), np.uint8)

    def integer(self, bits: int) -> int:
        """Return the next ``bits`` bits, a multiple of 8, as an integer."""
        return int.from_bytes(self.take(bits // 8).tobytes(), "little")
