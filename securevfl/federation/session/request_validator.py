"""What the primary may still ask of one secondary in this session, and nothing besides."""

import math
from dataclasses import dataclass
from typing import Final, Literal, get_args

import numpy as np

from securevfl.core.errors import ProtocolError
from securevfl.federation.messages import EpochMark, RoundPlan
from securevfl.federation.run_plan import Purpose, RunPlan

Part = Literal["train", "validation", "test"]

_PARTS: Final[tuple[Part, ...]] = get_args(Part)
_NOBODY: Final = -1


@dataclass(frozen=True, kw_only=True, slots=True)
class SessionLimits:
    """What the federation file and the primary's row counts make of a session."""

    rows: int
    """The primary's rows; ids run from 0."""

    part_rows: dict[Part, int]
    """How many of them each part of the table has."""

    batch_size: int
    """Most rows of a round."""

    epochs: int
    """Most epochs of the run."""

    rank: int
    """This secondary's own rank."""

    ranks: tuple[int, ...]
    """Ranks of all secondaries, ascending."""

    active: int
    """How many of them take part in a training round; in every other round all do."""

    average_positions_every: int
    """Epochs between averages of positional encodings; 0 for none."""

    single_pass: Purpose | None
    """Purpose of each row's only release, if that is all that happens; None otherwise."""

    first_row: int = 0
    """The first row that may be asked for; those before it take part in linking alone."""

    after_round: int = 0
    """Round numbers up to it are used."""

    @classmethod
    def of(cls, plan: RunPlan, *, party: str, after_round: int = 0) -> "SessionLimits":
        """Return the limits of a run at one of its secondaries.

        Args:
            plan: The run, or one request for predictions.
            party: Whose limits they are.
            after_round: Round numbers up to it were used before in this session.
        """
        facts, training = plan.facts, plan.config.training
        return cls(
            rows=facts.rows,
            part_rows={
                "train": plan.training_rows,
                "validation": facts.validation_rows,
                "test": facts.test_rows,
            },
            batch_size=training.batch_size,
            epochs=plan.config.training.epochs,
            rank=plan.ranks[party],
            ranks=tuple(sorted(plan.secondaries)),
            active=plan.active,
            average_positions_every=plan.average_positions_every,
            single_pass=plan.single_pass,
            first_row=facts.rows - facts.predicted_rows if facts.predicts else 0,
            after_round=after_round,
        )


class RequestValidator:
    """A session's plan and what was used of it; every handler asks it first.

    A session goes on like this, and every step that is not due is refused by name, before anything
    of it is used: epochs of training rounds, an average of positional encodings where one is due,
    validation rounds and the epoch's mark; then the best weights come back, and test rounds follow.
    A frozen run is one pass of release rounds. A row belongs to one part of the table for good, and
    comes once in an epoch. What the ledger charges can therefore never pass its plan, whatever the
    primary says.
    """

    def __init__(self, limits: SessionLimits) -> None:
        self.limits = limits
        self.last_round = limits.after_round
        """Round numbers up to it are used."""
        self._epoch = 0
        """Epochs that are done."""
        self._testing = False
        self._averaged = False
        self._part_of_row = np.full(limits.rows, _NOBODY, dtype=np.int8)
        self._used = np.zeros(limits.rows, dtype=np.bool_)
        """Rows of this epoch's rounds; of all rounds, in a frozen run and in testing."""
        self._part_sizes = dict.fromkeys(_PARTS, 0)
        self._rounds: dict[Purpose, int] = {}
        self._seen: dict[Purpose, int] = {}

    def take_round(self, round_number: int) -> None:
        """Take a round number of another stage of the session into account.

        Raises:
            ProtocolError: If it was used.
        """
        self._require_new(round_number)
        self.last_round = round_number

    def start_after(self, epoch: int) -> None:
        """Continue after so many epochs, whose state this party has.

        Raises:
            ProtocolError: If the run has not so many.
        """
        if not 0 <= epoch <= self.limits.epochs:
            raise ProtocolError(
                f"the primary goes on after epoch {epoch} of a run of {self.limits.epochs}"
            )
        self._epoch = epoch

    def validate_round(self, plan: RoundPlan) -> None:
        """Take a round into account, or refuse it.

        Raises:
            ProtocolError: If its number was used; it names rows that there are not, rows twice, or
                too many; its parties are not those of such a round; or it is not due.
        """
        where, single = f"round {plan.round_number}", self.limits.single_pass
        self._require_new(plan.round_number)
        self._require_parties(plan, where=where)
        self._require_size(plan, where=where)
        rows = plan.rows
        if rows.min() < self.limits.first_row or rows.max() >= self.limits.rows:
            raise ProtocolError(
                f"{where}: the primary asks for rows outside the "
                f"{self.limits.rows - self.limits.first_row} that it may ask for"
            )
        if len(np.unique(rows)) != len(rows):
            raise ProtocolError(f"{where}: the primary lists a row twice in one batch")
        if self._used[rows].any():
            raise ProtocolError(
                f"{where}: the primary asks again for {int(self._used[rows].sum())} rows that were "
                f"released {'before' if single or self._testing else 'in this epoch'}"
            )
        if single is not None:
            rows_due = self.limits.rows - self.limits.first_row
            self._require_pass(single, plan, of=rows_due, where=where)
        else:
            self._require_part(plan, where=where)
        self.last_round = plan.round_number
        self._used[rows] = True
        self._rounds[plan.purpose] = self._rounds.get(plan.purpose, 0) + 1
        self._seen[plan.purpose] = self._seen.get(plan.purpose, 0) + len(rows)

    @property
    def epoch(self) -> int:
        """The epoch that training rounds are of, from 1."""
        return self._epoch + 1

    @property
    def has_predicted(self) -> bool:
        """Whether every row of a request for predictions was asked for."""
        return self._seen.get("predict") == self.limits.rows - self.limits.first_row

    def validate_average(self, round_number: int) -> None:
        """Take an average of positional encodings into account, or refuse it.

        Raises:
            ProtocolError: If its number was used, or none is due.
        """
        self._require_new(round_number)
        if not self._average_due() or self._seen.get("validation") or not self._training_complete():
            raise ProtocolError(
                f"round {round_number}: the primary asks for positional encodings, and no average "
                f"of them is due (model.average_positions_every = "
                f"{self.limits.average_positions_every})"
            )
        self.last_round = round_number
        self._averaged = True

    def validate_epoch(self, mark: EpochMark) -> None:
        """Take the end of an epoch, or of training, into account, or refuse it.

        Raises:
            ProtocolError: If it is not due.
        """
        if mark.restore_best:
            begun = bool(self._seen)
            if self._testing or begun or not 1 <= mark.epoch <= self._epoch:
                raise ProtocolError(
                    f"the primary ends training at epoch {mark.epoch}, which is not due after "
                    f"{self._epoch} epochs"
                )
            self._testing = True
            return
        due = self._epoch + 1
        whole = (
            self._training_complete()
            and not self._average_due()
            and self._seen.get("validation", 0) == self.limits.part_rows["validation"]
        )
        if self._testing or mark.epoch != due or due > self.limits.epochs or not whole:
            raise ProtocolError(
                f"the primary ends epoch {mark.epoch}, which is not due: "
                f"{self._epoch} of {self.limits.epochs} epochs are done"
            )
        self._epoch = due
        self._averaged = False
        self._used[:] = False
        self._rounds.clear()
        self._seen.clear()

    def validate_done(self) -> None:
        """Take the end of the run into account, or refuse it.

        Raises:
            ProtocolError: If it comes within an epoch.
        """
        if self._seen and not self._testing and self.limits.single_pass is None:
            raise ProtocolError(f"the primary ends the run within epoch {self._epoch + 1}")

    def _require_new(self, round_number: int) -> None:
        if round_number <= self.last_round:
            raise ProtocolError(
                f"round {round_number}: rounds up to {self.last_round} were announced already"
            )

    def _require_parties(self, plan: RoundPlan, *, where: str) -> None:
        active, ranks = plan.active, self.limits.ranks
        if tuple(sorted(set(active) & set(ranks))) != active or self.limits.rank not in active:
            raise ProtocolError(f"{where}: impossible parties {list(active)!r:.80}")
        due = self.limits.active if plan.purpose == "train" else len(ranks)
        if len(active) != due:
            raise ProtocolError(
                f"{where}: {len(active)} secondaries take part; the run has {due} in a round for "
                f"{plan.purpose}, and its noise is made for them"
            )

    def _require_size(self, plan: RoundPlan, *, where: str) -> None:
        """Refuse a round that is larger than the noise of updates was made for."""
        if not 1 <= len(plan.rows) <= self.limits.batch_size:
            raise ProtocolError(
                f"{where}: the primary names {len(plan.rows)} rows; a round has at most "
                f"training.batch_size = {self.limits.batch_size}"
            )

    def _require_part(self, plan: RoundPlan, *, where: str) -> None:
        """Refuse a round of another part of the table, or of a part that is not due."""
        part: Part
        match plan.purpose:
            case "train":
                due = not self._testing and self._epoch < self.limits.epochs
                due = due and not self._averaged and not self._seen.get("validation")
                part = "train"
            case "validation":
                due = not self._testing and self._training_complete() and not self._average_due()
                part = "validation"
            case "test":
                due, part = self._testing, "test"
            case _:
                due, part = False, "train"
        if not due:
            raise ProtocolError(
                f"{where}: a round for {plan.purpose} is not due after {self._epoch} epochs of "
                f"{self.limits.epochs}"
            )
        self._require_pass(part, plan, of=self.limits.part_rows[part], where=where)
        own = _PARTS.index(part)
        known = self._part_of_row[plan.rows]
        if ((known != _NOBODY) & (known != own)).any():
            raise ProtocolError(
                f"{where}: the primary asks for rows for {part} that it used for another purpose"
            )
        size = self._part_sizes[part] + int((known == _NOBODY).sum())
        if size > self.limits.part_rows[part]:
            raise ProtocolError(
                f"{where}: the primary has used {size} different rows for {part}; it has "
                f"{self.limits.part_rows[part]}"
            )
        self._part_sizes[part] = size
        self._part_of_row[plan.rows] = own

    def _require_pass(self, purpose: Purpose, plan: RoundPlan, *, of: int, where: str) -> None:
        """Refuse rows and rounds beyond one pass over a part of the table."""
        if plan.purpose != purpose:
            raise ProtocolError(f"{where}: a round for {plan.purpose} is not due")
        rows = self._seen.get(purpose, 0) + len(plan.rows)
        rounds = self._rounds.get(purpose, 0) + 1
        most = math.ceil(of / self.limits.batch_size)
        if rows > of or rounds > most:
            raise ProtocolError(
                f"{where}: the primary asks for {rows} rows in {rounds} rounds for {purpose}; one "
                f"pass has {of} rows in {most} rounds"
            )

    def _training_complete(self) -> bool:
        """Whether the epoch's training rounds may be over, as far as this party can see."""
        if self._epoch >= self.limits.epochs:
            return False
        # With party dropout a secondary hears of its own rounds alone.
        sees_all = self.limits.active == len(self.limits.ranks)
        return not sees_all or self._seen.get("train", 0) == self.limits.part_rows["train"]

    def _average_due(self) -> bool:
        every = self.limits.average_positions_every
        return bool(every) and (self._epoch + 1) % every == 0 and not self._averaged
