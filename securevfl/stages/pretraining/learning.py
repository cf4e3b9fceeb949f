"""One party in pretraining: the rows and records that it learns from, and its learner on them."""

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from securevfl.core.conventions import stream
from securevfl.core.devices import to_device
from securevfl.core.errors import DataError
from securevfl.core.progress import Observer, Warned
from securevfl.data.tables import RowSplit
from securevfl.federation.rounds.release import require_finite
from securevfl.models.family import Learner
from securevfl.mpc.codec import fraction_bits
from securevfl.stages.pretraining.learner import sphere_spread, unit


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PretrainingRows:
    """Row numbers of the primary's table, each part ascending."""

    aligned: Int64[np.ndarray, " aligned"]
    """Rows whose records at all parties learn from one another: linked at every secondary."""

    own: Int64[np.ndarray, " own"]
    """Rows of the primary's local step: all training rows, labelled or not."""

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


COLLAPSED: Final = 0.1
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
    def collapsed_encoders(self) -> tuple[str, ...]:
        """Names of the encoders whose representations have collapsed."""
        spreads = {"cross-party": self.cross_spread, "local": self.local_spread}
        return tuple(n for n, value in spreads.items() if value is not None and value < COLLAPSED)


@dataclass(eq=False)
class LearnerWithRecords:
    """A party's learner with the party's records.

    The primary's aligned rows are its own records; a secondary looks its records up by its links.
    """

    learner: Learner
    features: Float[Tensor, "records features"]
    own: npt.NDArray[np.int64]
    """Records of its local pretraining."""
    _: KW_ONLY
    name: str
    seed: int
    bits: Mapping[str, int] = field(default_factory=dict, init=False)
    """Binary places of the next mean of weights, by tensor."""
    _present: Tensor | None = field(default=None, init=False)
    _cross_losses: list[Tensor] = field(default_factory=list, init=False)
    _local_losses: list[Tensor] = field(default_factory=list, init=False)
    _spreads: dict[str, Tensor] = field(default_factory=dict, init=False)

    def begin_iteration(self, iteration: int, steps: Sequence[str]) -> None:
        """Get ready for an iteration, counted from 0, with these steps."""
        if iteration and "aggregate" in steps:
            # What is shared is the last mean still, and so the same at every party.
            self.bits = fraction_bits(self.learner.shared_weights())
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
        device = self.features.device
        present = np.flatnonzero(records >= 0)
        out = torch.zeros(len(records), self.learner.settings.projection_width, device=device)
        # One row alone has no batch statistics, and is left out.
        self._present = to_device(present, device) if len(present) >= 2 else None
        if self._present is not None:
            vectors = self.learner.project(self.features[to_device(records[present], device)])
            require_finite("a projection", vectors, round_number=round_number)
            self._spreads["cross"] = sphere_spread(unit(vectors))
            out[self._present] = vectors
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
                index = to_device(part, self.features.device)
                loss, target = self.learner.learn_local(self.features[index])
                self._local_losses.append(loss)
            assert target is not None
            self._spreads["local"] = sphere_spread(target)

    def figures(self) -> IterationFigures:
        """Return this iteration's losses and spreads so far."""
        return IterationFigures(
            cross_loss=_mean(self._cross_losses),
            cross_spread=_float_or_none(self._spreads.get("cross")),
            local_loss=_mean(self._local_losses),
            local_spread=_float_or_none(self._spreads.get("local")),
        )


def _mean(losses: list[Tensor]) -> float | None:
    return _float_or_none(torch.stack(losses).mean() if losses else None)


def _float_or_none(value: Tensor | None) -> float | None:
    return None if value is None else float(value)


@dataclass
class CollapseWatch:
    """Warns once of each encoder that is collapsed in two iterations running, or at the end."""

    party: str
    observe: Observer
    _before: frozenset[str] = field(default_factory=frozenset, init=False)
    _warned: set[str] = field(default_factory=set, init=False)

    def __call__(self, figures: IterationFigures, *, last: bool) -> None:
        """Take an iteration's figures."""
        now = frozenset(figures.collapsed_encoders)
        sure = now if last else now & self._before
        self._before = now
        for encoder in sorted(sure - self._warned):
            self._warned.add(encoder)
            text = (
                f"{self.party}: the {encoder} encoder has collapsed: it answers nearly the same "
                f"for every record, and fine-tuning gains nothing from it; lower "
                f"pretraining.learning_rate, raise pretraining.batch_size, or use "
                f'algorithm = "moco"'
            )
            self.observe(Warned(text=text))
