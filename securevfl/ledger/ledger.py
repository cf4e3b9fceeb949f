"""A party's ledger: every release is charged before it is made, or refused.

Charges are lines of the table's ledger file (:mod:`securevfl.ledger.ledger_file`). A release beyond
a session's plan, a run's budget or the owner's limit is refused.
"""

import secrets
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, TypeVar

import numpy as np
from jaxtyping import Int64

from securevfl.core import checks
from securevfl.core.errors import BudgetExceededError, PrivacyError
from securevfl.core.formatting import finite_or_none
from securevfl.data.tables import KeyTable
from securevfl.dp.release_plan import ReleasePlan
from securevfl.ledger.book import (
    MOST_ROWS,
    LedgerBook,
    Outlook,
    ReleaseCounts,
    Session,
    epsilon_of_sessions,
    ranges_of,
)
from securevfl.ledger.chain import now
from securevfl.ledger.ledger_file import LedgerFile, RecordCounts

Linked = TypeVar("Linked", bound=int | None)

_ROUNDING: Final = 1e-9
"""Relative difference of epsilon by rounding, between a release in parts and in one go."""


def require_size(plan: ReleasePlan, rows: int, *, party: str, what: str) -> None:
    """Refuse a round with more rows than the plan allows.

    Raises:
        BudgetExceededError: If it has more rows.
    """
    if rows > plan.rows_per_round:
        raise BudgetExceededError(
            f"{party}: {what} has {rows} rows; the noise was chosen for {plan.rows_per_round} at "
            f"most"
        )


def require_planned(own: Session, after: Session, *, what: str) -> None:
    """Refuse releases beyond a session's plan, for which its noise was chosen.

    Args:
        own: The session.
        after: The session with the requested releases.
        what: The request, in words.

    Raises:
        BudgetExceededError: If the session would exceed its plan.
    """
    plan = own.plan
    # If records are counted, more rounds or rows reveal no more about any record.
    if not own.counts_records and (
        after.rounds > plan.rounds
        or after.row_releases > plan.row_releases
        or after.passes > plan.releases_per_row
    ):
        raise BudgetExceededError(
            f"{own.party}: {what} would pass the plan of {plan.rounds} releases and "
            f"{plan.row_releases} rows, each at most {plan.releases_per_row} times, for which "
            f"the noise was chosen ({own.rounds} releases and {own.row_releases} rows are "
            f"made); plan more epochs at the start"
        )


def require_rows(sessions: Sequence[Session], most: int | None, *, more: int) -> None:
    """Refuse rows beyond ``prediction.rows``, the limit for all predictions of a model.

    Args:
        sessions: All sessions of the model; the last one makes the request.
        most: Most rows of all predictions; None for any number.
        more: Rows of the request.

    Raises:
        BudgetExceededError: If there are too many.
    """
    asked = sum(session.row_releases for session in sessions)
    if most is not None and asked + more > most:
        raise BudgetExceededError(
            f"{sessions[-1].party}: {more} rows more would bring all predictions of this model to "
            f"{asked + more} rows, over prediction.rows = {most}; raise it in every party's file"
        )


def budget_of(sessions: Sequence[Session]) -> float | None:
    """Return the epsilon that sessions with a common budget may spend; None if unbounded.

    With ``noise_multiplier`` it is the planned epsilon of the run's first session, for all later
    ones too; predictions then have no bound.

    Args:
        sessions: All sessions with this budget, in order; the last one is the current one.
    """
    first, own = sessions[0], sessions[-1]
    privacy = own.plan.privacy
    if privacy.accounting != "sound" or privacy.epsilon is not None:
        return privacy.epsilon if privacy.accounting == "sound" else None
    if own.model or first.noise_share_std == 0:
        return None
    return first.plan.epsilon(first.noise_share_std) * (1 + _ROUNDING)


def over_budget(
    own: Session, epsilon: float, *, budget: float, spent: tuple[float, float], what: str
) -> BudgetExceededError:
    """Return the refusal of a request beyond a run's budget.

    Args:
        own: The session.
        epsilon: Epsilon that the sessions with this budget would reach.
        budget: Epsilon that they may spend.
        spent: Epsilon spent by its run, and by earlier sessions with the same budget.
        what: The request, in words.
    """
    now, before = spent
    if own.model:
        most = own.plan.releases_per_record
        less = f"lower releases_per_record = {most}" if most else "ask for all rows in one request"
        return BudgetExceededError(
            f"{own.party}: {what} would bring all predictions of this model to epsilon = "
            f"{epsilon:.4f}, over the {budget:g} that they may spend ({before:.4f} is spent); "
            f"raise prediction.epsilon in every party's file, or {less}"
        )
    had = f", {before:.4f} of it before the run was resumed" if before else ""
    limit = f"privacy.epsilon = {budget:g}"
    advice = "raise privacy.epsilon, lower training.epochs, or add noise"
    if own.plan.privacy.epsilon is None:
        limit = f"the {budget:.4f} that this run was planned to spend"
        advice = "begin another run, with another --out"
    return BudgetExceededError(
        f"{own.party}: {what} would bring epsilon to {epsilon:.4f}, over {limit} ({now:.4f} is "
        f"spent{had}); {advice}"
    )


def over_limit(book: LedgerBook, after: Session, *, what: str) -> BudgetExceededError:
    """Return the refusal of a request beyond the limit of the table's owner.

    Args:
        book: The table's book.
        after: The session with the requested releases.
        what: The request, in words.
    """
    unit, party = after.plan.privacy.unit, after.party
    limit, total = book.limits.get(unit), book.limited_total(after)
    program = "; a program has read the table, see --programs" if book.programs else ""
    if limit is None or total is None:
        limited = " and ".join(sorted(book.limits))
        return BudgetExceededError(
            f"{party}: the owner of this table has set a limit for unit = {limited}, which "
            f"does not count what this run spends for unit = {unit}; set one for that too: "
            f"securevfl ledger limit TABLE --unit {unit} --epsilon ..."
        )
    return BudgetExceededError(
        f"{party}: {what} would bring the total of all runs on this table to epsilon = "
        f"{total:.4f} at delta = {limit.delta:g}, over the limit of its owner, "
        f"{limit.epsilon:g} ({book.total(unit, delta=limit.delta):.4f} is spent{program}); only "
        f"the owner can raise it: securevfl ledger limit"
    )


_OF_A_FILE = ("federation", "settings", "party", "noise_share_std", "model")


class Ledger:
    """A party's ledger during a session: books every release before it is made, or refuses it.

    There are three bounds. A session cannot release more rounds or rows than were planned when its
    noise was chosen. All sessions of the run together keep ``privacy.epsilon`` or, with
    ``noise_multiplier``, the planned epsilon of the first session. And all runs on the table
    together keep the limit of the table's owner, which no federation file can change.

    The file stays with its party. It never holds a record, a key or a representation.
    """

    def __init__(
        self,
        file: LedgerFile | Path | None,
        *,
        party: str,
        plan: ReleasePlan,
        noise_share_std: float,
        durable: bool = True,
        run: str | None = None,
        federation: str = "",
        settings: str = "",
        model: str = "",
    ) -> None:
        """Open a new or existing ledger, and begin a session.

        Args:
            file: Path of the ledger, or its open file; None keeps the record in memory only (the
                simulator).
            party: Name of the table's party in the federation.
            plan: The session's plan of releases.
            noise_share_std: ``tau``, the noise that this session adds, from
                :meth:`ReleasePlan.noise_share_std`; 0 for the mechanism ``none``.
            durable: Whether every charge must survive a crash of the machine.
            run: The run's id, common to all its sessions; None begins a new run.
            federation: Its federation's name.
            settings: The digest of its federation file's settings.
            model: Id of the run whose kept model predicts; empty for a run that trains.

        Raises:
            ConfigError: If the file is in use, of another version, or cannot be opened.
            PrivacyError: If the file was changed, or the run was charged for another unit before.
        """
        self.party = party
        self.records: RecordCounts | None = None
        """Counts of a secondary's records, if their number of releases is limited; else None."""
        self._file = file if isinstance(file, LedgerFile) else LedgerFile(file, durable=durable)
        self._book = self._file.book
        self.others = self._book.others  # as the file was when it was opened
        try:
            own = Session(
                run=run or secrets.token_hex(16),
                federation=federation,
                settings=settings,
                party=party,
                time=now(),
                plan=plan,
                noise_share_std=noise_share_std,
                model=model,
            )
            self._enter(own)
            self._file.append(own.opening())
        except BaseException:
            self._file.close()
            raise

    def _enter(self, own: Session) -> None:
        self.run, self._own, self._uses = own.run, own, ReleaseCounts()
        self._go_on()
        self._book.sessions.append(own)
        # Every charge keeps the plan: a limit that covers the whole plan need not be checked again.
        self._covered = self._book.limit_covers(self._whole)

    def begin(self, plan: ReleasePlan, *, run: str) -> None:
        """Begin another session in the same file, with the same noise.

        If records are counted, the current session continues with the request.

        Args:
            plan: The new session's plan.
            run: The new session's run id.

        Raises:
            BudgetExceededError: If the budget does not cover the whole plan; nothing is written
                then.
            StorageError: If the file cannot be written.
        """
        if self._own.goes_on_with(plan):
            own, self._uses = self._own, ReleaseCounts()
            own.plan, own.passes, own.last_round = plan, 0, 0
            self.require_room(rounds=plan.rounds, row_releases=plan.row_releases, passes=1)
            return
        before = self.run, self._own, self._uses, self._covered
        same = {name: getattr(self._own, name) for name in _OF_A_FILE}
        own = Session(run=run, time=now(), plan=plan, **same)
        self._enter(own)
        try:
            passes = plan.releases_per_row
            self.require_room(rounds=plan.rounds, row_releases=plan.row_releases, passes=passes)
            self._file.append(own.opening())
        except BaseException:
            self._book.sessions.pop()
            self.run, self._own, self._uses, self._covered = before
            raise

    def _go_on(self) -> None:
        """Take over the unit and the released rows of this run's earlier sessions."""
        unit = self._own.plan.privacy.unit
        for session in self._sessions:
            if session.plan.privacy.unit != unit:
                raise PrivacyError(
                    f"{self.party}: this run was charged for unit = {session.plan.privacy.unit!r} "
                    f"before, and now asks for {unit!r}; restore the federation file, or begin "
                    f"another run"
                )
            if self._own.releases_once:
                for first, last in session.released:
                    self._uses.add(np.arange(first, last + 1))

    @property
    def file(self) -> LedgerFile:
        """The open file, for countersigning."""
        return self._file

    @property
    def path(self) -> Path | None:
        """Path of the ledger; None in memory."""
        return self._file.path

    @property
    def head(self) -> str:
        """The chain's head; a copy elsewhere reveals a cut ledger."""
        return self._file.head

    @property
    def rounds(self) -> int:
        """Releases charged in all sessions of this run."""
        return sum(session.rounds for session in self._sessions)

    @property
    def row_releases(self) -> int:
        """Rows charged in all sessions of this run, summed over their rounds."""
        return sum(session.row_releases for session in self._sessions)

    @property
    def updates(self) -> int:
        """Noised updates of dp-trained models charged, in all sessions of this run."""
        return sum(session.updates for session in self._sessions)

    @property
    def encoder_fitted(self) -> bool:
        """Whether this run's frozen encoder was fitted, in any of its sessions."""
        return any(session.fits for session in self._sessions)

    @property
    def linked_rows(self) -> int | None:
        """The linked-row count that this run has reported, in any of its sessions."""
        row_counts = (session.linked_rows for session in self._sessions)
        return next((linked for linked in row_counts if linked is not None), None)

    @property
    def link_counts_due(self) -> int:
        """Number of linked-row counts that this run still has to report: 1 or 0."""
        due = self._own.plan.linked_rows is not None
        return int(due and not any(session.link_counts for session in self._sessions))

    @property
    def released_rows(self) -> Int64[np.ndarray, " released"]:
        """Ids of the rows that a frozen run released, in all its sessions and in order."""
        return self._uses.rows if self._own.releases_once else np.zeros(0, dtype=np.int64)

    @property
    def epsilon_spent(self) -> float:
        """Epsilon of all sessions of this run at its delta, rounded up.

        If records are counted, all requests to the model count as one run.
        """
        own = self.budget_sessions if self._own.counts_records else self._sessions
        return epsilon_of_sessions(own, delta=self._delta)

    @property
    def total(self) -> float:
        """Epsilon of all runs on the table for this run's unit at its delta, rounded up."""
        return self._book.total(self._own.plan.privacy.unit, delta=self._delta)

    @property
    def runs(self) -> int:
        """Number of runs on the table with spending for this run's unit, and of programs."""
        return len(self._book.runs(unit=self._own.plan.privacy.unit)) + len(self._book.programs)

    @property
    def has_spent(self) -> bool:
        """Whether any spending is booked."""
        return bool(self._book.runs())

    def outlook(self) -> Outlook:
        """Return the run's planned spending, and earlier spending on its table."""
        return self._book.outlook(self._own, self._whole, budget=budget_of(self.budget_sessions))

    def require_room(self, *, rounds: int, row_releases: int, passes: int) -> None:
        """Refuse a run that could not finish within the budget; call it before anything is sent.

        Args:
            rounds: Number of remaining releases, >= 0.
            row_releases: Sum of their rows, >= ``rounds``.
            passes: Largest number of them with the same row.

        Raises:
            BudgetExceededError: If the budget does not cover them.
        """
        checks.whole(rounds=rounds, row_releases=row_releases)
        checks.at_least(0, rounds=rounds)
        checks.at_least(rounds, row_releases=row_releases)
        if rounds:
            self._require(
                rounds=rounds,
                rows=row_releases,
                passes=self._own.passes + passes,
                link_counts=self.link_counts_due,
                what=f"the {'request' if self._own.model else 'run'}'s {rounds} releases",
            )

    def charge(
        self, *, round_number: int, rows: Int64[np.ndarray, " batch"], purpose: str
    ) -> float:
        """Book one release durably; call it before the release, never after.

        A round that is aborted afterwards stays booked, since others may have seen it. A training
        round of a dp-trained encoder is booked with the following update, made or not.

        Args:
            round_number: Number of the round, from 1 on, rising within a session; a retry is a new
                round.
            rows: Ids of the release's rows. The file gets their number and the largest release
                count among them; for frozen encoders also the ids.
            purpose: Purpose of the release; every purpose costs the same.

        Returns:
            Epsilon of this run including this release, rounded up.

        Raises:
            BudgetExceededError: If the budget or the plan does not cover it. Nothing is booked
                then, and the caller must not release anything.
            ConfigError: If the file cannot be written.
            PrivacyError: If the round was charged before, or the ledger is closed.
        """
        checks.whole(round_number=round_number)
        checks.at_least(1, round_number=round_number, rows=len(rows))
        what, plan = f"round {round_number} ({purpose})", self._own.plan
        if round_number <= self._own.last_round:
            raise PrivacyError(
                f"round {round_number}: rounds up to {self._own.last_round} are charged already; "
                f"a retry needs a new round number"
            )
        require_size(plan, len(rows), party=self.party, what=what)
        if not 0 <= int(rows.min()) <= int(rows.max()) < MOST_ROWS:
            raise PrivacyError(f"{self.party}: {what} asks for rows that no table has")
        passes = self._uses.most_with(rows)
        if self._own.releases_once and passes > plan.releases_per_row:
            raise BudgetExceededError(
                f"{self.party}: {what} asks for rows that this run has released before; a frozen "
                f"encoder releases a row {plan.releases_per_row} times at most, whatever became of "
                f"the released values"
            )
        epsilon = self._require(rounds=1, rows=len(rows), passes=passes, what=what)
        self._file.append(
            {
                "kind": "charge",
                "round": round_number,
                "rows": len(rows),
                "passes": passes,
                "purpose": purpose,
                "epsilon": finite_or_none(epsilon),
                **({"released": ranges_of(rows)} if self._own.releases_once else {}),
                **({"counts": self.records.head} if self.records else {}),
            }
        )
        self._own.book(round_number=round_number, rows=len(rows), passes=passes, purpose=purpose)
        self._uses.add(rows)
        return epsilon

    def charge_fitting(self) -> float:
        """Book the fitting of a frozen encoder durably; call it before its noise is drawn.

        Returns:
            Epsilon of this run including the fitting, rounded up.

        Raises:
            BudgetExceededError: If the budget does not cover it; nothing is booked then.
            PrivacyError: If this session fitted before, or the ledger is closed.
        """
        if self._own.fits:
            raise PrivacyError("the encoder was fitted before in this session; it is fitted once")
        epsilon = self._require(rounds=0, rows=0, passes=0, fits=1, what="fitting the encoder")
        multiplier = self._own.plan.fitting_multiplier()
        self._file.append(
            {"kind": "fit", "noise_multiplier": multiplier, "epsilon": finite_or_none(epsilon)}
        )
        self._own.fits += 1
        return epsilon

    def charge_link_count(self, draw: Callable[[], Linked]) -> Linked:
        """Book how many rows are linked, durably, and return it: once a run.

        The line holds the number, so that it is charged and known at the same moment.

        Args:
            draw: Draws a secondary's noised number; returns None at the primary, which books the
                secondaries' answers.

        Raises:
            BudgetExceededError: If the budget does not cover it; nothing is drawn or booked then.
            PrivacyError: If this run reports no such number, or has reported it before.
        """
        if not self.link_counts_due:
            raise PrivacyError(
                "how many rows are linked is said once in a run, where it is planned"
            )
        epsilon = self._require(
            rounds=0, rows=0, passes=0, link_counts=1, what="saying how many rows are linked"
        )
        linked = draw()
        self._file.append(
            {"kind": "link-count", "linked": linked, "epsilon": finite_or_none(epsilon)}
        )
        self._own.link_counts += 1
        self._own.linked_rows = linked
        return linked

    def count_records(self, folder: Path, keys: KeyTable) -> None:
        """Open the counts of each record's releases in predictions.

        Args:
            folder: The secondary's own in the run folder.
            keys: Keys of the secondary's records.

        Raises:
            ConfigError: If the file cannot be opened, or is in use.
            PrivacyError: If it is missing, damaged, or does not match this ledger.
        """
        if self.records is None:
            last, lost = None, False
            for session in self.budget_sessions:
                # A promise booked again after restoring covers outdated counts, until counts are
                # booked again.
                if session.lost or session.counts:
                    last, lost = session.counts, session.lost
            self.records = RecordCounts(folder, self._file, keys, last=last, lost=lost)

    @property
    def record_counts(self) -> RecordCounts:
        """Counts of each record's releases in predictions.

        Raises:
            PrivacyError: If they are not held; see :meth:`count_records`.
        """
        if self.records is None:
            raise PrivacyError(f"{self.party}: releases of records are not counted here")
        return self.records

    def require_same_release(self, digest: str) -> None:
        """Book the digest of a frozen run's release, which all its sessions must share.

        Sessions of one run with the same digest are one fixed answer; others add up.

        Args:
            digest: Digest of everything that determines the release except its rows and noise:
                links, secret sample, encoder.

        Raises:
            PrivacyError: If the run released with another digest before.
        """
        if not self._own.releases_once:
            raise PrivacyError("only a frozen encoder makes one release in parts")
        for session in self._sessions:
            if session.release not in (None, digest):
                raise PrivacyError(
                    f"{self.party}: this run has released rows by other links, another secret "
                    f"sample or another encoder; what is left of it cannot be released under the "
                    f"same promise. Begin another run, with another --out"
                )
        if self._own.release is None:
            self._file.append({"kind": "release", "digest": digest})
            self._own.release = digest

    def require_history(self, head: str) -> None:
        """Refuse a ledger whose chain does not contain ``head``.

        Raises:
            PrivacyError: If the ledger was cut or exchanged.
        """
        *earlier, _ = self._sessions
        restored = [session.lost for session in earlier if session.has_spent][-1:] == [True]
        if not (restored or self._file.chain.contains(head)):
            self._file.note_head(head)
            raise PrivacyError(
                f"ledger {self.path}: lacks releases that the checkpoint knows of; it was cut or "
                f"exchanged, and what was spent cannot be known. Restore it from a copy; if that "
                f"lacks them too, book them: securevfl ledger restored TABLE"
            )

    def close(self) -> None:
        """Close the files; later charges raise."""
        if self.records is not None:
            self.records.close()
        self._file.close()

    @property
    def _sessions(self) -> list[Session]:
        """This run's sessions, in order; the last one is the current one."""
        return [session for session in self._book.sessions if session.run == self.run]

    @property
    def sessions(self) -> list[Session]:
        """All sessions on the table, in order; the last one is the current one."""
        return self._book.sessions

    @property
    def budget_sessions(self) -> list[Session]:
        """Sessions that share this one's budget, in order; the last one is the current one."""
        return [session for session in self._book.sessions if session.shares_budget_with(self._own)]

    @property
    def _whole(self) -> Session:
        """This session with everything planned released."""
        plan = self._own.plan
        return self._own.with_more(
            rounds=plan.rounds,
            rows=plan.row_releases,
            passes=plan.releases_per_row,
            link_counts=self.link_counts_due,
        )

    @property
    def _delta(self) -> float:
        return self._own.plan.privacy.delta

    def _require(self, *, what: str, **more: int) -> float:
        """Return the run's epsilon with further releases, if all bounds allow them.

        Args:
            what: The request, in words.
            more: Arguments of :meth:`Session.with_more`.
        """
        after = self._own.with_more(**more)
        require_planned(self._own, after, what=what)
        *earlier, _ = self.budget_sessions
        epsilon = epsilon_of_sessions([*earlier, after], delta=self._delta)
        budget = budget_of(self.budget_sessions)
        if budget is not None and not epsilon <= budget:  # written so that NaN fails
            spent = self.epsilon_spent, epsilon_of_sessions(earlier, delta=self._delta)
            raise over_budget(self._own, epsilon, budget=budget, spent=spent, what=what)
        # No federation file changes the limit of the table's owner.
        if not (self._covered or self._book.limit_covers(after)):
            raise over_limit(self._book, after, what=what)
        return epsilon
