"""All parties in one process: the same arithmetic as between processes, no cryptography."""

from collections.abc import Callable, Iterator, Mapping

from jaxtyping import Float
from torch import Tensor

from securevfl.federation.cut import Cut
from securevfl.federation.rounds import EpochMark, RoundCounter, RoundPlan
from securevfl.federation.secondary import Secondary
from securevfl.federation.stacked import Stacks
from securevfl.mpc.secure_mean import decode_mean, encode_weighted
from securevfl.mpc.sum_to import InProcessSum
from securevfl.transport.message import MessageKind, TypedMessage


class SimulatedExchange:
    """An exchange with secondaries of the same process, on CPU or GPU."""

    def __init__(
        self,
        secondaries: Mapping[int, Secondary],
        cut: Cut,
        *,
        end_epoch: Callable[[EpochMark], None],
        links: int = 0,
    ) -> None:
        """Make it.

        Args:
            secondaries: By rank.
            cut: The format of what crosses it.
            end_epoch: Keeps what an epoch's mark says.
            links: K, links of a row, by which small secondaries are computed together; with 0 each
                works alone.
        """
        self.secondaries = dict(secondaries)
        self.cut = cut
        self._stacks = Stacks(self.secondaries, links=links) if links else None
        self.rounds = RoundCounter()
        self._end_epoch = end_epoch

    @property
    def ranks(self) -> tuple[int, ...]:
        """Ranks of all secondaries."""
        return tuple(self.secondaries)

    def release(self, plan: RoundPlan) -> Float[Tensor, "batch positions width"]:
        """Return the average of the active secondaries' contributions.

        Reveals:
            What :meth:`securevfl.federation.rounds.Exchange.release` reveals; in a simulation
            everything is in one process anyway.
        """
        shares = self._stacks.of_round(plan) if self._stacks else {}
        words = [
            self.secondaries[rank].answer(plan, share=shares.get(rank)) for rank in plan.active
        ]
        return self.cut.decode(InProcessSum()(words), rows=len(plan.rows), active=len(plan.active))

    def release_each(
        self, plans: Iterator[RoundPlan]
    ) -> Iterator[Float[Tensor, "batch positions width"]]:
        """Yield the average of one round after the other: nobody is far away.

        Reveals:
            What :meth:`securevfl.federation.rounds.Exchange.release_each` reveals.
        """
        return map(self.release, plans)

    def return_gradient(
        self, plan: RoundPlan, gradient: Float[Tensor, "batch positions width"]
    ) -> None:
        """Let every active secondary learn.

        Reveals:
            What :meth:`securevfl.federation.rounds.Exchange.return_gradient` reveals.
        """
        for rank in plan.active:
            self.secondaries[rank].learn(plan, gradient)

    def average_positions(self, own: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Average the positional encodings of all parties.

        Reveals:
            What :meth:`securevfl.federation.rounds.Exchange.average_positions` reveals.
        """
        number = self.rounds.next()
        parties = [own, *(party.share_positions(number) for party in self.secondaries.values())]
        words = [encode_weighted(one, weight=1, parties=len(parties)) for one in parties]
        mean = decode_mean(InProcessSum()(words), {name: own[name].shape for name in own})
        for party in self.secondaries.values():
            party.load_position_weights(mean)
        return mean

    def tell(self, message: TypedMessage, *, answer: MessageKind | None = None) -> None:
        """Let every secondary hear it as it would come over a wire.

        Reveals:
            What :meth:`securevfl.federation.rounds.Exchange.tell` reveals.
        """
        for party in self.secondaries.values():
            answered = party.hear(message.to_message())
            assert (answered and answered.KIND) is answer, "both know when an answer is due"

    def end_epoch(self, mark: EpochMark) -> None:
        """Let every secondary keep what the mark says.

        Reveals:
            What :meth:`securevfl.federation.rounds.Exchange.end_epoch` reveals.
        """
        for party in self.secondaries.values():
            party.allowance.admit_epoch(mark)
        self._end_epoch(mark)
