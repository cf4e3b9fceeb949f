"""Parties that compute with CrypTen as threads of one process, and what travels between them."""

import queue
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import combinations
from typing import Any

import numpy as np
from helpers.patience import PATIENCE_S
from helpers.queue_star import run_parties

from securevfl.core.errors import ProtocolError
from securevfl.mpc.dealt_tuples import TupleDealer, TupleRequest
from securevfl.mpc.on_shares import LineCommunicator, Seat, computing

CONTEXT = b"a test"


@dataclass
class QueueLines:
    """Lines of threads; ``changed`` may alter what a party sends."""

    ranks: Sequence[int]
    changed: Callable[[int, int, int, np.ndarray], np.ndarray] = lambda _a, _b, _step, values: (
        values
    )
    seen: list[tuple[int, int, np.ndarray]] = field(default_factory=list)
    """Sender, receiver and array of all that travelled."""

    def __post_init__(self) -> None:
        self._queues: dict[tuple[int, int], queue.Queue[tuple[int, np.ndarray]]] = {
            (one, other): queue.Queue() for one in self.ranks for other in self.ranks
        }

    def of(self, rank: int) -> "QueueEnd":
        return QueueEnd(self, rank)


@dataclass
class QueueEnd:
    lines: QueueLines
    rank: int

    def send(self, rank: int, step: int, values: np.ndarray) -> None:
        sent = self.lines.changed(self.rank, rank, step, values.copy())
        self.lines.seen.append((self.rank, rank, sent))
        self.lines._queues[self.rank, rank].put((step, sent))

    def receive(self, rank: int, step: int, *, dtype: Any, shape: tuple[Any, ...]) -> np.ndarray:
        came, values = self.lines._queues[rank, self.rank].get(timeout=PATIENCE_S)
        fits = len(shape) == values.ndim and all(
            want in (None, got) for want, got in zip(shape, values.shape, strict=True)
        )
        if came != step or values.dtype != np.dtype(dtype) or not fits:
            raise ProtocolError(f"rank {rank}: {values.dtype}{values.shape} of step {came} came")
        return values


@dataclass
class DealerHere:
    """A dealer that members call as a function."""

    dealer: TupleDealer
    changed: Callable[[np.ndarray], np.ndarray] = lambda words: words
    waiting: deque[tuple[int, np.ndarray]] = field(default_factory=deque)
    asked: list[int] = field(default_factory=list)
    seeds: dict[int, "queue.Queue[bytes]"] = field(default_factory=dict)

    def of(self, rank: int) -> "LineHere":
        self.seeds[rank] = queue.Queue()
        return LineHere(self, rank)


@dataclass
class LineHere:
    """One member's line to a dealer of the same process."""

    here: DealerHere
    rank: int

    def begin(self, world: Sequence[int], number: int) -> None:
        for rank, seed in self.here.dealer.begin(world, number).items():
            self.here.seeds[rank].put(seed)

    def seed(self) -> bytes:
        return self.here.seeds[self.rank].get(timeout=PATIENCE_S)

    def ask(self, requests: Sequence[TupleRequest]) -> None:
        self.here.asked.append(len(requests))
        words = self.here.changed(self.here.dealer.corrections(requests))
        self.here.waiting.append((requests[0].number, words))

    def take(self, number: int, count: int) -> np.ndarray:
        dealt, words = self.here.waiting.popleft()
        if (dealt, len(words)) != (number, count):
            raise ProtocolError(f"{len(words)} numbers of {dealt} came, not {count} of {number}")
        return words


def members(
    world: tuple[int, ...], *, lines: QueueLines | None = None, dealer: DealerHere | None = None
) -> dict[int, Seat]:
    """Return the members of a world, whose keys are the same each time."""
    lines = lines or QueueLines(world)
    dealer = dealer or DealerHere(TupleDealer(world, CONTEXT))
    keys = {pair: bytes(pair) * 16 for pair in combinations(world, 2)}
    return {
        rank: Seat(
            rank=rank,
            world=world,
            pair_keys={
                peer: keys[min(rank, peer), max(rank, peer)] for peer in world if peer != rank
            },
            context=CONTEXT,
            lines=lines.of(rank),
            dealer=dealer.of(rank),
        )
        for rank in world
    }


def together(
    those: dict[int, Seat],
    program: Callable[[int, LineCommunicator], Any],
    *,
    number: int = 0,
) -> dict[int, Any]:
    """Run a program at all members; return what each got."""

    def run(member: Seat) -> Any:
        with computing(member, number=number) as here:
            return program(member.rank, here)

    return run_parties({rank: partial(run, one) for rank, one in those.items()})
