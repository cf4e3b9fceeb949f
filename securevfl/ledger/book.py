"""The lines of a ledger read: sessions, runs, totals and the owner's limit.

A run is all sessions with one id: the first, and those that resumed it. Runs add up, and so do a
run's sessions; but sessions of a frozen run that continue one and the same release (the same
links, secret sample and encoder) are parts of one fixed answer, and cost what the answer costs.
Requests for predictions of a model whose secondaries count the releases of each record are parts of
one adaptive answer: together they cost what the promised number of releases costs.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final

import numpy as np
from jaxtyping import Int64

from securevfl.core import checks
from securevfl.core.errors import ConfigError, PrivacyError
from securevfl.core.settings import read_settings
from securevfl.dp.accountant import epsilon_of
from securevfl.dp.events import GaussianRelease, Release
from securevfl.dp.labels import LabelRelease
from securevfl.dp.privacy import Privacy, UnitName
from securevfl.dp.release_plan import ReleasePlan
from securevfl.ledger.countersigning import COUNTERSIGNED, FORGOTTEN, OtherLedgers

LABELS: Final = "labels"
"""Kind of a line about labels that secondaries are sent."""

# How often each row was released, and row ids in few characters.

MOST_ROWS: Final = 2**31
"""More rows than any table has; an id above it is not one."""


class ReleaseCounts:
    """How often each row was released: one small number a row."""

    def __init__(self) -> None:
        self._counts = np.zeros(0, dtype=np.int32)

    def most_with(self, rows: Int64[np.ndarray, " batch"]) -> int:
        """Return the most releases that one of these rows would have with this one."""
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
    """Return ids as ranges with both ends in them."""
    ids = np.unique(rows)
    ends = np.flatnonzero(np.diff(ids) != 1)
    first, last = ids[np.append(0, ends + 1)], ids[np.append(ends, len(ids) - 1)]
    return list(zip(first.tolist(), last.tolist(), strict=True))


def ranges_from(written: Iterable[Iterable[int]], *, rows: int) -> list[tuple[int, int]]:
    """Read what :func:`ranges_of` has made of so many rows.

    Raises:
        ValueError: If these are no ranges, or not of so many rows.
    """
    ranges = [(int(first), int(last)) for first, last in written]
    sizes = [last - first + 1 for first, last in ranges if 0 <= first <= last < MOST_ROWS]
    if len(sizes) < len(ranges) or sum(sizes) != rows:
        raise ValueError(f"released: is not {rows} rows in ranges")
    return ranges


# What the lines of a ledger say: sessions, runs, what they cost together, and the owner's limit.

VERSION: Final = 5
"""Of the lines that this program writes, and the only one that it reads."""

_TEXTS: Final = ("run", "federation", "settings", "party", "time")
"""What the line that opens a session says of it in words."""


@dataclass(kw_only=True)
class Session:
    """What was planned when the ledger was opened, and what has been released since."""

    run: str
    """The run's id."""
    federation: str
    """Its federation's name."""
    settings: str
    """Digest of the federation file's settings."""
    party: str
    """What the federation calls the table's party."""
    time: str
    """When it began, in UTC."""
    plan: ReleasePlan
    noise_share_std: float
    """``tau``; 0 adds no noise."""
    model: str = ""
    """Id of the run whose kept model predicts in this session; empty for a session that trains."""

    counts: str | None = None
    """Where records are counted: the head of what counts them, at the last release; None at the
    primary, which has no records."""
    fits: int = 0
    """Fittings of a frozen encoder."""
    link_counts: int = 0
    """Answers on how many rows are linked."""
    linked_rows: int | None = None
    """What a secondary has answered; None before that, and at the primary."""
    rounds: int = 0
    row_releases: int = 0
    passes: int = 0
    """Most rounds that one row was in."""
    updates: int = 0
    last_round: int = 0
    release: str | None = None
    """Digest of what a frozen run's release is made with; None before it is named."""
    released: list[tuple[int, int]] = field(default_factory=list)
    """Rows that a frozen session released, in ranges with both ends in them."""
    labels: list[LabelRelease] = field(default_factory=list)
    """Releases of the primary's labels to secondaries: another promise, never in epsilon."""
    _known: tuple[tuple[int, ...], list[Release]] | None = field(
        default=None, init=False, repr=False, compare=False
    )
    """Cached :meth:`events`, with the counts they were made for: every charge asks for all."""

    def __post_init__(self) -> None:
        checks.non_negative(noise_share_std=self.noise_share_std)

    @property
    def frozen(self) -> bool:
        """Whether the session's releases are parts of one fixed answer."""
        return self.plan.privacy.encoder == "frozen"

    @property
    def counts_records(self) -> bool:
        """Whether all requests to the model are parts of one answer, in which records are counted.

        The session then goes on with one request after another.
        """
        return self.plan.releases_per_record is not None

    @property
    def spent(self) -> bool:
        """Whether anything was released or fitted."""
        return self.fits + self.rounds + self.link_counts > 0

    def goes_on_with(self, plan: ReleasePlan) -> bool:
        """Return whether another request with that plan is under the same promise."""
        sizes = {name: getattr(plan, name) for name in ("rounds", "rows_per_round", "row_releases")}
        return self.counts_records and replace(self.plan, **sizes) == plan

    def book(self, *, round_number: int, rows: int, passes: int, purpose: str) -> None:
        """Count a round."""
        self.rounds += 1
        self.updates += purpose == "train" and self.plan.privacy.encoder == "dp-trained"
        self.row_releases += rows
        self.passes = max(self.passes, passes)
        self.last_round = round_number

    def with_more(
        self, *, rounds: int, rows: int, passes: int, fits: int = 0, link_counts: int = 0
    ) -> "Session":
        """Return the session as it would be with so many more releases."""
        return replace(
            self,
            fits=self.fits + fits,
            link_counts=self.link_counts + link_counts,
            rounds=self.rounds + rounds,
            row_releases=self.row_releases + rows,
            passes=max(self.passes, passes),
        )

    def continues_in(self, later: "Session") -> bool:
        """Return whether a later session made further parts of the same fixed answer."""
        # One that fitted and released nothing revealed nothing: what it fitted is lost.
        only_fitted = self.release is None and self.rounds == 0
        return (
            self.frozen
            and later.release is not None
            and self.run == later.run
            and (only_fitted or self.release == later.release)
            and self.noise_share_std == later.noise_share_std
            and self.plan == later.plan
            and self.fits + later.fits <= 1
        )

    def events(self) -> list[Release]:
        """Return what the session released, for an accountant.

        Reveals:
            Nothing: it computes what was released before.
        """
        booked = self.fits, self.link_counts, self.rounds, self.row_releases, self.passes
        if self._known is None or self._known[0] != booked:
            self._known = booked, self._events()
        return self._known[1]

    def _events(self) -> list[Release]:
        # A release of a fitted encoder has its fitting behind it, in any session.
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

    def opening(self) -> dict[str, Any]:
        """Return its ``open`` line."""
        return {
            "kind": "open",
            "version": VERSION,
            **{name: getattr(self, name) for name in _TEXTS},
            "noise_share_std": self.noise_share_std,
            "plan": asdict(self.plan),
            **({"model": self.model} if self.model else {}),
        }

    def shares_budget_with(self, other: "Session") -> bool:
        """Return whether one epsilon is kept by both: of one run, or of one model's predictions."""
        return self.model == other.model if self.model else self.run == other.run


@dataclass(frozen=True, kw_only=True, slots=True)
class Limit:
    """What the owner of a table lets all runs on it spend together, for one unit."""

    unit: UnitName
    epsilon: float
    delta: float
    """At which epsilon is taken; no federation file changes it."""
    time: str = ""
    """When it was set, in UTC."""

    def __post_init__(self) -> None:
        Privacy(epsilon=self.epsilon, delta=self.delta, unit=self.unit)

    def line(self) -> dict[str, Any]:
        """Return its ``limit`` line."""
        return {"kind": "limit", "version": VERSION, **asdict(self)}


@dataclass(frozen=True, kw_only=True, slots=True)
class Outlook:
    """What a run may spend, and what was spent on the same table before it."""

    epsilon: float
    """Of the run, when all that is planned is released; infinite: no bound."""
    total_before: float
    """Of the earlier runs on the table, for the same unit and at the same delta."""
    runs_before: int
    total: float
    """Of all of them and this one."""
    unit: str
    delta: float
    limit: Limit | None
    """What the table's owner allows for this unit; None allows everything."""


class LedgerBook:
    """The content of a ledger, line by line."""

    def __init__(self) -> None:
        self.sessions: list[Session] = []
        """In the order in which they began."""
        self.limits: dict[str, Limit] = {}
        """The newest by unit."""
        self.others = OtherLedgers()
        """What is remembered of other parties' ledgers."""

    def read(self, entries: Iterable[Mapping[str, Any]], *, where: str) -> None:
        """Take in all lines of a file.

        Raises:
            ConfigError: If they are of another version of the format.
            PrivacyError: If one is no ledger's line.
        """
        for number, entry in enumerate(entries, 1):
            self.take(entry, where=f"{where}, line {number}")

    def take(self, entry: Mapping[str, Any], where: str) -> None:
        """Take in a line; see :meth:`read`."""
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
        """Units that anything was spent or limited for."""
        spent = [one.plan.privacy.unit for one in self.sessions if one.spent]
        return sorted({*spent, *self.limits})

    def runs(self, *, unit: str | None = None) -> dict[str, list[Session]]:
        """Return the sessions that spent anything, by run; of one unit or of all."""
        found: dict[str, list[Session]] = {}
        for session in self.sessions:
            if session.spent and unit in (None, session.plan.privacy.unit):
                found.setdefault(session.run, []).append(session)
        return found

    def total(self, unit: str, *, delta: float) -> float:
        """Return epsilon of everything that was spent for a unit, at ``delta``; rounded up."""
        return epsilon_of_sessions(
            [one for one in self.sessions if one.plan.privacy.unit == unit], delta=delta
        )

    def limit_covers(self, after: Session) -> bool:
        """Return whether the owner's limit allows the newest session to become ``after``."""
        total = self.limited_total(after)
        return not self.limits or (
            total is not None and total <= self.limits[after.plan.privacy.unit].epsilon
        )

    def limited_total(self, after: Session) -> float | None:
        """Return what all runs would have spent at the limit's delta; None without one.

        Args:
            after: What the newest session would become.
        """
        unit = after.plan.privacy.unit
        limit = self.limits.get(unit)
        if limit is None:
            return None
        *earlier, _ = [one for one in self.sessions if one.plan.privacy.unit == unit]
        return epsilon_of_sessions([*earlier, after], delta=limit.delta)

    def outlook(self, own: Session, whole: Session, *, budget: float | None) -> Outlook:
        """Return what a run may spend, and what was spent before it.

        Args:
            own: Its session, the newest.
            whole: The same with everything released that is planned.
            budget: Which epsilon it keeps with the run's other sessions; None for none.
        """
        privacy = own.plan.privacy
        others = [one for one in self.sessions if one.plan.privacy.unit == privacy.unit]
        before = [one for one in others if one.run != own.run]
        mine = [one for one in others if one.run == own.run and one is not own]
        epsilon = epsilon_of_sessions([*mine, whole], delta=privacy.delta)
        # A resumed run asks before every release, and stops within its budget.
        epsilon = epsilon if budget is None else min(epsilon, budget)
        return Outlook(
            epsilon=epsilon,
            total_before=epsilon_of_sessions(before, delta=privacy.delta),
            runs_before=len({one.run for one in before if one.spent}),
            total=epsilon_of_sessions([*before, *mine, whole], delta=privacy.delta),
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
        if session.frozen:
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
        names = ("mechanism", "epsilon", "delta", "parties", "digest")
        self.sessions[-1].labels.append(LabelRelease(**{name: entry[name] for name in names}))

    def _limit(self, entry: Mapping[str, Any]) -> None:
        names = ("unit", "epsilon", "delta", "time")
        limit = read_settings(Limit, {name: entry[name] for name in names}, where="limit")
        self.limits[limit.unit] = limit

    def _of_others(self, entry: Mapping[str, Any]) -> None:
        """Take in what concerns other parties' ledgers: it charges nothing."""
        self.others.take(entry)


_KINDS: Final[Mapping[str, Callable[[LedgerBook, Mapping[str, Any]], None]]] = {
    "open": LedgerBook._open,
    "charge": LedgerBook._charge,
    "fit": LedgerBook._fit,
    "link-count": LedgerBook._link_count,
    "release": LedgerBook._release,
    LABELS: LedgerBook._labels,
    "limit": LedgerBook._limit,
    COUNTERSIGNED: LedgerBook._of_others,
    FORGOTTEN: LedgerBook._of_others,
}
"""What each kind of line adds to a book."""

_FIRST: Final = ("open", "limit")
"""Kinds that a ledger may start with; they carry the format's version."""


def epsilon_of_sessions(sessions: Sequence[Session], *, delta: float) -> float:
    """Return epsilon of all sessions together, at ``delta``; rounded up, infinite without noise.

    Raises:
        ConfigError: If nothing is left of delta for the accounting.
    """
    parts: dict[str, list[Session]] = {}
    for session in sessions:
        if not session.spent:
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
    for part in (one for own in parts.values() for one in own):
        if part.counts_records:
            counted.setdefault(part.model, []).append(part)
        elif part.model:
            # Requests are many and alike: equal releases are composed as one made so often.
            asked.update(part.events())
        else:
            events += part.events()
    events += [replace(event, count=event.count * times) for event, times in asked.items()]
    for own in counted.values():
        # No record was released more often than the largest N that was promised, and never with
        # less noise over its effect than in the session that had the least.
        most = max(one.plan.releases_per_record or 0 for one in own)
        plans = [(replace(one.plan, releases_per_record=most), one.noise_share_std) for one in own]
        least = min(plan.release_multiplier(share_std) for plan, share_std in plans)
        events.append(GaussianRelease(noise_multiplier=least))
    return epsilon_of(events, delta=delta)
