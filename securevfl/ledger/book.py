"""The content of a ledger's lines: sessions, runs, totals and the owner's limits.

An ``open`` line holds a session's plan, a ``charge`` line one release, ``fit`` the fitting of a
frozen encoder, ``link-count`` a report of linked rows, ``release`` the digest of a frozen run's
release, ``labels`` a release of labels to secondaries, ``program`` a program that reads the table,
``limit`` and ``programs`` the owner's choices, and ``restored`` the promises that a restored copy
may lack. ``countersigned`` and ``forgotten`` lines are about other parties' ledgers.

A run consists of all sessions with one id: the first, and those that resumed it. The costs of runs
add up, and so do those of a run's sessions, with two exceptions. Sessions of a frozen run that
continue the same release (the same links, secret sample and encoder) are parts of one fixed answer,
and together cost as much as that answer. Requests for predictions of a model whose secondaries
count the releases of each record are parts of one adaptive answer, and together cost as much as the
promised number of releases. No epsilon bounds a program that has read the table. If a ledger was
restored from a copy, each promise that may have been used since counts once more, in full.
"""

import math
import secrets
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Final

import numpy as np
from jaxtyping import Int64

from securevfl.core import checks
from securevfl.core.errors import BudgetExceededError, ConfigError, PrivacyError
from securevfl.core.formatting import finite_or_none
from securevfl.core.settings import read_settings
from securevfl.dp.accountant import epsilon_of
from securevfl.dp.events import GaussianRelease, Release
from securevfl.dp.gaussian import gaussian_noise_multiplier
from securevfl.dp.labels import LabelRelease, LabelTotal, labels_total
from securevfl.dp.privacy import Privacy, UnitName
from securevfl.dp.release_plan import ReleasePlan
from securevfl.ledger.countersigning import COUNTERSIGNED, END, FORGOTTEN, OtherLedgers

LABELS: Final = "labels"
"""Kind of a line about labels that secondaries are sent."""
PROGRAM: Final = "program"
"""Kind of a line about a program that reads the table."""
RESTORED: Final = "restored"
"""Kind of a line that books what may be missing in a copy."""


MOST_ROWS: Final = 2**31
"""More rows than any table has; an id above it is not one."""


class ReleaseCounts:
    """The number of releases of each row."""

    def __init__(self) -> None:
        self._counts = np.zeros(0, dtype=np.int32)

    def most_with(self, rows: Int64[np.ndarray, " batch"]) -> int:
        """Return the largest release count among these rows if they were released once more."""
        self._reach(int(rows.max()))
        ids, counts = np.unique(rows, return_counts=True)
        return int((self._counts[ids] + counts).max())

    def add(self, rows: Int64[np.ndarray, " batch"]) -> None:
        """Count a release of these rows."""
        self._reach(int(rows.max()))
        np.add.at(self._counts, rows, 1)

    @property
    def rows(self) -> Int64[np.ndarray, " released"]:
        """Ids of the rows that were released, in order."""
        return np.flatnonzero(self._counts)

    def _reach(self, row: int) -> None:
        if row >= len(self._counts):
            more = max(row + 1, 2 * len(self._counts)) - len(self._counts)
            self._counts = np.concatenate([self._counts, np.zeros(more, dtype=np.int32)])


def ranges_of(rows: Int64[np.ndarray, " batch"]) -> list[tuple[int, int]]:
    """Return ids as inclusive ranges."""
    ids = np.unique(rows)
    ends = np.flatnonzero(np.diff(ids) != 1)
    first, last = ids[np.append(0, ends + 1)], ids[np.append(ends, len(ids) - 1)]
    return list(zip(first.tolist(), last.tolist(), strict=True))


def ranges_from(written: Iterable[Iterable[int]], *, rows: int) -> list[tuple[int, int]]:
    """Read the ranges of :func:`ranges_of`, which must hold ``rows`` rows.

    Raises:
        ValueError: If they are not valid ranges of ``rows`` rows.
    """
    ranges = [(int(first), int(last)) for first, last in written]
    sizes = [last - first + 1 for first, last in ranges if 0 <= first <= last < MOST_ROWS]
    if len(sizes) < len(ranges) or sum(sizes) != rows:
        raise ValueError(f"released: is not {rows} rows in ranges")
    return ranges


VERSION: Final = 5
"""Format version of the lines that this program writes, and the only one that it reads."""

_TEXTS: Final = ("run", "federation", "settings", "party", "time")
"""Text fields of the line that opens a session."""


@dataclass(kw_only=True)
class Session:
    """A session of a run: its plan, and its releases so far."""

    run: str
    """The run's id."""
    federation: str
    """Name of the run's federation."""
    settings: str
    """Digest of the federation file's settings."""
    party: str
    """Name of the table's party in the federation."""
    time: str
    """Start of the session, in UTC."""
    plan: ReleasePlan
    noise_share_std: float
    """``tau``; 0 adds no noise."""
    model: str = ""
    """Id of the run whose kept model predicts in this session; empty for a session that trains."""

    counts: str | None = None
    """Head of the record counts at the last release; None without counts."""
    fits: int = 0
    """Number of fittings of a frozen encoder."""
    link_counts: int = 0
    """Number of reports of linked rows."""
    linked_rows: int | None = None
    """Linked-row count that a secondary has reported; None before that, and at the primary."""
    rounds: int = 0
    row_releases: int = 0
    passes: int = 0
    """Largest number of rounds with the same row."""
    updates: int = 0
    last_round: int = 0
    release: str | None = None
    """Digest of a frozen run's release (links, sample, encoder); None before it is booked."""
    released: list[tuple[int, int]] = field(default_factory=list)
    """Rows that a frozen session released, in ranges with both ends in them."""
    labels: list[LabelRelease] = field(default_factory=list)
    """Releases of the primary's labels to secondaries, which have their own epsilon."""
    lost: bool = False
    """True if the session stands for everything that a run or model may have released without a
    line, since its ledger was restored from a copy."""
    _known: tuple[tuple[int, ...], list[Release]] | None = field(
        default=None, init=False, repr=False, compare=False
    )
    """Cached :meth:`events`, with the counts they were made for: every charge asks for all."""

    def __post_init__(self) -> None:
        checks.non_negative(noise_share_std=self.noise_share_std)

    @property
    def releases_once(self) -> bool:
        """Whether the session's releases are parts of one fixed answer."""
        return self.plan.privacy.regime.releases_once

    @property
    def counts_records(self) -> bool:
        """Whether a record's number of releases is limited over all requests to the model.

        All requests are then parts of one answer, in one session.
        """
        return self.plan.releases_per_record is not None

    @property
    def has_spent(self) -> bool:
        """Whether anything was released or fitted."""
        return self.fits + self.rounds + self.link_counts > 0

    def goes_on_with(self, plan: ReleasePlan) -> bool:
        """Return whether this session can continue with another request of that plan."""
        sizes = {name: getattr(plan, name) for name in ("rounds", "rows_per_round", "row_releases")}
        return self.counts_records and replace(self.plan, **sizes) == plan

    def book(self, *, round_number: int, rows: int, passes: int, purpose: str) -> None:
        """Count a round."""
        self.rounds += 1
        self.updates += purpose == "train" and self.plan.privacy.regime.noises_updates
        self.row_releases += rows
        self.passes = max(self.passes, passes)
        self.last_round = round_number

    def with_more(
        self, *, rounds: int, rows: int, passes: int, fits: int = 0, link_counts: int = 0
    ) -> "Session":
        """Return the session as it would be with further releases."""
        return replace(
            self,
            fits=self.fits + fits,
            link_counts=self.link_counts + link_counts,
            rounds=self.rounds + rounds,
            row_releases=self.row_releases + rows,
            passes=max(self.passes, passes),
        )

    def continues_in(self, later: "Session") -> bool:
        """Return whether a later session released further parts of the same fixed answer."""
        # A session that fitted an encoder but released nothing has revealed nothing; its encoder is
        # lost.
        only_fitted = self.release is None and self.rounds == 0
        return (
            self.releases_once
            and not self.lost
            and not later.lost
            and later.release is not None
            and self.run == later.run
            and (only_fitted or self.release == later.release)
            and self.noise_share_std == later.noise_share_std
            and self.plan == later.plan
            and self.fits + later.fits <= 1
        )

    def events(self) -> list[Release]:
        """Return the session's releases for an accountant.

        Reveals:
            Nothing: it is computed from earlier releases.
        """
        booked = self.fits, self.link_counts, self.rounds, self.row_releases, self.passes
        if self._known is None or self._known[0] != booked:
            self._known = booked, self._events()
        return self._known[1]

    def _events(self) -> list[Release]:
        if self.lost and self.model:
            # Unknown requests, within the budget of all the model's predictions.
            privacy = self.plan.privacy
            sound = privacy.accounting == "sound"
            epsilon = (sound and privacy.epsilon) or self.plan.epsilon(self.noise_share_std)
            multiplier = gaussian_noise_multiplier(epsilon=epsilon, delta=privacy.delta)
            return [GaussianRelease(noise_multiplier=multiplier)]
        # Releases of a fitted encoder include its fitting, in any session.
        before: list[Release] = []
        if self.fits + self.rounds:
            before += self.plan.fitting_releases()
        for _ in range(self.link_counts):
            before += self.plan.link_count_releases(self.noise_share_std)
        if self.rounds == 0:
            return before
        return [
            *before,
            self.plan.release(
                self.noise_share_std,
                rounds=self.rounds,
                row_releases=self.row_releases,
                passes=self.passes,
            ),
        ]

    def promise(self, *, run: str, model: str, time: str) -> "Session":
        """Return a session that has released everything promised for this one's run or model.

        Args:
            run: The new session's run id; this session's for the training of a run.
            model: Id of the run whose model predicted; empty for training.
            time: Time of booking, in UTC.
        """
        privacy, plan = self.plan.privacy, self.plan
        # Predictions without an epsilon, bounded in number only, may have revealed anything.
        sound = privacy.epsilon is not None and privacy.accounting == "sound"
        bounded = sound or not self.model or self.counts_records
        own = Session(
            **{name: getattr(self, name) for name in ("federation", "settings", "party", "plan")},
            run=run,
            model=model,
            time=time,
            lost=True,
            noise_share_std=self.noise_share_std if bounded else 0.0,
            labels=[] if model else list(self.labels),
        )
        if model:
            return own.with_more(rounds=1, rows=0, passes=0)
        return own.with_more(
            rounds=plan.rounds, rows=plan.row_releases, passes=plan.releases_per_row
        )

    def opening(self) -> dict[str, Any]:
        """Return the session's ``open`` line."""
        return {
            "kind": "open",
            "version": VERSION,
            **{name: getattr(self, name) for name in _TEXTS},
            "noise_share_std": self.noise_share_std,
            "plan": asdict(self.plan),
            **({"model": self.model} if self.model else {}),
        }

    def shares_budget_with(self, other: "Session") -> bool:
        """Return whether both share a budget: sessions of one run, or one model's predictions."""
        return self.model == other.model if self.model else self.run == other.run


@dataclass(frozen=True, kw_only=True, slots=True)
class Limit:
    """The owner's limit of what all runs on a table may spend together, for one unit."""

    unit: UnitName
    epsilon: float
    delta: float
    """Delta at which the limit's epsilon holds; no federation file changes it."""
    time: str = ""
    """Time when the limit was set, in UTC."""

    def __post_init__(self) -> None:
        Privacy(epsilon=self.epsilon, delta=self.delta, unit=self.unit)

    def line(self) -> dict[str, Any]:
        """Return the ledger's ``limit`` line."""
        return {"kind": "limit", "version": VERSION, **asdict(self)}


@dataclass(frozen=True, kw_only=True, slots=True)
class ProgramUse:
    """A program that has read a table; no epsilon bounds what it reveals."""

    run: str
    """Id of the session in which it ran."""
    federation: str
    """Name of the session's federation."""
    party: str
    """Name of the table's party in the federation."""
    program: str
    """Digest of the program."""
    peers: Mapping[str, str]
    """Public identity of each other party that took part, by name."""
    time: str
    """Time of booking, in UTC."""

    def line(self) -> dict[str, Any]:
        """Return the ledger's ``program`` line."""
        return {"kind": PROGRAM, "version": VERSION, **asdict(self)}


@dataclass(frozen=True, kw_only=True, slots=True)
class Outlook:
    """The planned spending of a run, and earlier spending on the same table."""

    epsilon: float
    """Epsilon of the run when all that is planned is released; infinite: no bound."""
    total_before: float
    """Total epsilon of earlier runs on the table, for the same unit and at the same delta."""
    runs_before: int
    total: float
    """Total epsilon of the earlier runs and this one."""
    unit: str
    delta: float
    limit: Limit | None
    """Limit of the table's owner for this unit; None allows everything."""


class LedgerBook:
    """The content of a ledger, built line by line."""

    def __init__(self) -> None:
        self.sessions: list[Session] = []
        """All sessions, in the order of their start."""
        self.limits: dict[str, Limit] = {}
        """The newest limit of each unit."""
        self.programs: list[ProgramUse] = []
        """Programs that have read the table, in order."""
        self.programs_allowed: bool | None = None
        """Whether the owner lets programs read the table; None: unless there is a limit."""
        self.others = OtherLedgers()
        """Remembered ledgers of other parties."""
        self._met: set[str] = set()
        """Runs that parties have countersigned at any point."""
        self._ended: set[str] = set()
        """Runs that parties have countersigned at their end."""

    def read(self, entries: Iterable[Mapping[str, Any]], *, where: str) -> None:
        """Add all lines of a file.

        Raises:
            ConfigError: If they are of another format version.
            PrivacyError: If a line is not valid.
        """
        for number, entry in enumerate(entries, 1):
            self.take(entry, where=f"{where}, line {number}")

    def take(self, entry: Mapping[str, Any], where: str) -> None:
        """Add a line; see :meth:`read`."""
        kind = entry.get("kind")
        reader = _KINDS.get(kind) if isinstance(kind, str) else None
        if reader is None or not (self.sessions or kind in _FIRST):
            raise PrivacyError(f"{where}: is not a line that a ledger can have there")
        if kind in _FIRST and entry.get("version") != VERSION:
            raise ConfigError(
                f"{where}: was written in version {entry.get('version')!r} of the format; this "
                f"program reads version {VERSION}. Keep the file, and what it says was spent, by "
                f"another name"
            )
        try:
            reader(self, entry)
        except (KeyError, TypeError, ValueError, AttributeError, PrivacyError) as error:
            raise PrivacyError(f"{where}: is not a ledger's line ({error})") from None

    @property
    def units(self) -> list[str]:
        """Units with any spending or limit."""
        spent = [session.plan.privacy.unit for session in self.sessions if session.has_spent]
        return sorted({*spent, *self.limits})

    def runs(self, *, unit: str | None = None) -> dict[str, list[Session]]:
        """Return the sessions with spending, by run; of one unit, or of all."""
        sessions_by_run: dict[str, list[Session]] = {}
        for session in self.sessions:
            if session.has_spent and unit in (None, session.plan.privacy.unit):
                sessions_by_run.setdefault(session.run, []).append(session)
        return sessions_by_run

    def total(self, unit: str, *, delta: float) -> float:
        """Return the epsilon of all spending for a unit at ``delta``, rounded up.

        It is infinite if a program has read the table.
        """
        return math.inf if self.programs else self._of_runs(unit, delta=delta)

    def _of_runs(self, unit: str, *, delta: float) -> float:
        return epsilon_of_sessions(
            [session for session in self.sessions if session.plan.privacy.unit == unit], delta=delta
        )

    def epsilon_left(self, unit: str) -> float | None:
        """Return the epsilon left of a unit's limit; allowed programs do not reduce it."""
        limit = self.limits.get(unit)
        if limit is None:
            return None
        counts = self.programs and not self.programs_allowed
        spent = math.inf if counts else self._of_runs(unit, delta=limit.delta)
        return max(0.0, limit.epsilon - spent)

    @property
    def allows_programs(self) -> bool:
        """Whether programs may read the table: the owner's choice, or else without a limit."""
        return not self.limits if self.programs_allowed is None else self.programs_allowed

    def require_program(self, party: str) -> None:
        """Refuse a program unless the table's owner allows programs.

        Args:
            party: Name of the table's party in the federation.

        Raises:
            BudgetExceededError: If the owner refuses programs, or has set a limit and not allowed
                them.
        """
        if self.allows_programs:
            return
        why = "refuses programs" if self.programs_allowed is False else "has set a limit"
        raise BudgetExceededError(
            f"{party}: the owner of this table {why}, and no epsilon bounds what a program reveals "
            f"of it; only the owner can allow it: securevfl ledger limit TABLE --programs allow"
        )

    def open_promises(self) -> list[dict[str, str]]:
        """Return promises that may have been used since this file was copied, in a line's format.

        For each run that has begun: its training, unless its end is countersigned here, and all
        predictions of its model. For each model with requests: all its predictions. A run whose
        session has neither met the others nor charged anything counts as begun only if it is the
        last one.
        """
        own = [session for session in self.sessions if not session.lost]
        runs = {
            session.run: session.run not in self._ended
            for session in own
            if not session.model
            and (session.has_spent or session.run in self._met or session is own[-1])
        }
        models = {**runs, **{session.model: True for session in own if session.model}}
        return [{"run": run, "model": ""} for run, trains in runs.items() if trains] + [
            {"run": secrets.token_hex(16), "model": model} for model in models
        ]

    def limit_covers(self, after: Session) -> bool:
        """Return whether the owner's limit would cover the newest session as ``after``."""
        total = self.limited_total(after)
        return not self.limits or (
            total is not None and total <= self.limits[after.plan.privacy.unit].epsilon
        )

    def limited_total(self, after: Session) -> float | None:
        """Return the epsilon that all runs would have spent at the limit's delta; None without one.

        Args:
            after: The newest session as it would be.
        """
        unit = after.plan.privacy.unit
        limit = self.limits.get(unit)
        if limit is None:
            return None
        if self.programs and not self.programs_allowed:
            return math.inf
        *earlier, _ = [session for session in self.sessions if session.plan.privacy.unit == unit]
        return epsilon_of_sessions([*earlier, after], delta=limit.delta)

    def outlook(self, own: Session, whole: Session, *, budget: float | None) -> Outlook:
        """Return a run's planned spending, and the spending before it.

        Args:
            own: The run's newest session.
            whole: The session with everything planned released.
            budget: Epsilon that the run's sessions keep together; None without one.
        """
        privacy = own.plan.privacy
        others = [session for session in self.sessions if session.plan.privacy.unit == privacy.unit]
        before = [session for session in others if session.run != own.run]
        mine = [session for session in others if session.run == own.run and session is not own]
        epsilon = epsilon_of_sessions([*mine, whole], delta=privacy.delta)
        # A resumed run checks before every release, and stops within its budget.
        epsilon = epsilon if budget is None else min(epsilon, budget)
        programs = math.inf if self.programs else 0.0
        return Outlook(
            epsilon=epsilon,
            total_before=max(programs, epsilon_of_sessions(before, delta=privacy.delta)),
            runs_before=len({session.run for session in before if session.has_spent})
            + len(self.programs),
            total=max(programs, epsilon_of_sessions([*before, *mine, whole], delta=privacy.delta)),
            unit=privacy.unit,
            delta=privacy.delta,
            limit=self.limits.get(privacy.unit),
        )

    def _open(self, entry: Mapping[str, Any]) -> None:
        texts: dict[str, Any] = {name: str(entry[name]) for name in _TEXTS}
        self.sessions.append(
            Session(
                **texts,
                plan=read_settings(ReleasePlan, entry["plan"], where="plan"),
                noise_share_std=entry["noise_share_std"],
                model=str(entry.get("model", "")),
            )
        )

    def _charge(self, entry: Mapping[str, Any]) -> None:
        session = self.sessions[-1]
        checks.whole(**{name: entry[name] for name in ("round", "rows", "passes")})
        checks.at_least(1, **{name: entry[name] for name in ("round", "rows", "passes")})
        session.book(
            round_number=entry["round"],
            rows=entry["rows"],
            passes=entry["passes"],
            purpose=entry["purpose"],
        )
        session.counts = str(entry["counts"]) if "counts" in entry else None
        if session.releases_once:
            session.released += ranges_from(entry["released"], rows=entry["rows"])

    def _fit(self, _entry: Mapping[str, Any]) -> None:
        self.sessions[-1].fits += 1

    def _link_count(self, entry: Mapping[str, Any]) -> None:
        session, linked = self.sessions[-1], entry["linked"]
        if linked is not None:
            checks.whole_from(0, linked=linked)
        session.link_counts += 1
        session.linked_rows = linked

    def _release(self, entry: Mapping[str, Any]) -> None:
        self.sessions[-1].release = str(entry["digest"])

    def _labels(self, entry: Mapping[str, Any]) -> None:
        self.sessions[-1].labels.append(LabelRelease(**_fields_of(LabelRelease, entry)))

    def _limit(self, entry: Mapping[str, Any]) -> None:
        limit = read_settings(Limit, _fields_of(Limit, entry), where="limit")
        self.limits[limit.unit] = limit

    def _program(self, entry: Mapping[str, Any]) -> None:
        self.programs.append(ProgramUse(**_fields_of(ProgramUse, entry)))

    def _programs(self, entry: Mapping[str, Any]) -> None:
        self.programs_allowed = entry["allowed"] is True

    def _restore(self, entry: Mapping[str, Any]) -> None:
        for promise in entry["promises"]:
            run, model = str(promise["run"]), str(promise["model"])
            known = [other for other in self.sessions if not other.lost]
            # A model without requests before the copy counts as its training does.
            asked = [other for other in known if model and other.model == model]
            last = (asked or [other for other in known if other.run == (model or run)])[-1]
            self.sessions.append(last.promise(run=run, model=model, time=str(entry["time"])))

    def _of_others(self, entry: Mapping[str, Any]) -> None:
        """Add a line about other parties' ledgers, which charges nothing."""
        self.others.take(entry)
        if entry["kind"] == COUNTERSIGNED:
            self._met.add(str(entry["run"]))
            if entry["point"] == END:
                self._ended.add(str(entry["run"]))


def _fields_of(kind: type[Any], entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return a line's values for the fields of a dataclass, by name."""
    return {data_field.name: entry[data_field.name] for data_field in fields(kind)}


_KINDS: Final[Mapping[str, Callable[[LedgerBook, Mapping[str, Any]], None]]] = {
    "open": LedgerBook._open,
    "charge": LedgerBook._charge,
    "fit": LedgerBook._fit,
    "link-count": LedgerBook._link_count,
    "release": LedgerBook._release,
    LABELS: LedgerBook._labels,
    "limit": LedgerBook._limit,
    PROGRAM: LedgerBook._program,
    "programs": LedgerBook._programs,
    RESTORED: LedgerBook._restore,
    COUNTERSIGNED: LedgerBook._of_others,
    FORGOTTEN: LedgerBook._of_others,
}
"""Method that adds each kind of line to a book."""

_FIRST: Final = ("open", "limit", PROGRAM, "programs", RESTORED)
"""Kinds of lines that do not belong to an earlier run, so that they may be a ledger's first line;
they have the format's version."""


def run_after(entry: Mapping[str, Any], run: str) -> str:
    """Return the run that lines belong to from this one on; empty: no run.

    Args:
        entry: A line.
        run: Id of the run that the previous line belongs to.
    """
    return str(entry.get("run", "")) if entry["kind"] in _FIRST else run


def epsilon_of_sessions(sessions: Sequence[Session], *, delta: float) -> float:
    """Return the epsilon of all sessions together at ``delta``, rounded up; infinite without noise.

    Raises:
        ConfigError: If delta is too small for the accounting.

    Reveals:
        Nothing: it is computed from earlier releases.
    """
    parts: dict[str, list[Session]] = {}
    for session in sessions:
        if not session.has_spent:
            continue
        if session.noise_share_std == 0:
            return math.inf
        # Only sessions of one run can be parts of one answer.
        own = parts.setdefault(session.run, [])
        for number, part in enumerate(own):
            if part.continues_in(session):
                more = part.with_more(
                    rounds=session.rounds,
                    rows=session.row_releases,
                    passes=session.passes,
                    fits=session.fits,
                    link_counts=session.link_counts,
                )
                own[number] = replace(more, release=session.release)
                break
        else:
            own.append(session)
    events, asked = [], Counter[Release]()
    counted: dict[str, list[Session]] = {}
    for part in (session for own in parts.values() for session in own):
        if part.counts_records:
            counted.setdefault(part.run if part.lost else part.model, []).append(part)
        elif part.model and not part.lost:
            # Many requests are equal, so equal releases are composed as one with a count.
            asked.update(part.events())
        else:
            events += part.events()
    events += [replace(event, count=event.count * times) for event, times in asked.items()]
    for own in counted.values():
        # No record was released more often than the largest promised N, and never with a smaller
        # noise multiplier than in the session with the smallest.
        most = max(session.plan.releases_per_record or 0 for session in own)
        promised = [
            replace(session.plan, releases_per_record=most).release(
                session.noise_share_std, rounds=1, row_releases=1
            )
            for session in own
        ]
        events.append(max(promised, key=lambda event: epsilon_of([event], delta=delta)))
    return epsilon_of(events, delta=delta)


@dataclass(frozen=True, kw_only=True, slots=True)
class LabelsSpent(LabelTotal):
    """Label releases of all runs on a table."""

    runs: int


def labels_spent(sessions: Iterable[Session]) -> LabelsSpent | None:
    """Return the total of the sessions' label releases; None without any."""
    released = [session for session in sessions if session.labels]
    total = labels_total(label for session in released for label in session.labels)
    if total is None:
        return None
    return LabelsSpent(runs=len({session.run for session in released}), **asdict(total))


def label_figures(own: Sequence[Session], table: Sequence[Session]) -> dict[str, float | None]:
    """Return the privacy figures of labels, of a run's sessions and of the table's, by name.

    Returns:
        ``epsilon`` against one secondary and ``together`` against all of them, at ``delta``;
        ``total_epsilon`` and ``total_together`` of all ``runs`` on the table; all None if the run
        released no labels.
    """
    run = labels_spent(own)
    total = None if run is None else labels_spent(table)
    return {
        **{name: getattr(run, name, None) for name in ("epsilon", "together", "delta")},
        "total_epsilon": getattr(total, "epsilon", None),
        "total_together": getattr(total, "together", None),
        "runs": getattr(total, "runs", None),
    }


def until_end(entries: Sequence[Mapping[str, Any]], run: str) -> Sequence[Mapping[str, Any]]:
    """Return a ledger's lines up to a run's last line, without later runs on the table.

    Args:
        entries: All lines of the ledger.
        run: The run's id.
    """
    current, end = "", 0
    for number, entry in enumerate(entries, 1):
        current = run_after(entry, current)
        if current == run:
            end = number
    return entries[:end]


def recompute_figures(entries: Sequence[Mapping[str, Any]], run: str) -> dict[str, float | None]:
    """Return a run's privacy figures by name, computed again from its ledger's lines.

    Args:
        entries: The ledger's lines up to the run's end.
        run: Its id.

    Returns:
        ``epsilon`` of the run and ``total_epsilon`` of all runs on the table, both at the run's
        delta and for its unit (None: no bound), ``releases`` and ``row_releases``; and the figures
        of labels, ``labels.epsilon`` and so on (None if none was released).

    Raises:
        PrivacyError: If they are no ledger's lines, or have no session of the run.
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
