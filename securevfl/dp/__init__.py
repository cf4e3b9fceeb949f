"""Differential privacy: settings, accounting, and the noise.

The public names are loaded on first use: accounting must not wait for torch, nor clipping for the
accountants.
"""

from typing import TYPE_CHECKING

from securevfl.core.stages import on_first_use

if TYPE_CHECKING:
    from securevfl.dp.budget import Budget
    from securevfl.dp.privacy import Privacy
    from securevfl.dp.release_plan import ReleasePlan

__all__ = ["Budget", "Privacy", "ReleasePlan"]

__getattr__, __dir__ = on_first_use(__name__, __file__, __all__)
