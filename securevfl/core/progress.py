"""Progress events of a run, and how long the rest of a step will take."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Final, get_args


@dataclass(frozen=True, kw_only=True, slots=True)
class Warned:
    """Something that the user should hear."""

    EVENT: ClassVar[str] = "warning"

    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class SpendingPlanned:
    """What the run may spend, and what was spent on a party's table before it.

    Every epsilon is for ``unit`` and at ``delta``, but for the limit's; None: no bound.
    """

    EVENT: ClassVar[str] = "spending"

    party: str
    unit: str
    delta: float
    runs_before: int
    epsilon: float | None = None
    """This run's epsilon when all that is planned is released."""
    total_before: float | None = None
    total: float | None = None
    """Epsilon of this run and all before it."""
    limit: float | None = None
    """Epsilon that the table's owner lets all runs spend together; None: no limit."""
    limit_delta: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Listening:
    """The primary waits for the others at this address."""

    EVENT: ClassVar[str] = "listening"

    host: str
    port: int


@dataclass(frozen=True, kw_only=True, slots=True)
class SessionLost:
    """A party was lost, and this one waits for it, to continue from what all have saved."""

    EVENT: ClassVar[str] = "lost"

    why: str
    """Who was lost, and how."""
    wait_s: float
    """Seconds that it may take to come back."""
    goes_on_after_s: float | None = None
    """After so many seconds the others continue without it, if enough are left; None: they wait."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PresenceChanged:
    """A session begins without some secondaries, or with some who are back."""

    EVENT: ClassVar[str] = "presence"

    epoch: int
    """The epoch that begins; one after the last where only test rows are left."""
    absent: Sequence[str] = ()
    back: Sequence[str] = ()
    secondaries: int
    """How many continue."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """A stage of the run begins."""

    EVENT: ClassVar[str] = "stage"

    text: str
    of: int = 1
    """Its units of work: parties, rounds, iterations."""
    epsilon: float | None = None
    bytes: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class PartDone:
    """So much of a step that may take minutes is done."""

    name: str
    """Whose step it is, or how it is done."""
    done: int
    of: int
    seconds_left: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class LinksMade(PartDone):
    """So many of a secondary's rows (or records, where these seek) are linked."""

    EVENT: ClassVar[str] = "links"


@dataclass(frozen=True, kw_only=True, slots=True)
class CiphertextsMade(PartDone):
    """A secondary has prepared so many ciphertexts."""

    EVENT: ClassVar[str] = "ciphertexts"


@dataclass(frozen=True, kw_only=True, slots=True)
class KeysAnnounced:
    """A secondary has announced how many keys it brings to private set intersection."""

    EVENT: ClassVar[str] = "keys-announced"

    name: str
    keys: int
    """Different keys, or guesses: so many it can test."""
    rows: int
    """The primary's."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LinksCounted:
    """A secondary is linked: counts for its own operator, and for a simulation."""

    EVENT: ClassVar[str] = "links-counted"

    name: str
    rows: int
    """The primary's."""
    records: int
    rows_linked: int
    """Rows that have a record."""
    records_linked: int
    """Records that have a row."""
    tied_rows: int
    """Rows that have K records, the last one of several with the very same key."""
    repeated_records: int
    """Records whose key another record has too."""
    median_distance: float | None = None
    """Median distance of linked rows to their nearest record; None where no data party knows
    distances."""
    unit: str
    """Unit of ``median_distance``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkedRowsCounted:
    """A secondary has said how many of the primary's rows are linked, behind its noise."""

    EVENT: ClassVar[str] = "linked-rows"

    name: str
    """The secondary's."""
    rows: int
    linked: int
    noise_std: float
    """Standard deviation of the noise, in rows; 0: the number is exact."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RowsAligned:
    """All are linked, and the primary knows which of its rows are linked at every secondary."""

    EVENT: ClassVar[str] = "aligned"

    aligned: int
    """Rows that are linked at every secondary."""
    rows: int
    by_secondary: Mapping[str, int]
    """Rows that are linked at each of them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RowsReleased:
    """So many rounds of the one pass over all rows, with frozen encoders, are done."""

    EVENT: ClassVar[str] = "release"

    done: int
    of: int
    epsilon: float | None = None
    bytes: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class RoundDone:
    """A training round is done."""

    EVENT: ClassVar[str] = "round"

    epoch: int
    done: int
    """Rounds of this epoch that are done."""
    of: int
    loss: float
    epsilon: float | None = None
    """Spent so far; None where nothing is promised."""
    bytes: int | None = None
    """That the primary has sent and received so far."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EpochDone:
    """An epoch is done."""

    EVENT: ClassVar[str] = "epoch"

    epoch: int
    epochs: int
    """How many there will be, at most."""
    loss: float
    train: float
    """Metric over the training rows, as they were seen."""
    validation: float
    seconds: float
    epsilon: float | None = None
    bytes: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class PretrainingRound:
    """A batch of cross-party pretraining is done."""

    EVENT: ClassVar[str] = "pretraining-round"

    iteration: int
    done: int
    of: int


@dataclass(frozen=True, kw_only=True, slots=True)
class PretrainingIteration:
    """An iteration of pretraining is done; figures of steps that it has not are None."""

    EVENT: ClassVar[str] = "pretraining"

    iteration: int
    iterations: int
    seconds: float
    cross_loss: float | None = None
    cross_spread: float | None = None
    local_loss: float | None = None
    local_spread: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class CoalitionsValued(PartDone):
    """So many sets of partners are valued, by a model that was kept or by ones trained again."""

    EVENT: ClassVar[str] = "coalitions"


@dataclass(frozen=True, kw_only=True, slots=True)
class PartyDone:
    """A secondary is done."""

    EVENT: ClassVar[str] = "figures"

    epsilon: float
    """Spent by this run, as the secondary's own ledger says."""
    total_epsilon: float
    """Spent by all runs on the secondary's table."""


ProgressEvent = (
    Warned
    | SessionLost
    | PresenceChanged
    | SpendingPlanned
    | Listening
    | Stage
    | LinksMade
    | CiphertextsMade
    | KeysAnnounced
    | LinksCounted
    | LinkedRowsCounted
    | RowsAligned
    | RowsReleased
    | RoundDone
    | EpochDone
    | PretrainingRound
    | PretrainingIteration
    | CoalitionsValued
    | PartyDone
)
"""Every progress event of a run."""

Observer = Callable[[ProgressEvent], None]
"""Hears of progress: figures and words, never a row or a record."""

_TYPES: Final[Mapping[str, type[Any]]] = {
    event_type.EVENT: event_type for event_type in get_args(ProgressEvent)
}


def unheard(_event: ProgressEvent) -> None:
    """Hear nothing: the observer of those who do not ask."""


def event_fields(event: ProgressEvent) -> dict[str, Any]:
    """Return an event's figures by name, without those that are not known."""
    values = {field.name: getattr(event, field.name) for field in fields(event)}
    return {name: value for name, value in values.items() if value is not None}


def links_in_words(counts: LinksCounted) -> str:
    """Return how many rows and records are linked, and how near, in one line."""
    text = (
        f"links of {counts.name}: {counts.rows_linked:,} of {counts.rows:,} rows "
        f"({counts.rows_linked / counts.rows:.0%}), {counts.records_linked:,} of "
        f"{counts.records:,} records"
    )
    if counts.median_distance is not None:
        near = nearness_in_words(counts)
        text += f"; half of these rows {near}" if counts.unit else f"; linked {near}"
    if counts.tied_rows:
        text += (
            f"; {counts.tied_rows:,} rows have one of several records with the very same key, by "
            f"record number"
        )
    return text


def linked_rows_in_words(count: LinkedRowsCounted) -> str:
    """Return which share of the rows is linked at a secondary, with two deviations of the noise."""
    share = f"{100 * count.linked / count.rows:.0f} %"
    if count.noise_std == 0:
        return f"{share} of the {count.rows:,} rows are linked at {count.name}"
    return (
        f"about {share} of the {count.rows:,} rows are linked at {count.name} "
        f"(± {200 * count.noise_std / count.rows:.2g} %)"
    )


def nearness_in_words(counts: LinksCounted) -> str:
    """Return how near half of the nearest records are: ``within 3 edits``, or ``to equal keys``."""
    if not counts.unit:
        return "to equal keys"
    of = "in " if counts.unit.startswith("the ") else ""
    return f"within {counts.median_distance:.4g} {of}{counts.unit}"


def alignment_in_words(figures: Mapping[str, Any]) -> str:
    """Return how many rows are linked, and where, in one line.

    Args:
        figures: With the fields of :class:`RowsAligned`.
    """
    each = ", ".join(f"{name} {count}" for name, count in figures["by_secondary"].items())
    return f"{figures['aligned']} of {figures['rows']} rows are aligned (linked at {each})"


def event_of(name: str, figures: Mapping[str, Any]) -> ProgressEvent | None:
    """Return the event that another process reported; None if it is not one of a run.

    Args:
        name: Its ``EVENT``.
        figures: What :func:`event_fields` returned there.
    """
    kind = _TYPES.get(name)
    if kind is None:
        return None
    # A report is JSON, which has no infinite number: it comes as a word.
    numbers = {field.name for field in fields(kind) if field.type in (float, float | None)}
    try:
        event: ProgressEvent = kind(
            **{
                name: float(figure) if name in numbers and isinstance(figure, str) else figure
                for name, figure in figures.items()
            }
        )
    except (TypeError, ValueError):
        return None
    return event


class Pace:
    """Reports how much of a long step is done, and an estimate of the seconds left.

    Args:
        observe: Hears of progress.
        step: Makes the event, for example :class:`LinksMade`.
        name: Whose step it is.
    """

    def __init__(self, observe: Observer, step: Callable[..., ProgressEvent], *, name: str) -> None:
        self._observe = observe
        self._step = step
        self._name = name
        self._begin = time.monotonic()

    def __call__(self, done: int, of: int) -> None:
        """Report progress to the observer.

        Args:
            done: Units of work that are done, >= 0.
            of: Units of work in all, as far as is known by now.
        """
        left = None
        if done:
            left = (time.monotonic() - self._begin) * (of - done) / done
        self._observe(self._step(name=self._name, done=done, of=of, seconds_left=left))
