"""Comparison of methods, and of settings, in the simulator on equal rows and seeds.

Finished runs are kept, and read again.
"""

# A notebook shows a signature's types as they are written here, not all that they stand for.
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import pandas as pd

from securevfl.config.disclosure import require_covered_channels
from securevfl.config.federation import FederationConfig
from securevfl.core import checks, files
from securevfl.core.conventions import Task as LabelTask
from securevfl.core.errors import ConfigError, SecureVflError
from securevfl.data.tables import PartyTable
from securevfl.lab.methods import (
    ALONE,
    IN_ONE_PLACE,
    JOINED,
    as_published_source,
    method_family,
    method_source_of,
)
from securevfl.lab.one_run import (
    LeftOut,
    Recipe,
    Run,
    StudyOptions,
    Task,
    by_name,
    cell,
    kept_or_temporary,
    markdown,
    method_config,
    on_test_rows,
    over_seeds,
    run_digest,
    summarise_seeds,
    train_tasks,
)
from securevfl.lab.pooled_methods import true_matches
from securevfl.lab.settings_grid import Point, Setting, parse_setting, points_of, text_of
from securevfl.lab.study_outputs import TableStore, digest_of_tables
from securevfl.models.registry import require_installed
from securevfl.models.task_metrics import TaskMetric, metrics_of
from securevfl.runtime.run_folder import require_own_folder
from securevfl.runtime.run_options import FederationSource, device_named, resolve_federation
from securevfl.runtime.simulation import RunResult
from securevfl.version import __version__

_DEFAULTS: Final = StudyOptions()

AUTO: Final = "auto"
"""Name of the method that is the best other one on validation rows with each seed."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Methods and settings to compare on one federation file, and the folder of the runs."""

    config: FederationConfig
    """The federation file."""

    methods: tuple[str, ...] = ()
    """Names of families, of ``alone`` and ``combine``, or of ``[methods.NAME]`` tables; ``auto``
    is, with each seed, the family or setting among them that is best on validation rows."""

    settings: tuple[Setting, ...] = ()
    """Settings of the file; each combination of their values is compared too."""

    seeds: int
    """Number of seeds, counting up from ``federation.seed``."""

    data_root: Path
    """Folder at which relative data paths start."""

    folder: Path
    """Folder of the runs; an interrupted comparison resumes from it."""

    tables: Mapping[str, PartyTable] | None = None
    """Every party's table by name; None: they lie where the federation file says."""

    device: str = "cpu"
    """Device of the models: ``"cpu"`` or ``"cuda"``."""

    metric: str | None = None
    """Metric to compare by; None: ``training.metric``."""

    def __post_init__(self) -> None:
        checks.at_least(1, seeds=self.seeds)
        metrics_of(self.config.federation.task, self.metric, named="metric")
        if not (self.methods or self.points):
            raise ConfigError("methods: name at least one")
        for name in self.methods:
            if self.methods.count(name) > 1:
                raise ConfigError(f"methods: {name!r} is named twice")
            if name != AUTO:
                method_family(self.config.source, name)
        if AUTO in self.methods:
            self._require_choice()
        for setting in self.settings:
            if self.methods and setting.changes_rows:
                raise ConfigError(
                    f"set: {setting.name}: may change the primary's rows or columns, and methods "
                    f"are compared on equal ones; leave out the methods"
                )
            if self.tables is not None and setting.changes_tables:
                raise ConfigError(
                    f"set: {setting.name}: may change a table, and these are in memory; compare a "
                    f"federation file"
                )

    def _require_choice(self) -> None:
        """Refuse ``auto`` where it has nothing to choose among.

        Raises:
            ConfigError: Saying what to name.
        """
        if AUTO in self.config.source.get("methods", {}):
            raise ConfigError(
                f'methods.{AUTO}: "{AUTO}" chooses among the methods that are named; rename it'
            )
        families = {method_family(self.config.source, name) for name in self.trained_methods}
        if families <= set(IN_ONE_PLACE) and not self.points:
            raise ConfigError(
                f'methods: "{AUTO}" chooses among families; name some with it, such as '
                "fedsim,fet,top1sim"
            )

    @cached_property
    def points(self) -> tuple[Point, ...]:
        """Every combination of the settings' values."""
        return points_of(self.settings)

    @property
    def trained_methods(self) -> tuple[str, ...]:
        """The methods that have runs of their own; ``alone`` where only settings are named."""
        if not self.methods and not any(setting.changes_rows for setting in self.settings):
            return ("alone",)
        return tuple(name for name in self.methods if name != AUTO)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all runs: methods, then settings."""
        return (*self.trained_methods, *(point.name for point in self.points))

    @property
    def runs(self) -> tuple[Run, ...]:
        """Every run; all names with one seed come before the next seed."""
        first = self.config.federation.seed
        return tuple(
            Run(name=name, seed=seed)
            for seed in range(first, first + self.seeds)
            for name in self.names
        )


def compare_methods(
    comparison: Comparison, options: StudyOptions = _DEFAULTS
) -> list[dict[str, Any]]:
    """Train every method and setting with every seed; runs that the folder has are read instead.

    All settings are checked and all tables are read first. A method that does not fit is skipped,
    and one that fails is left out; the others continue.

    Args:
        comparison: The methods, the settings and the folder.
        options: Number of parallel runs, and callbacks.

    Returns:
        One result a run of every name that has all of its runs, in the order of
        :attr:`Comparison.runs`.

    Raises:
        ConfigError: If a setting is impossible, ``folder`` holds runs of other settings, or no
            method fits.
        DataError: If a table is not what it should be.
        PrivacyError: If the privacy settings of a combination contradict one another.
        SecureVflError: If every method that fits has failed.

    Reveals:
        Everything is inside one organisation: a comparison protects nobody's table.
    """
    device_named(comparison.device)
    config = comparison.config
    recipes = {point.name: point.recipe(config) for point in comparison.points}
    store = TableStore(comparison.data_root, comparison.tables)
    whole = bool(recipes) or not all(
        method_family(config.source, name) in ALONE for name in comparison.trained_methods
    )
    tables = store.by_digest[store.digest_for(config, whole=whole)]
    out: dict[str, LeftOut] = {}
    for method in comparison.trained_methods:
        reason = _misfit(config, method, tables)
        if reason is None:
            own = method_config(config, method)
            recipes[method] = Recipe(source=config.source, method=method), own
        else:
            out[method] = LeftOut(name=method, status="skipped", reason=reason)
    _require_some(comparison, out)
    if options.in_other_processes:
        # Other processes read the file itself first, and so the family that it names.
        for trained in (config, *(own for _, own in recipes.values())):
            require_installed(trained.family, by="comparing in other processes")
    for skipped in out.values():
        options.leave_out(skipped)
    primary = digest_of_tables([tables[config.primary.name]])
    tasks = []
    for run in comparison.runs:
        if run.name in recipes:
            recipe, own = recipes[run.name]
            held = store.digest_for(config if recipe.method else own)
            pooled = recipe.pooled()
            alone = pooled is not None and pooled[0] in ALONE
            tasks.append(
                Task(
                    run=run,
                    recipe=recipe,
                    digest=run_digest(recipe, run, tables_digest=primary if alone else held),
                    tables=held,
                    data_root=comparison.data_root.resolve(),
                )
            )
    results, failed = train_tasks(
        tasks,
        folder=comparison.folder,
        device=comparison.device,
        tables=store.by_digest,
        options=options,
    )
    out |= failed
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


def _misfit(config: FederationConfig, method: str, tables: Mapping[str, PartyTable]) -> str | None:
    """Return why a method can't be trained on this file and these tables, or None."""
    family = method_family(config.source, method)
    try:
        own = method_config(config, method)
        if family not in IN_ONE_PLACE:
            require_covered_channels(own)
        elif family in JOINED:
            for party in own.secondaries:
                true_matches(tables[own.primary.name], tables[party.name])
    except SecureVflError as error:
        return str(error).removeprefix(f"method {method!r}: ")
    return None


def _require_some(comparison: Comparison, out: Mapping[str, LeftOut]) -> None:
    if len(out) < len(comparison.names):
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


REFERENCES: Final = ("alone", "fedsim", "fet")
"""Methods with which all others are compared seed by seed, if they take part."""

PLACEBO: Final = "placebo"
"""Name of the difference to a method's placebos, which lack the partners' information."""

_OTHERS_ON_A_SCREEN: Final = 3

_CSV_FIELDS: Final = (
    *("method", "family", "seed", "metric", "test", "validation", "train"),
    *("epochs", "best_epoch", "seconds", "cpu_seconds", "chosen"),
)


def summary(
    results: Sequence[Mapping[str, Any]],
    *,
    federation: str,
    task: LabelTask,
    metric: str | None = None,
    left_out: Sequence[LeftOut] = (),
    adapted: Mapping[str, Sequence[str]] = MappingProxyType({}),
    points: Sequence[Point] = (),
) -> dict[str, Any]:
    """Return a comparison as one JSON object.

    Args:
        results: Results of :func:`securevfl.lab.comparison.compare_methods`.
        federation: Name of the federation.
        task: Kind of label.
        metric: Metric to compare by; None: that of the training.
        left_out: Methods without figures, with reasons.
        adapted: Each method's differences from the file, in words.
        points: Combinations of settings among the methods.

    Returns:
        ``metric``; ``chosen_by``, the metric that chose every run's best epoch; ``methods`` with
        each method's ``mean``, ``std`` (of a sample: n - 1; None for one seed) and ``seeds`` (the
        test metric of each), and the same of every metric of the task in ``metrics``; of the
        primary alone, and of ``auto``, also what was ``chosen`` with each seed; of the primary
        alone every model's figures in ``candidates``; and ``differences``: for each reference that
        takes part, each other method minus it, seed by seed, and each method minus its own
        ``placebo`` (partners' rows permuted, or no partners: the better one); ``left_out`` with the
        ``status`` and ``reason`` of each method without figures; ``adapted``; ``settings``,
        the names of those compared, and the values of each method that is a combination of them; of
        these ``best``, the one whose mean on validation rows is best, None without one. A metric
        that is not defined for some seed's rows has no mean and no deviation.

    Raises:
        ConfigError: If the task has no such metric.
    """
    methods = by_name(results)
    first = results[0]
    ordered = metrics_of(task, metric or first["metric"])
    shown = ordered[0]
    tests = {name: on_test_rows(runs, shown.name) for name, runs in methods.items()}
    settings = {point.name: {"settings": dict(point.settings)} for point in points}
    figures: dict[str, dict[str, Any]] = {
        name: {
            **over_seeds(runs, ordered),
            "family": runs[0]["family"],
            **settings.get(name, {}),
            **_chosen(runs),
            **_candidates(runs, shown.name),
        }
        for name, runs in methods.items()
    }
    measured = {
        name: figures[name]["validation"]
        for name in settings
        if name in figures and figures[name]["validation"] is not None
    }
    sign = 1 if shown.higher_is_better else -1
    return {
        "federation": federation,
        "task": task,
        "metric": shown.name,
        "higher_is_better": shown.higher_is_better,
        "chosen_by": first["metric"],
        "seed_numbers": [run["seed"] for run in methods[first["name"]]],
        "methods": figures,
        "settings": sorted({setting for point in points for setting in point.settings}),
        "best": max(measured, key=lambda name: sign * measured[name], default=None),
        "differences": _from_partners(methods, shown)
        | {
            reference: {
                name: summarise_seeds(
                    [
                        None if mine is None or theirs is None else mine - theirs
                        for mine, theirs in zip(tests[name], tests[reference], strict=True)
                    ]
                )
                for name in methods
                if name != reference
            }
            for reference in REFERENCES
            if reference in methods
        },
        "left_out": {
            method.name: {"status": method.status, "reason": method.reason} for method in left_out
        },
        "adapted": {name: list(notes) for name, notes in adapted.items() if name in methods},
        "version": __version__,
    }


def _from_partners(
    methods: Mapping[str, Sequence[Mapping[str, Any]]], metric: TaskMetric
) -> dict[str, Any]:
    """Return each method's test figure minus that of the best of its placebos, seed by seed.

    It is 0 where the local baseline answers: then no partner is asked.
    """
    better = max if metric.higher_is_better else min

    def less(run: Mapping[str, Any]) -> float | None:
        if run["used"] == "alone":
            return 0.0
        mine = run["test_metrics"][metric.name]
        theirs = [placebo[metric.name] for placebo in run["placebos"].values()]
        return None if mine is None or None in theirs else mine - better(theirs)

    differences = {
        name: summarise_seeds([less(run) for run in runs])
        for name, runs in methods.items()
        if all(run["placebos"] for run in runs)
    }
    return {PLACEBO: differences} if differences else {}


def _chosen(runs: Sequence[Mapping[str, Any]]) -> dict[str, list[str]]:
    """Return the choices of a method that chooses with each seed; empty for others."""
    chosen = [run["chosen"] for run in runs if run.get("chosen")]
    return {"chosen": chosen} if chosen else {}


def _candidates(runs: Sequence[Mapping[str, Any]], metric: str) -> dict[str, Any]:
    """Return the test figures of each model of the primary alone; empty for other methods."""
    each = [run.get("candidates") or {} for run in runs]
    common = [name for name in each[0] if all(name in candidates for candidates in each)]
    if not common:
        return {}
    return {
        "candidates": {
            name: summarise_seeds([candidates[name][metric] for candidates in each])
            for name in common
        }
    }


def table_rows(figures: Mapping[str, Any], *, narrow: bool = False) -> list[list[str]]:
    """Return the table for people, its heading first.

    Args:
        figures: Result of :func:`summary`.
        narrow: Whether it is for a screen, which has room for a few metrics beside the first,
            without deviations, and for no reason why a method is left out.
    """
    references = list(figures["differences"])
    first = next(iter(figures["methods"].values()))
    others = [name for name in first["metrics"] if name != figures["metric"]]
    if narrow:
        others = others[:_OTHERS_ON_A_SCREEN]
    differences = (f"minus {name}" for name in references)
    # Settings are chosen by it; methods are not.
    validated = ["validation"] if figures["best"] else []
    rows = [["method", figures["metric"], *validated, *differences, *others, "CPU s a run"]]
    seeds = len(figures["seed_numbers"])
    for name, method in figures["methods"].items():
        cells = [name, cell(method)]
        if validated:
            cells.append(cell({"mean": method["validation"], "std": None}))
        for reference in references:
            other = figures["differences"][reference].get(name)
            cells.append("" if other is None else cell(other, sign="+"))
        spreads = [method["metrics"][other] for other in others]
        cells += [cell({**spread, "std": None} if narrow else spread) for spread in spreads]
        rows.append([*cells, f"{method['cpu_seconds'] / seeds:.1f}"])
    empty = [""] * (len(rows[0]) - 2)
    for name, entry in figures["left_out"].items():
        rows.append(
            [name, entry["status"] if narrow else f"{entry['status']}: {entry['reason']}", *empty]
        )
    return rows


def write_comparison(
    folder: Path, figures: Mapping[str, Any], results: Sequence[Mapping[str, Any]]
) -> None:
    """Write ``comparison.json``, ``comparison.csv`` (a row a run) and ``comparison.md``."""
    files.write_text(folder / "comparison.csv", _csv_of(figures, results), for_others=True)
    files.write_text(folder / "comparison.md", markdown(table_rows(figures)), for_others=True)
    files.write_json(folder / "comparison.json", figures, for_others=True)


def _csv_of(figures: Mapping[str, Any], results: Sequence[Mapping[str, Any]]) -> str:
    """Return a CSV with a row for each run; settings and metrics are columns of their own."""
    rows = []
    columns = dict.fromkeys(["method", *figures["settings"], *_CSV_FIELDS])
    for result in results:
        settings = figures["methods"][result["name"]].get("settings", {})
        measured = {
            f"{split}_{name}": value
            for split in ("test", "validation")
            for name, value in result[f"{split}_metrics"].items()
        }
        columns |= dict.fromkeys(measured)
        texts = {name: text_of(value) for name, value in settings.items()}
        rows.append({**result, **texts, **measured, "method": result["name"]})
    table = pd.DataFrame(rows, dtype=object).reindex(columns=list(columns))
    return table.to_csv(index=False, lineterminator="\n")


def compare(
    federation: FederationSource | RunResult,
    methods: Sequence[str] = (),
    *,
    settings: Mapping[str, str | Sequence[Any]] = MappingProxyType({}),
    seeds: int = 5,
    as_published: bool = False,
    metric: str | None = None,
    device: str = "cpu",
    data_root: Path | None = None,
    out: Path | None = None,
    options: StudyOptions | None = None,
) -> dict[str, Any]:
    """Compare methods, and settings, in the simulator on equal rows and seeds.

    Args:
        federation: Path of a federation file, what :func:`securevfl.read_federation` returned, or
            the result of :func:`securevfl.simulate`, whose tables and settings are taken.
        methods: Families; ``alone``, ``solo``, ``boosting``, ``boosting-links``, ``combine``,
            ``boosting-combine``; names of the file's ``[methods.NAME]`` tables; and ``auto``,
            with each seed the best of families and settings on validation rows. Default: ``alone``
            beside settings.
        settings: Values by ``table.field`` of the file, a list or a text such as ``"1,10,50"``;
            each combination is compared.
        seeds: Number of run seeds, counting up from the file's.
        as_published: Whether presets such as ``"fedsim-paper"`` train for as many epochs, and with
            such batches, as their papers; otherwise as the file says.
        metric: Metric to compare by; another one needs no training. Default: ``training.metric``.
        device: ``"cpu"`` or ``"cuda"``.
        data_root: Folder at which relative data paths start; default: that of the file, or the
            current one.
        out: Folder for the table and the runs, from which a later call continues; default: a
            temporary one.
        options: Number of parallel runs, and callbacks.

    Returns:
        Content of ``comparison.json``; see :func:`securevfl.lab.comparison.summary`.

    Raises:
        ConfigError: If a setting is impossible, ``out`` holds runs of other settings, or no method
            fits.
        DataError: If a table can't be read.
        PrivacyError: If the privacy settings of a combination contradict one another.
        SecureVflError: If every method that fits has failed.

    Reveals:
        Everything is inside one organisation: a comparison protects no party's table.
    """
    tables = None
    if isinstance(federation, RunResult):
        if federation.trained is None:
            raise ConfigError("the run has pretrained encoders; compare its federation file")
        trained = federation.trained
        config, root, tables = trained.config, trained.data_root, trained.tables
    else:
        config, root = resolve_federation(federation, data_root)
    tried = (
        parse_setting(f"{name}={values}")
        if isinstance(values, str)
        else Setting(name=name, values=tuple(values))
        for name, values in settings.items()
    )
    with kept_or_temporary(out) as folder:
        comparison = Comparison(
            config=published(config, methods) if as_published else config,
            methods=tuple(methods),
            settings=tuple(tried),
            seeds=seeds,
            tables=tables,
            data_root=root,
            folder=folder,
            device=device,
            metric=metric,
        )
        figures = compare_and_write(comparison, options or StudyOptions())
        if out is None:
            del figures["folder"]
        return figures


def published(config: FederationConfig, methods: Sequence[str]) -> FederationConfig:
    """Return the federation with presets' own epochs and batches."""
    return replace(config, source=as_published_source(config.source, methods))


def compare_and_write(comparison: Comparison, options: StudyOptions) -> dict[str, Any]:
    """Train a comparison, and write ``comparison.json``, ``.csv`` and ``.md``.

    Args:
        comparison: The methods, the settings and the folder.
        options: Number of parallel runs, and callbacks.

    Returns:
        Content of ``comparison.json``.

    Raises:
        SecureVflError: As :func:`compare_methods`.
    """
    require_own_folder(comparison.config, comparison.folder, resume=True)
    out: list[LeftOut] = []

    def note(method: LeftOut) -> None:
        out.append(method)
        options.leave_out(method)

    results = compare_methods(comparison, replace(options, leave_out=note))
    federation = comparison.config.federation
    figures = summary(
        results,
        federation=federation.name,
        task=federation.task,
        metric=comparison.metric,
        left_out=out,
        adapted={
            name: notes
            for name in comparison.trained_methods
            if name not in {method.name for method in out}
            and (notes := method_source_of(comparison.config, name)[1])
        },
        points=comparison.points,
    )
    figures["folder"] = str(comparison.folder)
    write_comparison(comparison.folder, figures, results)
    return figures
