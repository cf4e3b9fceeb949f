"""Launches of whole federations from a process that has loaded everything: seconds each."""

import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import helpers.loaded  # noqa: F401 - once, for all that are forked
import sklearn.neighbors  # noqa: F401
from helpers.chaos.witness import Watch

from securevfl import SecureVflError, read_federation
from securevfl.cli.main import main as run_command
from securevfl.core.progress import Observer, unheard
from securevfl.launch import fork_server
from securevfl.launch.fork_server import fork_children
from securevfl.runtime.entry import finished_metrics
from securevfl.runtime.launching import train_in_processes
from securevfl.runtime.run_options import RunOptions

PATIENCE_S: Final = 150.0
"""No launch takes so long on a machine with a load of 8; one that does is stuck."""
GONE_S: Final = 20.0
"""Whoever has lost its launcher is gone by then."""


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a launch ended."""

    code: int
    """Exit code; minus the number of the signal that ended the launcher."""
    said: str
    """What it said of its failure; empty if it ended well."""
    seconds: float
    left: tuple[str, ...]
    """Processes that were still there after :data:`GONE_S`."""


class _Warm:
    """A process that is forked, in the place of one that is started and loads everything."""

    def __init__(self, command: Sequence[str], *, pass_fds: Sequence[int], **more: Any) -> None:
        self.pid = os.fork()
        if self.pid:
            return
        code = 1
        try:
            os.setpgid(0, 0)
            (handle,) = pass_fds
            _let_go_of_all_but(handle)
            os.environ.update(more["env"])
            sys.argv = ["fork server", str(handle)]
            fork_children(_WATCHED.run)
            code = 0
        finally:
            os._exit(code)

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)

    def wait(self) -> None:
        os.waitpid(self.pid, 0)


class _Watched:
    """What a party's process does: the command line, watched."""

    watch: Watch | None = None

    def run(self) -> None:
        if self.watch is not None:
            self.watch.begin()
        run_command()


_WATCHED = _Watched()


def _let_go_of_all_but(kept: int) -> None:
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208 - of numbers
        number = int(name)
        if number > 2 and number != kept:
            with suppress(OSError):
                os.close(number)
    empty = os.open(os.devnull, os.O_RDWR)
    for number in range(3):
        os.dup2(empty, number)


def launch(path: Path, watch: Watch, *, resume: bool) -> Ended:
    """Train a federation as ``securevfl train`` does, and let strikes fall on it.

    Args:
        path: The federation file.
        watch: Where the run folder and notes lie, and what happens.
        resume: Whether it goes on.
    """
    began = time.monotonic()
    pid = start(path, watch, resume=resume)
    status = _watched(pid, replace(watch, launcher=pid), began)
    return ended(pid, status, watch, seconds=time.monotonic() - began)


def start(path: Path, watch: Watch, *, resume: bool, observe: Observer = unheard) -> int:
    """Start a launcher in a process of its own, and return its number.

    Args:
        path: The federation file.
        watch: Where the run folder and notes lie, and what happens.
        resume: Whether it goes on.
        observe: Hears of progress, in the launcher's process.
    """
    watch.notes.mkdir(exist_ok=True)
    _told(watch).write_text("")
    pid = os.fork()
    if not pid:
        _be_launcher(path, watch, resume=resume, observe=observe)
    return pid


def ended(pid: int, status: int, watch: Watch, *, seconds: float) -> Ended:
    """Return how a launcher ended, and who of its parties did not."""
    return Ended(
        code=os.waitstatus_to_exitcode(status),
        said=_told(watch).read_text().strip(),
        seconds=seconds,
        left=tuple(_survivors(pid)),
    )


def _told(watch: Watch) -> Path:
    return watch.notes / "launcher.txt"


def _watched(pid: int, watch: Watch, began: float) -> int:
    """Wait for a launcher; hit by the clock, and kill those that were stopped."""
    stopped: dict[int, float] = {}
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        now = time.monotonic()
        for number, strike in enumerate(watch.strikes):
            if not watch.has_fallen(number):
                if strike.point is None and not done and now - began >= strike.after_s:
                    watch.fall(number)
                break
            since = stopped.setdefault(number, now)
            if strike.way == "SIGSTOP" and (done or now - since >= strike.stopped_s):
                watch.finish(number)
        if done:
            return status
        if now - began > PATIENCE_S:
            end_all(pid)
        time.sleep(0.005)


def end_all(pid: int) -> None:
    """Kill a launcher and all its parties."""
    for other in _session(pid):
        with suppress(ProcessLookupError):
            os.kill(other, signal.SIGKILL)


def _be_launcher(path: Path, watch: Watch, *, resume: bool, observe: Observer) -> None:
    code, told = 1, _told(watch)
    try:
        os.setsid()
        _let_go_of_all_but(-1)
        temporary = watch.notes.parent / "tmp"
        temporary.mkdir(exist_ok=True)
        os.environ["TMPDIR"] = str(temporary)
        tempfile.tempdir = None
        _WATCHED.watch = replace(watch, launcher=os.getpid())
        popen = SimpleNamespace(Popen=_Warm, DEVNULL=None)
        setattr(fork_server, "subprocess", popen)  # noqa: B010
        config = read_federation(path)
        if not (resume and finished_metrics(config, watch.out) is not None):
            train_in_processes(
                config,
                RunOptions(
                    run_folder=watch.out,
                    data_root=path.parent,
                    resume=resume and (watch.out / "parties").is_dir(),
                    observe=observe,
                ),
            )
        code = 0
    except SecureVflError as error:
        told.write_text(str(error))
        code = error.exit_code
    except KeyboardInterrupt:
        told.write_text("interrupted")
        code = 130
    except BaseException:  # whatever it is, it is a finding
        told.write_text(traceback.format_exc())
    finally:
        os._exit(code)


def _session(pid: int) -> Iterator[int]:
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with suppress(OSError, ProcessLookupError):
                if os.getsid(int(folder.name)) == pid:
                    yield int(folder.name)


def _survivors(pid: int) -> Iterator[str]:
    """Wait until nobody of a launch is there; yield who still is."""
    until = time.monotonic() + GONE_S
    while list(_session(pid)) and time.monotonic() < until:
        time.sleep(0.02)
    for other in list(_session(pid)):
        with suppress(OSError):
            yield Path(f"/proc/{other}/comm").read_text().strip()
            os.kill(other, signal.SIGKILL)
