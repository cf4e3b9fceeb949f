"""Isotropic Gaussian noise (ISO) of FedHSSL: a heuristic, kept apart from noise that promises.

What :mod:`securevfl.dp` draws is booked, and a bound on norms that everybody knows sets its size.
Here the values themselves set it. Nothing is booked and no epsilon goes with it.
"""

import math
import os

import torch
from jaxtyping import Float
from torch import Tensor


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
    longest = float(torch.linalg.vector_norm(rows, dim=1).max())
    # Never from the run's seed: every party knows it, and could take the noise off again.
    generator = torch.Generator(device=values.device)
    generator.manual_seed(int.from_bytes(os.urandom(8), "big") >> 1)
    noise = torch.randn(values.shape, generator=generator, device=values.device, dtype=values.dtype)
    return values + scale * longest / math.sqrt(rows.shape[1]) * noise
