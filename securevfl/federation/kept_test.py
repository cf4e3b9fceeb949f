"""What the primary keeps of test rounds: rows that came before a loss are not paid for again."""

import hashlib
from collections.abc import Iterator, Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn

from securevfl.federation.exchange_around import ExchangeAround
from securevfl.federation.rounds import Exchange, RoundPlan
from securevfl.federation.state_files import DamagedError, StateFolder


class KeptTestRounds(ExchangeAround):
    """An exchange that asks only for test rows that it has not yet: a file each round."""

    def __init__(
        self,
        inner: Exchange,
        files: StateFolder,
        parts: Sequence[Tensor],
        *,
        top: nn.Module,
        shape: tuple[int, ...],
        device: torch.device,
    ) -> None:
        """Find out what is kept.

        Args:
            inner: Where the secondaries are.
            files: The primary's; they name the run.
            parts: Row ids of every test round, in order; int64.
            top: The primary's half of the model that is tested. What is kept of another model, or
                of other secondaries, is asked for again.
            shape: Of one row of the cut, (L, H).
            device: Where the top model computes.
        """
        super().__init__(inner)
        self._files = files
        self._parts = parts
        self._model = _digest(top, inner.ranks)
        self._shape = shape
        self._device = device
        self._kept: list[Tensor] = []
        # Rounds are kept in order, so what comes behind one that is missing is of another model.
        for number in range(len(parts)):
            aggregate = self._read(number)
            if aggregate is None:
                break
            self._kept.append(aggregate)

    def missing(self) -> list[int]:
        """Return how many rows each round has that is still to be asked for."""
        return [len(part) for part in self._parts[len(self._kept) :]]

    def release(self, plan: RoundPlan) -> Float[Tensor, "batch positions width"]:
        """Return the average of the active secondaries' representations.

        Reveals:
            What the inner exchange reveals.
        """
        return self.inner.release(plan)

    def release_each(
        self, plans: Iterator[RoundPlan]
    ) -> Iterator[Float[Tensor, "batch positions width"]]:
        """Yield the averages of all test rounds: first those that are kept, then fresh ones.

        Reveals:
            What the inner exchange reveals, of the rounds that are not kept.
        """
        before = len(self._kept)
        for aggregate, _ in zip(tuple(self._kept), plans, strict=False):
            yield aggregate.to(self._device)
        for number, aggregate in enumerate(self.inner.release_each(plans), before):
            state = {"model": self._model, "rows": self._parts[number]}
            self._files.write(_name(number), {**state, "aggregate": aggregate.cpu()})
            self._kept.append(aggregate)
            yield aggregate

    def _read(self, number: int) -> Tensor | None:
        try:
            state = self._files.read(_name(number))
        except (FileNotFoundError, DamagedError):
            return None
        rows, aggregate = state.get("rows"), state.get("aggregate")
        part = self._parts[number]
        if not isinstance(rows, Tensor) or not isinstance(aggregate, Tensor):
            return None
        if state.get("model") != self._model or not torch.equal(rows, part):
            return None
        return aggregate if aggregate.shape == (len(part), *self._shape) else None


def _digest(top: nn.Module, ranks: tuple[int, ...]) -> str:
    """Return the hash of a model and of who answers.

    An epoch that is trained once more, behind other noise, is another model of the same number.
    """
    made = hashlib.sha256(repr(ranks).encode())
    for name, value in sorted(top.state_dict().items()):
        made.update(name.encode())
        made.update(value.detach().cpu().contiguous().numpy().tobytes())
    return made.hexdigest()


def _name(number: int) -> str:
    return f"tested/{number + 1}.pt"
