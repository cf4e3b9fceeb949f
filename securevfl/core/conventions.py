"""Conventions of all parties: the primary's rank, tasks, and random streams from one seed.

Noise and masks never come from the run's seed, but from the operating system's entropy.
"""

import hashlib
import math
import os
from typing import Final, Literal

import numpy as np
from jaxtyping import Float64

PRIMARY_RANK: Final = 0
"""Rank of the primary; secondaries have the ranks from 1 on."""


Task = Literal["regression", "binary", "multiclass"]
"""A number, one of two classes, or one of several."""


def derive_seed(seed: int, *names: str | int) -> int:
    """Return a 63-bit seed for the stream with these names, the same at every party.

    Args:
        seed: The run seed of the federation file.
        names: Purpose of the stream, for example ``("init", "rental")``.
    """
    text = "\x1f".join(["securevfl-stream", str(seed), *map(str, names)])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def stream(seed: int, *names: str | int) -> np.random.Generator:
    """Return the named numpy stream of a run seed; see :func:`derive_seed`."""
    return np.random.default_rng(derive_seed(seed, *names))


def unseeded_normal(*shape: int) -> Float64[np.ndarray, "..."]:
    """Return standard normal numbers from the operating system's entropy, for a heuristic's noise.

    They do not come from the run's seed, which every party knows, so that it could remove the
    noise; nor from torch's generator, whose 32-bit seed could be found by search.

    References:
        [BM58] Box and Muller, A note on the generation of random normal deviates.
    """
    words = np.frombuffer(os.urandom(16 * math.prod(shape)), np.uint64).reshape(2, *shape)
    radius, angle = ((words >> np.uint64(11)) + 0.5) * 2.0**-53
    return np.asarray(np.sqrt(-2 * np.log(radius)) * np.cos(2 * np.pi * angle))
