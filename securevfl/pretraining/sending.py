"""What the primary sends of its projections: as they are, with ISO noise, or accounted for."""

import math
import os
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from securevfl.core.errors import ConfigError
from securevfl.dp.clipping import clip_rows
from securevfl.dp.privacy import Privacy
from securevfl.dp.release_plan import ReleasePlan
from securevfl.dp.ring_noise import ExactDiscreteGaussian
from securevfl.federation.ledger import Ledger
from securevfl.models.fedhssl.settings import PretrainingSettings
from securevfl.mpc.codec import quantise, to_float
from securevfl.mpc.ring_format import RingFormat


@runtime_checkable
class Sending(Protocol):
    """Protects the primary's unit vectors before they leave."""

    def __call__(
        self, vectors: Float[Tensor, "batch width"], *, round_number: int
    ) -> Float[Tensor, "batch width"]:
        """Return what is sent in place of the vectors.

        Reveals:
            To every secondary: what is returned.
        """
        ...

    def close(self) -> None:
        """Close the files that are held open."""
        ...


class SentPlain:
    """The vectors as they are."""

    def __call__(
        self,
        vectors: Float[Tensor, "batch width"],
        *,
        round_number: int,  # noqa: ARG002 - a Sending
    ) -> Float[Tensor, "batch width"]:
        """Return the vectors.

        Reveals:
            To every secondary: a representation of each of the primary's aligned rows.
        """
        return vectors

    def close(self) -> None:
        """Do nothing."""


class SentWithIso:
    """Isotropic noise at the scale of the largest row: a heuristic that promises nothing.

    References:
        [FedHSSL] Equation 7: sigma = lambda max ||d|| / sqrt(P).
    """

    def __init__(self, scale: float) -> None:
        self.scale = scale

    def __call__(
        self,
        vectors: Float[Tensor, "batch width"],
        *,
        round_number: int,  # noqa: ARG002 - a Sending
    ) -> Float[Tensor, "batch width"]:
        """Return the vectors with noise.

        Reveals:
            To every secondary: the noisy vectors. No guarantee goes with them.
        """
        largest = torch.linalg.vector_norm(vectors, dim=1).max()
        deviation = self.scale * largest / math.sqrt(vectors.shape[1])
        generator = torch.Generator(device=vectors.device)
        generator.manual_seed(int.from_bytes(os.urandom(8), "big") >> 1)
        noise = torch.randn(vectors.shape, generator=generator, device=vectors.device)
        return vectors + deviation * noise

    def close(self) -> None:
        """Do nothing."""


class SentWithGaussianNoise:
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
        self, vectors: Float[Tensor, "batch width"], *, round_number: int
    ) -> Float[Tensor, "batch width"]:
        """Book the batch and return its noised vectors.

        Raises:
            BudgetExceededError: If the budget does not cover it; nothing was sent.

        Reveals:
            To every secondary: the noised vectors, covered by the ledger's epsilon.
        """
        # Which rows they are does not matter to the price of a trained encoder.
        rows = np.arange(len(vectors))
        self.ledger.charge(round_number=round_number, rows=rows, purpose="pretraining")
        clipped = clip_rows(vectors.unsqueeze(1), self.clip_norm).squeeze(1)
        units = quantise(clipped, self.ring)
        units += self.noise.sample(units.shape, device=units.device)
        return to_float(units, self.ring, divisor=1)

    def close(self) -> None:
        """Close the ledger."""
        self.ledger.close()


def sending(
    settings: PretrainingSettings, *, batches: int, rows: int, ledger: Path, run: str, party: str
) -> Sending:
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
        return SentPlain()
    if settings.primary_sends == "iso":
        return SentWithIso(settings.iso_scale)
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
    return SentWithGaussianNoise(plan, book, noise_share_std=tau)
