"""A star of queues: parties as threads of one process, for tests of what travels."""

import queue
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from helpers.patience import PATIENCE_S
from torch import Tensor

DEADLINE_S = PATIENCE_S


class QueueStar:
    """Carries words between threads, and keeps a copy of all that the primary gets."""

    def __init__(self, ranks: Sequence[int]) -> None:
        self._queues: dict[int, queue.Queue[tuple[int, Tensor]]] = {
            rank: queue.Queue() for rank in ranks
        }
        self.seen: dict[int, list[Tensor]] = {rank: [] for rank in ranks}

    def wire(self, rank: int) -> "QueueWire":
        """Return the end that the party of ``rank`` holds."""
        return QueueWire(self, rank)

    def put(self, rank: int, round_number: int, words: Tensor) -> None:
        """Carry one message to the primary."""
        self.seen[rank].append(words.clone())
        self._queues[rank].put((round_number, words.clone()))

    def take(self, rank: int, round_number: int) -> Tensor:
        """Hand the next message over."""
        got, words = self._queues[rank].get(timeout=DEADLINE_S)
        assert got == round_number
        return words


class QueueWire:
    """One party's end of a :class:`QueueStar`."""

    def __init__(self, star: QueueStar, rank: int) -> None:
        self._star = star
        self._rank = rank

    @property
    def masked(self) -> bool:
        """Whether this is a secondary's end."""
        return self._rank != 0

    def carry(self, round_number: int, words: Tensor, ranks: Sequence[int]) -> None:
        """Send words to the primary; there, add what the ranks sent."""
        if self.masked:
            self._star.put(self._rank, round_number, words)
            return
        for rank in ranks:
            words += self._star.take(rank, round_number)


def run_parties(work: dict[int, Callable[[], object]]) -> dict[int, object]:
    """Run every party's work in its own thread; return what each returned."""
    with ThreadPoolExecutor(len(work)) as pool:
        futures = {rank: pool.submit(task) for rank, task in work.items()}
        return {rank: future.result(timeout=DEADLINE_S) for rank, future in futures.items()}
