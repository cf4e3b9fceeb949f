"""The message that ends a session between two epochs, so that a party may come back."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from securevfl.core.errors import ProtocolError
from securevfl.federation.messages import RoundKind
from securevfl.transport.message import Message, TypedMessage


@dataclass(frozen=True, kw_only=True, slots=True)
class Rejoin(TypedMessage):
    """An epoch is over, and some who were lost are back: all join the next session, with these."""

    KIND: ClassVar = RoundKind.REJOIN
    WAY: ClassVar = "primary to every secondary"

    ranks: tuple[int, ...]
    """Of those who are back, ascending."""

    def to_message(self) -> Message:
        """Return it as it is sent."""
        return Message(kind=self.KIND, meta={"ranks": list(self.ranks)})

    @classmethod
    def from_message(cls, message: Message, *, absent: Sequence[int]) -> "Rejoin":
        """Read the primary's.

        Args:
            message: As it came.
            absent: Ranks of the secondaries that are not in this session.

        Raises:
            ProtocolError: If it names nobody, or somebody who is here.
        """
        ranks: list[Any] = message.figure("ranks", list)
        plain = all(type(rank) is int for rank in ranks)
        if not ranks or not plain or sorted(set(ranks) & set(absent)) != ranks:
            raise ProtocolError(f"the primary says that parties {ranks!r:.80} are back")
        return cls(ranks=tuple(ranks))
