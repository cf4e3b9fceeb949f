"""One party in pretraining: its learner on its own records, wherever the others are."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Float
from torch import Tensor

from securevfl.core.seeds import stream
from securevfl.federation.release import require_finite
from securevfl.models.fedhssl.losses import unit
from securevfl.models.fedhssl.towers import spread
from securevfl.models.learner import Learner
from securevfl.pretraining.rows import even_batches

COLLAPSED = 0.1
"""Spread below which representations count as collapsed; evenly spread ones have 1."""


@dataclass(frozen=True, kw_only=True, slots=True)
class IterationFigures:
    """What one party sees of one iteration; None where it has no such step."""

    cross_loss: float | None
    """Mean loss against other parties' projections."""

    cross_spread: float | None
    """Spread of the party's own projections in the last batch, 0 to about 1."""

    local_loss: float | None
    """Mean loss between views of own records, with guidance."""

    local_spread: float | None
    """Spread of its targets in the last batch."""

    @property
    def collapsed(self) -> tuple[str, ...]:
        """Names of the encoders whose representations have collapsed."""
        spreads = {"cross-party": self.cross_spread, "local": self.local_spread}
        return tuple(n for n, value in spreads.items() if value is not None and value < COLLAPSED)


class LearnerWithRecords:
    """A party's learner with the party's records.

    The primary's aligned rows are its own records; a secondary looks its records up by its links.
    """

    def __init__(
        self,
        learner: Learner,
        features: Float[Tensor, "records features"],
        own: npt.NDArray[np.int64],
        *,
        name: str,
        seed: int,
    ) -> None:
        self.learner = learner
        self.features = features
        self.own = own
        self.name = name
        self._seed = seed
        self._present: Tensor | None = None
        self._cross_losses: list[Tensor] = []
        self._local_losses: list[Tensor] = []
        self._spreads: dict[str, float] = {}

    @property
    def weight(self) -> int:
        """The party's say in aggregated weights.

        References:
            [FedHSSL] Algorithm 1, line 32: 1/K, so all equal. ``weights = "records"`` weighs by
            the records that each learns from.
        """
        return len(self.own) if self.learner.settings.weights == "records" else 1

    def begin_iteration(self, iteration: int) -> None:
        """Get ready for an iteration, counted from 0."""
        self.learner.begin_iteration(iteration)
        self._cross_losses, self._local_losses, self._spreads = [], [], {}

    def project(
        self, records: npt.NDArray[np.int64], *, round_number: int
    ) -> Float[Tensor, "batch width"]:
        """Return projections of records, for others; zeros where there is no record (-1).

        Raises:
            PrivacyError: If training has diverged; nothing was sent.

        Reveals:
            Nothing by itself.
        """
        index = torch.as_tensor(records, device=self.features.device)
        present = index >= 0
        width = self.learner.settings.projection_width
        out = torch.zeros(len(index), width, device=self.features.device)
        # One row alone has no batch statistics, and is left out.
        self._present = present if int(present.sum()) >= 2 else None
        if self._present is not None:
            vectors = self.learner.project(self.features[index[present]])
            require_finite("a projection", vectors, round_number=round_number)
            self._spreads["cross"] = spread(unit(vectors))
            out[present] = vectors
        return out

    def learn_cross(self, targets: list[Float[Tensor, "batch width"]]) -> None:
        """Learn from what came back for the last :meth:`project`."""
        if self._present is None:
            return
        chosen = [target[self._present] for target in targets]
        self._present = None
        self._cross_losses.append(self.learner.learn_cross(chosen))

    def learn_local(self, iteration: int) -> None:
        """Go through the party's own records, as often as the settings say."""
        settings = self.learner.settings
        for epoch in range(settings.local_epochs):
            order = stream(self._seed, "pretraining", self.name, iteration, epoch)
            shuffled = order.permutation(self.own)
            target = None
            for part in even_batches(shuffled, batch_size=settings.batch_size):
                index = torch.as_tensor(part, device=self.features.device)
                loss, target = self.learner.learn_local(self.features[index])
                self._local_losses.append(loss)
            assert target is not None
            self._spreads["local"] = spread(target)

    def figures(self) -> IterationFigures:
        """Return this iteration's losses and spreads so far."""
        return IterationFigures(
            cross_loss=_mean(self._cross_losses),
            cross_spread=self._spreads.get("cross"),
            local_loss=_mean(self._local_losses),
            local_spread=self._spreads.get("local"),
        )

    def shared_weights(self) -> dict[str, Tensor]:
        """Return the weights of the local top encoder, which parties average."""
        return self.learner.shared_weights()

    def load_shared(self, weights: Mapping[str, Tensor]) -> None:
        """Load averaged weights into the local top encoder."""
        self.learner.load_shared(weights)

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint needs."""
        return self.learner.state()


def _mean(losses: list[Tensor]) -> float | None:
    return float(torch.stack(losses).mean()) if losses else None
