"""Comparison of methods in the simulator on equal rows and seeds; finished runs are kept."""

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from securevfl.config.disclosure import require_covered_channels
from securevfl.config.federation import FederationConfig
from securevfl.core import checks
from securevfl.core.conventions import Task as LabelTask
from securevfl.core.errors import ConfigError, SecureVflError
from securevfl.data.tables import PartyTable
from securevfl.lab.methods import ALONE, IN_ONE_PLACE, method_family
from securevfl.lab.one_run import (
    LeftOut,
    Recipe,
    Run,
    Task,
    method_adaptations,
    method_config,
    run_digest,
)
from securevfl.lab.pooled_methods import require_fitting
from securevfl.lab.study import Study, StudyOptions
from securevfl.lab.study_tables import TableStore, digest_of_tables, tables_for
from securevfl.models.registry import family_named, require_installed
from securevfl.models.task_metrics import metrics_of
from securevfl.runtime.run_options import device_named

_DEFAULTS: Final = StudyOptions()

AUTO: Final = "auto"
"""Name of the method that is the best other method on validation rows with each seed."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Methods to compare on one federation file, and the folder of the runs."""

    config: FederationConfig
    """The federation file; its ``[methods]`` may say more of each method."""

    methods: tuple[str, ...]
    """Names of families, of ``alone`` and ``combine``, or of ``[methods.NAME]`` tables; ``auto``
    is, with each seed, the family among them that is best on validation rows."""

    seeds: int
    """Number of seeds, counting up from ``federation.seed``."""

    data_root: Path
    """Folder at which relative data paths start."""

    folder: Path
    """Folder of the runs; an interrupted comparison resumes from it."""

    device: str = "cpu"
    """Device of the models: ``"cpu"`` or ``"cuda"``."""

    metric: str | None = None
    """Metric to compare by; None: ``training.metric``."""

    def __post_init__(self) -> None:
        checks.at_least(1, seeds=self.seeds)
        metrics_of(self.config.federation.task, self.metric, named="metric")
        if not self.methods:
            raise ConfigError("methods: name at least one")
        for name in self.methods:
            if self.methods.count(name) > 1:
                raise ConfigError(f"methods: {name!r} is named twice")
            if name != AUTO:
                method_family(self.config.source, name)
        if AUTO in self.methods:
            if AUTO in self.config.source.get("methods", {}):
                raise ConfigError(
                    f'methods.{AUTO}: "{AUTO}" chooses among the methods that are named; rename it'
                )
            families = {method_family(self.config.source, name) for name in self.trained_methods}
            if families <= set(IN_ONE_PLACE):
                raise ConfigError(
                    f'methods: "{AUTO}" chooses among families; name some with it, such as '
                    "fedsim,fet,assist"
                )

    @property
    def trained_methods(self) -> tuple[str, ...]:
        """The methods that have runs of their own."""
        return tuple(name for name in self.methods if name != AUTO)

    @property
    def seed_numbers(self) -> tuple[int, ...]:
        """The run seeds."""
        first = self.config.federation.seed
        return tuple(range(first, first + self.seeds))

    @property
    def runs(self) -> tuple[Run, ...]:
        """Every run; all methods with one seed come before the next seed."""
        return tuple(
            Run(name=method, seed=seed)
            for seed in self.seed_numbers
            for method in self.trained_methods
        )


def compare_methods(
    comparison: Comparison,
    options: StudyOptions = _DEFAULTS,
) -> list[dict[str, Any]]:
    """Train every method with every seed; runs that the folder has are read instead.

    A method that does not fit is skipped, and one that fails is left out; the others continue.

    Args:
        comparison: The methods and the folder.
        options: Number of parallel runs, and callbacks.

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
    device_named(comparison.device)
    tables = tables_for(comparison.config, comparison.trained_methods, comparison.data_root)
    config = _with_outputs(comparison, tables)
    comparison = replace(comparison, config=config)
    out: dict[str, LeftOut] = {}
    for method in comparison.trained_methods:
        reason = _misfit(config, method, tables)
        if reason is not None:
            out[method] = LeftOut(name=method, status="skipped", reason=reason)
    _require_some(comparison, out)
    fitting = [method for method in comparison.trained_methods if method not in out]
    if options.in_other_processes:
        # Other processes read the file itself first, and so the family that it names.
        for trained_config in (config, *(method_config(config, method) for method in fitting)):
            require_installed(trained_config.family, by="comparing in other processes")
    for skipped in out.values():
        options.leave_out(skipped)
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
            data_root=comparison.data_root.resolve(),
        )
        for run in comparison.runs
        if run.name in recipes
    ]
    with Study(
        folder=comparison.folder,
        device=comparison.device,
        tables=store.by_digest,
        options=options,
    ) as study:
        results = study.train(tasks)
        out |= study.failed
    _require_some(comparison, out)
    run_results = [results[run] for run in comparison.runs if run.name not in out]
    return (
        [*run_results, *_chosen_by_validation(run_results, config.federation.task)]
        if AUTO in comparison.methods
        else run_results
    )


def _chosen_by_validation(
    results: Sequence[Mapping[str, Any]], task: LabelTask
) -> list[dict[str, Any]]:
    """Return the result of the best family on validation rows for each seed.

    Its costs are the sums over all families.
    """
    chosen = []
    for seed in dict.fromkeys(result["seed"] for result in results):
        asked = [
            result
            for result in results
            if result["seed"] == seed and result["family"] not in IN_ONE_PLACE
        ]
        if not asked:
            return []  # every family was left out
        metric = asked[0]["metric"]
        known = [result for result in asked if result["validation_metrics"][metric] is not None]
        sign = 1 if metrics_of(task, metric)[0].higher_is_better else -1
        best = max(
            known or asked[:1],
            key=lambda result: sign * (result["validation_metrics"][metric] or 0),
        )
        costs = {
            field: None if None in values else sum(values)
            for field in ("seconds", "cpu_seconds", "epsilon")
            if (values := [result[field] for result in asked])
        }
        chosen.append({**best, **costs, "name": AUTO, "chosen": best["name"]})
    return chosen


def adaptations(comparison: Comparison, *, without: Container[str]) -> dict[str, tuple[str, ...]]:
    """Return each method's differences from the file, in words.

    Args:
        comparison: The methods.
        without: Methods that are left out.
    """
    notes_by_method = {
        name: method_adaptations(comparison.config, name)
        for name in comparison.trained_methods
        if name not in without
    }
    return {name: notes for name, notes in notes_by_method.items() if notes}


def _with_outputs(comparison: Comparison, tables: Mapping[str, PartyTable]) -> FederationConfig:
    """Return the file with the classes of the label written out for methods that plan by them."""
    config = comparison.config
    if config.federation.task != "multiclass":
        return config
    outputs = len(tables[config.primary.name].classes or ())
    methods = dict(config.source.get("methods", {}))
    for name in comparison.trained_methods:
        family = method_family(config.source, name)
        if family not in IN_ONE_PLACE and not family_named(family).learns_by_gradients:
            methods[name] = {"outputs": outputs, **methods.get(name, {})}
    return replace(config, source={**config.source, "methods": methods})


def _misfit(config: FederationConfig, method: str, tables: Mapping[str, PartyTable]) -> str | None:
    """Return why a method can't be trained on this file and these tables, or None."""
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
    if len(out) < len(comparison.trained_methods):
        return
    reasons = "; ".join(
        f"{method.name} {method.status}: {method.reason}" for method in out.values()
    )
    kind = (
        ConfigError
        if all(method.status == "skipped" for method in out.values())
        else SecureVflError
    )
    raise kind(f"no method could be trained: {reasons}")
