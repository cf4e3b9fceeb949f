"""Grid of settings in the simulator, on equal rows and seeds; finished runs are read again."""

import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from securevfl.config.federation import FederationConfig
from securevfl.core import files
from securevfl.core.errors import ConfigError, SecureVflError
from securevfl.lab.engine import Study, StudyOptions
from securevfl.lab.one_run import (
    LeftOut,
    Recipe,
    Run,
    Task,
    by_name,
    cell,
    csv_of_runs,
    markdown,
    over_seeds,
    run_digest,
)
from securevfl.lab.study_outputs import TableStore
from securevfl.lab.sweep_settings import SEED, Point, Setting, source_of, text_of
from securevfl.models.registry import require_installed
from securevfl.models.task_metrics import TaskMetric, metrics_of
from securevfl.runtime.run_options import device_named
from securevfl.version import __version__

ALONE: Final = "alone"
"""Name of the runs of the primary alone."""

_MOST_POINTS: Final = 10_000


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """Settings to try on one federation file, and the folder of the runs."""

    config: FederationConfig
    """The federation file."""

    tried: tuple[Setting, ...]
    """Settings to try, ``federation.seed`` among them."""

    data_root: Path
    """Folder at which relative data paths start."""

    folder: Path
    """Folder of the runs; an interrupted sweep resumes from it."""

    device: str = "cpu"
    """Device of the models: ``"cpu"`` or ``"cuda"``."""

    metric: str | None = None
    """Metric to compare by; None: ``training.metric``."""

    def __post_init__(self) -> None:
        metrics_of(self.config.federation.task, self.metric, named="metric")
        names = [setting.name for setting in self.tried]
        for name in names:
            if names.count(name) > 1:
                raise ConfigError(f"set: {name} is set twice; write all its values behind one =")
        # Wrong seeds are refused before any work.
        _ = self.seeds

    @property
    def settings(self) -> tuple[Setting, ...]:
        """All settings to try, except the seed."""
        return tuple(setting for setting in self.tried if setting.name != SEED)

    @property
    def seeds(self) -> tuple[int, ...]:
        """Run seeds; the file's if none is set.

        Raises:
            ConfigError: If a value is not a seed.
        """
        for setting in self.tried:
            if setting.name == SEED:
                for seed in setting.values:
                    if type(seed) is not int or seed < 0:
                        raise ConfigError(
                            f"set: seed: must be whole numbers from 0 on, such as 0..4; "
                            f"got {seed!r}"
                        )
                return setting.values
        return (self.config.federation.seed,)

    @property
    def metrics(self) -> tuple[TaskMetric, ...]:
        """The task's metrics; the first is the one to compare by."""
        training = self.config.training.metric
        return metrics_of(self.config.federation.task, self.metric or training)

    @cached_property
    def source(self) -> dict[str, Any]:
        """The parsed federation file, which every point changes."""
        return source_of(self.config)

    @property
    def has_alone(self) -> bool:
        """Whether one local baseline is compared with all points."""
        return not any(setting.changes_alone for setting in self.settings)

    def grid(self) -> tuple[Point, ...]:
        """Return every combination of values.

        Raises:
            ConfigError: If there are too many.
        """
        values = [setting.values for setting in self.settings]
        many = math.prod(map(len, values))
        if many > _MOST_POINTS:
            raise ConfigError(f"set: these are {many} combinations; at most {_MOST_POINTS} go")
        names = [setting.name for setting in self.settings]
        return tuple(
            Point(settings=dict(zip(names, chosen, strict=True)))
            for chosen in itertools.product(*values)
        )


def train_grid(
    sweep: Sweep, options: StudyOptions
) -> tuple[list[dict[str, Any]], dict[str, LeftOut]]:
    """Train every point with every seed; runs that the folder has are read instead.

    All points are checked and all tables are read first. A point that fails is left out; the others
    continue.

    Args:
        sweep: The settings to try.
        options: Number of parallel runs, and callbacks.

    Returns:
        A result for each run of the points, and of the primary alone, without the names that have a
        failed run; and those names' failures.

    Raises:
        ConfigError: If a setting or the device is impossible, or the folder holds runs of other
            settings.
        DataError: If a table can't be read.
        PrivacyError: If the privacy settings of a point contradict one another.
        SecureVflError: If every point has failed.

    Reveals:
        Everything is inside one organisation: a sweep protects no party's table.
    """
    device_named(sweep.device)
    store = TableStore(sweep.data_root)
    rows = [_alone_tasks(sweep, store)] if sweep.has_alone else []
    rows += [
        _point_tasks(sweep, point, store, in_other_processes=options.in_other_processes)
        for point in sweep.grid()
    ]
    tasks = [task for tasks_of_seed in zip(*rows, strict=True) for task in tasks_of_seed]
    with Study(
        folder=sweep.folder, device=sweep.device, tables=store.by_digest, options=options
    ) as study:
        results = study.train(tasks)
    failed = study.failed
    if all(point.name in failed for point in sweep.grid()):
        reasons = "; ".join(
            f"{point.name} {point.status}: {point.reason}" for point in failed.values()
        )
        raise SecureVflError(f"no run could be trained: {reasons}")
    return [results[task.run] for task in tasks if task.run.name not in failed], failed


def _point_tasks(
    sweep: Sweep, point: Point, store: TableStore, *, in_other_processes: bool
) -> list[Task]:
    """Return a point's runs, one for each seed; its settings are checked and its tables read."""
    recipe, config = point.recipe(sweep.source)
    if in_other_processes:
        require_installed(config.family, by="sweeping in other processes")
    return _tasks(sweep, point.name, recipe, store.digest_for(config))


def _alone_tasks(sweep: Sweep, store: TableStore) -> list[Task]:
    """Return the runs of the primary alone, one for each seed."""
    recipe = Recipe(source=sweep.source, method=ALONE)
    return _tasks(sweep, ALONE, recipe, store.digest_for(sweep.config))


def _tasks(sweep: Sweep, name: str, recipe: Recipe, tables: str) -> list[Task]:
    runs = [Run(name=name, seed=seed) for seed in sweep.seeds]
    return [
        Task(
            run=run,
            recipe=recipe,
            digest=run_digest(recipe, run, tables_digest=tables),
            tables=tables,
            data_root=sweep.data_root.resolve(),
        )
        for run in runs
    ]


_COLUMNS_ON_A_SCREEN: Final = 3
"""Most columns of settings and further metrics together."""

_CSV_FIELDS: Final = (
    "seed",
    "metric",
    "test",
    "validation",
    "train",
    "epsilon",
    "epochs",
    "best_epoch",
    "seconds",
    "cpu_seconds",
)


def summary(
    sweep: Sweep, results: Sequence[Mapping[str, Any]], *, left_out: Mapping[str, LeftOut]
) -> dict[str, Any]:
    """Return a grid as one JSON object.

    Args:
        sweep: The sweep.
        results: Results of :func:`securevfl.lab.sweep.train_grid`.
        left_out: Points without figures, by name.

    Returns:
        ``metric``, by which points are compared on test rows; ``chosen_by``, the metric that chose
        every run's best epoch; ``settings`` with all values of each; ``points``, each with its
        ``settings`` and the figures of :func:`securevfl.lab.one_run.over_seeds`; ``alone``
        with the same figures, None where settings change what the primary alone would be; ``best``,
        the point whose mean on validation rows is best, None where that is not defined; and
        ``left_out`` with the reason.
    """
    shown = sweep.metrics[0]
    runs = by_name(results)
    points = {
        point.name: {
            "settings": dict(point.settings),
            **over_seeds(runs[point.name], sweep.metrics),
        }
        for point in sweep.grid()
        if point.name in runs
    }
    measured = {
        name: point["validation"]
        for name, point in points.items()
        if point["validation"] is not None
    }
    sign = 1 if shown.higher_is_better else -1
    return {
        "federation": sweep.config.federation.name,
        "task": sweep.config.federation.task,
        "metric": shown.name,
        "higher_is_better": shown.higher_is_better,
        "chosen_by": results[0]["metric"],
        "seed_numbers": list(sweep.seeds),
        "settings": {setting.name: list(setting.values) for setting in sweep.settings},
        "points": points,
        "alone": over_seeds(runs[ALONE], sweep.metrics) if ALONE in runs else None,
        "best": max(measured, key=lambda name: sign * measured[name], default=None),
        "left_out": {
            point.name: {"status": point.status, "reason": point.reason}
            for point in left_out.values()
        },
        "version": __version__,
    }


def table_rows(figures: Mapping[str, Any], *, narrow: bool = False) -> list[list[str]]:
    """Return the table for people, its heading first.

    Args:
        figures: Result of :func:`summary`.
        narrow: Whether it is for a screen, which has room for a few metrics beside the first,
            without deviations.
    """
    points, metric = figures["points"], figures["metric"]
    names = _headings(figures["settings"]) or ["settings"]
    others = [name for name in next(iter(points.values()))["metrics"] if name != metric]
    if narrow:
        others = others[: max(0, _COLUMNS_ON_A_SCREEN - len(names))]
    noised = any(point["epsilon"] is not None for point in points.values())
    rows = [
        [
            *names,
            f"test {metric}",
            "validation",
            *(["epsilon"] if noised else []),
            *others,
            "CPU s a run",
        ]
    ]
    alone = figures["alone"]
    lines = [
        ([text_of(value) for value in point["settings"].values()] or ["as written"], point)
        for point in points.values()
    ]
    if alone is not None:
        lines.append(([ALONE, *[""] * (len(names) - 1)], alone))
    for first, line in lines:
        spreads = [line["metrics"][other] for other in others]
        cpu = line["cpu_seconds"]
        epsilon = "" if line["epsilon"] is None else f"{line['epsilon']:.4g}"
        rows.append(
            [
                *first,
                cell(line),
                cell({"mean": line["validation"], "std": None}),
                *([epsilon] if noised else []),
                *(cell({**other, "std": None} if narrow else other) for other in spreads),
                "" if cpu is None else f"{cpu / len(figures['seed_numbers']):.1f}",
            ]
        )
    return rows


def _headings(settings: Collection[str]) -> list[str]:
    """Return short names of settings: the last part if it is unique."""
    last = [name.rpartition(".")[2] for name in settings]
    return [
        short if last.count(short) == 1 else name
        for name, short in zip(settings, last, strict=True)
    ]


def write_sweep(
    folder: Path, figures: Mapping[str, Any], results: Sequence[Mapping[str, Any]]
) -> None:
    """Write ``sweep.json``, ``sweep.csv`` (a row a run, a column a setting) and ``sweep.md``."""
    names = list(figures["settings"])
    rows = [
        {**result, "run": result["name"], **_settings_of(figures["points"], result["name"])}
        for result in results
    ]
    text = csv_of_runs(rows, first=("run", *names, *_CSV_FIELDS), splits=("test", "validation"))
    files.write_text(folder / "sweep.csv", text, for_others=True)
    files.write_text(folder / "sweep.md", markdown(table_rows(figures)), for_others=True)
    files.write_json(folder / "sweep.json", figures, for_others=True)


def _settings_of(points: Mapping[str, Any], name: str) -> dict[str, str]:
    """Return a run's settings as columns of CSV; empty for the primary alone."""
    settings = points[name]["settings"] if name in points else {}
    return {setting: text_of(value) for setting, value in settings.items()}
