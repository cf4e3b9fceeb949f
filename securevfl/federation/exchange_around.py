"""An exchange around another one: what it does not change, it passes on."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping

from jaxtyping import Float
from torch import Tensor

from securevfl.federation.rounds import EpochMark, Exchange, RoundCounter, RoundPlan
from securevfl.transport.message import MessageKind, TypedMessage


class ExchangeAround(ABC):
    """Passes everything on but releases, which are what its subclasses are for."""

    def __init__(self, inner: Exchange) -> None:
        self.inner = inner

    @property
    def rounds(self) -> RoundCounter:
        """Gives out the session's round numbers."""
        return self.inner.rounds

    @property
    def ranks(self) -> tuple[int, ...]:
        """Ranks of all secondaries that the inner exchange reaches."""
        return self.inner.ranks

    @abstractmethod
    def release(self, plan: RoundPlan) -> Float[Tensor, "batch positions width"]:
        """Return the average of the active secondaries' representations.

        Reveals:
            What the inner exchange reveals.
        """

    @abstractmethod
    def release_each(
        self, plans: Iterator[RoundPlan]
    ) -> Iterator[Float[Tensor, "batch positions width"]]:
        """Yield the averages of rounds of which none depends on another.

        Reveals:
            What the inner exchange reveals.
        """

    def return_gradient(
        self, plan: RoundPlan, gradient: Float[Tensor, "batch positions width"]
    ) -> None:
        """Pass the gradient on.

        Reveals:
            What the inner exchange reveals.
        """
        self.inner.return_gradient(plan, gradient)

    def average_positions(self, own: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Pass the request on.

        Reveals:
            What the inner exchange reveals.
        """
        return self.inner.average_positions(own)

    def tell(self, message: TypedMessage, *, answer: MessageKind | None = None) -> None:
        """Pass the message on.

        Reveals:
            What the inner exchange reveals.
        """
        self.inner.tell(message, answer=answer)

    def end_epoch(self, mark: EpochMark) -> None:
        """Pass the mark on.

        Reveals:
            What the inner exchange reveals.
        """
        self.inner.end_epoch(mark)
