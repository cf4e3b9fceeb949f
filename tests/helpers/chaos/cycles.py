"""Cycles of kill and resume: drawn from a seed, gone through, and checked."""

import json
import shutil
import signal
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from random import Random
from typing import Any, Final

from helpers.chaos.checks import differences, ledger_faults, left_behind
from helpers.chaos.kinds import KINDS, NAMES, WITHOUT_NOISE, budget_of, ledgers_of, write_kind
from helpers.chaos.launches import Ended, launch
from helpers.chaos.witness import LAUNCHER, Strike, Watch, notes_of

BY_THE_CLOCK: Final = "by the clock"
_PRETRAINING: Final = frozenset({"PRETRAIN", "CROSS", "LOCAL", "TOPS", "MEAN", "PRETRAINED"})
_MESSAGES: Final = {
    **dict.fromkeys(("SESSION", "HELLO", "WELCOME", "READY", "MEMORIES"), "joining"),
    **dict.fromkeys(("LINK_KEYS", "LINKED", "LINKED_ROWS"), "linkage"),
    **dict.fromkeys(_PRETRAINING, "pretraining"),
    **dict.fromkeys(("EPOCH", "HEADS"), "checkpoint"),
    **dict.fromkeys(("DONE", "LEAVE", "COUNTERSIGN"), "end"),
}
_FILES: Final = {
    **dict.fromkeys(("run.pt", "federation.toml", "identities.json", "ledger.json"), "joining"),
    **dict.fromkeys(("released/", "answers/", "release.pt", "/released", "/answers"), "releases"),
    **dict.fromkeys(("pretraining-", "encoders.pt", "pretraining.json"), "pretraining"),
    **dict.fromkeys(("epoch-", "best-"), "checkpoint"),
}
_PURPOSES: Final = {"train": "rounds", "validation": "validation", "release": "releases"}
_POINTS: Final = {"start": "joining", "end": "end", "released": "releases"}
# What a launcher ends with that has lost a party, that was killed, or that a user has ended.
_OF_A_LOSS: Final = frozenset({3, -signal.SIGKILL, -signal.SIGTERM})


@dataclass(frozen=True)
class Undisturbed:
    """A run of one kind that nobody disturbs: the truth, and the places at which others are hit."""

    kind: str
    folder: Path
    seconds: float

    @cached_property
    def points(self) -> Mapping[str, Sequence[tuple[str, str, int]]]:
        """What its processes were about to do, by the part of the run."""
        found: dict[str, list[tuple[str, str, int]]] = {}
        for party, notes in notes_of(self.folder / "notes").items():
            lines = ledgers_of(self.folder)[party].read_text().splitlines()
            entries = [json.loads(line) for line in lines]
            charges = [one["purpose"] for one in entries if one["kind"] == "charge"]
            shares = sum(one["what"] == "SHARE" for one in notes)
            for one in notes:
                what, count = one["what"], one["count"]
                if what == "PLAN":
                    place = _place_of_purpose(charges[(count - 1) // (len(NAMES) - 1)])
                elif what == "SHARE":
                    # Sums of pretraining come first, and are not in this ledger.
                    number = count - 1 - (shares - len(charges))
                    place = "pretraining" if number < 0 else _place_of_purpose(charges[number])
                elif what.endswith("ledger.jsonl") and what.startswith("sync"):
                    place = _place_of_line(entries[min(count, len(entries)) - 1])
                else:
                    place = _place_of(what)
                found.setdefault(place, []).append((party, what, count))
        return {place: sorted(points) for place, points in sorted(found.items())}


def _place_of_purpose(purpose: str) -> str:
    return _PURPOSES.get(purpose, "end")


def _place_of_line(entry: Mapping[str, Any]) -> str:
    if entry["kind"] == "charge":
        return _place_of_purpose(entry["purpose"])
    if entry["kind"] == "countersigned":
        return _POINTS.get(entry["point"], "checkpoint")
    return "joining"


def _place_of(what: str) -> str:
    if what == "GRADIENT":
        return "rounds"
    if " " not in what:
        return _MESSAGES.get(what, "end")
    return next((place for part, place in _FILES.items() if part in what), "end")


def undisturbed(kind: str, folder: Path) -> Undisturbed:
    """Run a kind once with nobody being hit.

    Raises:
        RuntimeError: If even that does not end well.
    """
    shutil.rmtree(folder, ignore_errors=True)
    path = write_kind(folder, kind, on_loss="stop")
    ended = launch(path, Watch(notes=folder / "notes", out=folder / "run"), resume=False)
    if ended.code or ended.left:
        raise RuntimeError(f"{kind}, undisturbed: {ended}")
    return Undisturbed(kind=kind, folder=folder, seconds=ended.seconds)


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """What will become of a run."""

    number: int
    kind: str
    on_loss: str
    strikes: tuple[Strike, ...]


def kind_of(seed: int, number: int) -> str:
    """Return a cycle's kind: all come in turns, in an order that the seed draws."""
    turn, place = divmod(number, len(KINDS))
    return Random(f"{seed}/{turn}").sample(sorted(KINDS), len(KINDS))[place]


def draw(seed: int, number: int, whole: Undisturbed) -> Drawn:
    """Draw a cycle; one seed and number draw the same whatever came before."""
    random = Random(f"{seed}/{number}/of")
    count = 1 if random.random() < 0.75 else 2
    return Drawn(
        number=number,
        kind=whole.kind,
        on_loss=random.choice(("stop", "wait")),
        strikes=tuple(_strike(random, whole) for _ in range(count)),
    )


def _strike(random: Random, whole: Undisturbed) -> Strike:
    place = random.choice([*whole.points, BY_THE_CLOCK])
    point = None if place == BY_THE_CLOCK else random.choice(whole.points[place])
    who = random.random()
    if who < 0.6:
        victims = [random.choice(NAMES)] if point is None or who < 0.1 else [point[0]]
    elif who < 0.8:
        victims = random.sample(NAMES, random.choice((2, 2, 3)))
    else:
        victims = random.choice(([LAUNCHER], [LAUNCHER], [random.choice(NAMES), LAUNCHER]))
    return Strike(
        victims=tuple(victims),
        way=random.choices(("SIGKILL", "SIGTERM", "SIGSTOP"), (70, 15, 15))[0],
        place=place,
        point=point,
        after_s=random.uniform(0.05, 1.0) * whole.seconds,
        stopped_s=random.uniform(0.1, 1.5),
    )


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of a run."""

    drawn: Drawn
    launches: tuple[Ended, ...]
    hits: int
    """How many of its strikes fell: a run may be over before."""
    seconds: float
    lost_s: float
    """More than the undisturbed run took."""
    equal: bool | None
    """Whether the model is the undisturbed run's; None: there is noise."""
    ledger: bool
    """Whether nothing is wrong with the ledgers."""
    tested: bool
    """Whether its budget had room for the test rows."""
    faults: tuple[str, ...]


def run_cycle(drawn: Drawn, whole: Undisturbed, folder: Path) -> Outcome:
    """Go through a cycle and check what comes of it; its folder stays if anything is wrong."""
    shutil.rmtree(folder, ignore_errors=True)
    path = write_kind(folder, drawn.kind, on_loss=drawn.on_loss)
    watch = Watch(notes=folder / "notes", out=folder / "run", strikes=drawn.strikes)
    launches: list[Ended] = []
    faults: list[str] = []
    fallen = 0
    while not launches or launches[-1].code:
        ended = launch(path, watch, resume=bool(launches))
        launches.append(ended)
        before, fallen = fallen, sum(map(watch.has_fallen, range(len(drawn.strikes))))
        faults += _faults_of(ended, drawn, drawn.strikes[before:fallen])
        if faults:
            break
    budget, notes = budget_of(drawn.kind), notes_of(watch.notes)
    if drawn.kind == "pretraining":
        notes = {}  # its sums are not in the ledger, as they are of no record's features
    once = drawn.kind.startswith("frozen")
    ledgers = list(ledger_faults(watch.out, ledgers_of(folder), notes, once=once, budget=budget))
    faults += ledgers
    equal = False if drawn.kind in WITHOUT_NOISE else None
    tested = False
    if not launches[-1].code:
        tested = "untested" not in json.loads((watch.out / "metrics.json").read_text())
        faults += left_behind(folder, whole.folder)
        if drawn.kind in WITHOUT_NOISE:
            unlike = list(differences(watch.out, whole.folder / "run"))
            equal = not unlike
            faults += unlike
    seconds = sum(one.seconds for one in launches)
    if not faults:
        shutil.rmtree(folder)
    return Outcome(
        drawn=drawn,
        launches=tuple(launches),
        hits=fallen,
        seconds=seconds,
        lost_s=seconds - whole.seconds,
        equal=equal,
        ledger=not ledgers,
        tested=tested,
        faults=tuple(faults),
    )


def _faults_of(ended: Ended, drawn: Drawn, fell: Sequence[Strike]) -> Iterator[str]:
    if ended.left:
        yield f"these outlived their launcher: {', '.join(ended.left)}"
    if "Traceback" in ended.said:
        yield ended.said
    elif ended.code and not fell:
        yield f"ended with {ended.code} though nobody was hit: {ended.said}"
    elif ended.code not in {0, *_OF_A_LOSS}:
        yield f"ended with {ended.code}: {ended.said}"
    elif (
        ended.code and drawn.on_loss == "wait" and not any(LAUNCHER in one.victims for one in fell)
    ):
        yield f"did not wait for whom it had lost: {ended.code}, {ended.said}"
