"""Small federations for tests of what extends securevfl: tables, quick runs and lying parties.

Names are loaded on first use, as those of the package.
"""

from typing import TYPE_CHECKING

from securevfl.core.stages import on_first_use

if TYPE_CHECKING:
    from securevfl.testing.lying_party import Lie
    from securevfl.testing.quick_runs import read_tables, run_between_processes, run_in_process
    from securevfl.testing.small_federation import make_frames, save_federation, write_federation
    from securevfl.transport.message import Message

__all__ = [
    "Lie",
    "Message",
    "make_frames",
    "read_tables",
    "run_between_processes",
    "run_in_process",
    "save_federation",
    "write_federation",
]

__getattr__, __dir__ = on_first_use(__name__, __file__, __all__)
