"""What hides the primary's labels from secondaries that are sent gradients.

One defence has a guarantee: labels that are drawn once, by randomised response, before anything is
trained on them. The others are heuristics. They change gradients on their way out, promise nothing,
and are measured only: noise on a gradient hides a label from no one who sees what the top model,
which has learned from it without noise, makes of other rows later.
"""

from dataclasses import dataclass

import numpy as np
import scipy
import torch
from jaxtyping import Bool, Float, Float64, Int64, Shaped
from torch import Tensor
from torch.nn import functional

from securevfl.config.sections import TrainingSettings
from securevfl.core.conventions import unseeded_normal
from securevfl.core.devices import to_device
from securevfl.dp.clipping import clip_rows
from securevfl.federation.rounds import cut
from securevfl.federation.rounds.cut import with_iso_noise


@dataclass(frozen=True, eq=False)
class DrawnLabels:
    """Labels of training rows by randomised response, and the loss that takes them as such."""

    targets: Shaped[Tensor, " rows"]
    """Labels of all the primary's rows, as drawn on training rows; no other row is trained on."""
    keep: float
    """With which probability a label was kept."""

    @classmethod
    def of(
        cls,
        drawn: Int64[np.ndarray, " train"],
        rows: Int64[np.ndarray, " train"],
        targets: Shaped[Tensor, " rows"],
        *,
        keep: float,
    ) -> "DrawnLabels":
        """Return drawn labels as the primary trains on them.

        Args:
            drawn: Classes, by :func:`securevfl.dp.labels.randomised_labels`.
            rows: Whose they are.
            targets: Of all rows, as they are.
            keep: With which probability a label was kept.
        """
        trained_on = targets.clone()
        trained_on[torch.from_numpy(rows).to(trained_on.device)] = torch.from_numpy(drawn).to(
            trained_on
        )
        return cls(trained_on, keep)

    def targets_of(self, rows: Int64[np.ndarray, " batch"]) -> Shaped[Tensor, " batch"]:
        """Return the labels of training rows as they were drawn."""
        return self.targets[to_device(rows, self.targets.device)]

    def loss(
        self, outputs: Float[Tensor, "rows outputs"], drawn: Shaped[Tensor, " rows"]
    ) -> Float[Tensor, ""]:
        """Return the mean cross-entropy of drawn labels, where outputs are of labels as they are.

        The model's probabilities are carried through the draw: a drawn label has probability
        ``q + (p - q) f_y`` where the label as it is has ``f_y``.

        References:
            [PRMNQ17] Patrini et al., Making Deep Neural Networks Robust to Label Noise, CVPR 2017,
            Theorem 2 ("forward" correction), with the matrix of randomised response.
        """
        if outputs.shape[1] == 1:
            right = torch.where(drawn > 0, outputs[:, 0], -outputs[:, 0]).sigmoid()
        else:
            right = functional.softmax(outputs, dim=1).gather(1, drawn[:, None])[:, 0]
        other = (1 - self.keep) / max(1, outputs.shape[1] - 1)
        return -(other + (self.keep - other) * right).log().mean()


def protect_gradient(
    gradient: cut.CutRows, targets: Shaped[Tensor, " batch"], training: TrainingSettings
) -> cut.CutRows:
    """Return a batch's gradient as it leaves, behind the heuristics of ``[training]``.

    Args:
        gradient: Of the mean loss of a batch, with respect to each row's average.
        targets: The labels that the loss took.
        training: Settings.

    Reveals:
        Nothing alone. None of what is sent has a guarantee.
    """
    if training.clip_gradients is not None:
        gradient = clip_rows(gradient, training.clip_gradients / len(gradient))
    if training.marvell:
        gradient = with_marvell_noise(gradient, targets == 1, power=training.marvell)
    return with_iso_noise(gradient, training.iso_gradients)


def with_marvell_noise(
    gradient: cut.CutRows, positive: Bool[Tensor, " batch"], *, power: float
) -> cut.CutRows:
    """Return gradients with the Gaussian noise that makes two classes hardest to tell apart.

    The gradients of each class are taken as normal around their mean. Of all noises of the same
    mean square length, this one makes the sum of both Kullback-Leibler divergences least: it is
    stronger along the line between the means, and for the class that varies less. A batch of one
    class, where there is no such line, gets the same noise in all directions.

    Args:
        gradient: A row's each.
        positive: Which rows are of the second class.
        power: s, mean square length of the noise over the squared distance of the means.

    References:
        [LSY22] Li et al., Label Leakage and Protection in Two-party Split Learning, ICLR 2022,
        Marvell.
    """
    rows = gradient.detach().flatten(1).double()
    drawn = to_device(torch.from_numpy(unseeded_normal(*rows.shape)), rows.device)
    if bool(positive.all()) or not bool(positive.any()):
        scale = (power * rows.square().mean()).sqrt()
        return gradient + (scale * drawn).view_as(gradient).to(gradient)
    means = [rows[positive == side].mean(dim=0) for side in (False, True)]
    between = means[1] - means[0]
    squared = float(between.square().sum())
    if not squared:
        return gradient
    spreads = [
        float((rows[positive == side] - mean).square().mean()) / squared
        for side, mean in zip((False, True), means, strict=True)
    ]
    lengths = squared * marvell_spectrum(
        *spreads, width=rows.shape[1], share=float(positive.double().mean()), power=power
    )
    # For each row: variance along the line between the means, and in all other directions.
    along, across = torch.from_numpy(lengths).to(rows.device).sqrt()[positive.long()].T
    line = between / squared**0.5
    noise = across[:, None] * drawn + ((along - across) * (drawn @ line))[:, None] * line
    return gradient + noise.view_as(gradient).to(gradient)


def marvell_spectrum(
    negative: float, positive: float, *, width: int, share: float, power: float
) -> Float64[np.ndarray, "two two"]:
    """Return the variances of Marvell's noise, in units of the squared distance of both means.

    Args:
        negative: u, variance of the first class's gradients in each direction, in these units.
        positive: v, of the second class's.
        width: d, numbers of a gradient.
        share: p, of the second class.
        power: s.

    Returns:
        For each class the variance along the line between the means, and in each other direction.

    References:
        [LSY22] Marvell's objective and constraints, solved here by sequential quadratic
        programming from two starts.
    """
    # Gradients that do not vary at all would divide by nothing.
    u, v = max(negative, 1e-9), max(positive, 1e-9)
    weights = np.array([1 - share, (1 - share) * (width - 1), share, share * (width - 1)])

    def divergence(x: Float64[np.ndarray, " four"]) -> float:
        along0, across0, along1, across1 = x
        ratio = (across0 + u) / (across1 + v)
        both = (
            (width - 1) * (ratio + 1 / ratio)
            + (along0 + u + 1) / (along1 + v)
            + (along1 + v + 1) / (along0 + u)
        )
        return float(np.log(both))

    limits = scipy.optimize.LinearConstraint(
        np.array([-weights, [1, -1, 0, 0], [0, 0, 1, -1]]), [-power, 0, 0], np.inf
    )
    starts = [np.array([power, 0, power, 0]), np.full(4, power / width)]
    optima = [
        scipy.optimize.minimize(
            divergence, start, method="SLSQP", bounds=[(0, None)] * 4, constraints=limits
        ).x
        for start in starts
    ]
    best = min([*starts, *optima], key=divergence)
    return np.maximum(best, 0.0).reshape(2, 2)


def distance_correlation(
    inputs: Float[Tensor, "rows columns"], outputs: Float[Tensor, "rows numbers"]
) -> Float[Tensor, ""]:
    """Return the sample distance correlation of rows, from 0 to 1; on the autograd graph.

    References:
        [SRB07] Székely et al., Measuring and Testing Dependence by Correlation of Distances, 2007;
        [VSGR20] Vepakomma et al., NoPeek, ICDM Workshops 2020, adds it to the loss.
    """

    def centred_distances(rows: Tensor) -> Tensor:
        apart = torch.cdist(rows, rows)
        return apart - apart.mean(dim=0) - apart.mean(dim=1, keepdim=True) + apart.mean()

    first, second = centred_distances(inputs), centred_distances(outputs)
    both = (first * second).mean().clamp_min(1e-12)
    alone = first.square().mean() * second.square().mean()
    return (both / alone.sqrt().clamp_min(1e-12)).sqrt()
