"""The primary's half of the network at work on rows, over any exchange."""

from collections import deque
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Float
from torch import Tensor, nn

from securevfl.data.rows import consecutive_batches
from securevfl.federation.rounds import Exchange, Purpose, RoundPlan, noting
from securevfl.models.alone.rule import scaled


@dataclass(frozen=True, kw_only=True)
class PrimaryInputs:
    """What the top model reads of the primary's rows, as tensors."""

    features: Float[Tensor, "rows features"]
    keys: Float[Tensor, "rows dimension"]
    similarities: Float[Tensor, "rows secondaries links"] | None = None
    """Each link's similarity, secondaries by rank; NaN where a slot holds no record. Only for
    families that read them."""
    base: Float[Tensor, "rows outputs"] | None = None
    """Margins of the primary alone, which outputs are added to: out of fold where the model that
    gave them was fitted to the row; None where there is no base."""
    first_row: int = 0
    """Id of the first row."""


class TopModel:
    """The primary's half of the network at work on rows, over any exchange."""

    def __init__(
        self,
        top: nn.Module,
        inputs: PrimaryInputs,
        exchange: Exchange,
        *,
        batch_size: int,
        scale: float = 1.0,
    ) -> None:
        """Make it.

        Args:
            top: The module.
            inputs: What it reads of the primary's rows.
            exchange: Where the secondaries are.
            batch_size: Most rows of a round.
            scale: See :attr:`scale`.
        """
        self.top = top
        self.inputs = inputs
        self.exchange = exchange
        self.batch_size = batch_size
        self.scale = scale
        """lambda: the joint model's weight beside a base's, in [0, 1]."""
        self._last_test: tuple[Tensor, Tensor, Tensor, Tensor | None] | None = None

    def predict(self, rows: npt.NDArray[np.int64], purpose: Purpose) -> Tensor:
        """Return the outputs for ``rows``, the base among them; shape (rows, outputs).

        Reveals:
            To the primary: one average a row. To the secondaries: the rows' ids.
        """
        self.top.eval()
        under_way: deque[RoundPlan] = deque()
        plans = (
            self._plan(batch, purpose, self.exchange.ranks)
            for batch in consecutive_batches(rows, batch_size=self.batch_size)
        )
        with torch.no_grad():
            aggregates = self.exchange.release_each(noting(plans, under_way))
            return torch.cat([self._forward(under_way.popleft(), one) for one in aggregates])

    def _forward(self, plan: RoundPlan, aggregate: Tensor) -> Tensor:
        inputs, base = self._read(plan, aggregate)
        if plan.purpose == "test":
            self._last_test = inputs
        output = self._compute(*inputs)
        return output if base is None else scaled(base, self._joint(base, output), self.scale)

    def _compute(
        self, features: Tensor, keys: Tensor, aggregate: Tensor, similarities: Tensor | None
    ) -> Tensor:
        output: Tensor = self.top(features, keys, aggregate, similarities)
        return output

    def _read(
        self, plan: RoundPlan, aggregate: Tensor
    ) -> tuple[tuple[Tensor, Tensor, Tensor, Tensor | None], Tensor | None]:
        """Return what the top model reads of a round's rows, and their base."""
        data = self.inputs
        index = torch.as_tensor(plan.rows - data.first_row, device=data.features.device)
        similarities = None
        if data.similarities is not None:
            # Ranks count from 1; a party that is left out of the round is left out here too.
            active = torch.as_tensor(plan.active, device=index.device) - 1
            similarities = data.similarities[index[:, None], active]
        inputs = (data.features[index], data.keys[index], aggregate, similarities)
        return inputs, None if data.base is None else data.base[index]

    def _joint(self, base: Tensor, output: Tensor) -> Tensor:  # noqa: ARG002
        """Return the joint model's margins, of the base's and what the top model says."""
        return output

    def _plan(
        self, rows: npt.NDArray[np.int64], purpose: Purpose, active: tuple[int, ...]
    ) -> RoundPlan:
        return RoundPlan(
            round_number=self.exchange.rounds.next(), rows=rows, active=active, purpose=purpose
        )


class CorrectingTopModel(TopModel):
    """A top model at work whose outputs are what the base lacks, and are added to it."""

    def _joint(self, base: Tensor, output: Tensor) -> Tensor:
        """Return the sum of both."""
        return base + output
