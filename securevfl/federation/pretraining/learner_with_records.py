"""A party's learner with its own records, and the batches that are drawn from them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from securevfl.core.conventions import stream
from securevfl.core.errors import DataError
from securevfl.data.rows import RowSplit
from securevfl.federation.rounds.release import require_finite
from securevfl.models.family import Learner
from securevfl.models.fedhssl.learner import spread, unit

# Which of the primary's rows pretraining may see, and for what.


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PretrainingRows:
    """Row numbers of the primary's table, each part ascending."""

    aligned: Int64[np.ndarray, " aligned"]
    """Rows whose records at all parties learn from one another: linked at every secondary."""

    own: Int64[np.ndarray, " own"]
    """Rows that the primary learns from by itself: all that are for training, labelled or not."""

    held_out: Int64[np.ndarray, " held_out"]
    """Validation and test rows; no party learns from them or from their records."""


def pretraining_rows(
    split: RowSplit, *, linked: Bool[np.ndarray, " rows"] | None, aligned: float, seed: int
) -> PretrainingRows:
    """Choose the rows of pretraining.

    Labelled rows that are linked are aligned in any case ([FedHSSL] section IV-A); of the others
    that are linked, as many are drawn as the share still lacks.

    Args:
        split: The primary's rows.
        linked: Which of its rows are linked at every secondary; None where nothing is learned
            across parties, so that nobody asks.
        aligned: Share of the linked training rows, labelled or not, that count as aligned, in
            (0, 1].
        seed: Run seed; the draw uses its stream ``"aligned"``.

    Raises:
        DataError: If fewer than two rows would be aligned: one row has no batch statistics.
    """
    own = np.sort(np.concatenate([split.train, split.unlabelled]))
    train, others = split.train, split.unlabelled
    if linked is not None:
        train, others = train[linked[train]], others[linked[others]]
    possible = len(train) + len(others)
    wanted = round(aligned * possible) - len(train)
    extra = stream(seed, "aligned").permutation(others)[: max(0, wanted)]
    chosen = np.sort(np.concatenate([train, extra]))
    if aligned < 1 and len(split.unlabelled) == 0:
        # All training rows are labelled: then alignment is drawn among them.
        chosen = np.sort(stream(seed, "aligned").permutation(train)[: round(aligned * possible)])
    if len(chosen) < 2:
        raise DataError(
            f"pretraining: {len(chosen)} aligned rows are too few, of {possible} of the "
            f"{len(own)} training rows that are linked at every secondary; at least 2"
        )
    return PretrainingRows(
        aligned=chosen,
        own=own,
        held_out=np.sort(np.concatenate([split.validation, split.test])),
    )


def even_batches(rows: Int64[np.ndarray, " rows"], *, batch_size: int) -> list[np.ndarray]:
    """Cut rows into batches of nearly one size, at most ``batch_size``, in the order given.

    A short last batch would have batch statistics of its own.
    """
    return np.array_split(rows, max(1, -(-len(rows) // batch_size)))


# One party in pretraining: its learner on its own records, wherever the others are.

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
        self.seed = seed
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
            order = stream(self.seed, "pretraining", self.name, iteration, epoch)
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
