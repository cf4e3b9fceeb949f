"""The message that asks a kept model for predictions."""

from dataclasses import asdict, dataclass
from typing import ClassVar, Final

from securevfl.core.errors import ProtocolError
from securevfl.federation.messages import RUN_ID, RoundKind
from securevfl.federation.run_plan import RunFacts
from securevfl.transport.message import Message, TypedMessage

# More rows than any table has; an id above it is not one.
_MOST_ROWS: Final = 2**31


@dataclass(frozen=True, kw_only=True, slots=True)
class PredictRequest(TypedMessage):
    """New rows want predictions of the kept model: the request's id, how many rows, and of whom.

    Some rows may take part in linking alone: those of training, beside which a record chose its
    rows then.
    """

    KIND: ClassVar = RoundKind.PREDICT
    WAY: ClassVar = "primary to every caller"

    run: str
    """The request's own id in all ledgers."""
    rows: int
    """Rows that are linked."""
    predicted_rows: int
    """How many of them, the last ones, are predicted."""
    active: tuple[int, ...]
    """Ranks of the secondaries that answer, ascending."""

    @property
    def facts(self) -> RunFacts:
        """What the request makes of the session."""
        return RunFacts(
            run=self.run,
            rows=self.rows,
            train_rows=0,
            validation_rows=0,
            test_rows=0,
            predicts=True,
            predicted_rows=self.predicted_rows,
            active=self.active,
        )

    def to_message(self) -> Message:
        """Return it as it is sent."""
        meta = {**asdict(self), "active": list(self.active)}
        return Message(kind=self.KIND, meta=meta)

    @classmethod
    def from_message(cls, message: Message) -> "PredictRequest":
        """Read the primary's.

        Raises:
            ProtocolError: If the id is none, or the numbers are impossible.
        """
        run = message.figure("run", str)
        rows, predicted = (message.figure(name, int) for name in ("rows", "predicted_rows"))
        if not RUN_ID.fullmatch(run):
            raise ProtocolError("the primary's id of a request is not one")
        if not 1 <= predicted <= rows <= _MOST_ROWS:
            raise ProtocolError(f"the primary asks for {predicted} predictions of {rows} rows")
        active = message.figure("active", list)
        if not all(type(rank) is int for rank in active):
            raise ProtocolError(
                f"the primary asks for predictions of impossible parties {active!r:.80}"
            )
        return cls(run=run, rows=rows, predicted_rows=predicted, active=tuple(active))
