"""Methods side by side in the simulator, on equal rows and seeds; finished runs are kept."""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from securevfl.config.federation import FederationConfig
from securevfl.config.methods import JOINED, method_family
from securevfl.config.reading import method_config
from securevfl.core import checks, files
from securevfl.core.errors import ConfigError, SecureVflError
from securevfl.core.progress import ProgressEvent
from securevfl.models.task_metrics import metrics_of
from securevfl.runtime.baselines import true_matches
from securevfl.runtime.device import device_named
from securevfl.runtime.tables import read_tables
from securevfl.studies.compare.run import MethodRun, finished_run, run_digest, train_run
from securevfl.studies.compare.workers import (
    Job,
    Tell,
    failure_of,
    throttled,
    train_in_workers,
)


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """What is compared, where, and on how many seeds."""

    config: FederationConfig
    """The federation file; its ``[methods]`` may say more of each method."""

    methods: tuple[str, ...]
    """Names of families, of ``solo`` and ``combine``, or of ``[methods.NAME]`` tables."""

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
            method_config(self.config, name)

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
) -> list[dict[str, Any]]:
    """Train every method with every seed, or take what was trained before.

    Args:
        comparison: What is compared.
        jobs: Processes at a time, with one thread each; 1 trains in this process.
        tell: Hears of progress.
        done: Gets each run's result as soon as it is there, those found first.

    Returns:
        One result a run, in the order of :attr:`Comparison.runs`.

    Raises:
        ConfigError: If a setting is impossible, or ``folder`` holds runs of other settings.
        DataError: If a table is not what it should be, or lacks the truth that a method joins by.
        SecureVflError: If a run fails; its text names the run.

    Reveals:
        Everything is on one machine: a comparison protects nobody's table.
    """
    checks.at_least(1, jobs=jobs)
    config = comparison.config
    device_named(comparison.device)
    tables = read_tables(config, comparison.data_root)
    if any(method_family(config.source, name) in JOINED for name in comparison.methods):
        for party in config.secondaries:
            true_matches(tables[config.primary.name], tables[party.name])
    files.require_writable_folder(comparison.folder, what="folder")
    tables_digest = _digest_of_tables(comparison)
    results: dict[MethodRun, dict[str, Any]] = {}
    missing: list[tuple[MethodRun, str]] = []
    for run in comparison.runs:
        digest = run_digest(config, run, tables_digest=tables_digest)
        found = finished_run(comparison.folder, run, digest=digest)
        if found is None:
            missing.append((run, digest))
        else:
            results[run] = found
            done(found)

    def keep(result: dict[str, Any]) -> None:
        results[MethodRun(method=result["method"], seed=result["seed"])] = result
        done(result)

    if jobs == 1:
        _train_here(comparison, tables, missing, tell=tell, done=keep)
    elif missing:
        job = Job(
            source=config.source,
            data_root=comparison.data_root,
            comparison=comparison.folder,
            device=comparison.device,
        )
        train_in_workers(job, missing, workers=jobs, tell=tell, done=keep)
    return [results[run] for run in comparison.runs]


def _train_here(
    comparison: Comparison,
    tables: Mapping[str, Any],
    missing: Sequence[tuple[MethodRun, str]],
    *,
    tell: Tell,
    done: Callable[[dict[str, Any]], None],
) -> None:
    with _one_thread():
        for run, digest in missing:

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
            except SecureVflError as error:
                raise type(error)(failure_of(run, error)) from None
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


def _digest_of_tables(comparison: Comparison) -> str:
    total = hashlib.sha256()
    for party in comparison.config.table_parties:
        content = (comparison.data_root / party.data).read_bytes()
        total.update(hashlib.sha256(content).digest())
    return total.hexdigest()
