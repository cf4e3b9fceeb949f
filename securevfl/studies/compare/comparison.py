"""Methods side by side in the simulator, on equal rows and seeds; finished runs are kept."""

from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from securevfl.config.federation import FederationConfig
from securevfl.config.methods import ALONE, IN_ONE_PLACE, method_family
from securevfl.config.reading import method_adaptations, method_config
from securevfl.config.rules import require_covered_channels
from securevfl.core import checks
from securevfl.core.errors import ConfigError, SecureVflError
from securevfl.data.tables import PartyTable
from securevfl.models.registry import family_named, require_installed
from securevfl.models.task_metrics import metrics_of
from securevfl.studies.runs.engine import Done, Tell
from securevfl.studies.runs.pooled_methods import require_fitting
from securevfl.studies.runs.run import LeftOut, Recipe, Run, Task, run_digest
from securevfl.studies.runs.study import Engines, Study
from securevfl.studies.runs.tables import TableStore, digest_of_tables, tables_for

_HERE: Final = Engines()


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
    def runs(self) -> tuple[Run, ...]:
        """Every run; all methods with one seed come before the next seed."""
        return tuple(
            Run(name=method, seed=seed) for seed in self.seed_numbers for method in self.methods
        )


def compare_methods(
    comparison: Comparison,
    *,
    engines: Engines = _HERE,
    tell: Tell = lambda _run, _event: None,
    done: Done = lambda _run, _result: None,
    leave_out: Callable[[LeftOut], None] = lambda _method: None,
) -> list[dict[str, Any]]:
    """Train every method with every seed, or take what was trained before.

    A method that does not fit is skipped, and one that fails is left out; the others go on.

    Args:
        comparison: What is compared.
        engines: Where runs are trained, and how many at a time; default: one after another in
            this process.
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
        Everything is inside one organisation: a comparison protects nobody's table.
    """
    engines.require_there(comparison.device)
    tables = tables_for(comparison.config, comparison.methods, comparison.data_root)
    config = _with_outputs(comparison, tables)
    comparison = replace(comparison, config=config)
    out: dict[str, LeftOut] = {}
    for method in comparison.methods:
        reason = _misfit(config, method, tables)
        if reason is not None:
            out[method] = LeftOut(name=method, status="skipped", reason=reason)
    _require_some(comparison, out)
    fitting = [method for method in comparison.methods if method not in out]
    if engines.elsewhere:
        # Other processes read the file itself first, and so the family that it names.
        for one in (config, *(method_config(config, method) for method in fitting)):
            require_installed(one.family, by="comparing in other processes")
    for skipped in out.values():
        leave_out(skipped)
    recipes = {method: Recipe(source=config.source, method=method) for method in fitting}
    store = TableStore(comparison.data_root)
    everyone = store.keep(tables)
    primary = digest_of_tables([tables[config.primary.name]])
    tasks = [
        Task(
            run=run,
            recipe=recipes[run.name],
            digest=run_digest(
                recipes[run.name],
                run,
                tables_digest=primary if recipes[run.name].family in ALONE else everyone,
            ),
            tables=everyone,
        )
        for run in comparison.runs
        if run.name in recipes
    ]
    with Study(
        folder=comparison.folder,
        device=comparison.device,
        tables=store.by_digest,
        engines=engines,
        tell=tell,
        done=done,
        leave_out=leave_out,
    ) as study:
        results = study.train(tasks)
        out |= study.failed
    _require_some(comparison, out)
    return [results[run] for run in comparison.runs if run.name not in out]


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


def _with_outputs(comparison: Comparison, tables: Mapping[str, PartyTable]) -> FederationConfig:
    """Return the file with the classes of the label written out for methods that plan by them."""
    config = comparison.config
    if config.federation.task != "multiclass":
        return config
    outputs = len(tables[config.primary.name].classes or ())
    methods = dict(config.source.get("methods", {}))
    for name in comparison.methods:
        family = method_family(config.source, name)
        if family not in IN_ONE_PLACE and family_named(family).assisted:
            methods[name] = {"outputs": outputs, **methods.get(name, {})}
    return replace(config, source={**config.source, "methods": methods})


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


def _require_some(comparison: Comparison, out: Mapping[str, LeftOut]) -> None:
    if len(out) < len(comparison.methods):
        return
    reasons = "; ".join(f"{one.name} {one.status}: {one.reason}" for one in out.values())
    kind = ConfigError if all(one.status == "skipped" for one in out.values()) else SecureVflError
    raise kind(f"no method could be trained: {reasons}")
