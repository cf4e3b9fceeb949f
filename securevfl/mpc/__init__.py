"""Secure sums and CrypTen: fixed-point words, pairwise masks, secret shares.

:func:`run` runs a custom program between parties. Programs import :data:`crypten` from here, since
with current versions of torch CrypTen needs a module put in its place first.
"""

from typing import TYPE_CHECKING

from securevfl.core.stages import on_first_use

if TYPE_CHECKING:
    from securevfl.mpc.crypten_bridge import crypten
    from securevfl.stages.programs.session import ProgramParty, run

__all__ = ["ProgramParty", "crypten", "run"]

__getattr__, __dir__ = on_first_use(__name__, __file__, __all__)
