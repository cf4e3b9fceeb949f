"""What a link's rank counts before anything is learned: links are listed nearest first."""

from typing import Final

import torch
from torch import Tensor

STEEPEST: Final = 16
"""Largest decay: a second link starts with a share of 2^-16."""


def rank_scores(links: int, *, decay: float) -> Tensor:
    """Return (links,) scores whose softmax gives the j-th nearest link a share of j^-decay.

    Keys say nearly nothing of which link is the true one but how near it is, and a softmax that
    starts even needs more steps than a run has to become uneven.

    Args:
        links: K, links of a row.
        decay: 0 starts even; the larger, the more the first link counts.
    """
    return -decay * torch.arange(1, links + 1).log()
