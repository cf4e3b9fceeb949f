"""Rounds in one process: the same arithmetic as between processes, no cryptography."""

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType

from securevfl.federation.messages import EpochMark
from securevfl.federation.rounds.cut import CutLayer
from securevfl.federation.rounds.exchanges import RoundExchange
from securevfl.federation.rounds.recording import Recorder
from securevfl.federation.rounds.secondary import Secondary, save_nothing
from securevfl.federation.rounds.stacks import Stacks
from securevfl.federation.session.peers import PeersHere
from securevfl.ledger.ledger import Ledger


class SimulatedExchange(RoundExchange):
    """Rounds with secondaries of the same process, on CPU or GPU."""

    def __init__(
        self,
        secondaries: Mapping[int, Secondary],
        cut: CutLayer,
        *,
        end_epoch: Mapping[int, Callable[[EpochMark], None]] = MappingProxyType({}),
        links: int = 0,
        ledger: Ledger | None = None,
        recorder: Recorder | None = None,
        blocks: int | None = None,
    ) -> None:
        """Make it.

        Args:
            secondaries: By rank.
            cut: The format of what crosses it.
            end_epoch: Saves what an epoch's mark says, by rank; nothing where there is none.
            links: K, links of a row, by which small secondaries are computed together; with 0 each
                works alone.
            ledger: The primary's own; see :class:`RoundExchange`.
            recorder: The primary's; see :class:`RoundExchange`.
            blocks: Number of blocks that a top model expects; see :class:`RoundExchange`.
        """
        self.secondaries = dict(secondaries)
        if links:
            stacks = Stacks(self.secondaries, links=links)
            for rank, secondary in self.secondaries.items():
                secondary.stacked_in = partial(stacks.share, rank)
        handlers = {
            rank: secondary.handlers(end_epoch.get(rank, save_nothing))
            for rank, secondary in self.secondaries.items()
        }
        device = next(iter(self.secondaries.values())).device
        super().__init__(
            PeersHere(handlers), cut, device=device, ledger=ledger, recorder=recorder, blocks=blocks
        )
