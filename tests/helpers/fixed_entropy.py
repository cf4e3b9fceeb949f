"""Noise, secret samples and drawn labels that are the same in every run of a test."""

import hashlib
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from unittest.mock import patch

_MODULES = (
    "securevfl.dp.labels",
    "securevfl.dp.ring_noise",
    "securevfl.federation.rounds.cached_release",
    "securevfl.linkage.sampling",
    # Of x on shares CrypTen's truncation is wrong with probability |x| 2^-64 in its own units.
    "securevfl.mpc.dealt_tuples",
    "securevfl.mpc.on_shares",
)


@contextmanager
def fixed_entropy(series: str = "") -> Iterator[None]:
    """Draw noise, secret samples and labels of this process from fixed keys.

    Everything else is as installed: the keys alone come from a counter instead of the system. A
    test within it has no chance to fail that it does not always take.

    Args:
        series: Another one has other keys.
    """
    drawn = {name: count() for name in _MODULES}
    system = os.urandom

    def urandom(size: int) -> bytes:
        name = sys._getframe(1).f_globals.get("__name__")
        if name not in drawn:
            return system(size)
        return hashlib.shake_256(f"{name} {next(drawn[name])}{series}".encode()).digest(size)

    with patch.object(os, "urandom", urandom):
        yield
