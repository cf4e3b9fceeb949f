"""Whole runs on the nodes of a Ray cluster, inside one organisation.

Ray is never near the star between parties: what it carries are all parties' tables and a run's
results, by pickles of its own, between machines that one organisation holds.
"""

import contextlib
import copy
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch

from securevfl.core import files
from securevfl.core.errors import ConfigError, require_extra
from securevfl.core.memory import keep_freed_memory
from securevfl.core.progress import ProgressEvent
from securevfl.data.tables import PartyTable
from securevfl.lab.engine import ONE_THREAD, Place, RunObservers, Waiting, throttle
from securevfl.lab.one_run import Run, RunFailure, Task, attempt
from securevfl.runtime.run_options import device_named
from securevfl.version import __version__

_HEAR_EVERY_S: Final = 0.5


class RayEngine:
    """Sends runs to a Ray cluster, one Ray task a run, and writes what comes back.

    Tables are read here and put into Ray's object store once; nodes need no data of their own and
    share no disk. Files of a run come back with its result, and are written into the run's folder
    on this machine.

    Args:
        place: What all runs share.
        jobs: Runs at a time; None: as many as the cluster has room for.
        address: Of the cluster; None starts one of this machine alone.
        gpus_per_run: GPUs that a run takes of its node; None: 1 with device ``"cuda"``.

    Raises:
        ConfigError: If Ray is not installed, the cluster does not answer or has no such GPU.
    """

    def __init__(
        self, place: Place, *, jobs: int | None, address: str | None, gpus_per_run: float | None
    ) -> None:
        self.require_installed()
        import ray

        self._ray = ray
        self._place = place
        self._jobs = jobs
        self._stored: dict[str, Any] = {}
        gpus = self.gpus(place.device, gpus_per_run)
        self._started_here = not ray.is_initialized()
        if self._started_here:
            _start(address, cpus=jobs)
        try:
            self._require_room(gpus)
            # One CPU a run, as a run has one thread. What dies is begun again by us, once: Ray
            # itself would try without end where memory runs out.
            settings = {"num_cpus": 1, "num_gpus": gpus, "max_retries": 0}
            self._train = ray.remote(_train_on_node).options(
                **settings, runtime_env={"env_vars": dict(ONE_THREAD)}
            )
            self._mailbox = ray.remote(_Mailbox).options(num_cpus=0).remote()
        except BaseException:
            self.close()
            raise

    @staticmethod
    def require_installed() -> None:
        """Refuse where the package is missing.

        Raises:
            ConfigError: Saying how to install it.
        """
        require_extra("ray", use="engine: ray")

    @staticmethod
    def gpus(device: str, asked: float | None) -> float:
        """Return how many GPUs a run takes of its node.

        Raises:
            ConfigError: If the device and that number contradict one another.
        """
        if device == "cuda":
            if asked == 0:
                raise ConfigError("gpus-per-run: device cuda needs more than 0 of a GPU a run")
            return 1.0 if asked is None else asked
        device_named(device)
        if asked:
            raise ConfigError(f"gpus-per-run: {asked:g} has no use with device {device}; take cuda")
        return 0.0

    @property
    def width(self) -> int:
        """How many runs are trained at a time."""
        if self._jobs is not None:
            return self._jobs
        return max(1, int(self._ray.cluster_resources().get("CPU", 1)))

    def train(self, tasks: Sequence[Task], hearing: RunObservers) -> None:
        """Train runs; see :class:`securevfl.lab.engine.Engine`.

        Reveals:
            To every node of the cluster: all parties' tables. It is one organisation's.
        """
        waiting = Waiting.of(tasks)
        flying: dict[Any, Task] = {}
        try:
            while waiting.tasks or flying:
                # More than there is room for, so that a cluster that can grow sees what waits.
                most = self.width if self._jobs is not None else 2 * self.width
                while waiting.tasks and len(flying) < most:
                    task = waiting.tasks.popleft()
                    flying[self._send(task)] = task
                landed, _ = self._ray.wait(list(flying), timeout=_HEAR_EVERY_S)
                self._tell(flying.values(), hearing)
                for reference in landed:
                    self._land(flying.pop(reference), reference, waiting, hearing)
        finally:
            for reference in flying:
                self._ray.cancel(reference, force=True)

    def close(self) -> None:
        """Leave the cluster, which ends what this process has started there."""
        if self._started_here:
            self._ray.shutdown()

    def _send(self, task: Task) -> Any:
        if task.tables not in self._stored:
            self._stored[task.tables] = self._ray.put(self._place.tables[task.tables])
        tables = self._stored[task.tables]
        return self._train.remote(task, tables, self._place.device, __version__, self._mailbox)

    def _land(self, task: Task, reference: Any, waiting: Waiting, hearing: RunObservers) -> None:
        """Take what a run ended with."""
        try:
            outcome, written = self._ray.get(reference)
        except self._ray.exceptions.RayError as error:
            died = not isinstance(error, self._ray.exceptions.RayTaskError)
            if died and waiting.again(task):
                return
            message = next(iter(str(error).strip().splitlines()[-1:]), type(error).__name__)
            reason = f"its Ray worker ended: {message}" if died else f"on its Ray worker: {message}"
            outcome, written = RunFailure(reason=f"seed {task.run.seed}: {reason}"), {}
        if isinstance(outcome, RunFailure):
            waiting.give_up(task.run.name)
            hearing.failed(task.run, outcome)
            return
        folder = task.run.folder(self._place.folder)
        # What a run on this machine may have left when it was cut off.
        shutil.rmtree(folder / "parties", ignore_errors=True)
        # The file that marks the run as done is the last.
        for name in sorted(written, key=lambda name: name == "result.json"):
            files.write_bytes(folder / name, written[name])
        hearing.done(task.run, outcome)

    def _tell(self, flying: Any, hearing: RunObservers) -> None:
        known = {task.run for task in flying}
        # Whoever carries progress may die with its node: runs go on without.
        with contextlib.suppress(self._ray.exceptions.RayError):
            for run, event in self._ray.get(self._mailbox.take.remote()):
                if run in known:
                    hearing.tell(run, event)

    def _require_room(self, gpus: float) -> None:
        if not gpus:
            return
        most = max((node["Resources"].get("GPU", 0.0) for node in self._ray.nodes()), default=0.0)
        if most < gpus:
            raise ConfigError(
                f"gpus-per-run: a run takes {gpus:g}, and no node of the Ray cluster has more "
                f"than {most:g}"
            )


class _Mailbox:
    """Buffer of events between runs and the command."""

    def __init__(self) -> None:
        self._events: list[tuple[Run, ProgressEvent]] = []

    def put(self, run: Run, event: ProgressEvent) -> None:
        """Keep an event."""
        self._events.append((run, event))

    def take(self) -> list[tuple[Run, ProgressEvent]]:
        """Return what was kept since the last call."""
        events, self._events = self._events, []
        return events


def _start(address: str | None, *, cpus: int | None) -> None:
    import ray

    # A run's names and sizes are nobody's business but ours: Ray reports use unless told not to.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Tasks without a GPU need not be told that a later release treats them otherwise.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    own = {} if address else {"num_cpus": cpus, "include_dashboard": False}
    try:
        ray.init(address=address or "local", log_to_driver=False, logging_level="ERROR", **own)
    except (ConnectionError, ValueError, RuntimeError, OSError) as error:
        message = " ".join(str(error).split())
        raise ConfigError(
            f"address: Ray does not answer at {address or 'local'}: {message}"
        ) from None


def _train_on_node(
    task: Task,
    tables: Mapping[str, PartyTable],
    device: str,
    version: str,
    mailbox: Any,
) -> tuple[dict[str, Any] | RunFailure, dict[str, bytes]]:
    """Train a run on a node, and return its outcome and its files by name."""
    if version != __version__:
        why = f"this Ray node has securevfl {__version__}, and the command is of {version}"
        return RunFailure(reason=f"seed {task.run.seed}: {why}"), {}
    torch.set_num_threads(1)
    keep_freed_memory()
    with tempfile.TemporaryDirectory(prefix="securevfl-") as name:
        study = Path(name)
        outcome = attempt(
            task,
            # Arrays of the object store are read only.
            copy.deepcopy(tables),
            study=study,
            device=device_named(device),
            observe=throttle(partial(mailbox.put.remote, task.run)),
        )
        folder = task.run.folder(study)
        written = {
            str(path.relative_to(folder)): path.read_bytes()
            for path in sorted(folder.rglob("*"))
            if path.is_file()
        }
    return outcome, written if not isinstance(outcome, RunFailure) else {}
