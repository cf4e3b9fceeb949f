"""Vertical federated learning on fuzzily linked tables.

Names are loaded on first use: the budget calculator must not wait for torch and CrypTen.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from securevfl.version import __version__

if TYPE_CHECKING:
    from securevfl import data, dp, linkage, models
    from securevfl.config.linkage import LinkageSettings
    from securevfl.config.sections import TrainingSettings
    from securevfl.core.errors import SecureVflError
    from securevfl.models.fedhssl.settings import PretrainingSettings
    from securevfl.runtime.in_memory import simulate

__all__ = [
    "LinkageSettings",
    "PretrainingSettings",
    "SecureVflError",
    "TrainingSettings",
    "__version__",
    "data",
    "dp",
    "linkage",
    "models",
    "simulate",
]

_HOME = {
    "LinkageSettings": "securevfl.config.linkage",
    "PretrainingSettings": "securevfl.models.fedhssl.settings",
    "SecureVflError": "securevfl.core.errors",
    "TrainingSettings": "securevfl.config.sections",
    "simulate": "securevfl.runtime.in_memory",
}
_PACKAGES = ("data", "dp", "linkage", "models")


def __getattr__(name: str) -> object:
    """Import a public name from its home module on first use."""
    if name in _PACKAGES:
        return import_module(f"securevfl.{name}")
    if name not in _HOME:
        raise AttributeError(f"module 'securevfl' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)
