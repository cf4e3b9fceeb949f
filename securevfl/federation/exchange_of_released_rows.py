"""Each row released once, then reused, as a frozen encoder allows; docs/privacy.md, section 4."""

from collections.abc import Iterator, Mapping

import torch
from jaxtyping import Float
from torch import Tensor

from securevfl.core.errors import ProtocolError
from securevfl.core.progress import Observer, RowsReleased
from securevfl.federation.kept_rows import KeptRows
from securevfl.federation.rounds import EpochMark, Exchange, RoundCounter, RoundPlan
from securevfl.transport.message import MessageKind, TypedMessage


class ReleasedRows:
    """An exchange that answers from stored releases: nothing is sent between parties."""

    def __init__(
        self,
        aggregates: Float[Tensor, "rows positions width"],
        *,
        ranks: tuple[int, ...],
        rounds: RoundCounter,
        device: torch.device,
    ) -> None:
        """Make it.

        Args:
            aggregates: Of all rows.
            ranks: Of all secondaries.
            rounds: Gives out the session's round numbers.
            device: Where the top model computes.
        """
        self._aggregates = aggregates
        self._ranks = ranks
        self.rounds = rounds
        self._device = device

    @property
    def ranks(self) -> tuple[int, ...]:
        """Ranks of all secondaries."""
        return self._ranks

    def release(self, plan: RoundPlan) -> Float[Tensor, "batch positions width"]:
        """Return the stored aggregates of the rows.

        Reveals:
            Nothing: these values were released before.
        """
        rows = torch.as_tensor(plan.rows, device=self._aggregates.device)
        return self._aggregates[rows].to(self._device)

    def release_each(
        self, plans: Iterator[RoundPlan]
    ) -> Iterator[Float[Tensor, "batch positions width"]]:
        """Yield the stored aggregates of each round's rows.

        Reveals:
            Nothing: these values were released before.
        """
        return map(self.release, plans)

    def return_gradient(
        self, plan: RoundPlan, gradient: Float[Tensor, "batch positions width"]
    ) -> None:
        """Drop the gradient: a frozen encoder does not learn.

        Reveals:
            Nothing.
        """

    def average_positions(self, own: Mapping[str, Tensor]) -> dict[str, Tensor]:  # noqa: ARG002
        """Refuse: positional encodings of frozen encoders are equal and stay so.

        Reveals:
            Nothing.
        """
        raise ProtocolError("a frozen encoder has no positional encoding to average")

    def tell(self, message: TypedMessage, *, answer: MessageKind | None = None) -> None:  # noqa: ARG002
        """Refuse: a frozen encoder learns nothing.

        Reveals:
            Nothing.
        """
        raise ProtocolError("a frozen encoder learns nothing that it could be told")

    def end_epoch(self, mark: EpochMark) -> None:
        """Do nothing: no secondary trains.

        Reveals:
            Nothing.
        """


def release_once(
    exchange: Exchange, kept: KeptRows, *, observe: Observer
) -> Float[Tensor, "rows positions width"]:
    """Release every row that is not kept yet, and return all aggregates, in the order of row ids.

    A round is announced when the one :data:`securevfl.federation.rounds.ROUNDS_AHEAD` before it is
    kept, so that a crash loses none but those under way, which every secondary can answer again.

    Args:
        exchange: Where the secondaries are.
        kept: What was released before, of all rows 0 to n - 1: training, validation and test
            alike.
        observe: Hears of every round.

    Reveals:
        To the primary: one noisy average for every row. To the secondaries: nothing new.
    """
    if not kept.parts:
        raise ProtocolError("there are no rows to release")
    missing = kept.missing()
    plans = (
        RoundPlan(
            round_number=exchange.rounds.next(),
            rows=kept.parts[number],
            active=exchange.ranks,
            purpose="release",
        )
        for number in missing
    )
    for number, aggregate in zip(missing, exchange.release_each(plans), strict=True):
        kept.keep(number, aggregate.cpu())
        observe(RowsReleased(done=number + 1, of=len(kept.parts)))
    return kept.all()
