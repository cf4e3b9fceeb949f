"""Progress events of a run, and estimates of the time left."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Final, get_args


@dataclass(frozen=True, kw_only=True, slots=True)
class Warned:
    """A warning for the user."""

    EVENT: ClassVar[str] = "warning"

    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class SpendingPlanned:
    """The epsilon that a run may spend on a party's table, and the epsilon spent before.

    Every epsilon but the limit's is for ``unit`` at ``delta``; None: no bound.
    """

    EVENT: ClassVar[str] = "spending"

    party: str
    unit: str
    delta: float
    runs_before: int
    epsilon: float | None = None
    """Epsilon of this run if everything planned is released."""
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
    """A party was lost; this party waits for it, to continue from a checkpoint of all parties."""

    EVENT: ClassVar[str] = "lost"

    why: str
    """Who was lost, and how."""
    wait_s: float
    """Seconds that it may take to come back."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """A stage of the run begins."""

    EVENT: ClassVar[str] = "stage"

    text: str
    of: int = 1
    """Number of units of work: parties, rounds, iterations."""
    epsilon: float | None = None
    bytes: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class PartDone:
    """Progress of a step that may take minutes."""

    name: str
    """Party or method of the step."""
    done: int
    of: int
    seconds_left: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class LinksMade(PartDone):
    """Progress of linking a secondary: rows, or records where these search for rows."""

    EVENT: ClassVar[str] = "links"


@dataclass(frozen=True, kw_only=True, slots=True)
class CiphertextsMade(PartDone):
    """Progress of a secondary's ciphertexts."""

    EVENT: ClassVar[str] = "ciphertexts"


@dataclass(frozen=True, kw_only=True, slots=True)
class KeysAnnounced:
    """A secondary has announced its number of keys for private set intersection."""

    EVENT: ClassVar[str] = "keys-announced"

    name: str
    keys: int
    """Number of different keys, which bounds the number of keys that it can test."""
    rows: int
    """Number of the primary's rows."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LinksCounted:
    """A secondary is linked: counts for its own operator, and for a simulation."""

    EVENT: ClassVar[str] = "links-counted"

    name: str
    rows: int
    """Number of the primary's rows."""
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
    doubt: str = ""
    """Likeliest cause if few rows are linked; else empty."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkedRowsCounted:
    """A secondary has reported the number of linked rows, with noise."""

    EVENT: ClassVar[str] = "linked-rows"

    name: str
    """Name of the secondary."""
    rows: int
    linked: int
    noise_std: float
    """Standard deviation of the noise, in rows; 0: the number is exact."""
    doubt: str = ""
    """Likeliest cause if they are few; else empty."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RowsAligned:
    """Linking is done, and the primary knows the rows that are linked at every secondary."""

    EVENT: ClassVar[str] = "aligned"

    aligned: int
    """Number of rows that are linked at every secondary."""
    rows: int
    by_secondary: Mapping[str, int]
    """Number of linked rows of each secondary, by name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RowsReleased:
    """Progress of the single pass over all rows with frozen encoders, in rounds."""

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
    """Bytes that the primary has sent and received so far."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EpochDone:
    """An epoch is done."""

    EVENT: ClassVar[str] = "epoch"

    epoch: int
    epochs: int
    """Maximum number of epochs."""
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
    """An iteration of pretraining is done; figures of steps that it lacks are None."""

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
    """Progress of valuing coalitions of partners."""

    EVENT: ClassVar[str] = "coalitions"


@dataclass(frozen=True, kw_only=True, slots=True)
class PartyDone:
    """A secondary is done."""

    EVENT: ClassVar[str] = "figures"

    epsilon: float
    """Epsilon spent by this run, according to the secondary's ledger."""
    total_epsilon: float
    """Spent by all runs on the secondary's table."""


ProgressEvent = (
    Warned
    | SessionLost
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
"""Receives progress events: figures and words, never a row or a record."""

_TYPES: Final[Mapping[str, type[Any]]] = {
    event_type.EVENT: event_type for event_type in get_args(ProgressEvent)
}


def unheard(_event: ProgressEvent) -> None:
    """Ignore a progress event."""


def event_fields(event: ProgressEvent) -> dict[str, Any]:
    """Return an event's known figures by name."""
    values = {field.name: getattr(event, field.name) for field in fields(event)}
    return {name: value for name, value in values.items() if value is not None}


def links_in_words(counts: LinksCounted) -> str:
    """Return the counts of links and their distances as one line of text."""
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
    return f"{text}; warning: {counts.doubt}" if counts.doubt else text


def linked_rows_in_words(count: LinkedRowsCounted) -> str:
    """Return the share of linked rows at a secondary in words, with two deviations of its noise."""
    about, noise = "", ""
    if count.noise_std:
        about, noise = "about ", f" (± {200 * count.noise_std / count.rows:.2g} %)"
    share = f"{about}{100 * count.linked / count.rows:.0f} %"
    text = f"{share} of the {count.rows:,} rows are linked at {count.name}{noise}"
    return f"warning: only {text}: {count.doubt}" if count.doubt else text


def nearness_in_words(counts: LinksCounted) -> str:
    """Return the median distance to nearest records in words: ``within 3 edits``."""
    if not counts.unit:
        return "to equal keys"
    of = "in " if counts.unit.startswith("the ") else ""
    return f"within {counts.median_distance:.4g} {of}{counts.unit}"


def alignment_in_words(figures: Mapping[str, Any]) -> str:
    """Return the number of aligned rows, and of linked rows by secondary, as one line of text.

    Args:
        figures: Figures of :class:`RowsAligned`.
    """
    each = ", ".join(f"{name} {count}" for name, count in figures["by_secondary"].items())
    return f"{figures['aligned']} of {figures['rows']} rows are aligned (linked at {each})"


def event_of(name: str, figures: Mapping[str, Any]) -> ProgressEvent | None:
    """Return the event that another process reported; None if it is not a run's event.

    Args:
        name: The event's ``EVENT``.
        figures: Result of :func:`event_fields` in that process.
    """
    kind = _TYPES.get(name)
    if kind is None:
        return None
    # A report is JSON, where an infinite number is a word.
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
    """Reports the progress of a long step, with an estimate of the seconds left.

    Args:
        observe: Receives progress events.
        step: Class of the event, for example :class:`LinksMade`.
        name: Party or method of the step.
    """

    def __init__(self, observe: Observer, step: Callable[..., ProgressEvent], *, name: str) -> None:
        self._observe = observe
        self._step = step
        self._name = name
        self._begin = time.monotonic()

    def __call__(self, done: int, of: int) -> None:
        """Report progress to the observer.

        Args:
            done: Units of work done, >= 0.
            of: Total units of work, as far as known.
        """
        left = None
        if done:
            left = (time.monotonic() - self._begin) * (of - done) / done
        self._observe(self._step(name=self._name, done=done, of=of, seconds_left=left))
