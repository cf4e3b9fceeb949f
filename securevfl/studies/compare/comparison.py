"""Methods side by side in the simulator, on equal rows and seeds; finished runs are kept."""

import hashlib
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from securevfl.config.federation import FederationConfig
from securevfl.config.methods import ALONE, IN_ONE_PLACE, method_family
from securevfl.config.reading import method_adaptations, method_config
from securevfl.config.rules import require_covered_channels
from securevfl.core import checks, files
from securevfl.core.errors import ConfigError, SecureVflError
from securevfl.core.progress import ProgressEvent
from securevfl.data.tables import PartyTable
from securevfl.models.registry import require_installed
from securevfl.models.task_metrics import metrics_of
from securevfl.runtime.device import device_named
from securevfl.studies.compare.pooled_methods import require_fitting
from securevfl.studies.compare.run import (
    LeftOut,
    MethodRun,
    finished_run,
    reason_of,
    run_digest,
    tables_for,
    train_run,
)
from securevfl.studies.compare.workers import (
    Job,
    Tell,
    throttled,
    train_in_workers,
)


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """What is compared, where, and on how many seeds."""

    config: FederationConfig
    """The federation file; its ``[methods]`` may say more of each method."""

    methods: tuple[str, ...]
    """Names of families, of ``alone`` and ``combine``, or of ``[methods.NAME]`` tables."""

    seeds: int
    """How many; they count up from ``federation.seed``."""

    data_root: Path
    """Where relative data paths start."""

    folder: Path
    """Gets one folder for each run; a comparison that was cut off goes on from there."""

    device: str = "cpu"
    """Where models are computed."""

    metric: str | None = None
    """The metric that methods are compared by; None: the one that training goes by."""

    def __post_init__(self) -> None:
        checks.at_least(1, seeds=self.seeds)
        metrics_of(self.config.federation.task, self.metric, named="metric")
        if not self.methods:
            raise ConfigError("methods: name at least one")
        for name in self.methods:
            if self.methods.count(name) > 1:
                raise ConfigError(f"methods: {name!r} is named twice")
            method_family(self.config.source, name)

    @property
    def seed_numbers(self) -> tuple[int, ...]:
        """The run seeds."""
        first = self.config.federation.seed
        return tuple(range(first, first + self.seeds))

    @property
    def runs(self) -> tuple[MethodRun, ...]:
        """Every run; all methods with one seed come before the next seed."""
        return tuple(
            MethodRun(method=method, seed=seed)
            for seed in self.seed_numbers
            for method in self.methods
        )


def compare_methods(
    comparison: Comparison,
    *,
    jobs: int = 1,
    tell: Tell = lambda _run, _event: None,
    done: Callable[[dict[str, Any]], None] = lambda _result: None,
    leave_out: Callable[[LeftOut], None] = lambda _method: None,
) -> list[dict[str, Any]]:
    """Train every method with every seed, or take what was trained before.

    A method that does not fit is skipped, and one that fails is left out; the others go on.

    Args:
        comparison: What is compared.
        jobs: Processes at a time, with one thread each; 1 trains in this process.
        tell: Hears of progress.
        done: Gets each run's result as soon as it is there, those found first.
        leave_out: Gets each method that has no figures, and why.

    Returns:
        One result a run of every method that has all of its runs, in the order of
        :attr:`Comparison.runs`.

    Raises:
        ConfigError: If a setting is impossible, ``folder`` holds runs of other settings, or no
            method fits.
        DataError: If a table is not what it should be.
        SecureVflError: If every method that fits has failed.

    Reveals:
        Everything is on one machine: a comparison protects nobody's table.
    """
    checks.at_least(1, jobs=jobs)
    config = comparison.config
    device_named(comparison.device)
    tables = tables_for(config, comparison.methods, comparison.data_root)
    out: dict[str, LeftOut] = {}
    for method in comparison.methods:
        reason = _misfit(config, method, tables)
        if reason is not None:
            out[method] = LeftOut(method=method, status="skipped", reason=reason)
    _require_some(comparison, out)
    _require_known_to_workers(
        config, [method for method in comparison.methods if method not in out], jobs=jobs
    )
    for one in out.values():
        leave_out(one)
    files.require_writable_folder(comparison.folder, what="folder")
    digests = {
        alone: _digest_of_tables([tables[config.primary.name]] if alone else tables.values())
        for alone in (True, False)
    }
    results: dict[MethodRun, dict[str, Any]] = {}
    missing: list[tuple[MethodRun, str]] = []
    for run in comparison.runs:
        if run.method in out:
            continue
        digest = run_digest(config, run, tables_digest=digests[_is_alone(config, run.method)])
        found = finished_run(comparison.folder, run, digest=digest)
        if found is None:
            missing.append((run, digest))
        else:
            results[run] = found
            done(found)

    def keep(result: dict[str, Any]) -> None:
        results[MethodRun(method=result["method"], seed=result["seed"])] = result
        done(result)

    def fail(run: MethodRun, reason: str) -> None:
        # Runs of one method that train at the same time may fail one after the other.
        if run.method not in out:
            out[run.method] = LeftOut(method=run.method, status="failed", reason=reason)
            leave_out(out[run.method])

    if jobs == 1:
        _train_here(comparison, tables, missing, tell=tell, done=keep, failed=fail)
    elif missing:
        job = Job(
            source=config.source,
            methods=comparison.methods,
            data_root=comparison.data_root,
            comparison=comparison.folder,
            device=comparison.device,
        )
        train_in_workers(job, missing, workers=jobs, tell=tell, done=keep, failed=fail)
    _require_some(comparison, out)
    return [results[run] for run in comparison.runs if run.method not in out]


def adaptations(comparison: Comparison, *, without: Container[str]) -> dict[str, tuple[str, ...]]:
    """Return what each method has otherwise than the file says, in words.

    Args:
        comparison: What is compared.
        without: Methods that are left out.
    """
    found = {
        name: method_adaptations(comparison.config, name)
        for name in comparison.methods
        if name not in without
    }
    return {name: notes for name, notes in found.items() if notes}


def _misfit(config: FederationConfig, method: str, tables: Mapping[str, PartyTable]) -> str | None:
    """Return why a method can't be trained on this file and these tables, if it can't."""
    family = method_family(config.source, method)
    try:
        own = method_config(config, method)
        if family in IN_ONE_PLACE:
            require_fitting(own, family, tables)
        else:
            require_covered_channels(own)
    except SecureVflError as error:
        return str(error).removeprefix(f"method {method!r}: ")
    return None


def _require_known_to_workers(
    config: FederationConfig, methods: Sequence[str], *, jobs: int
) -> None:
    if jobs == 1:
        return
    # Workers read the file itself first, and so the family that it names.
    for one in (config, *(method_config(config, method) for method in methods)):
        require_installed(one.family, by=f"comparing with {jobs} jobs")


def _require_some(comparison: Comparison, out: Mapping[str, LeftOut]) -> None:
    if len(out) < len(comparison.methods):
        return
    reasons = "; ".join(f"{one.method} {one.status}: {one.reason}" for one in out.values())
    kind = ConfigError if all(one.status == "skipped" for one in out.values()) else SecureVflError
    raise kind(f"no method could be trained: {reasons}")


def _train_here(
    comparison: Comparison,
    tables: Mapping[str, PartyTable],
    missing: Sequence[tuple[MethodRun, str]],
    *,
    tell: Tell,
    done: Callable[[dict[str, Any]], None],
    failed: Callable[[MethodRun, str], None],
) -> None:
    lost = set()
    with _one_thread():
        for run, digest in missing:
            if run.method in lost:
                continue

            def observe(event: ProgressEvent, run: MethodRun = run) -> None:
                tell(run, event)

            try:
                result = train_run(
                    comparison.config,
                    tables,
                    run,
                    comparison=comparison.folder,
                    digest=digest,
                    device=device_named(comparison.device),
                    observe=throttled(observe),
                )
            except Exception as error:  # noqa: BLE001, other methods go on
                lost.add(run.method)
                failed(run, reason_of(error, run, comparison=comparison.folder))
                continue
            done(result)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Compute with one thread, as the workers do: sums then do not depend on how many there are."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _is_alone(config: FederationConfig, method: str) -> bool:
    return method_family(config.source, method) in ALONE


def _digest_of_tables(tables: Iterable[PartyTable]) -> str:
    # Of what was read, not of files: a database has no file, and may hold other rows tomorrow.
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
