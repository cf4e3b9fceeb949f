"""Membership: which secondaries take part from which epoch on, and what an absence changes.

A primary that may choose who answers could ask for one secondary alone, whose numbers the secure
sum is there to hide. So every secondary has a least number of its own reckoning.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from securevfl.config.federation import FederationConfig, link_spec
from securevfl.core import checks
from securevfl.core.errors import ConfigError, ProtocolError
from securevfl.federation.checkpoint import PRESENCE, DamagedError, StateFolder
from securevfl.federation.run_plan import active_parties
from securevfl.linkage.spec import LinkSpec


def least_secondaries(config: FederationConfig) -> int:
    """Return how few secondaries may answer a request for predictions.

    ``prediction.least_secondaries``, where the file says it. Else, with noise, one more than may
    collude: the request's epsilon is computed for those that answer, so the promise holds for any
    number that an honest one is among. Without noise there is no promise, and fewer may answer
    only where training rounds had as few (``model.party_dropout``, ``runtime.least_secondaries``),
    or where each one's numbers have coordinates of their own.
    """
    stated = config.prediction.least_secondaries
    if stated is not None:
        return stated
    if config.privacy.mechanism != "none":
        return config.privacy.colluding + 1
    if config.in_blocks:
        # Without noise, each one's numbers are seen by themselves whoever answers.
        return 1
    if config.regime.releases_once:
        return len(config.secondaries)
    return active_parties(range(config.least_in_training), config.model.party_dropout)


def active_without(config: FederationConfig, without: Sequence[str]) -> tuple[int, ...] | None:
    """Return the ranks of the secondaries that answer, ascending; None for all.

    Args:
        config: The federation file.
        without: Names of those that do not. Where these are all, nobody is asked.

    Raises:
        ConfigError: If one is no secondary, is named twice, or too few are left.
    """
    if not without:
        return None
    names = [party.name for party in config.secondaries]
    for name in without:
        if name not in names:
            near = checks.did_you_mean(name, names)
            raise ConfigError(
                f"without: there is no secondary {name!r}; there are {', '.join(names)}{near}"
            )
    if len(set(without)) != len(without):
        raise ConfigError(f"without: names a secondary twice, in {', '.join(without)}")
    left = [name for name in names if name not in without]
    if not left:
        return ()
    least = least_secondaries(config)
    if len(left) < least:
        raise ConfigError(
            f"without: leaves {len(left)} of {len(names)} secondaries, and {least} must answer; "
            f"write least_secondaries = {max(1, len(left))} in [prediction] of every party's file "
            f"if all of them agree to what that shows (docs/predictions.md)"
        )
    return tuple(config.ranks[name] for name in left)


def require_active(
    config: FederationConfig, active: Sequence[int] | None, *, rank: int, predicts: bool
) -> None:
    """Refuse a primary that leaves out parties as it must not.

    Args:
        config: The federation file, as this party has it.
        active: Ranks of the secondaries that take part, as the primary says; None: all.
        rank: This party's own.
        predicts: Whether a kept model is asked for predictions; else parties train.

    Raises:
        ProtocolError: If they are not some of the secondaries, ascending; this party is one and
            not among them; or they are fewer than this party's file allows.
    """
    if active is None:
        return
    what = "predictions" if predicts else "training"
    if not predicts and not config.continues_on_loss:
        raise ProtocolError(
            f"the primary leaves out parties of a run that trains, and this party's file has "
            f"runtime.on_loss = {config.runtime.on_loss!r}"
        )
    ranks = [config.ranks[party.name] for party in config.secondaries]
    if not active or sorted(set(active) & set(ranks)) != list(active):
        raise ProtocolError(f"the primary asks for {what} of impossible parties {active!r:.80}")
    if rank in ranks and rank not in active:
        raise ProtocolError(
            f"the primary asks this party for {what} without it, of {list(active)!r}"
        )
    least = least_secondaries(config) if predicts else config.least_in_training
    if len(active) < least:
        setting = f"{'prediction' if predicts else 'runtime'}.least_secondaries"
        raise ProtocolError(
            f"the primary asks for {what} of {len(active)} secondaries, and this party's file "
            f"wants {least} at least ({setting})"
        )


def callers_in_predictions(
    config: FederationConfig, active: Sequence[int] | None
) -> tuple[str, ...]:
    """Return who dials the primary where a kept model answers, by rank.

    Args:
        config: The federation file.
        active: Ranks of the secondaries that answer; None: all.
    """
    absent = (*absent_names(config, active), *idle_helpers(config))
    return tuple(party.name for party in config.callers if party.name not in absent)


def idle_helpers(config: FederationConfig) -> tuple[str, ...]:
    """Return the names of helpers that predictions have no use for: new rows are never voted on."""
    needed = {*link_spec(config).roles.helpers.values()}
    return tuple(p.name for p in config.callers if p.is_helper and p.name not in needed)


def absent_names(config: FederationConfig, active: Sequence[int] | None) -> tuple[str, ...]:
    """Return the names of the secondaries that do not answer, by rank."""
    if active is None:
        return ()
    return tuple(p.name for p in config.secondaries if config.ranks[p.name] not in active)


def session_spec(config: FederationConfig, active: Sequence[int] | None) -> LinkSpec:
    """Return how the parties link that take part, by their ranks; None: all."""
    spec = link_spec(config)
    absent = frozenset(absent_names(config, active))
    return replace(spec, roles=replace(spec.roles, absent=absent))


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
