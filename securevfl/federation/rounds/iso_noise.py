"""Isotropic Gaussian noise (ISO) of FedHSSL: a heuristic, kept apart from noise that promises.

What :mod:`securevfl.dp` draws is booked, and a bound on norms that everybody knows sets its size.
Here the values themselves set it. Nothing is booked and no epsilon goes with it.
"""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from securevfl.core.conventions import unseeded_normal
from securevfl.core.devices import to_device


def with_iso_noise(values: Float[Tensor, "*shape"], scale: float) -> Float[Tensor, "*shape"]:
    """Return the values with ISO noise: one deviation for all of them, set by the longest row.

    With the first axis as b rows, and all others together as the m numbers of a row, every number
    gets a normal number of deviation ``scale * max_i ||d_i||_2 / sqrt(m)``. The noise of a row is
    then about ``scale`` times as long as the longest row of the batch.

    **It promises nothing.** The length of the longest row is a function of private values, and
    whoever gets b m noised numbers reads it off their spread: of gradients it says how badly the
    worst row of the batch is predicted, of weights how long a layer's longest row is. Two batches
    that differ in that row get noise of two sizes, which can be told apart with certainty as b m
    grows; so no epsilon holds, whatever ``scale`` is.

    Args:
        values: d, such as projections (B, P), gradients (B, L, H), or weights with a row for each
            output; a single axis is b rows of one number.
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
