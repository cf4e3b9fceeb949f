"""What one round is: which rows, which secondaries, what for; and how all parties hear of it."""

from collections import deque
from collections.abc import Iterator, Mapping, Sized
from dataclasses import dataclass, field
from typing import Final, Literal, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
from jaxtyping import Float
from torch import Tensor

from securevfl.core.errors import ProtocolError
from securevfl.transport.message import Message, MessageKind, TypedMessage

Purpose = Literal["release", "train", "validation", "test", "predict"]

ROUNDS_AHEAD: Final = 8
"""Most rounds that are announced and not yet answered, where none depends on another.

Over a line with a round trip of 50 ms one round at a time waits 50 ms for each; eight wait once. A
secondary of a frozen run keeps as many answers, so more would cost it disk.
"""


@dataclass(frozen=True, kw_only=True)
class RoundPlan:
    """One exchange: batch announced, aggregate released, gradient returned."""

    round_number: int
    """Counts from 1 within a session and never repeats, whatever the round is for."""

    rows: npt.NDArray[np.int64] = field(repr=False)
    """Primary row ids of the batch, shape (B,)."""

    active: tuple[int, ...]
    """Ranks of the secondaries that take part; the others compute nothing (party dropout)."""

    purpose: Purpose
    """What the primary does with the aggregate; every purpose is charged alike."""

    @property
    def wants_gradient(self) -> bool:
        """Whether the gradient of the aggregate goes back to the active secondaries."""
        return self.purpose == "train"


@dataclass(frozen=True, kw_only=True, slots=True)
class EpochMark:
    """What every party does at the end of an epoch."""

    epoch: int
    """Epochs done, from 1."""

    best: bool
    """Keep this epoch's weights as the best ones."""

    restore_best: bool = False
    """Go back to the best weights: training is over and the test rows come next."""


class RoundCounter:
    """Round numbers of one session; a number is given out once."""

    def __init__(self) -> None:
        self.last = 0

    def next(self) -> int:
        """Return the next round number, from 1."""
        self.last += 1
        return self.last


@runtime_checkable
class Exchange(Protocol):
    """How the primary reaches the secondaries: simulated, between processes, or from a cache."""

    @property
    def rounds(self) -> RoundCounter:
        """Gives out the session's round numbers."""
        ...

    @property
    def ranks(self) -> tuple[int, ...]:
        """Ranks of all secondaries."""
        ...

    def release(self, plan: RoundPlan) -> Float[Tensor, "batch positions width"]:
        """Return the average of the active secondaries' clipped, noised representations.

        Reveals:
            To the primary: that average. To the secondaries: the row ids of the batch.
        """
        ...

    def release_each(
        self, plans: Iterator[RoundPlan]
    ) -> Iterator[Float[Tensor, "batch positions width"]]:
        """Yield the averages of rounds of which none depends on another, in their order.

        Up to :data:`ROUNDS_AHEAD` rounds may be under way at once. A plan is taken from ``plans``
        when its round is about to be announced, and no round is announced before the caller is
        done with the average of that many rounds before it.

        Reveals:
            What :meth:`release` reveals, for each.
        """
        ...

    def return_gradient(
        self, plan: RoundPlan, gradient: Float[Tensor, "batch positions width"]
    ) -> None:
        """Hand the gradient of the loss with respect to the aggregate to the active secondaries.

        Reveals:
            To every active secondary: one and the same tensor, from which labels may be inferred.
        """
        ...

    def average_positions(self, own: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the mean of all parties' positional-encoding weights, ``own`` among them.

        Reveals:
            To every party: the mean. To the relaying primary: nothing more than the mean.
        """
        ...

    def tell(self, message: TypedMessage, *, answer: MessageKind | None = None) -> None:
        """Tell every secondary what the family's own protocol has to say, and wait for answers.

        Args:
            message: What all are told.
            answer: The kind that every secondary answers with; None: nobody answers.

        Reveals:
            To every secondary: what the message's type says.
        """
        ...

    def end_epoch(self, mark: EpochMark) -> None:
        """Tell every secondary what to keep.

        Reveals:
            To the secondaries: the epoch number and whether it was the best so far.
        """
        ...


def noting(plans: Iterator[RoundPlan], taken: deque[RoundPlan]) -> Iterator[RoundPlan]:
    """Yield plans, each put into ``taken`` as it is taken."""
    for plan in plans:
        taken.append(plan)
        yield plan


def active_parties(secondaries: Sized, party_dropout: float) -> int:
    """Return how many secondaries answer a training round; at least one.

    References:
        [FeT] section 5.1, party dropout: ``(1 - r_d) k``, here rounded to the nearest whole.
    """
    return max(1, round((1 - party_dropout) * len(secondaries)))


def read_ranks(message: Message) -> tuple[int, ...]:
    """Return the ranks of the secondaries that a message says are active, whoever they are.

    Raises:
        ProtocolError: If they are no whole numbers.
    """
    active = message.figure("active", list)
    if not all(type(rank) is int for rank in active):
        raise ProtocolError(f"round {message.round_number}: impossible parties {active!r:.80}")
    return tuple(active)
