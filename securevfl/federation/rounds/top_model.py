"""The primary's half of the network at work on rows, over any exchange."""

from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Float
from torch import Tensor, nn

from securevfl.core.devices import Precision, to_device
from securevfl.data.rows import consecutive_batches
from securevfl.federation.messages import RoundPlan
from securevfl.federation.rounds.cut import CutRows
from securevfl.federation.rounds.exchanges import Exchange
from securevfl.federation.run_plan import Purpose
from securevfl.models.alone.choice import mix_outputs
from securevfl.models.cuda_graphs import Network
from securevfl.models.family import share_of_base


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


@dataclass(eq=False)
class TopModel:
    """The primary's half of the network at work on rows, over any exchange."""

    top: nn.Module
    """The module."""
    inputs: PrimaryInputs
    """Inputs from the primary's rows."""
    exchange: Exchange
    """Where the secondaries are."""
    _: KW_ONLY
    batch_size: int
    """Most rows of a round."""
    scale: float = 1.0
    """lambda: the joint model's weight in its average with a base, in [0, 1]."""
    precision: Precision = "float32"
    """Precision in which :attr:`top` computes."""
    _network: Network | None = field(default=None, init=False)
    _last_test: tuple[Tensor, Tensor, Tensor, Tensor | None] | None = field(
        default=None, init=False
    )

    def predict(self, rows: npt.NDArray[np.int64], purpose: Purpose) -> Tensor:
        """Return the outputs for ``rows``, the base among them; shape (rows, outputs).

        Reveals:
            To the primary: one average a row. To the secondaries: the rows' ids.
        """
        self.top.eval()
        with torch.no_grad():
            return torch.cat([self._forward(*batch) for batch in self._rounds(rows, purpose)])

    def _rounds(
        self, rows: npt.NDArray[np.int64], purpose: Purpose
    ) -> Iterator[tuple[RoundPlan, CutRows]]:
        """Yield rounds of rows that depend on nothing, with their averages."""
        plans = (
            self._plan(batch, purpose, self.exchange.ranks)
            for batch in consecutive_batches(rows, batch_size=self.batch_size)
        )
        return self.exchange.release_each(plans)

    def _forward(self, plan: RoundPlan, aggregate: Tensor) -> Tensor:
        inputs, base = self._read(plan, aggregate)
        if plan.purpose == "test":
            self._last_test = inputs
        output = self._compute(*inputs)
        if base is None:
            return output
        return mix_outputs(base, share_of_base(self.top) * base + output, self.scale)

    def _compute(
        self, features: Tensor, keys: Tensor, aggregate: Tensor, similarities: Tensor | None
    ) -> Tensor:
        if self._network is None or self._network.module is not self.top:
            self._network = Network(self.top, self.precision)
        return self._network(features, keys, aggregate, similarities)

    def _read(
        self, plan: RoundPlan, aggregate: Tensor
    ) -> tuple[tuple[Tensor, Tensor, Tensor, Tensor | None], Tensor | None]:
        """Return what the top model reads of a round's rows, and their base."""
        data = self.inputs
        index = to_device(plan.rows - data.first_row, data.features.device)
        similarities = None
        if data.similarities is not None:
            # Ranks count from 1; a party that is left out of the round is left out here too.
            active = to_device(torch.as_tensor(plan.active) - 1, index.device)
            similarities = data.similarities[index[:, None], active]
        inputs = (data.features[index], data.keys[index], aggregate, similarities)
        return inputs, None if data.base is None else data.base[index]

    def _plan(
        self, rows: npt.NDArray[np.int64], purpose: Purpose, active: tuple[int, ...]
    ) -> RoundPlan:
        return RoundPlan(
            round_number=self.exchange.rounds.next(), rows=rows, active=active, purpose=purpose
        )
