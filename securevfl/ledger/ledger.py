"""The ledger of a table: charges before releases, limits, refusals and summaries.

One file a table, for all runs on it (:mod:`securevfl.ledger.ledger`), hash-chained
(:mod:`securevfl.ledger.chain`). ``open`` lines hold a session's plan, ``charge`` lines one release
each, ``fit`` the fitting of a frozen encoder, ``release`` what its release is made with, ``labels``
what secondaries are sent of labels, ``program`` a program that reads the table, ``limit`` and
``programs`` what the owner allows, ``restored`` what may be missing in a copy
(:mod:`securevfl.ledger.book`).
"""

import contextlib
import hashlib
import os
import secrets
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
from jaxtyping import Int64

from securevfl.core import checks, files
from securevfl.core.checks import strict_json
from securevfl.core.errors import BudgetExceededError, ConfigError, PrivacyError, StorageError
from securevfl.core.formatting import finite_or_none
from securevfl.data.sources.source_files import file_behind
from securevfl.data.tables import KeyTable
from securevfl.dp.labels import LabelTotal, labels_total
from securevfl.dp.release_plan import ReleasePlan
from securevfl.ledger.book import (
    MOST_ROWS,
    RESTORED,
    VERSION,
    LedgerBook,
    Limit,
    Outlook,
    ProgramUse,
    ReleaseCounts,
    Session,
    epsilon_of_sessions,
    ranges_of,
    run_after,
)
from securevfl.ledger.chain import MOST_LEVELS, ChainedFile, now
from securevfl.ledger.record_counts import RecordCounts

# A ledger's file with what its lines say.


class LedgerFile(ChainedFile):
    """A table's ledger, held open: no other process writes to it until it is closed."""

    def __init__(self, path: Path | None, *, restores: bool = False, **how: bool) -> None:
        """Open the file and read all its lines; see :class:`ChainedFile`.

        Args:
            path: As of :class:`ChainedFile`.
            restores: Whether what it lacks is about to be booked.
            **how: ``durable`` and ``read_only``, as of :class:`ChainedFile`.

        Raises:
            ConfigError: If it cannot be opened, is of another version, or another process holds it.
            PrivacyError: If it was altered, or lacks lines that a run has written.
        """
        self.book = LedgerBook()
        """What the lines said when the file was opened, and what its ledger adds."""
        super().__init__(path, take=self.book.take, **how)
        if not (restores or self.noted_head is None or self.chain.contains(self.noted_head)):
            self.close()
            raise PrivacyError(
                f"ledger {path}: lacks lines that a run has written ({path}.head names the last); "
                f"what was spent cannot be known. Restore it from the newest copy; if that lacks "
                f"them too, book them: securevfl ledger restored TABLE"
            )

    @property
    def note(self) -> Path:
        """Where the head is noted that the file must have had, once a run has found it damaged."""
        assert self.path is not None, "what is in memory is not found damaged"
        return self.path.with_name(f"{self.path.name}.head")

    @property
    def noted_head(self) -> str | None:
        """The head that was noted; None where there is no note, no head if it cannot be read."""
        if self.path is None or not os.path.lexists(self.note):
            return None
        try:
            return self.note.read_text(encoding="utf-8", errors="replace")
        except OSError:
            return ""

    def note_head(self, head: str) -> None:
        """Keep a head that every later opening of the ledger must find in it."""
        # The damage is reported whether there is room for a note or not.
        with contextlib.suppress(StorageError, OSError):
            files.write_text(self.note, head)
            files.sync_folder(self.note.parent)

    def _find_alteration(self, handle: int, place: Path) -> str | None:
        altered = super()._find_alteration(handle, place)
        if altered is not None:
            # While the lock is held: the next run asks for it.
            self.note_head(self.head)
        return altered


# Where a table's ledger lies, so that every later run on that table finds it again.

Book = Literal["ledger", "pretraining-ledger"]
"""``ledger`` records what a run's averages reveal of secondaries' records;
``pretraining-ledger`` what the primary's own vectors reveal of its rows."""

_HASH_DIGITS: Final = 16


def ledger_of_table(table: Path, *, book: Book = "ledger") -> Path:
    """Return the path of a table's ledger, be it there yet or not.

    It lies next to the table, ``bank.csv.ledger.jsonl``. Where the table's folder cannot be written
    it lies in the user's state folder, under a name made of the table's own path. Links are
    followed first, and source files too: one table has one ledger, under all its names.
    That of a database lies next to the source file that has its address.

    Args:
        table: The party's table; relative to the working directory, if it is relative.
        book: Which of the two.

    Raises:
        ConfigError: If there is one in both places, or no such table.
    """
    try:
        table = file_behind(table).resolve(strict=True)
    except (OSError, RuntimeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "its links run in a circle"
        raise ConfigError(f"table {table}: has no ledger ({reason})") from None
    beside = table.with_name(f"{table.name}.{book}.jsonl")
    name = hashlib.sha256(str(table).encode()).hexdigest()[:_HASH_DIGITS]
    away = _state_folder() / "ledgers" / f"{table.stem}-{name}.{book}.jsonl"
    if beside.exists() and away.exists():
        raise ConfigError(
            f"table {table}: has two ledgers, {beside} and {away}, and what was spent is in both; "
            f"move one away, and set a limit that leaves room for what it holds"
        )
    if away.exists():
        return away
    return beside if beside.exists() or _takes_files(table.parent) else away


def _state_folder() -> Path:
    """Return where this system keeps what a user's programs remember."""
    chosen = os.environ.get("XDG_STATE_HOME", "").strip()
    if sys.platform == "win32":
        return Path(os.environ["LOCALAPPDATA"], "securevfl", "securevfl")
    if chosen:
        return Path(chosen, "securevfl")
    usual = "Library/Application Support" if sys.platform == "darwin" else ".local/state"
    return Path.home() / usual / "securevfl"


def _takes_files(folder: Path) -> bool:
    try:
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False


# What a ledger refuses, in words: beyond a session's plan, its budget, or the owner's limit.

_ROUNDING: Final = 1e-9
"""Releases in parts add up with other roundings than in one go, relative to epsilon."""


def require_size(plan: ReleasePlan, rows: int, *, party: str, what: str) -> None:
    """Refuse a round with more rows than the noise was chosen for.

    Raises:
        BudgetExceededError: If it has more.
    """
    if rows > plan.rows_per_round:
        raise BudgetExceededError(
            f"{party}: {what} has {rows} rows; the noise was chosen for {plan.rows_per_round} at "
            f"most"
        )


def require_planned(own: Session, after: Session, *, what: str) -> None:
    """Refuse what a session's noise was not chosen for, at any epsilon.

    Args:
        own: The session.
        after: The same as it would be.
        what: What was asked for.

    Raises:
        BudgetExceededError: If it would pass its plan.
    """
    plan = own.plan
    # Where records are counted, no number of rounds or rows shows more of any of them.
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
    """Refuse rows beyond those that all predictions of a model may ask for.

    Args:
        sessions: All of the model; the last one asks.
        most: How many rows they may release; None for any number.
        more: Rows of the request.

    Raises:
        BudgetExceededError: If they are too many.
    """
    asked = sum(session.row_releases for session in sessions)
    if most is not None and asked + more > most:
        raise BudgetExceededError(
            f"{sessions[-1].party}: {more} rows more would bring all predictions of this model to "
            f"{asked + more} rows, over prediction.rows = {most}; raise it in every party's file"
        )


def budget_of(sessions: Sequence[Session]) -> float | None:
    """Return the epsilon that sessions of one budget keep together; None where nothing bounds it.

    With ``noise_multiplier`` it is what the run's first session planned, for all later ones.
    Predictions then have no epsilon to keep.

    Args:
        sessions: All that share the budget, in order; the last one is under way.
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
    """Return the refusal of what a run's own budget does not cover.

    Args:
        own: The session.
        epsilon: What it would come to, with the sessions that share its budget.
        budget: What they may spend.
        spent: What its run has spent, and what the earlier sessions of the same budget have.
        what: What was asked for.
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
    """Return the refusal of what the table's owner does not allow.

    Args:
        book: Of the table.
        after: The session as it would be.
        what: What was asked for.
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


# A party's record of its releases and of the privacy spent: charge, then release.

_OF_A_FILE = ("federation", "settings", "party", "noise_share_std", "model")


class Ledger:
    """Book every release before it is made, and refuse what the budget does not cover.

    Three bounds hold, each by itself. A session cannot release more rounds or rows than were
    planned when its noise was chosen. All sessions of the run together keep ``privacy.epsilon`` or,
    with ``noise_multiplier``, the epsilon of the first one's plan. And all runs on the table
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
        """Open a ledger: a new one, or the one that lies there.

        Args:
            file: Its path, or the file, open; None keeps the record in memory only (the simulator).
            party: Whose releases these are, by the federation's name.
            plan: What this session will release.
            noise_share_std: ``tau``, the noise that this session really adds, as
                :meth:`ReleasePlan.noise_share_std` returned it; 0 for the mechanism ``none``.
            durable: Whether every charge must outlive a crash of the machine.
            run: The run's id, which all its sessions have in common; None begins a run.
            federation: Its federation's name.
            settings: The digest of its federation file's settings.
            model: Id of the run whose kept model predicts; empty for a run that trains.

        Raises:
            ConfigError: If the file is in use, of another version, or cannot be opened.
            PrivacyError: If the file was altered, or the run was charged for another unit before.
        """
        self.party = party
        self.records: RecordCounts | None = None
        """What counts a secondary's records, where each has a number of releases."""
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
        # Every charge keeps the plan: a limit that covers all of it need not be asked again.
        self._covered = self._book.limit_covers(self._whole)

    def begin(self, plan: ReleasePlan, *, run: str) -> None:
        """Begin another session in the same file, with the noise of the one before it.

        Where records are counted, the session that is under way goes on with the request.

        Args:
            plan: What it will release.
            run: Its own id.

        Raises:
            BudgetExceededError: If the budget does not cover all of it; nothing is written then.
            StorageError: If the disk takes no more.
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
        """Take over what earlier sessions of this run leave to be kept."""
        unit = self._own.plan.privacy.unit
        for session in self._sessions:
            if session.plan.privacy.unit != unit:
                raise PrivacyError(
                    f"{self.party}: this run was charged for unit = {session.plan.privacy.unit!r} "
                    f"before, and now asks for {unit!r}; restore the federation file, or begin "
                    f"another run"
                )
            if self._own.frozen:
                for first, last in session.released:
                    self._uses.add(np.arange(first, last + 1))

    @property
    def file(self) -> LedgerFile:
        """The file itself, for countersigning."""
        return self._file

    @property
    def path(self) -> Path | None:
        """Where the record lies."""
        return self._file.path

    @property
    def head(self) -> str:
        """The chain's head; keep it elsewhere to notice a ledger that was cut."""
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
        """What this run has answered on how many rows are linked, in any of its sessions."""
        row_counts = (session.linked_rows for session in self._sessions)
        return next((linked for linked in row_counts if linked is not None), None)

    @property
    def link_counts_due(self) -> int:
        """How often this run still has to answer how many rows are linked: once, or never again."""
        due = self._own.plan.linked_rows is not None
        return int(due and not any(session.link_counts for session in self._sessions))

    @property
    def released_rows(self) -> Int64[np.ndarray, " released"]:
        """Ids of the rows that a frozen run released, in all its sessions and in order."""
        return self._uses.rows if self._own.frozen else np.zeros(0, dtype=np.int64)

    @property
    def epsilon_spent(self) -> float:
        """Epsilon of this run, at its delta: of all its sessions together; rounded up.

        Where records are counted, all requests to the model are one run.
        """
        own = self.budget_sessions if self._own.counts_records else self._sessions
        return epsilon_of_sessions(own, delta=self._delta)

    @property
    def total(self) -> float:
        """Epsilon of all runs on the table, for this run's unit and at its delta; rounded up."""
        return self._book.total(self._own.plan.privacy.unit, delta=self._delta)

    @property
    def runs(self) -> int:
        """Runs on the table that spent anything for this run's unit, and programs."""
        return len(self._book.runs(unit=self._own.plan.privacy.unit)) + len(self._book.programs)

    @property
    def has_spent(self) -> bool:
        """Whether anything at all is booked."""
        return bool(self._book.runs())

    def outlook(self) -> Outlook:
        """Return what the run may spend, and what was spent on its table before."""
        return self._book.outlook(self._own, self._whole, budget=budget_of(self.budget_sessions))

    def require_room(self, *, rounds: int, row_releases: int, passes: int) -> None:
        """Refuse a run that could not finish; call it before anything is sent.

        Args:
            rounds: Releases still to be made, >= 0.
            row_releases: Their rows, summed; >= ``rounds``.
            passes: Most of them that one row will be in.

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
        """Book one release, durably; call it before the release, never after.

        A round that is aborted afterwards stays booked: others may have seen it. A training round
        of a dp-trained encoder is booked with the update that follows from it, made or not.

        Args:
            round_number: Rises within a session, from 1 on; a retry is a new round.
            rows: Ids of the release's rows; the file gets their number, and how often the most
                released of them was released. Of frozen encoders it gets the ids.
            purpose: What for; every purpose is charged alike.

        Returns:
            Epsilon of this run, this release included; rounded up.

        Raises:
            BudgetExceededError: If the budget or the plan does not cover it. Nothing is booked
                then, and the caller must not release.
            ConfigError: If the disk takes no more.
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
        if self._own.frozen and passes > plan.releases_per_row:
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
                **({"released": ranges_of(rows)} if self._own.frozen else {}),
                **({"counts": self.records.head} if self.records else {}),
            }
        )
        self._own.book(round_number=round_number, rows=len(rows), passes=passes, purpose=purpose)
        self._uses.add(rows)
        return epsilon

    def charge_fitting(self) -> float:
        """Book the fitting of a frozen encoder, durably; call it before its noise is drawn.

        Returns:
            Epsilon of this run, the fitting included; rounded up.

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

    def charge_link_count(self, draw: Callable[[], int] | None = None) -> float:
        """Book how many rows are linked, durably, with the number itself; once a run.

        The line has the number, so that there is no moment at which it is charged and not known, or
        known and not charged.

        Args:
            draw: Draws a secondary's noised number; None at the primary, which has none to give.

        Returns:
            Epsilon of this run, the number included; rounded up.

        Raises:
            BudgetExceededError: If the budget does not cover it; nothing is drawn or booked then.
            PrivacyError: If this run has no such number, or has answered before.
        """
        if not self.link_counts_due:
            raise PrivacyError(
                "how many rows are linked is said once in a run, where it is planned"
            )
        epsilon = self._require(
            rounds=0, rows=0, passes=0, link_counts=1, what="saying how many rows are linked"
        )
        linked, kind = None if draw is None else draw(), "link-count"
        self._file.append({"kind": kind, "linked": linked, "epsilon": finite_or_none(epsilon)})
        self._own.link_counts += 1
        self._own.linked_rows = linked
        return epsilon

    def count_records(self, folder: Path, keys: KeyTable) -> None:
        """Hold what counts in how many rows of predictions each record was released.

        Args:
            folder: The secondary's own in the run folder.
            keys: Of its records.

        Raises:
            ConfigError: If the file cannot be opened, or is in use.
            PrivacyError: If it is missing, damaged, or not of the same time as this ledger.
        """
        if self.records is None:
            last, lost = None, False
            for session in self.budget_sessions:
                # What was booked anew covers counts of any time, until they are booked again.
                if session.lost or session.counts:
                    last, lost = session.counts, session.lost
            self.records = RecordCounts(folder, self._file, keys, last=last, lost=lost)

    def require_same_release(self, digest: str) -> None:
        """Book what a frozen run makes its release with, and hold later sessions to the same.

        Sessions of one run that name the same are one fixed answer; others add up.

        Args:
            digest: Of all that the release is a function of, but for its rows and its noise:
                links, secret sample, encoder.

        Raises:
            PrivacyError: If the run released with others before.
        """
        if not self._own.frozen:
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
        """Refuse a ledger that does not hold the line whose hash was ``head``.

        Raises:
            PrivacyError: If the ledger was cut, or is another one.
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
        """Let the files go; later charges raise."""
        if self.records is not None:
            self.records.close()
        self._file.close()

    @property
    def _sessions(self) -> list[Session]:
        """This run's, in order; its last one is this one."""
        return [session for session in self._book.sessions if session.run == self.run]

    @property
    def sessions(self) -> list[Session]:
        """All on the table, in order; the last one is this one."""
        return self._book.sessions

    @property
    def budget_sessions(self) -> list[Session]:
        """Sessions that keep one epsilon with this one, in order; the last one is this one."""
        return [session for session in self._book.sessions if session.shares_budget_with(self._own)]

    @property
    def _whole(self) -> Session:
        """This session as it would be with everything released that is planned."""
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
        """Return the run's epsilon with so many more releases, if all bounds allow them.

        Args:
            what: What is asked for, in words.
            more: As :meth:`Session.with_more` takes it.
        """
        after = self._own.with_more(**more)
        require_planned(self._own, after, what=what)
        *earlier, _ = self.budget_sessions
        epsilon = epsilon_of_sessions([*earlier, after], delta=self._delta)
        budget = budget_of(self.budget_sessions)
        if budget is not None and not epsilon <= budget:  # written so that NaN fails
            spent = self.epsilon_spent, epsilon_of_sessions(earlier, delta=self._delta)
            raise over_budget(self._own, epsilon, budget=budget, spent=spent, what=what)
        # What the table's owner does not allow, no federation file changes.
        if not (self._covered or self._book.limit_covers(after)):
            raise over_limit(self._book, after, what=what)
        return epsilon


# A table's ledger as its owner reads it: runs, totals, limits; and how the owner sets one.


@dataclass(frozen=True, kw_only=True, slots=True)
class LabelsSpent(LabelTotal):
    """Label releases of all runs on a table."""

    runs: int


def labels_spent(sessions: Iterable[Session]) -> LabelsSpent | None:
    """Return what sessions released of labels together; None without such a release."""
    released = [session for session in sessions if session.labels]
    total = labels_total(label for session in released for label in session.labels)
    if total is None:
        return None
    return LabelsSpent(runs=len({session.run for session in released}), **asdict(total))


def label_figures(own: Sequence[Session], table: Sequence[Session]) -> dict[str, float | None]:
    """Return what a run's sessions released of labels, and all on the table, by name.

    Returns:
        ``epsilon`` against one secondary and ``together`` against all of them, at ``delta``;
        ``total_epsilon`` and ``total_together`` of all ``runs`` on the table; each None where the
        run released none.
    """
    run, total = labels_spent(own), labels_spent(table)
    if run is None or total is None:
        names = ("epsilon", "together", "delta", "total_epsilon", "total_together", "runs")
        return dict.fromkeys(names)
    return {
        "epsilon": run.epsilon,
        "together": run.together,
        "delta": run.delta,
        "total_epsilon": total.epsilon,
        "total_together": total.together,
        "runs": total.runs,
    }


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSpent:
    """What one run spent."""

    run: str
    federation: str
    party: str
    """Name of the table's party in the federation."""
    began: str
    """In UTC."""
    sessions: int
    unit: str
    encoder: str
    epsilon: float | None
    """All its sessions together; None: no bound."""
    delta: float
    releases: int
    row_releases: int
    lost: bool
    """True if some promise of the run has releases in no line, as the ledger was restored."""


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitSpent:
    """What all runs spent for one unit; totals of different units do not add up."""

    unit: str
    epsilon: float | None
    """None: no bound, as where a program has read the table."""
    delta: float
    """The limit's; without one, the smallest of the runs'."""
    runs: int
    limit: float | None
    """None: the owner has set none."""
    left: float | None
    """Epsilon left of the limit; programs that the owner allows take nothing of it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LedgerSummary:
    """What a ledger says."""

    ledger: str
    runs: tuple[RunSpent, ...]
    """In the order in which they began."""
    units: tuple[UnitSpent, ...]
    programs: tuple[ProgramUse, ...]
    """Programs that have read the table, in the order in which they ran."""
    programs_allowed: bool
    """True if the owner lets the next program read the table."""
    labels: LabelsSpent | None
    """Releases of the table's own labels, which only a primary has; None where there was none."""
    head: str
    """Hash of the last line."""


def summary_of(path: Path) -> LedgerSummary:
    """Read a ledger while no run holds it; nothing is written.

    Raises:
        ConfigError: If it cannot be opened, is in use, or is of another version.
        PrivacyError: If it was altered.
    """
    file = LedgerFile(path, read_only=True)
    try:
        book = file.book
        runs = [_run_spent(sessions) for sessions in book.runs().values()]
        units = [_unit_spent(book, unit) for unit in book.units]
        return LedgerSummary(
            ledger=str(path),
            runs=tuple(runs),
            units=tuple(units),
            programs=tuple(book.programs),
            programs_allowed=book.allows_programs,
            labels=labels_spent(book.sessions),
            head=file.head,
        )
    finally:
        file.close()


def set_limit(path: Path, limit: Limit) -> UnitSpent:
    """Append a limit to a table's ledger, making the file where needed; the newest one holds.

    Returns:
        What is spent of it.

    Raises:
        ConfigError: If the ledger cannot be opened or written, is in use, or is of another version.
        PrivacyError: If it was altered.
    """
    file = LedgerFile(path)
    try:
        book = file.book
        limit = replace(limit, time=now())
        file.append(limit.line())
        book.limits[limit.unit] = limit
        return _unit_spent(book, limit.unit)
    finally:
        file.close()


def allow_programs(path: Path, *, allowed: bool) -> None:
    """Append whether programs may read a table, making the file where needed; the newest one holds.

    Raises:
        ConfigError: As :func:`set_limit`.
        PrivacyError: As :func:`set_limit`.
    """
    with contextlib.closing(LedgerFile(path)) as file:
        file.append({"kind": "programs", "version": VERSION, "allowed": allowed, "time": now()})


def book_restored(path: Path) -> list[RunSpent]:
    """Book what a ledger that was restored from a copy may lack: every promise that is open.

    Each of :meth:`LedgerBook.open_promises` counts once more, in full. Whoever does it twice has
    booked twice: nobody can know that nothing was released in between. Only a ledger that ends with
    the head which the run that found it damaged has noted lacks nothing, and gets no line.

    Returns:
        What was booked, a promise each.

    Raises:
        ConfigError: If there is no ledger, it cannot be opened or written, or is in use.
        PrivacyError: If it was altered.
    """
    if not path.exists():
        raise ConfigError(f"ledger {path}: is not there; put the newest copy of it there first")
    with contextlib.closing(LedgerFile(path, restores=True)) as file:
        book, promises = file.book, file.book.open_promises()
        before = len(book.sessions)
        if promises and file.noted_head != file.head:
            line = {"kind": RESTORED, "version": VERSION, "time": now(), "promises": promises}
            file.append(line)
            book.take(line, f"ledger {path}")
        try:
            file.note.unlink(missing_ok=True)
        except OSError as error:
            raise ConfigError(
                f"ledger {path}: is booked; remove {file.note} by hand ({error.strerror})"
            ) from None
        return [_run_spent([session]) for session in book.sessions[before:]]


def _run_spent(sessions: list[Session]) -> RunSpent:
    first, privacy = sessions[0], sessions[-1].plan.privacy
    epsilon = epsilon_of_sessions(sessions, delta=privacy.delta)
    return RunSpent(
        run=first.run,
        federation=first.federation,
        party=first.party,
        began=first.time,
        sessions=len(sessions),
        unit=privacy.unit,
        encoder=privacy.encoder,
        epsilon=finite_or_none(epsilon),
        delta=privacy.delta,
        releases=sum(session.rounds for session in sessions),
        row_releases=sum(session.row_releases for session in sessions),
        lost=any(session.lost for session in sessions),
    )


def _unit_spent(book: LedgerBook, unit: str) -> UnitSpent:
    runs, limit = book.runs(unit=unit), book.limits.get(unit)
    deltas = [session.plan.privacy.delta for sessions in runs.values() for session in sessions]
    delta = limit.delta if limit else min(deltas)
    epsilon = book.total(unit, delta=delta)
    return UnitSpent(
        unit=unit,
        epsilon=finite_or_none(epsilon),
        delta=delta,
        runs=len(runs),
        limit=limit.epsilon if limit else None,
        left=book.epsilon_left(unit),
    )


def lines_of_run(path: Path, run: str) -> list[dict[str, Any]]:
    """Return what a ledger holds of one run, one mapping a line, as its sessions wrote them.

    Raises:
        ConfigError: If there is no ledger.
    """
    try:
        text = path.read_text(encoding="utf-8")
        lines = [strict_json(line, depth=MOST_LEVELS) for line in text.splitlines()]
    except (OSError, ValueError) as error:
        raise ConfigError(f"ledger {path}: cannot be read ({error})") from None
    run_lines, current = [], ""
    for line in lines:
        current = run_after(line, current)
        if current == run:
            run_lines.append(line)
    return run_lines


# A run's privacy figures, computed again from a ledger's lines.


def until_end(entries: Sequence[Mapping[str, Any]], run: str) -> Sequence[Mapping[str, Any]]:
    """Return a ledger's lines up to a run's last; later runs on the table are not in its figures.

    Args:
        entries: All lines.
        run: The run's id.
    """
    current, end = "", 0
    for number, entry in enumerate(entries, 1):
        current = run_after(entry, current)
        if current == run:
            end = number
    return entries[:end]


def recompute_figures(entries: Sequence[Mapping[str, Any]], run: str) -> dict[str, float | None]:
    """Return a run's privacy figures by name, as its ledger's lines give them.

    Args:
        entries: The ledger's lines up to the run's end.
        run: Its id.

    Returns:
        ``epsilon`` of the run and ``total_epsilon`` of all runs on the table, both at the run's
        delta and for its unit (None: no bound), ``releases`` and ``row_releases``; and those of
        labels, ``labels.epsilon`` and so on (None too where none was released).

    Raises:
        PrivacyError: If they are no ledger's lines, or hold nothing of the run.
    """
    book = LedgerBook()
    book.read(entries, where="the ledger")
    sessions = [session for session in book.sessions if session.run == run]
    if not sessions:
        raise PrivacyError(f"no session of run {run} was opened in it")
    privacy = sessions[-1].plan.privacy
    labels = label_figures(sessions, book.sessions)
    return {
        "epsilon": finite_or_none(epsilon_of_sessions(sessions, delta=privacy.delta)),
        "total_epsilon": finite_or_none(book.total(privacy.unit, delta=privacy.delta)),
        "releases": sum(session.rounds for session in sessions),
        "row_releases": sum(session.row_releases for session in sessions),
        **{f"labels.{name}": value for name, value in labels.items()},
    }
