"""A federation of processes, each in a home of its own, and the one loop that watches them all."""

import os
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import tomllib
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import helpers.loaded  # noqa: F401 - once, for all that are forked
import sklearn.neighbors  # noqa: F401
from helpers.chaos.kinds import write_kind
from helpers.chaos.witness import notes_of
from helpers.faults.lines import Line
from helpers.faults.party import Life, Point

from securevfl.federation.checkpoint import has_begun
from securevfl.launch.spawn import reserved_port
from securevfl.testing import save_federation
from securevfl.transport.identity import provision

NAMES: Final[Mapping[str, str]] = {
    "primary": "agency",
    "secondary": "bank-1",
    "coordinator": "coordinator",
    "dealer": "dealer",
}
"""Who is hit, by role."""
SILENCE_S: Final = 3.0
"""``runtime.silence_timeout_s`` of these runs."""
JOIN_S: Final = 12.0
"""Their ``runtime.join_timeout_s``, and ``round_timeout_s``."""
WAIT_S: Final = 60.0
"""Their ``runtime.wait_s``."""
PATIENCE_S: Final = 100.0
"""No launch takes so long; one that does is stuck."""
_DISK: Final = "8m"
_HOME_MOUNTS: Final = ("mount", "-t", "tmpfs", "-o", f"size={_DISK}", "tmpfs")


def write_stage(folder: Path, kind: str, *, on_loss: str) -> Path:
    """Write the tables and the federation file of a kind, every party in a home of its own.

    Args:
        folder: Gets one folder a party.
        kind: ``"helped"`` has all four roles; others are of :data:`helpers.chaos.kinds.KINDS`.
        on_loss: As in the file.
    """
    path = write_kind(folder, "trained" if kind == "helped" else kind, on_loss=on_loss)
    source = tomllib.loads(path.read_text())
    if kind == "helped":
        source["party"] += [{"name": role, "role": role} for role in ("coordinator", "dealer")]
        source["linkage"] = {"protection": "shares", "ranges": [[-1.0, 11.0]] * 2}
    source["runtime"] |= {
        "silence_timeout_s": SILENCE_S,
        "join_timeout_s": JOIN_S,
        "round_timeout_s": JOIN_S,
        "wait_s": WAIT_S,
    }
    names = [party["name"] for party in source["party"]]
    pinned = provision(names, folder / "identities")
    for party in source["party"]:
        name = party["name"]
        (folder / name).mkdir()
        shutil.move(folder / "identities" / name, folder / name / "identity")
        if "data" in party:
            shutil.move(folder / party["data"], folder / name / party["data"])
        party["identity"] = pinned[name]
    (folder / "identities").rmdir()
    return save_federation(folder, source)


@dataclass(eq=False, kw_only=True)
class Party:
    """A party's process, and what it has said."""

    name: str
    pid: int
    watched: int
    """Descriptor that tells of its end."""
    stderr: int
    control: socket.socket
    began: float
    said: list[tuple[float, str]] = field(default_factory=list)
    """What it wrote for its user, and when."""
    code: int | None = None
    """Exit code; minus the number of the signal that ended it."""
    ended: float = 0.0
    unread: bytes = b""

    @property
    def lines(self) -> list[tuple[float, str]]:
        """What it said of itself, in the form in which it says it, but for where its page lies."""
        start = "securevfl: "
        lines = [(at, text[len(start) :]) for at, text in self.said if text.startswith(start)]
        return [(at, text) for at, text in lines if not text.startswith("what left ")]

    def signal(self, number: signal.Signals) -> None:
        """Send it a signal."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, number)


def can_mount() -> bool:
    """Whether a small file system can be had for a party."""
    with tempfile.TemporaryDirectory() as folder:
        if subprocess.run([*_HOME_MOUNTS, folder], capture_output=True).returncode:
            return False
        subprocess.run(["umount", folder], capture_output=True)
        return True


class Stage:
    """A federation at work, in which things go wrong.

    Args:
        folder: As :func:`write_stage` has left it.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.source = tomllib.loads((folder / "fed.toml").read_text())
        self.names = [party["name"] for party in self.source["party"]]
        self.roles = {party["name"]: party["role"] for party in self.source["party"]}
        self.primary = self.names[0]
        self.selector = selectors.DefaultSelector()
        self._kept = reserved_port("127.0.0.1")
        self.port = self._kept.__enter__()
        self.source["party"][0]["address"] = f"127.0.0.1:{self.port}"
        save_federation(folder, self.source)
        self.lines = {
            name: Line(self.selector, self.port) for name in self.names if name != self.primary
        }
        self.parties: dict[str, Party] = {}
        """By name, the processes that count."""
        self.others: list[Party] = []
        """Second ones of a name."""
        self.files: dict[str, Path] = {}
        """By party: the federation file that it has, if not everybody's."""
        self.on_point: Callable[[Party], None] = lambda _party: None
        """Called when a party is where something is to happen; it waits meanwhile."""
        self.on_turn: Callable[[float], None] = lambda _now: None
        """Called every turn of the loop."""
        self.mounted: list[Path] = []
        self.kept_sockets: list[socket.socket] = []
        """Calls of others, which end with the stage."""
        (folder / "notes").mkdir(exist_ok=True)

    def home(self, name: str) -> Path:
        """Where a party has its table, its identity and its run folder."""
        return self.folder / name

    def begun(self, name: str) -> bool:
        """Whether a party has something to go on from, so that its user says ``--resume``."""
        return has_begun(self.home(name) / "run" / "parties" / name)

    def start(
        self,
        name: str,
        *,
        at: Point | None = None,
        within: str = "",
        before: str = "",
        home: Path | None = None,
    ) -> Party:
        """Start a party, or, with a home of its own, a second one of its name.

        Args:
            name: The party.
            at: Where it stops and tells.
            within: What happens within it then.
            before: What happens within it at once.
            home: Another folder that it takes for its own.
        """
        own = home or self.home(name)
        again = home is None and self.begun(name)
        fed = self.files.get(name, self.folder / "fed.toml")
        arguments = ["party", fed, "--name", name, "--identity", own / "identity"]
        arguments += ["--out", own / "run", "--data-root", own, "--device", "cpu"]
        arguments += ["--resume"] if again else []
        told, ours = os.pipe(), socket.socketpair()
        life = Life(
            arguments=[str(part) for part in arguments],
            name=name,
            notes=str(self.folder / "notes" / f"{name}{'' if home is None else '-second'}.jsonl"),
            run=str(own / "run"),
            home=str(own),
            port=self.port,
            line=self.lines[name].port if name in self.lines else self.port,
            control=ours[1].fileno(),
            at=at,
            within=within,
            before=before,
        )
        stdout = self.folder / f"{name}.out"
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if not pid:
            self._be(life, stdout, told[1])
        ours[1].close()
        os.close(told[1])
        os.set_blocking(told[0], False)
        party = Party(
            name=name,
            pid=pid,
            watched=os.pidfd_open(pid),
            stderr=told[0],
            control=ours[0],
            began=time.monotonic(),
        )
        self.selector.register(party.watched, selectors.EVENT_READ, lambda _: self._end(party))
        self.selector.register(party.stderr, selectors.EVENT_READ, lambda _: self._hear(party))
        self.selector.register(party.control, selectors.EVENT_READ, lambda _: self._point(party))
        if home is None:
            self.parties[name] = party
        else:
            self.others.append(party)
        return party

    def run(self) -> bool:
        """Let them all live until they have ended; return False if some had to be killed."""
        until = time.monotonic() + PATIENCE_S
        while alive := [one for one in self.everybody() if one.code is None]:
            now = time.monotonic()
            self._turn(now)
            self.on_turn(time.monotonic())
            if now > until:
                for party in alive:
                    party.signal(signal.SIGKILL)
                    self._end(party)
                return False
        return True

    def wait_for_word_of(self, party: Party) -> None:
        """Let all live until one of them has warned its user or ended, or a join's time is over.

        Whoever waits for :attr:`on_point` goes on waiting.
        """
        until = time.monotonic() + JOIN_S / 2
        while party.code is None and (now := time.monotonic()) < until:
            if any(text.startswith("warning: ") for _, text in party.lines):
                return
            self._turn(now)

    def _turn(self, now: float) -> None:
        waits = [wait for line in self.lines.values() if (wait := line.tick(now)) is not None]
        for key, events in self.selector.select(min([0.1, *waits])):
            key.data(events)

    def let_disk_be_small(self, name: str) -> None:
        """Give a party a disk of its own for its home."""
        home, aside = self.home(name), self.folder / f"{name}-aside"
        home.rename(aside)
        home.mkdir(mode=0o700)
        subprocess.run([*_HOME_MOUNTS, home], check=True)
        self.mounted.append(home)
        shutil.copytree(aside, home, dirs_exist_ok=True)
        shutil.rmtree(aside)

    def together(self, folder: Path) -> Path:
        """Put what the parties have kept of a run into one run folder, and return it."""
        shutil.rmtree(folder, ignore_errors=True)
        for name in self.names:
            run = self.home(name) / "run"
            if run.is_dir():
                shutil.copytree(run, folder, dirs_exist_ok=True)
        return folder

    def has_table(self, name: str) -> bool:
        """Whether a party is more than a helper."""
        return self.roles[name] in ("primary", "secondary")

    def is_unfinished(self) -> bool:
        """Whether a party that keeps something of the run has not ended well."""
        return any(self.parties[name].code != 0 for name in self.names if self.has_table(name))

    def ledgers(self) -> dict[str, Path]:
        """Return the ledgers of the tables, by party."""
        return {
            party["name"]: self.home(party["name"]) / f"{party['data']}.ledger.jsonl"
            for party in self.source["party"]
            if "data" in party
        }

    def notes(self) -> dict[str, list[Mapping[str, Any]]]:
        """Return what left, by party and in order."""
        return notes_of(self.folder / "notes")

    def close(self) -> None:
        """End what is left, and give everything back."""
        for party in self.everybody():
            if party.code is None:
                party.signal(signal.SIGKILL)
                self._end(party)
        for line in self.lines.values():
            line.close()
        for call in self.kept_sockets:
            call.close()
        self.selector.close()
        self._kept.__exit__(None, None, None)
        for home in self.mounted:
            subprocess.run(["umount", "--lazy", home], capture_output=True)

    def everybody(self) -> Iterator[Party]:
        """Yield all processes, second ones last."""
        yield from self.parties.values()
        yield from self.others

    def _be(self, life: Life, stdout: Path, stderr: int) -> None:
        code = 1
        try:
            os.setpgid(0, 0)
            empty = os.open(os.devnull, os.O_RDONLY)
            out = os.open(stdout, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            for number, handle in enumerate((empty, out, stderr)):
                os.dup2(handle, number)
            # The tool's own streams may be files; these are none that can be sought in.
            sys.stdout, sys.stderr = (open(one, "w", buffering=1, closefd=False) for one in (1, 2))  # noqa: SIM115
            for name in os.listdir("/proc/self/fd"):  # noqa: PTH208 - of numbers
                if int(name) > 2 and int(name) != life.control:
                    with suppress(OSError):
                        os.close(int(name))
            code = life.live()
            sys.stdout.flush()
            sys.stderr.flush()
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)

    def _point(self, party: Party) -> None:
        try:
            there = party.control.recv(1)
        except OSError:
            there = b""
        if not there:
            self.selector.unregister(party.control)
            return
        self.on_point(party)
        with suppress(OSError):
            party.control.sendall(b"!")

    def _hear(self, party: Party) -> None:
        while True:
            try:
                raw = os.read(party.stderr, 1 << 16)
            except BlockingIOError:
                return
            if not raw:
                if party.stderr in self.selector.get_map():
                    self.selector.unregister(party.stderr)
                return
            *whole, party.unread = (party.unread + raw).split(b"\n")
            now = time.monotonic()
            party.said += [(now, line.decode(errors="replace")) for line in whole]

    def _end(self, party: Party) -> None:
        _, status = os.waitpid(party.pid, 0)
        party.code, party.ended = os.waitstatus_to_exitcode(status), time.monotonic()
        self._hear(party)
        for handle in (party.watched, party.stderr, party.control):
            if handle in self.selector.get_map():
                self.selector.unregister(handle)
        os.close(party.watched)
        os.close(party.stderr)
        party.control.close()
