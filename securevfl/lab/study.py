"""Runs of a study in one folder: finished ones are read, missing ones are trained."""

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from securevfl.config.federation import FederationConfig
from securevfl.core import files
from securevfl.core.errors import ConfigError
from securevfl.data.tables import PartyTable
from securevfl.lab.engine import Done, Engine, Here, Place, RunObservers, Tell, Workers
from securevfl.lab.methods import ALONE, method_family
from securevfl.lab.on_ray import RayEngine
from securevfl.lab.one_run import LeftOut, Run, RunFailure, Task, finished_run
from securevfl.runtime.run_options import device_named
from securevfl.runtime.run_tables import read_party, read_tables

# The tables that a study's runs are trained on.

_READ_BY_NOBODY: Final = (
    "model",
    "encoder",
    "base",
    "pretraining",
    "prediction",
    "runtime",
    "methods",
)
"""Tables of a federation file that say nothing of how parties' tables are read."""


def tables_for(
    config: FederationConfig, methods: Sequence[str], data_root: Path
) -> dict[str, PartyTable]:
    """Read the tables that methods need: the primary's alone where none reads another.

    Raises:
        DataError: As :func:`securevfl.runtime.run_tables.read_party`.
    """
    if all(method_family(config.source, name) in ALONE for name in methods):
        return {config.primary.name: read_party(config, config.primary, data_root)}
    return read_tables(config, data_root)


class TableStore:
    """Tables of federation files that differ in settings: equal ones are read and kept once.

    Args:
        data_root: Where relative data paths start.
    """

    def __init__(self, data_root: Path) -> None:
        self._data_root = data_root
        self._digests: dict[str, str] = {}
        self.by_digest: dict[str, Mapping[str, PartyTable]] = {}
        """Every party's table, by the digest of all of them."""

    def digest_for(self, config: FederationConfig) -> str:
        """Read every party's table as a file says, unless it was read so before.

        Raises:
            DataError: As :func:`securevfl.runtime.run_tables.read_party`.
        """
        reading = _reading(config)
        if reading not in self._digests:
            tables = read_tables(config, self._data_root)
            self._digests[reading] = self.keep(tables)
        return self._digests[reading]

    def keep(self, tables: Mapping[str, PartyTable]) -> str:
        """Keep tables that were read, and return their digest."""
        digest = digest_of_tables(tables.values())
        self.by_digest.setdefault(digest, tables)
        return digest


def _reading(config: FederationConfig) -> str:
    """Return all settings that may say how tables are read; too many rather than too few."""
    kept = {name: value for name, value in config.source.items() if name not in _READ_BY_NOBODY}
    kept["federation"] = {
        name: value for name, value in config.source["federation"].items() if name != "seed"
    }
    return json.dumps(kept, sort_keys=True, default=repr)


def digest_of_tables(tables: Iterable[PartyTable]) -> str:
    """Return a digest of what was read: a database may hold other rows tomorrow."""
    total = hashlib.sha256()
    for table in tables:
        names = (table.name, table.key_names, table.feature_names, table.classes)
        total.update(repr(names).encode())
        keys = {} if table.link_columns is None else table.link_columns.columns
        arrays = (
            table.keys,
            table.features,
            table.labels,
            table.labelled,
            table.entities,
            table.split_by,
        )
        for values in (*arrays, *keys.values()):
            if values is None or values.dtype == object:
                total.update(repr(None if values is None else values.tolist()).encode())
            else:
                total.update(np.ascontiguousarray(values).tobytes())
    return total.hexdigest()


# Runs of one folder: what is finished is taken from there, and what is missing is trained.


@dataclass(frozen=True, kw_only=True, slots=True)
class StudyOptions:
    """How a study's runs are trained and reported; results do not depend on it."""

    engine: str = "local"
    """``"local"``: on this machine; ``"ray"``: on the nodes of a Ray cluster."""

    jobs: int | None = None
    """Runs at a time, with one thread each; default: one, and on Ray as many as it has room for."""

    address: str | None = None
    """Ray cluster address, ``"auto"`` or ``"HOST:PORT"``; default: one on this machine alone."""

    gpus_per_run: float | None = None
    """GPUs that a run takes of a Ray node, such as 0.25; default: 1 with ``device="cuda"``."""

    tell: Tell = lambda _run, _event: None
    """Called with each event of a run."""

    done: Done = lambda _run, _result: None
    """Called with each run's result as soon as it is there, those of finished runs first."""

    leave_out: Callable[[LeftOut], None] = lambda _one: None
    """Called with each method or point that is skipped or has failed; the others continue."""

    def __post_init__(self) -> None:
        if self.engine not in ("local", "ray"):
            raise ConfigError(f'engine: must be "local" or "ray", got {self.engine!r}')
        if self.jobs is not None and self.jobs < 1:
            raise ConfigError(f"jobs: must be at least 1, got {self.jobs}")
        if self.engine == "local":
            for name in ("address", "gpus_per_run"):
                if getattr(self, name) is not None:
                    option = name.replace("_", "-")
                    raise ConfigError(f'{option}: is for engine "ray"')
        if self.gpus_per_run is not None and self.gpus_per_run < 0:
            raise ConfigError(f"gpus-per-run: must be at least 0, got {self.gpus_per_run}")

    @property
    def elsewhere(self) -> bool:
        """Whether runs are trained in processes other than this one."""
        return self.engine == "ray" or self.jobs not in (None, 1)

    def require_there(self, device: str) -> None:
        """Refuse an engine that cannot be started, or has no such device.

        Raises:
            ConfigError: If a package or the device is missing.
        """
        if self.engine == "local":
            device_named(device)
        else:
            RayEngine.require_installed()
            RayEngine.gpus(device, self.gpus_per_run)

    def start_engine(self, place: Place) -> Engine:
        """Start the engine.

        Raises:
            ConfigError: If it cannot be started.
        """
        if self.engine == "ray":
            return RayEngine(
                place, jobs=self.jobs, address=self.address, gpus_per_run=self.gpus_per_run
            )
        if self.jobs in (None, 1):
            return Here(place)
        return Workers(place, width=self.jobs)


class Study:
    """Trains what a folder lacks; the engine is started when something is missing.

    Args:
        folder: Gets one folder for each run.
        device: Where models are computed.
        tables: Every party's table, by the digest that tasks name; more may come later.
        options: How runs are trained and reported.

    Raises:
        ConfigError: If the folder cannot be written.
    """

    def __init__(
        self,
        *,
        folder: Path,
        device: str,
        tables: Mapping[str, Mapping[str, PartyTable]],
        options: StudyOptions,
    ) -> None:
        files.require_writable_folder(folder, what="folder")
        self._place = Place(folder=folder, device=device, tables=tables)
        self._options = options
        self._engine: Engine | None = None
        self.failed: dict[str, LeftOut] = {}
        """Names with a failed run."""

    def __enter__(self) -> "Study":
        return self

    def __exit__(self, *_: object) -> None:
        if self._engine is not None:
            self._engine.close()

    @property
    def width(self) -> int:
        """How many runs are trained at a time."""
        return self._running_engine().width

    def train(self, tasks: Iterable[Task]) -> dict[Run, dict[str, Any]]:
        """Return each run's result, found or trained; those that failed have none.

        Args:
            tasks: The runs, in the order in which they are begun.

        Raises:
            ConfigError: If the folder holds runs of other settings or tables.

        Reveals:
            Everything is inside one organisation: a study protects nobody's table.
        """
        results: dict[Run, dict[str, Any]] = {}
        missing: list[Task] = []
        for task in tasks:
            saved = finished_run(self._place.folder, task.run, digest=task.digest)
            if saved is None:
                missing.append(task)
            else:
                results[task.run] = saved
                self._options.done(task.run, saved)

        def keep(run: Run, result: dict[str, Any]) -> None:
            results[run] = result
            self._options.done(run, result)

        if missing:
            hearing = RunObservers(tell=self._options.tell, done=keep, failed=self._fail)
            self._running_engine().train(missing, hearing)
        return results

    def _running_engine(self) -> Engine:
        if self._engine is None:
            self._engine = self._options.start_engine(self._place)
        return self._engine

    def _fail(self, run: Run, failure: RunFailure) -> None:
        reason = failure.reason
        if failure.trace is not None:
            path = run.folder(self._place.folder) / "failure.txt"
            files.write_text(path, failure.trace)
            reason += f" (trace: {path})"
        # Runs of one name that train at the same time may fail one after the other.
        if run.name not in self.failed:
            failed_run = LeftOut(name=run.name, status="failed", reason=reason)
            self.failed[run.name] = failed_run
            self._options.leave_out(failed_run)
