"""The primary's end of a federation between processes."""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from securevfl.federation.exchange import ROUNDS_AHEAD, EpochMark, RoundCounter, RoundPlan
from securevfl.federation.messages import Announcement, AverageRequest, EpochEnd, Gradient, Mean
from securevfl.federation.rounds.cut import Cut
from securevfl.federation.session.peers import sum_to_primary
from securevfl.mpc.sum_to import decode_mean, encode_weighted
from securevfl.transport.message import MessageKind, TypedMessage
from securevfl.transport.star import PrimaryTransport


class FederatedExchange:
    """An exchange with secondaries in other processes, over the authenticated star."""

    def __init__(
        self,
        transport: PrimaryTransport,
        names: Mapping[int, str],
        cut: Cut,
        *,
        deadline_s: float,
        device: torch.device,
        work_s: float | None = None,
        rounds: RoundCounter | None = None,
    ) -> None:
        """Make it.

        Args:
            transport: The primary's end of the star.
            names: The secondaries by rank.
            cut: The format of what crosses the cut.
            deadline_s: How long a secondary may take to answer, in seconds.
            device: Where the primary computes.
            work_s: How long it may work on what it was told, in seconds; None: ``deadline_s``.
            rounds: Goes on with a session's round numbers; None begins them.
        """
        self.transport = transport
        self.names = dict(names)
        self.cut = cut
        self._work_s = deadline_s if work_s is None else work_s
        self.device = device
        self.rounds = RoundCounter() if rounds is None else rounds
        self.sum_to = sum_to_primary(transport, self.names, deadline_s=deadline_s)

    @property
    def ranks(self) -> tuple[int, ...]:
        """Ranks of all secondaries."""
        return tuple(self.names)

    def release(self, plan: RoundPlan) -> Float[Tensor, "batch positions width"]:
        """Announce the round and return the average of the active secondaries.

        Reveals:
            What :meth:`securevfl.federation.exchange.Exchange.release` reveals.
        """
        self._announce(plan)
        return self._collect(plan)

    def release_each(
        self, plans: Iterator[RoundPlan]
    ) -> Iterator[Float[Tensor, "batch positions width"]]:
        """Announce rounds ahead, and yield each one's average in turn.

        Reveals:
            What :meth:`securevfl.federation.exchange.Exchange.release_each` reveals.
        """
        under_way: deque[RoundPlan] = deque()
        for plan in plans:
            self._announce(plan)
            under_way.append(plan)
            if len(under_way) == ROUNDS_AHEAD:
                yield self._collect(under_way.popleft())
        while under_way:
            yield self._collect(under_way.popleft())

    def _announce(self, plan: RoundPlan) -> None:
        self._tell(plan.active, Announcement(plan=plan))

    def _collect(self, plan: RoundPlan) -> Tensor:
        total = self.sum_to(
            self.cut.zeros(len(plan.rows)), round_number=plan.round_number, active=plan.active
        )
        assert total is not None, "the primary's reveal returns the total"
        return self.cut.decode(total.to(self.device), rows=len(plan.rows), active=len(plan.active))

    def return_gradient(
        self, plan: RoundPlan, gradient: Float[Tensor, "batch positions width"]
    ) -> None:
        """Send the gradient of the aggregate to every active secondary.

        Reveals:
            What :meth:`securevfl.federation.exchange.Exchange.return_gradient` reveals.
        """
        sent = gradient.detach().cpu().numpy()
        self._tell(plan.active, Gradient(round_number=plan.round_number, gradient=sent))

    def average_positions(self, own: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Average the positional encodings of all parties through the secure mean.

        Reveals:
            What :meth:`securevfl.federation.exchange.Exchange.average_positions` reveals.
        """
        round_number = self.rounds.next()
        self._tell(self.ranks, AverageRequest(round_number=round_number))
        words = encode_weighted(own, weight=1, parties=len(self.names) + 1).cpu()
        total = self.sum_to(words, round_number=round_number, active=self.ranks)
        assert total is not None, "the primary's reveal returns the total"
        mean = decode_mean(total, {name: own[name].shape for name in own})
        values = {name: value.numpy() for name, value in mean.items()}
        self._tell(self.ranks, Mean(round_number=round_number, values=values))
        return mean

    def tell(self, message: TypedMessage, *, answer: MessageKind | None = None) -> None:
        """Send it to every secondary, and wait as long as it takes to work on it.

        Reveals:
            What :meth:`securevfl.federation.exchange.Exchange.tell` reveals.
        """
        self._tell(self.ranks, message)
        if answer is None:
            return
        for _ in self.transport.receive_each(
            list(self.names.values()), answer, round_number=0, deadline_s=self._work_s
        ):
            pass

    def end_epoch(self, mark: EpochMark) -> None:
        """Tell every secondary what to keep.

        Reveals:
            What :meth:`securevfl.federation.exchange.Exchange.end_epoch` reveals.
        """
        self._tell(self.ranks, EpochEnd(mark=mark))

    def _tell(self, ranks: Sequence[int], told: TypedMessage) -> None:
        self.transport.broadcast([self.names[rank] for rank in ranks], told.to_message())
