"""One fault, one party, one phase: gone through, mended, and judged."""

import gc
import json
import re
import shutil
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Final

from helpers.chaos.checks import differences, ledger_faults
from helpers.faults.kinds import POINTS, Fault
from helpers.faults.party import LOADED
from helpers.faults.stage import JOIN_S, NAMES, SILENCE_S, Party, Stage, write_stage

_LATE_S: Final = 3.0
"""How much later than its deadline a thing may be noticed on a busy machine."""
_NEVER_S: Final = JOIN_S + 2 * _LATE_S
_LAST: Final = ("test", "report")
_MOST_RESUMED: Final = 2
# What a party says of a run in which nothing is wrong.
_USUAL: Final = ("; its log and ledger: ", "cost to ", "links of ", " rows are linked at ")
# A sum of masked words tells nobody who has sent wrong ones.
_UNKNOWABLE: Final = "which party sent other words than its own no sum tells"
# What no user should have to read.
_RAW: Final = re.compile(
    r"Traceback|\[SSL|_ssl\.c|OpenSSL|\[Errno|SSLError|mistake of this program|unexpected [A-Z]"
    r"|RuntimeError|error:[0-9A-F]{8}"
)


@dataclass(kw_only=True)
class Outcome:
    """What became of one cell."""

    fault: str
    role: str
    phase: str
    on_loss: str
    noticed: dict[str, float] = field(default_factory=dict)
    """By party: after how many seconds it said something."""
    lines: dict[str, str] = field(default_factory=dict)
    """By party: what it said first."""
    codes: dict[str, int] = field(default_factory=dict)
    """By party: how it ended for the first time."""
    resumed: int = 0
    """How often all had to be started again by hand."""
    repeated: int = 0
    """Rounds that a secondary answered more often than in an undisturbed run."""
    ledger: bool = False
    """Whether no ledger is below what left, and all of them verify."""
    right: bool = False
    """Whether the run ended as an undisturbed one."""
    seconds: float = 0.0
    findings: list[str] = field(default_factory=list)
    """What should not be so."""

    @property
    def after_s(self) -> float | None:
        """Seconds until the last party knew; None: nobody said anything."""
        return max(self.noticed.values(), default=None)


def kind_of(phase: str) -> str:
    """Return the kind of run that has a phase."""
    return "pretraining" if phase == "pretraining" else "helped"


def undisturbed(kind: str, folder: Path) -> Path:
    """Run a kind with nothing going wrong; return a run folder of all parties.

    Raises:
        RuntimeError: If even that does not end well.
    """
    shutil.rmtree(folder, ignore_errors=True)
    write_stage(folder, kind, on_loss="stop")
    stage = Stage(folder)
    try:
        for name in stage.names:
            stage.start(name)
        stage.run()
        codes = {name: party.code for name, party in stage.parties.items()}
        if any(codes.values()):
            raise RuntimeError(f"{kind}, undisturbed: {codes}")
        _load_what_they_did(stage)
        return stage.together(folder / "whole")
    finally:
        stage.close()


def _load_what_they_did(stage: Stage) -> None:
    """Load here what parties have loaded, so that those to come find it."""
    for notes in stage.notes().values():
        for name in next(note for note in notes if note["what"] == LOADED)["names"]:
            with suppress(ImportError):
                import_module(name)
    gc.collect()
    gc.freeze()  # collections would copy all of it in each of them


class _Cell:
    """A fault that falls on a stage."""

    def __init__(self, stage: Stage, fault: Fault, outcome: Outcome) -> None:
        self.stage, self.fault, self.outcome = stage, fault, outcome
        self.victim = NAMES[outcome.role]
        self.fallen: float | None = None
        self.mended = self.again = False
        self.joined: frozenset[str] = frozenset()
        """Who was in a session before all were started again."""
        self.earlier: list[Party] = []
        """Processes that others have taken the place of."""
        self.alive: list[str] = []
        stage.on_point, stage.on_turn = self.befall, self.turn

    def begin(self) -> None:
        """Start all parties; one of them stops where the fault falls."""
        role, phase = self.outcome.role, self.outcome.phase
        own = POINTS[role].get(phase)
        waits, at = (self.victim, own) if own else (self.stage.primary, POINTS["primary"][phase])
        from_start = self.fault.effect == "refused"
        for name in self.stage.names:
            self.stage.start(
                name,
                at=at if name == waits and not from_start else None,
                within=self.fault.within if name == self.victim else "",
                before=self.fault.before if name == self.victim else "",
            )
        if from_start:
            self.alive = list(self.stage.names)
            self.fallen = time.monotonic()

    def befall(self, _party: Party) -> None:
        """Let it happen."""
        joined = _joined(self.stage)
        self.alive = [
            name for name, one in self.stage.parties.items() if one.code is None and name in joined
        ]
        self.fallen = time.monotonic()
        self.fault.befall(self.stage, self.victim)

    def turn(self, now: float) -> None:
        """Mend what has befallen as soon as all others have noticed."""
        if self.fallen is None or self.fault.effect == "harmless":
            return
        if self.mended:
            self._start_again()
            return
        for name in self.alive:
            self._hear(name)
        others = [name for name in self.alive if name != self.victim]
        all_know = all(name in self.outcome.noticed for name in others)
        if all_know or now - self.fallen >= _NEVER_S:
            self.mended = True
            self.fault.mend(self.stage, self.victim)

    def _start_again(self) -> None:
        """Start a party that has ended, once, where the others wait for it."""
        victim, waits = self.stage.parties[self.victim], self.outcome.on_loss == "wait"
        others = [one for name, one in self.stage.parties.items() if name != self.victim]
        lost = self.fault.effect == "lost" and waits
        if lost and victim.code and not self.again and any(one.code is None for one in others):
            self._hear(self.victim)
            self.again = True
            self.outcome.codes[self.victim] = victim.code
            self.earlier.append(victim)
            self.stage.start(self.victim)

    def _hear(self, name: str) -> None:
        assert self.fallen is not None
        party = self.stage.parties[name]
        if name in self.outcome.noticed:
            return
        for at, text in party.lines:
            if at >= self.fallen and _tells(text):
                self.outcome.noticed[name] = at - self.fallen
                self.outcome.lines[name] = text
                return
        if party.code:
            self.outcome.noticed[name] = party.ended - self.fallen
            self.outcome.lines[name] = ""

    def listen(self) -> None:
        """Note what was said until the last one ended."""
        if self.fallen is not None:
            for name in self.alive:
                self._hear(name)


def _joined(stage: Stage) -> frozenset[str]:
    """Return who is, or was, in a session."""
    notes = stage.notes()
    said = {name for name in notes if any(one["what"] == "HELLO" for one in notes[name])}
    return frozenset({stage.primary} | said)


def _tells(text: str) -> bool:
    """Whether a line says that something is wrong."""
    if text.startswith("warning: "):
        return "; waiting " in text
    return not any(usual in text for usual in _USUAL)


def run_cell(
    fault: Fault,
    role: str,
    phase: str,
    *,
    on_loss: str,
    whole: Path,
    folder: Path,
) -> Outcome:
    """Let a fault fall, mend it, let the run go on and judge what came of it.

    Args:
        fault: The fault.
        role: On whom it falls.
        phase: When.
        on_loss: As in the federation file.
        whole: The run folder of an undisturbed run.
        folder: Gets what the run writes; it stays if anything is wrong.
    """
    shutil.rmtree(folder, ignore_errors=True)
    outcome = Outcome(fault=fault.name, role=role, phase=phase, on_loss=on_loss)
    write_stage(folder, kind_of(phase), on_loss=on_loss)
    stage = Stage(folder)
    began = time.monotonic()
    try:
        cell = _Cell(stage, fault, outcome)
        fault.prepare(stage, cell.victim)
        cell.begin()
        in_time = stage.run()
        cell.listen()
        cell.joined = _joined(stage)
        outcome.seconds = time.monotonic() - began
        everybody = [*cell.earlier, *stage.everybody()]
        said = [(one.name, text) for one in everybody for _, text in one.said]
        for name, party in stage.parties.items():
            outcome.codes.setdefault(name, party.code or 0)
        for other in stage.others:
            outcome.codes[f"second {other.name}"] = other.code or 0
            first = [text for _, text in other.lines if _tells(text)]
            outcome.lines[f"second {other.name}"] = first[0] if first else ""
        outcome.findings += _found(cell, in_time=in_time)
        if cell.fallen is not None and not cell.mended:
            fault.mend(stage, cell.victim)
        while stage.is_unfinished() and outcome.resumed < _MOST_RESUMED:
            outcome.resumed += 1
            stage.on_point, stage.on_turn = lambda _party: None, lambda _now: None
            for name in stage.names:
                stage.start(name)
            stage.run()
            said += [(one.name, text) for one in stage.parties.values() for _, text in one.said]
        outcome.findings += [f"{name}: {text}" for name, text in said if _RAW.search(text)]
        outcome.findings += _judged(stage, outcome, whole)
    finally:
        stage.close()
    if not outcome.findings:
        shutil.rmtree(folder)
    return outcome


def _found(cell: _Cell, *, in_time: bool) -> Iterator[str]:
    """Yield what was not noticed as it should be."""
    fault, outcome = cell.fault, cell.outcome
    if not in_time:
        yield "had to be killed"
    if cell.fallen is None:
        yield "the fault never fell"
        return
    if fault.effect == "harmless":
        yield from (f"{name} was disturbed: {line}" for name, line in _of_first(outcome))
        yield from (
            f"{name} ended with {code}"
            for name, code in outcome.codes.items()
            if code and not name.startswith("second ")
        )
        yield from (f"{name} ended well" for name, code in _seconds(outcome) if not code)
        return
    others = [name for name in cell.alive if name != cell.victim]
    ended_well = not any(outcome.codes[name] for name in cell.stage.names if name != cell.victim)
    if fault.may_pass and ended_well and not outcome.codes[cell.victim]:
        return
    through = outcome.phase in _LAST or not cell.stage.has_table(cell.victim)
    if through and ended_well:
        return  # the run was over before they could notice
    limit = JOIN_S if fault.effect == "refused" else SILENCE_S
    for name in others:
        after = outcome.noticed.get(name)
        if after is None and outcome.on_loss == "stop" and not outcome.codes[name]:
            continue  # a helper that had done its work
        if after is None:
            yield f"{name} noticed nothing"
        elif after > limit + _LATE_S:
            yield f"{name} noticed after {after:.1f} s"
    yield from _misnamed(cell)
    if fault.effect == "lost" and outcome.on_loss == "wait":
        yield from (
            f"{name} did not wait: {code}, {outcome.lines.get(name)}"
            for name, code in outcome.codes.items()
            if code and name != cell.victim
        )


def _of_first(outcome: Outcome) -> Iterator[tuple[str, str]]:
    for name, line in outcome.lines.items():
        if not name.startswith("second "):
            yield name, line


def _seconds(outcome: Outcome) -> Iterator[tuple[str, int]]:
    for name, code in outcome.codes.items():
        if name.startswith("second "):
            yield name, code


def _misnamed(cell: _Cell) -> Iterator[str]:
    """Yield who was told of somebody who has done nothing."""
    stage, victim = cell.stage, cell.victim
    true = {victim} | ({"primary"} if victim == stage.primary else set())
    if cell.fault.on_wire:
        true |= {stage.primary} | ({"bank-1"} if victim == stage.primary else set())
    for name, line in cell.outcome.lines.items():
        if name == victim:
            # What it says of itself need not begin with its name.
            continue
        if _UNKNOWABLE in line and cell.fault.effect == "ends":
            continue
        # Who has not joined yet knows the primary alone.
        known = true if name in cell.joined else true | {stage.primary}
        if not any(re.search(rf"\b{re.escape(one)}\b", line) for one in known):
            yield f"{name} was told of another one: {line or 'nothing'}"


def _judged(stage: Stage, outcome: Outcome, whole: Path) -> Iterator[str]:
    """Yield what is wrong in the end."""
    unfinished = stage.is_unfinished()
    if unfinished:
        yield from (
            f"did not go on: {name}, {party.code}: {party.lines[-1][1] if party.lines else ''}"
            for name, party in stage.parties.items()
            if party.code
        )
    run = stage.together(stage.folder / "together")
    notes = {} if outcome.phase == "pretraining" else stage.notes()
    ledgers = list(ledger_faults(run, stage.ledgers(), notes, once=False, budget=None))
    outcome.ledger = not ledgers
    yield from ledgers
    if not unfinished:
        unlike = list(differences(run, whole))
        outcome.right = not unlike
        yield from unlike
    charged = [_charges(path) for path in stage.ledgers().values()]
    usual = [_charges(path) for path in sorted(whole.glob("parties/*/ledger.jsonl"))]
    outcome.repeated = max(charged, default=0) - max(usual, default=0)


def _charges(path: Path) -> int:
    if not path.exists():
        return 0
    kinds = Counter(json.loads(line)["kind"] for line in path.read_text().splitlines())
    return kinds["charge"]
