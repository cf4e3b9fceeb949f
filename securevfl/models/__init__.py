"""Model families: plain PyTorch, without transport, cryptography or accounting.

A family's settings are public under the family's own name: ``models.FeT(neighbours=50)``. They are
loaded on first use, and reading settings does not wait for torch.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from securevfl.models.fet.config import FeTConfig as FeT

__all__ = ["FeT"]


def __getattr__(name: str) -> object:
    """Import a public name from its home module on first use."""
    if name != "FeT":
        raise AttributeError(f"module 'securevfl.models' has no attribute {name!r}")
    from securevfl.models.fet.config import FeTConfig

    return FeTConfig
