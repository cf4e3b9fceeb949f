"""Projections as they leave a party: in a sum, as they are, with ISO noise, or accounted for."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor

from securevfl.core.conventions import unseeded_normal
from securevfl.core.devices import to_device
from securevfl.core.errors import ConfigError
from securevfl.dp.clipping import clip_rows
from securevfl.dp.privacy import Privacy
from securevfl.dp.release_plan import ReleasePlan
from securevfl.dp.ring_noise import ExactDiscreteGaussian
from securevfl.federation.rounds.cut import CutLayer
from securevfl.ledger.ledger import Ledger
from securevfl.models.family import PretrainingSettings
from securevfl.mpc.codec import RingFormat, quantise, to_float
from securevfl.stages.pretraining.learner import unit

# What torch's batch norms call their running statistics.
_STATISTICS: Final = ("running_mean", "running_var")


def with_iso_noise(values: Float[Tensor, "*shape"], scale: float) -> Float[Tensor, "*shape"]:
    """Return the values with ISO noise: one deviation for all of them, set by the longest row.

    With the first axis as b rows, and all others together as the m numbers of a row, every number
    gets a normal number of deviation ``scale * max_i ||d_i||_2 / sqrt(m)``. The noise of a row is
    then about ``scale`` times as long as the longest row of the batch.

    **It promises nothing.** The length of the longest row is a function of private values, and
    whoever gets b m noised numbers reads it off their spread: of weights it says how
    long a layer's longest row is. Two batches
    that differ in that row get noise of two sizes, which can be told apart with certainty as b m
    grows; so no epsilon holds, whatever ``scale`` is.

    Args:
        values: d, such as projections (B, P), or weights with a row for each output; a single
            axis is b rows of one number.
        scale: lambda, dimensionless, >= 0; 0 returns the values as they are.

    Reveals:
        Nothing by itself. Of what is sent: noisy values, and the length of the longest row.

    References:
        [FedHSSL] section VI-B, Equation 7.
    """
    if not scale:
        return values
    rows = values.detach().reshape(len(values) if values.dim() else 1, -1)
    longest = torch.linalg.vector_norm(rows, dim=1).max()
    noise = to_device(torch.from_numpy(unseeded_normal(*values.shape)), values.device).to(values)
    return values + scale / math.sqrt(rows.shape[1]) * longest * noise


@runtime_checkable
class ProjectionMechanism(Protocol):
    """Protects the primary's projections before they leave."""

    def __call__(
        self, projections: Float[Tensor, "batch width"], *, round_number: int
    ) -> Float[Tensor, "batch width"]:
        """Return what is sent in place of the projections, which are of any length.

        Reveals:
            To every secondary: what is returned.
        """
        ...

    def close(self) -> None:
        """Close the files that are held open."""
        ...


@dataclass(frozen=True)
class PlainProjections:
    """Their directions, without lengths; or, with ISO noise, as they are.

    ISO noise is a heuristic that promises nothing. Without it losses read directions alone.

    References:
        [FedHSSL] section VI-B ("applies ISO to the output of its cross-party encoder"), Equation 7.
    """

    scale: float = 0.0
    """Scale of ISO noise; 0 adds none."""

    def __call__(
        self,
        projections: Float[Tensor, "batch width"],
        *,
        round_number: int,
    ) -> Float[Tensor, "batch width"]:
        """Return unit vectors, or the projections with noise.

        Reveals:
            To every secondary: a representation of each of the primary's aligned rows; with ISO
            noise, noisy ones, and from the size of the noise how long the longest of the batch is.
            No guarantee goes with them.
        """
        return with_iso_noise(projections, self.scale) if self.scale else unit(projections)

    def close(self) -> None:
        """Do nothing."""


class GaussianProjections:
    """Clipped vectors with discrete Gaussian noise, each batch booked before it is sent.

    The encoder was trained on the rows, so one row may change all B vectors of a batch, by up to
    2C each: this is the unit ``secondary-record`` of a trained encoder (docs/privacy.md, section
    3), with the primary as the only party that contributes.
    """

    def __init__(self, plan: ReleasePlan, ledger: Ledger, *, noise_share_std: float) -> None:
        """Make it.

        Args:
            plan: What pretraining sends in all.
            ledger: Books every batch.
            noise_share_std: ``tau`` at which the plan keeps its promise.
        """
        tau = noise_share_std
        self.ledger = ledger
        self.ring = RingFormat.choose(
            clip_norm=plan.privacy.clip_norm, noise_share_std=tau, parties=1
        )
        self.clip_norm = plan.privacy.clip_norm
        self.noise = ExactDiscreteGaussian(tau / self.ring.granularity)

    def __call__(
        self, projections: Float[Tensor, "batch width"], *, round_number: int
    ) -> Float[Tensor, "batch width"]:
        """Book the batch and return its unit vectors with noise.

        Raises:
            BudgetExceededError: If the budget does not cover it; nothing was sent.

        Reveals:
            To every secondary: the noised vectors, covered by the ledger's epsilon.
        """
        # Which rows they are does not matter to the price of a trained encoder.
        rows = np.arange(len(projections))
        self.ledger.charge(round_number=round_number, rows=rows, purpose="pretraining")
        clipped = clip_rows(unit(projections).unsqueeze(1), self.clip_norm).squeeze(1)
        units = quantise(clipped, self.ring)
        units += self.noise.sample(units.shape, device=units.device)
        return to_float(units, self.ring, divisor=1)

    def close(self) -> None:
        """Close the ledger."""
        self.ledger.close()


def projection_mechanism(
    settings: PretrainingSettings, *, batches: int, rows: int, ledger: Path, run: str, party: str
) -> ProjectionMechanism:
    """Return what the federation file chooses.

    Args:
        settings: How to pretrain.
        batches: Batches of aligned rows in one pass.
        rows: Aligned rows.
        ledger: The path of the primary's ledger of pretraining.
        run: The run's id.
        party: The primary's name.

    Raises:
        ConfigError: If the ledger is in use, or the noise does not fit the ring.
        PrivacyError: If the ledger was altered.
    """
    if settings.primary_sends == "plain":
        return PlainProjections(settings.iso_projections)
    if settings.epsilon is None:
        raise ConfigError('pretraining.epsilon: primary_sends = "gaussian" needs it')
    passes = settings.iterations * settings.cross_epochs
    plan = ReleasePlan(
        privacy=Privacy(
            mechanism="gaussian",
            epsilon=settings.epsilon,
            delta=settings.delta,
            clip_norm=1.0,
            unit="secondary-record",
            encoder="trained",
        ),
        parties=1,
        min_active=1,
        rounds=passes * batches,
        rows_per_round=-(-rows // batches),
        row_releases=passes * rows,
        # Batches are booked by their sizes, not by their rows.
        releases_per_row=passes * batches,
        links=1,
    )
    tau = plan.noise_share_std()
    book = Ledger(ledger, party=party, plan=plan, noise_share_std=tau, run=run)
    return GaussianProjections(plan, book, noise_share_std=tau)


def sent_weights(weights: Mapping[str, Tensor], scale: float) -> dict[str, Tensor]:
    """Return the primary's weights as they enter the mean of all parties': with ISO noise.

    Each parameter gets noise of its own size. A batch norm's running statistics are no parameters,
    and stay as they are: a noised variance may be negative.

    Args:
        weights: The primary's local top encoder and heads, by name.
        scale: lambda of ``pretraining.iso_weights``; 0 adds no noise.

    Reveals:
        Nothing by itself. From the mean, of two parties the other one takes the noisy weights, the
        statistics as they are, and from the noise each parameter's longest row. No guarantee goes
        with them.

    References:
        [FedHSSL] section VI-B ("and parameters of its local top encoder"), Equation 7.
    """
    return {
        name: value if name.endswith(_STATISTICS) else with_iso_noise(value, scale)
        for name, value in weights.items()
    }


# A vector is of length 1 but for the rounding of float32.
_LONGEST: Final = 1 + 2.0**-20


def projection_cut(width: int, *, parties: int) -> CutLayer:
    """Return the format in which so many secondaries' unit vectors are averaged."""
    ring = RingFormat.choose(clip_norm=1.0, noise_share_std=0.0, parties=parties)
    return CutLayer(ring=ring, slots=1, shape=(width,), clip_norm=_LONGEST)


def projection_words(
    vectors: Float[Tensor, "batch width"], cut: CutLayer
) -> Int64[Tensor, " words"]:
    """Return a secondary's unit vectors as words of the sum."""
    return cut.encode(quantise(vectors, cut.ring))
