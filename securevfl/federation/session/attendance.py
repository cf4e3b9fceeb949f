"""Presence: which secondaries took part in a run, from which epoch on, as the primary keeps it."""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from securevfl.core.errors import ConfigError
from securevfl.federation.state_folder import PRESENCE, DamagedError, StateFolder

_MALFORMED: Final = (KeyError, TypeError, ValueError)


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """From one epoch on these secondaries took part, until the next span."""

    after: int
    """Epochs that were done before."""

    active: tuple[int, ...]
    """Their ranks, ascending."""


class SecondariesBackError(Exception):
    """Between two epochs: secondaries that were lost call, and may come back now."""

    def __init__(self, names: tuple[str, ...]) -> None:
        super().__init__(", ".join(names))
        self.names = names


class Presence:
    """The spans of one run, kept in the primary's folder.

    There are none until every secondary has begun the run: whoever has not heard of it could never
    come back to it, so until then nobody is left out.
    """

    def __init__(self, files: StateFolder, names: Mapping[int, str]) -> None:
        """Read what an earlier session has kept; nothing of a file that is damaged.

        Args:
            files: The primary's; a fresh run has no id yet, and nothing to read.
            names: Of all secondaries, by rank.

        Raises:
            ConfigError: If the file is of another run, or of other settings.
        """
        self._files = files
        self._names = names
        self.calling: Callable[[], tuple[str, ...]] = tuple
        """Returns who is absent from the session and calls to be let in."""
        self.spans: list[Span] = []
        # What a run that never began has left belongs to no run.
        if not files.run or not files.holds(PRESENCE):
            return
        try:
            self.spans = [
                _span(after, ranks, known=names) for after, ranks in files.read(PRESENCE)["spans"]
            ]
        except DamagedError:
            return
        except _MALFORMED:
            raise ConfigError(f"{files.path / PRESENCE}: is not what a run keeps") from None

    @property
    def current(self) -> tuple[int, ...] | None:
        """Ranks of the secondaries of the last session; None if none can be left out yet."""
        return self.spans[-1].active if self.spans else None

    @property
    def since(self) -> int:
        """After which epoch they were these."""
        return self.spans[-1].after if self.spans else 0

    @property
    def continuing_parties(self) -> frozenset[str]:
        """Names of those that were in the last session, or must be in any."""
        current = self.current
        return frozenset(
            name for rank, name in self._names.items() if current is None or rank in current
        )

    def enough(
        self, *, least: int, patience_s: float, awaited: Collection[str]
    ) -> Callable[[Collection[str], float], bool]:
        """Return whom a session waits for, as a question about who has joined, after what time.

        At a run's start for all: whoever has not begun it could not come back to it. Afterwards,
        whoever was in the last session is given a while, and whoever this one is for; others are
        let in if they happen to be there.

        Args:
            least: Fewest secondaries.
            patience_s: Seconds that are given.
            awaited: Names of those whom this session is for.
        """
        everybody = frozenset(self._names.values())
        needed = self.continuing_parties | set(awaited)

        def enough(joined: Collection[str], waited_s: float) -> bool:
            there = everybody.intersection(joined)
            if self.current is None:
                return False
            return len(there) >= least and (needed <= there or waited_s >= patience_s)

        return enough

    def begin(self, *, after: int, active: tuple[int, ...]) -> None:
        """Keep who takes part from an epoch on; sessions that it repeats are forgotten.

        Raises:
            StorageError: If the disk takes no more.
        """
        spans = [span for span in self.spans if span.after < after]
        if not spans or spans[-1].active != active:
            spans.append(Span(after=after, active=active))
        if spans != self.spans:
            self.spans = spans
            self._files.write(
                PRESENCE, {"spans": [[span.after, list(span.active)] for span in spans]}
            )

    def let_back(self) -> None:
        """End the session if an absent party calls.

        Raises:
            SecondariesBackError: Naming who it is.
        """
        if names := self.calling():
            raise SecondariesBackError(names)

    def absences(self) -> list[dict[str, Any]]:
        """Return who was absent, and when, in the order of their going.

        Returns:
            For each: ``party``, ``from_epoch``, and ``to_epoch``, None if it did not come back
            before the end. From an epoch after the last one on it was absent from testing alone.
        """
        absences = []
        for rank, name in self._names.items():
            gone: int | None = None
            for span in self.spans:
                if rank not in span.active and gone is None:
                    gone = span.after + 1
                elif rank in span.active and gone is not None:
                    absences.append({"party": name, "from_epoch": gone, "to_epoch": span.after})
                    gone = None
            if gone is not None:
                absences.append({"party": name, "from_epoch": gone, "to_epoch": None})
        return sorted(absences, key=lambda absence: (absence["from_epoch"], absence["party"]))


def _span(after: object, ranks: object, *, known: Collection[int]) -> Span:
    """Return what a file has kept.

    Raises:
        ValueError: If it is no span of these parties.
    """
    numbers = ranks if isinstance(ranks, list) else []
    if type(after) is not int or after < 0 or not all(type(rank) is int for rank in numbers):
        raise ValueError("no numbers")
    if not numbers or sorted(set(numbers) & set(known)) != numbers:
        raise ValueError("no ranks")
    return Span(after=after, active=tuple(numbers))


def absences_in_words(absences: Iterable[Mapping[str, Any]], *, epochs: int) -> str:
    """Return who was absent and when, in a sentence; empty if all were there."""
    return "; ".join(_in_words(absence, epochs) for absence in absences)


def _in_words(absence: Mapping[str, Any], epochs: int) -> str:
    first, last = absence["from_epoch"], absence["to_epoch"]
    if last is None and first > epochs:
        when = "the test rows"
    elif last is None:
        when = f"epoch {first} on, test rows included"
    else:
        when = f"epoch {first}" if first == last else f"epochs {first} to {last}"
    verb = "was absent from" if last is None else "was absent in"
    return f"{absence['party']} {verb} {when}"
