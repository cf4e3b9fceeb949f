"""Noise, secret samples and drawn labels that are the same in every run of a test."""

import hashlib
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import securevfl.dp.labels
import securevfl.dp.ring_noise
import securevfl.federation.rounds.cut
import securevfl.linkage.sampling

_MODULES = (
    securevfl.dp.labels,
    securevfl.dp.ring_noise,
    securevfl.federation.rounds.cut,
    securevfl.linkage.sampling,
)


@contextmanager
def fixed_entropy() -> Iterator[None]:
    """Draw noise, secret samples and labels of this process from fixed keys.

    Everything else is as installed: the keys alone come from a counter instead of the system. A
    test within it has no chance to fail that it does not always take.
    """
    real = [vars(module)["os"] for module in _MODULES]
    for module, system in zip(_MODULES, real, strict=True):
        drawn = iter(range(1_000_000))

        def urandom(size: int, *, name: str = module.__name__, drawn: Any = drawn) -> bytes:
            return hashlib.shake_256(f"{name} {next(drawn)}".encode()).digest(size)

        vars(module)["os"] = types.SimpleNamespace(**{**vars(system), "urandom": urandom})
    try:
        yield
    finally:
        for module, system in zip(_MODULES, real, strict=True):
            vars(module)["os"] = system
