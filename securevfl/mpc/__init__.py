"""Secure sums and CrypTen: fixed-point words, masks that cancel, shares, and what opens them.

Programs of one's own run between parties by :func:`run`. They take :data:`crypten` from here: with
today's torch CrypTen loads only once what it asks for has been put in its place.
"""

from typing import TYPE_CHECKING

from securevfl.core.lazy_names import on_first_use

if TYPE_CHECKING:
    from securevfl.mpc.crypten_bridge import crypten
    from securevfl.stages.programs.party import ProgramParty
    from securevfl.stages.programs.run import run

__all__ = ["ProgramParty", "crypten", "run"]

__getattr__, __dir__ = on_first_use(__name__, __file__, __all__)
