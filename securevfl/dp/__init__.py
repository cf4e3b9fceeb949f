"""Differential privacy: settings, accounting, and the noise.

The public names are loaded on first use: accounting must not wait for torch, nor clipping for the
accountants.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from securevfl.dp.budget import Budget
    from securevfl.dp.privacy import Privacy
    from securevfl.dp.release_plan import ReleasePlan

__all__ = ["Budget", "Privacy", "ReleasePlan"]

_HOME = {
    "Budget": "securevfl.dp.budget",
    "Privacy": "securevfl.dp.privacy",
    "ReleasePlan": "securevfl.dp.release_plan",
}


def __getattr__(name: str) -> object:
    """Import a public name from its home module on first use."""
    if name not in _HOME:
        raise AttributeError(f"module 'securevfl.dp' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    """Name everything public, loaded yet or not."""
    return __all__
