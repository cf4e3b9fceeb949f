"""How the step size of training goes on from epoch to epoch."""

import math
from typing import Literal

Schedule = Literal["constant", "cosine"]
"""What :func:`learning_rate_in` knows."""


def learning_rate_in(epoch: int, *, first: float, schedule: Schedule, epochs: int) -> float:
    """Return the step size of an epoch.

    Args:
        epoch: Counted from 1.
        first: The step size of the first one.
        schedule: ``constant``, or ``cosine``: half a period of it, which would reach 0 one epoch
            after the last.
        epochs: How many there are, at most.

    References:
        [SGDR] Loshchilov and Hutter 2017 (arXiv:1608.03983v5), equation 5, by epochs, without
        restarts and with 0 as the least rate.
    """
    if schedule == "constant":
        return first
    return first * (1 + math.cos(math.pi * (epoch - 1) / epochs)) / 2
