"""The first failure of a federation: who, why, and how it travels to everybody else."""

from dataclasses import dataclass
from typing import ClassVar, Final, Literal, get_args

from securevfl.core.errors import (
    AuthenticationError,
    OutOfMemoryError,
    PartyAbsentError,
    PartyFailedError,
    PartyLostError,
    PartyTimeoutError,
    PartyTwiceError,
    ProtocolError,
    SecureVflError,
    StorageError,
    of_this_machine,
    shown,
)
from securevfl.transport.message import Message, StarKind, TypedMessage

FailureKind = Literal["failed", "lost", "twice", "timeout", "absent", "protocol", "authentication"]

_ERRORS: Final[dict[FailureKind, type[ProtocolError]]] = {
    "failed": PartyFailedError,
    "lost": PartyLostError,
    "twice": PartyTwiceError,
    "timeout": PartyTimeoutError,
    "absent": PartyAbsentError,
    "protocol": ProtocolError,
    "authentication": AuthenticationError,
}
# A reason is one sentence; what is longer is cut.
_MAX_REASON: Final = 400


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure(TypedMessage):
    """Who failed and why, told to everybody. Never holds data."""

    KIND: ClassVar = StarKind.ABORT
    WAY: ClassVar = "either way; the primary passes it on"

    party: str
    """The party where it began."""

    reason: str
    """One sentence without private data: every party reads it."""

    kind: FailureKind = "failed"
    """Which error the waits of every party raise."""

    def error(self) -> ProtocolError:
        """Return a new exception that names the party and the reason."""
        error = _ERRORS[self.kind](f"{self.party}: {self.reason}")
        error.party = self.party
        return error

    def to_message(self) -> Message:
        """Return the ABORT that tells a peer.

        Reveals:
            To the receiver: the party's name, the kind of failure and the reason.
        """
        meta = {"party": self.party, "reason": self.reason[:_MAX_REASON], "kind": self.kind}
        return Message(kind=self.KIND, meta=meta)

    @classmethod
    def from_message(
        cls, message: Message, *, relayed: bool, receiver: str | None = None
    ) -> "Failure":
        """Read an ABORT.

        Args:
            message: As it was received.
            relayed: Whether the sender may speak for others, which only the primary may; what a
                secondary says is about itself, or about the primary, whom alone it talks to.
            receiver: Who reads it.
        """
        party, reason = message.figure("party", str), message.figure("reason", str)
        if not relayed:
            reason = f"it reports of {party}: {reason}" if party == receiver else reason
            party = message.sender
        reason = shown(reason, _MAX_REASON)
        kind = message.figure("kind", str)
        return cls(
            party=shown(party, _MAX_REASON),
            reason=reason,
            kind=kind if kind in get_args(FailureKind) else "failed",
        )


def kind_of(error: BaseException) -> FailureKind:
    """Return what an error of this party is to the others.

    An operator who interrupts a party, or makes room on its machine, can start it again.
    """
    known = of_this_machine(error) or error
    mendable = isinstance(known, KeyboardInterrupt | StorageError | OutOfMemoryError)
    return "lost" if mendable else "failed"


def public_reason(error: BaseException) -> str:
    """Return what other organisations may read about an error of this party.

    An error that was not raised on purpose may quote a table in its text, so only its kind is told.
    """
    if isinstance(error, KeyboardInterrupt):
        return "was interrupted by its operator"
    known = error if isinstance(error, SecureVflError) else of_this_machine(error)
    if known is not None:
        return known.for_others()
    return f"stopped by an unexpected {type(error).__name__} (its own log says more)"
