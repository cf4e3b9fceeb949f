"""SplitAvg as a CrypTen program: secondaries share their rows, and the sum is made of shares.

With ``mpc.engine = "crypten"`` every secondary's words are CrypTen tensors that all active ones
share. Each adds its shares up and sends what comes of it to the primary, under its pairwise masks
as ever: to the primary alone the shares add up to the plain sum, equal to the last bit to what
``"masked"`` gives.

With ``privacy.verify_clip`` rows and noise are shared apart, as whole numbers, and before anything
goes to the primary their lengths are compared with limits on shares
(:mod:`securevfl.mpc.clip_limits`). What is opened is one word a secondary, which is 0 if all is
within the limits: 64 parities, drawn at the end, of all bits that must be 0.

Rows that are too long, and lies in the noise, are found for a secondary that runs this program on
what it shares. One that computes otherwise within the comparison can change its outcome.
"""

import hashlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final, Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Int64
from torch import Tensor

from securevfl.core.errors import ProtocolError
from securevfl.mpc.clip_limits import PROJECTIONS, ClipLimits
from securevfl.mpc.crypten_bridge import ArithmeticSharedTensor, CrypTenSumTo, crypten
from securevfl.mpc.dealt_sums import uniform
from securevfl.mpc.dealt_tuples import DealtTuples, TupleRequest
from securevfl.mpc.on_shares import Computing, LineCommunicator, Seat, computing
from securevfl.mpc.sum_to import Words

_BITS: Final = 64
# Numbers that meet what is drawn for them while that is in a processor's cache.
_DRAWN_AT_ONCE: Final = 1 << 12
_SIGN: Final = -(1 << 63)

Parts = Int64[Tensor, "two rows numbers"]
"""A secondary's rows and its noise, in units of the ring."""


@runtime_checkable
class Limits(Protocol):
    """Returns the limits of a round, which depend on how many rows it has."""

    def __call__(self, *, rows: int) -> ClipLimits:
        """Return the limits."""
        ...


class SharedSum:
    """The sum between processes, made of CrypTen's shares; see the module."""

    def __init__(
        self, revealed: CrypTenSumTo, seat: Seat, *, names: Mapping[int, str], limits: Limits
    ) -> None:
        """Make it.

        Args:
            revealed: Masks a secondary's share, and reveals the sum to the primary.
            seat: This secondary's place among all of them.
            names: Of all secondaries, by rank.
            limits: Returns what a round of so many rows is held to, as ``limits(rows=...)``.
        """
        self._names, self._limits = names, limits
        self._revealed = revealed
        self._seat = seat
        self._needs: dict[tuple[int, ...], list[TupleRequest]] = {}

    def __call__(self, words: Words, *, round_number: int, active: Sequence[int]) -> Words | None:
        """Share ``words``, add up the shares and contribute them; see :class:`SumTo`.

        Raises:
            ProtocolError: If the round's mask was used before, or a peer is at fault.

        Reveals:
            What :class:`securevfl.mpc.crypten_bridge.CrypTenSumTo` reveals.
        """
        with computing(self._among(active, deals=False), number=round_number) as here:
            shared = _shared_by_each(words, here.communicator)
            total = sum(shared[1:], shared[0]).share
        return self._revealed(total, round_number=round_number, active=active)

    def bind(self, message_digest: bytes, ranks: Sequence[int]) -> None:
        """Bind a message of the primary; see :class:`securevfl.mpc.sum_to.SumTo`.

        Reveals:
            Nothing.
        """
        self._revealed.bind(message_digest, ranks)

    def prepare(self, count: int, *, round_number: int, active: Sequence[int]) -> None:
        """Start making this round's mask in the background.

        Raises:
            ProtocolError: If the round's mask was used before.

        Reveals:
            Nothing.
        """
        self._revealed.prepare(count, round_number=round_number, active=active)

    def checked(
        self,
        parts: Parts,
        *,
        round_number: int,
        active: Sequence[int],
    ) -> Words:
        """Share rows and noise, and return this party's share of their sum once all are checked.

        Args:
            parts: This party's.
            round_number: The round, never used before in this session.
            active: Ranks of the secondaries that contribute.

        Raises:
            ProtocolError: Naming the secondaries whose rows or noise are too long.

        Reveals:
            To the active secondaries: which of them are within the limits. To the dealer: sizes.
        """
        seat, shape = self._among(active, deals=True), (len(active), *parts.shape)
        needs = self._needs.get(shape, [])
        with computing(seat, number=round_number, needs=needs) as here:
            assert here.tuples is not None, "the dealer's"
            shared = ArithmeticSharedTensor.stack(_shared_by_each(parts, here.communicator))
            limits = self._limits(rows=parts.shape[1])
            violations = _violations(shared, limits, here, here.tuples)
            self._needs[shape] = here.tuples.asked
        found = zip(seat.world, violations.tolist(), strict=True)
        guilty = [self._names[rank] for rank, violation in found if violation]
        if guilty:
            raise ProtocolError(
                f"round {round_number}: rows or noise of {' and '.join(map(repr, guilty))} are "
                f"longer than privacy.clip_norm and the noise allow (privacy.verify_clip); the "
                f"round is refused"
            )
        total: Tensor = shared.share.sum((0, 1))
        return total.reshape(-1)

    def _among(self, active: Sequence[int], *, deals: bool) -> Seat:
        world = tuple(sorted(active))
        return replace(self._seat, world=world, dealer=self._seat.dealer if deals else None)


def _shared_by_each(values: Tensor, link: LineCommunicator) -> list[Any]:
    """Return the tensors that each party shares, in their order."""
    others = torch.zeros_like(values)
    return [
        ArithmeticSharedTensor(values if src == link.get_rank() else others, precision=0, src=src)
        for src in range(link.get_world_size())
    ]


def _violations(
    shared: Any, limits: ClipLimits, here: Computing, tuples: DealtTuples
) -> Int64[Tensor, "parties"]:
    """Return a word for each party, which is 0 if its rows and noise are within the limits.

    Args:
        shared: What each party shares, of shape (parties, 2, rows, numbers).
        limits: The round's.
        here: What this party computes with.
        tuples: The dealer's.

    Reveals:
        To all that compute: the words.
    """
    squares = crypten.mpc.primitives.beaver.square(shared).share.sum(-1)
    most = torch.tensor([limits.row_square, limits.noise_square])
    # Drawn from what was opened of every party's numbers, so that these are fixed.
    draw = partial(_drawn, here.communicator.opened.digest())
    first = here.communicator.get_rank() == 0
    left = (most[:, None] if first else 0) - squares
    halves = torch.tensor([1 << (bits - 1) for bits in (limits.row_bits, limits.noise_bits)])
    projected = [
        share + (halves[:, None] if first else 0) for share in _projections(shared, limits, draw)
    ]
    values = torch.cat([left, *projected], dim=-1)
    must_be_zero = torch.full(values.shape[1:], _SIGN)
    for part, bits in enumerate((limits.row_bits, limits.noise_bits)):
        must_be_zero[part, left.shape[-1] :] = -1 << bits
    bad = _bits_of(values, tuples) & must_be_zero
    drawn = uniform(
        hashlib.sha256(here.communicator.opened.digest()).digest(), 0, (_BITS, *values.shape[1:])
    )
    bad.share = _parities(bad.share, torch.from_numpy(drawn.view(np.int64)))
    words: Tensor = bad.reveal()
    return words


def _projections(shared: Any, limits: ClipLimits, draw: Any) -> Iterator[Tensor]:
    """Yield shares of each block's projections, of shape (parties, 2, projections).

    A block may be a whole table; what is drawn for it never is in memory at once.
    """
    numbers = itertools.count()
    rows = shared.share.shape[2]
    for start in range(0, rows, limits.block):
        block = shared.share[:, :, start : start + limits.block].flatten(2)
        pieces = block.split(_DRAWN_AT_ONCE, dim=2)
        projected = [piece @ draw(next(numbers), piece.shape[2]).T for piece in pieces]
        yield torch.stack(projected).sum(0)


def _drawn(key: bytes, number: int, count: int) -> Int64[Tensor, "projections count"]:
    """Return rho: -1, 0 and 1 with probabilities 1/4, 1/2 and 1/4."""
    words = -(-2 * PROJECTIONS * count // _BITS)
    bits = np.unpackbits(uniform(key, number, (words,)).view(np.uint8))[: 2 * PROJECTIONS * count]
    one, other = torch.from_numpy(bits.view(np.int8)).view(2, PROJECTIONS, count)
    return (one - other).long()


def _bits_of(share: Tensor, tuples: DealtTuples) -> Any:
    """Return shares of the bits of numbers of which each party has an additive share.

    A random number that the dealer has shared both ways is added, and the sum opened; a circuit
    takes the number's bits off again: ``x = m - r``, whose bits are those of ``~(~m + r)``.
    """
    added, bits = tuples.double(share.shape)
    opened = ArithmeticSharedTensor.from_shares(share + added.share, precision=0).reveal()
    return ~crypten.mpc.primitives.circuit.add(bits, ~opened)


def _parities(share: Tensor, drawn: Tensor) -> Int64[Tensor, "parties"]:
    """Return for each party a word of 64 parities of its share's bits, each over drawn ones."""
    kept = (share[:, None] & drawn).flatten(2).numpy()
    words = np.bitwise_xor.reduce(kept, axis=-1).view(np.uint64)
    for shift in (32, 16, 8, 4, 2, 1):
        words ^= words >> np.uint64(shift)
    places = np.arange(_BITS, dtype=np.uint64)
    packed = np.bitwise_or.reduce((words & np.uint64(1)) << places, axis=-1)
    return torch.from_numpy(packed.view(np.int64))
