"""Conventions that all parties share: ranks, tasks, and random streams derived from one seed.

Noise and masks are never among them: they come from the operating system's entropy.
"""

import hashlib
import math
import os
from typing import Final, Literal, get_args

import numpy as np
from jaxtyping import Float64

# Ranks, by which parties name one another: the primary's is 0, secondaries count up from 1.

PRIMARY_RANK: Final = 0


# What a label may be.

Task = Literal["regression", "binary", "multiclass"]
"""A number, one of two classes, or one of several."""

TASKS: Final[dict[str, Task]] = {task: task for task in get_args(Task)}
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


def unseeded_normal(*shape: int) -> Float64[np.ndarray, "..."]:
    """Return standard normal numbers from the system's random source, for a heuristic's noise.

    Never from the run's seed: every party knows it, and could take the noise off again. Nor from
    torch's generator, whose seed of 32 bits could be searched for.

    References:
        [BM58] Box and Muller, A note on the generation of random normal deviates.
    """
    words = np.frombuffer(os.urandom(16 * math.prod(shape)), np.uint64).reshape(2, *shape)
    radius, angle = ((words >> np.uint64(11)) + 0.5) * 2.0**-53
    return np.asarray(np.sqrt(-2 * np.log(radius)) * np.cos(2 * np.pi * angle))
