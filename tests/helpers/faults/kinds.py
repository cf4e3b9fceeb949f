"""Every fault that a party meets: how it falls, how it is mended, and what must come of it."""

import shutil
import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from helpers.faults import lines
from helpers.faults.lines import Alteration, Line, Way
from helpers.faults.party import Point
from helpers.faults.stage import NAMES, Stage

from securevfl.testing import save_federation
from securevfl.transport.identity import CERTIFICATE_FILE, TRUST_FOLDER, Identity, certificate_pem

ROLES: Final = tuple(NAMES)
LINKING: Final = ("handshake", "linkage")
TRAINING: Final = ("round", "validation", "test", "checkpoint", "report")
PHASES: Final = ("handshake", "linkage", "pretraining", *TRAINING)

POINTS: Final[Mapping[str, Mapping[str, Point]]] = {
    "primary": {
        "handshake": ("WELCOME", 2),
        "linkage": ("LINK_TURN", 3),
        "pretraining": ("CROSS", 9),
        "round": ("PLAN", 11),
        "validation": ("PLAN", 15),
        "test": ("PLAN", 25),
        "checkpoint": ("write parties/agency/epoch-2.pt", 1),
        "report": ("write predictions.csv", 1),
    },
    "secondary": {
        "handshake": ("HELLO", 1),
        "linkage": ("LINK_MASKED", 1),
        "pretraining": ("SHARE", 6),
        "round": ("SHARE", 6),
        "validation": ("SHARE", 8),
        "test": ("SHARE", 13),
        "checkpoint": ("write parties/bank-1/epoch-2.pt", 1),
        "report": ("write parties/bank-1/model/weights.safetensors", 1),
    },
    "coordinator": {"handshake": ("HELLO", 1), "linkage": ("LINK_BLOCK", 3)},
    "dealer": {"handshake": ("HELLO", 1), "linkage": ("LINK_DEALING", 3)},
}
"""What a party is about to do when the fault falls. A helper has nothing to do after linkage: the
fault falls on it when the primary is there."""


def _nothing(_stage: Stage, _victim: str) -> None:
    """Leave all as it is."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One fault."""

    name: str
    what: str
    """What happens, for the table."""
    phases: Sequence[str] = PHASES
    stop: Sequence[str] | None = None
    """Phases under ``on_loss = "stop"``; None: :attr:`phases`."""
    wait: Sequence[str] | None = None
    """Phases under ``on_loss = "wait"``."""
    roles: Sequence[str] = ROLES
    effect: str = "lost"
    """What must come of it: ``"lost"``, the party is waited for; ``"ends"``, the run ends for all;
    ``"refused"``, it never begins; ``"harmless"``, nobody but a second one need notice."""
    prepare: Callable[[Stage, str], None] = _nothing
    """Done before anybody starts."""
    befall: Callable[[Stage, str], None] = _nothing
    """Done when the party is where it falls."""
    mend: Callable[[Stage, str], None] = _nothing
    """Done when the others have noticed."""
    within: str = ""
    """As :attr:`helpers.faults.party.Life.within`."""
    before: str = ""
    """As :attr:`helpers.faults.party.Life.before`."""
    helpers_speak: bool = False
    """Whether it needs a message of the party's own, of which helpers send none after linkage."""
    may_pass: bool = False
    """Whether it need not be noticed by who has nothing to do just then that it hinders."""
    on_wire: bool = False
    """Whether nobody is to blame but the line: either end may be named."""
    mounts: bool = False
    """Whether it needs a small file system."""
    sets_clock: bool = False
    """Whether it needs a clock that can be set (``clock.c``)."""

    def cells(self, *, on_loss: str) -> list[tuple[str, str]]:
        """Return roles and phases in which it makes sense."""
        found = []
        told = self.stop if on_loss == "stop" else self.wait
        phases = self.phases if told is None else told
        for role in self.roles:
            helper = role in ("coordinator", "dealer")
            # Unless somebody may have to link again, a helper leaves when links are made.
            most = LINKING if helper and (self.helpers_speak or on_loss == "stop") else PHASES
            found += [
                (role, phase)
                for phase in phases
                if phase in most and not (helper and phase == "pretraining")
            ]
        return found


def _lines_of(stage: Stage, victim: str) -> list[Line]:
    return list(stage.lines.values()) if victim == stage.primary else [stage.lines[victim]]


def _signal(number: signal.Signals) -> Callable[[Stage, str], None]:
    return lambda stage, victim: stage.parties[victim].signal(number)


def _swallow(stage: Stage, victim: str) -> None:
    for line in _lines_of(stage, victim):
        line.swallows = True


def _slow(stage: Stage, victim: str) -> None:
    for line in _lines_of(stage, victim):
        line.slow = True


def _mend_lines(stage: Stage, victim: str) -> None:
    for line in _lines_of(stage, victim):
        line.mend()


def _altered(how: Alteration) -> Callable[[Stage, str], None]:
    def befall(stage: Stage, victim: str) -> None:
        way: Way = "down" if victim == stage.primary else "up"
        _lines_of(stage, victim)[0].alter(way, how)

    return befall


def _replay(stage: Stage, victim: str) -> None:
    stage.kept_sockets.append(stage.lines[victim].replay())


def _second(stage: Stage, victim: str) -> None:
    """Start a second party of the name, with the same key and on another machine.

    The first one's run is not over before the second has called.
    """
    home = stage.folder / f"{victim}-second"
    home.mkdir()
    own = stage.home(victim)
    shutil.copytree(own / "identity", home / "identity")
    for table in own.glob("*.csv"):
        shutil.copy(table, home)
    stage.wait_for_word_of(stage.start(victim, home=home))


def _second_in_folder(stage: Stage, victim: str) -> None:
    """Start a party once more where it is at work already."""
    stage.wait_for_word_of(stage.start(victim, home=stage.home(victim)))


def _small_disk(stage: Stage, victim: str) -> None:
    stage.let_disk_be_small(victim)


def _fill(stage: Stage, victim: str) -> None:
    with (stage.home(victim) / "ballast").open("wb", buffering=0) as ballast, suppress(OSError):
        while True:
            ballast.write(bytes(1 << 16))


def _empty(stage: Stage, victim: str) -> None:
    (stage.home(victim) / "ballast").unlink()


def _modes(*, writable: bool) -> Callable[[Stage, str], None]:
    def change(stage: Stage, victim: str) -> None:
        run = stage.home(victim) / "run"
        for path in [run, *run.rglob("*")]:
            mode = path.stat().st_mode
            path.chmod(mode | 0o200 if writable else mode & ~0o222)

    return change


def _write_identity(folder: Path, identity: Identity) -> None:
    shutil.rmtree(folder)
    identity.save(folder)


def _own_identity(stage: Stage, victim: str) -> Identity:
    return Identity.load(stage.home(victim) / "identity", victim)


def _put_aside(stage: Stage) -> None:
    """Keep everybody's identity and file as they should be."""
    (stage.folder / "aside").mkdir()
    shutil.copy(stage.folder / "fed.toml", stage.folder / "aside")
    for name in stage.names:
        shutil.copytree(stage.home(name) / "identity", stage.folder / "aside" / name)


def _put_back(stage: Stage, _victim: str) -> None:
    aside = stage.folder / "aside"
    shutil.copy(aside / "fed.toml", stage.folder)
    stage.files.clear()
    for name in stage.names:
        shutil.rmtree(stage.home(name) / "identity")
        shutil.copytree(aside / name, stage.home(name) / "identity")


def _file_with(stage: Stage, victim: str, pinned: str, *, of: Sequence[str]) -> None:
    """Give some parties a federation file that pins another key of one party."""
    source = dict(stage.source)
    source["party"] = [
        {**party, "identity": pinned} if party["name"] == victim else party
        for party in source["party"]
    ]
    folder = stage.folder / "other"
    folder.mkdir(exist_ok=True)
    path = save_federation(folder, source)
    stage.files |= dict.fromkeys(of, path)


def _new_key(stage: Stage, victim: str) -> None:
    """Let a party have made itself a new key, of which it has told nobody."""
    _put_aside(stage)
    old = _own_identity(stage, victim)
    new = Identity.create(victim, valid_days=1.0)
    _write_identity(stage.home(victim) / "identity", new.trusting(old.trusted))
    _file_with(stage, victim, new.public_text, of=[victim])


def _revoked(stage: Stage, victim: str) -> None:
    """Let all others have taken back their trust in a party's key, and await a new one."""
    _put_aside(stage)
    new = Identity.create(victim, valid_days=1.0)
    others = [name for name in stage.names if name != victim]
    for name in others:
        own = _own_identity(stage, name)
        _write_identity(
            stage.home(name) / "identity",
            own.trusting({**own.trusted, victim: new.certificate}),
        )
    _file_with(stage, victim, new.public_text, of=others)


def _expired(stage: Stage, victim: str) -> None:
    """Let a party's certificate have expired, of which all have a copy."""
    _put_aside(stage)
    own = _own_identity(stage, victim)
    old = Identity.create(victim, valid_days=1e-9)
    _write_identity(
        stage.home(victim) / "identity",
        old.trusting({**own.trusted, victim: old.certificate}),
    )
    assert (stage.home(victim) / "identity" / CERTIFICATE_FILE).exists()
    for name in stage.names:
        trusted = stage.home(name) / "identity" / TRUST_FOLDER / f"{victim}.pem"
        trusted.write_bytes(certificate_pem(old.certificate))
    _file_with(stage, victim, old.public_text, of=stage.names)


_LOST_STOP: Final = ("handshake", "linkage", "round")
_LOST_WAIT: Final = ("handshake", "linkage", "pretraining", "round", "test", "report")
_WORK: Final = ("linkage", "round")
_HARMED: Final[Mapping[str, tuple[str, Alteration]]] = {
    "truncated": ("bytes are lost on the line", lines.truncated),
    "duplicated": ("bytes come twice", lines.duplicated),
    "reordered": ("bytes overtake others", lines.reordered),
    "flipped": ("a bit is flipped on the line", lines.flipped),
    "oversized": ("a record comes that is longer than any may be", lines.oversized),
}
_LIES: Final[Mapping[str, str]] = {
    "truncated": "it sends less of a message than it announced",
    "duplicated": "it sends a message twice",
    "reordered": "it sends a message before its turn",
    "flipped": "a bit of a message's head is another one",
    "oversized": "it announces a message of a tebibyte",
    "another session": "it sends a message of another session",
}

FAULTS: Final[Mapping[str, Fault]] = {
    fault.name: fault
    for fault in (
        Fault(
            name="killed",
            what="its process is killed (SIGKILL)",
            stop=_LOST_STOP,
            befall=_signal(signal.SIGKILL),
        ),
        Fault(
            name="hung",
            what="its process stands still (SIGSTOP)",
            stop=_LOST_STOP,
            wait=_LOST_WAIT,
            befall=_signal(signal.SIGSTOP),
            mend=_signal(signal.SIGCONT),
        ),
        Fault(
            name="half-open",
            what="its machine is gone without a word: the line swallows all",
            stop=_LOST_STOP,
            wait=_LOST_WAIT,
            befall=_swallow,
            mend=_mend_lines,
            on_wire=True,
        ),
        Fault(
            name="slow",
            what="its line takes 10 kB a second from now on",
            phases=_WORK,
            stop=(),
            effect="harmless",
            befall=_slow,
        ),
        *(
            Fault(
                name=f"line-{name}",
                what=what,
                phases=_WORK,
                stop=("round",),
                befall=_altered(how),
                mend=_mend_lines,
                helpers_speak=True,
                on_wire=True,
            )
            for name, (what, how) in _HARMED.items()
        ),
        *(
            Fault(
                name=f"sends-{name.replace(' ', '-')}",
                what=what,
                phases=_WORK,
                wait=("round",),
                effect="ends",
                within=name,
                helpers_speak=True,
            )
            for name, what in _LIES.items()
        ),
        Fault(
            name="version",
            what="it speaks another version of the protocol",
            phases=("handshake",),
            wait=(),  # nobody waits for who was never there
            effect="refused",
            before="another version",
        ),
        Fault(
            name="wrong-certificate",
            what="it has a new key, of which the others know nothing",
            phases=("handshake",),
            wait=(),  # nobody waits for who was never there
            effect="refused",
            prepare=_new_key,
            mend=_put_back,
        ),
        Fault(
            name="revoked-certificate",
            what="the others do not trust its key any more",
            phases=("handshake",),
            wait=(),  # nobody waits for who was never there
            effect="refused",
            prepare=_revoked,
            mend=_put_back,
        ),
        Fault(
            name="expired-certificate",
            what="its certificate has expired",
            phases=("handshake",),
            wait=(),  # nobody waits for who was never there
            effect="refused",
            prepare=_expired,
            mend=_put_back,
        ),
        Fault(
            name="replayed",
            what="somebody calls and sends once more all that it has sent",
            phases=("linkage", "round"),
            stop=(),
            roles=("secondary", "coordinator", "dealer"),
            effect="harmless",
            befall=_replay,
        ),
        Fault(
            name="second",
            what="a second one of its name and key is started elsewhere",
            phases=("handshake", "round"),
            stop=("round",),
            effect="harmless",
            befall=_second,
        ),
        Fault(
            name="second-in-folder",
            what="it is started once more in the same folder",
            phases=("handshake", "round"),
            stop=("round",),
            effect="harmless",
            befall=_second_in_folder,
        ),
        Fault(
            name="disk-full",
            what="its disk is full",
            phases=("handshake", "round", "checkpoint", "report"),
            stop=("linkage", "checkpoint"),
            may_pass=True,
            prepare=_small_disk,
            mounts=True,
            befall=_fill,
            mend=_empty,
        ),
        Fault(
            name="read-only",
            what="its run folder cannot be written any more",
            phases=("handshake", "round", "checkpoint", "report"),
            stop=("linkage", "checkpoint"),
            may_pass=True,
            befall=_modes(writable=False),
            mend=_modes(writable=True),
        ),
        Fault(
            name="memory",
            what="it gets no more memory",
            phases=("handshake", "round", "report"),
            stop=_WORK,
            may_pass=True,
            within="no memory",
        ),
        *(
            Fault(
                name=f"clock-{way}",
                what=f"its clock jumps 400 days {way}",
                phases=("round",),
                stop=(),
                effect="harmless",
                within=f"clock {way}",
                sets_clock=True,
            )
            for way in ("ahead", "back")
        ),
        *(
            Fault(
                name=f"clock-wrong-{way}",
                what=f"its clock is 400 days {way} from the start",
                phases=("handshake",),
                wait=(),
                effect="refused",
                before=f"clock {way}",
                sets_clock=True,
            )
            for way in ("ahead", "back")
        ),
    )
}
"""All of them, by name."""
