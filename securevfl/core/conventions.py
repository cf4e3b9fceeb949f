"""Conventions that all parties share: ranks, tasks, and random streams derived from one seed.

Noise and masks are never among them: they come from the operating system's entropy.
"""

import hashlib
from typing import Final, Literal, get_args

import numpy as np

# Ranks, by which parties name one another: the primary's is 0, secondaries count up from 1.

PRIMARY_RANK: Final = 0


# What a label may be.

Task = Literal["regression", "binary", "multiclass"]
"""A number, one of two classes, or one of several."""

TASKS: Final[dict[str, Task]] = {one: one for one in get_args(Task)}
"""Every task by its name."""


# One run seed, many named streams: initialisation, shuffling, dropout.


def derive_seed(seed: int, *names: str | int) -> int:
    """Return a 63-bit seed for the stream called ``names``, the same at every party.

    Args:
        seed: The run seed of the federation file.
        names: What the stream is for, for example ``("init", "rental")``.
    """
    text = "\x1f".join(["securevfl-stream", str(seed), *map(str, names)])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def stream(seed: int, *names: str | int) -> np.random.Generator:
    """Return the named numpy stream of a run seed; see :func:`derive_seed`."""
    return np.random.default_rng(derive_seed(seed, *names))
