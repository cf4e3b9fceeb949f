"""Sweep over settings in the simulator; finished runs are read again."""

import hashlib
import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from securevfl.config.disclosure import require_covered_channels
from securevfl.config.encoder import AUTO
from securevfl.config.federation import FederationConfig
from securevfl.config.reading import parse_federation
from securevfl.core.errors import ConfigError, PrivacyError, SecureVflError
from securevfl.federation.base import require_estimator
from securevfl.lab.one_run import LeftOut, Recipe, Run, Task, run_digest
from securevfl.lab.study import Study, StudyOptions, TableStore
from securevfl.lab.sweep_settings import SEED, Setting, text_of
from securevfl.models.registry import require_installed
from securevfl.models.task_metrics import TaskMetric, metrics_of

# A point of a grid or of a search: the federation file under certain settings.

_AS_WRITTEN: Final = "as-written"
_LONGEST_NAME: Final = 120
_ODD: Final = re.compile(r"[^A-Za-z0-9._=,+\[\]-]+")


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """Values of the settings that are tried, but for the seed."""

    settings: Mapping[str, Any]
    """Value by ``table.field``."""

    @property
    def text(self) -> str:
        """The settings, for people."""
        return ", ".join(f"{name}={text_of(value)}" for name, value in self.settings.items())

    @property
    def name(self) -> str:
        """The settings, as the name of a folder: no two points share one."""
        text = self.text.replace(", ", ",") or _AS_WRITTEN
        plain = _ODD.sub("-", text)
        if plain == text and len(text) <= _LONGEST_NAME:
            return text
        return f"{plain[:_LONGEST_NAME]}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"

    def recipe(self, source: Mapping[str, Any]) -> tuple[Recipe, FederationConfig]:
        """Return what runs of this point train, checked as a federation file is.

        Args:
            source: What :func:`source_of` returned.

        Raises:
            ConfigError: If a setting is impossible, or does not go with the rest; with the point.
            PrivacyError: If the privacy settings contradict one another.
        """
        changed = dict(source)
        for name, value in self.settings.items():
            changed = _with(changed, name, value)
        where = f"with {self.text}" if self.settings else "federation file"
        try:
            config = parse_federation(changed, file=where)
            require_covered_channels(config)
            require_estimator(config, None)
        except (ConfigError, PrivacyError) as error:
            text = str(error)
            raise type(error)(text if text.startswith(where) else f"{where}: {text}") from None
        return Recipe(source=changed, method=None), config


def as_asked(source: Mapping[str, Any], chosen: Mapping[str, Any]) -> dict[str, Any]:
    """Return a file as it was before ``auto`` chose, so that a changed one is resolved anew.

    Args:
        source: The file with what was chosen.
        chosen: What was chosen.
    """
    if not chosen:
        return dict(source)
    as_written = {
        table: {name: value for name, value in fields.items() if f"{table}.{name}" not in chosen}
        if isinstance(fields, Mapping)
        else fields
        for table, fields in source.items()
    }
    return {**as_written, "encoder": {**as_written["encoder"], "method": AUTO}}


def source_of(config: FederationConfig) -> dict[str, Any]:
    """Return a federation file as it was written, without what only comparisons read.

    What ``auto`` chose is left to it again, so that it follows from the settings of each point.
    """
    source = as_asked(config.source, config.chosen)
    return {name: value for name, value in source.items() if name != "methods"}


def _with(source: Mapping[str, Any], name: str, value: Any) -> dict[str, Any]:
    """Return a parsed file with one setting changed; nothing is changed in place."""
    first, *rest = name.split(".")
    if first == "party":
        return {**source, "party": _with_party(source, rest, name, value)}
    return _deeper(source, [first, *rest], name, value)


def _deeper(table: Any, path: list[str], name: str, value: Any) -> dict[str, Any]:
    if not isinstance(table, Mapping):
        raise ConfigError(
            f"set: {name}: {table!r} is a value and no table with a field {path[0]!r}"
        )
    first, *rest = path
    return {**table, first: _deeper(table.get(first, {}), rest, name, value) if rest else value}


def _with_party(source: Mapping[str, Any], path: list[str], name: str, value: Any) -> list[Any]:
    parties = list(source.get("party", []))
    names = [party.get("name") for party in parties if isinstance(party, Mapping)]
    if len(path) < 2 or path[0] not in names:
        known = ", ".join(map(str, names))
        raise ConfigError(f"set: {name}: write party.NAME.FIELD; parties are {known}")
    place = names.index(path[0])
    parties[place] = _deeper(parties[place], path[1:], name, value)
    return parties


# A grid of settings in the simulator, on equal rows and seeds; finished runs are kept.

ALONE: Final = "alone"
"""Name of the runs of the primary alone."""

_MOST_POINTS: Final = 10_000


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """What is tried, where, and on which seeds."""

    config: FederationConfig
    """The federation file."""

    tried: tuple[Setting, ...]
    """Settings to try, ``federation.seed`` among them."""

    data_root: Path
    """Where relative data paths start."""

    folder: Path
    """Folder of the runs; an interrupted sweep resumes from it."""

    device: str = "cpu"
    """Where models are computed."""

    metric: str | None = None
    """The metric to compare by; None: the one that training goes by."""

    def __post_init__(self) -> None:
        metrics_of(self.config.federation.task, self.metric, named="metric")
        names = [setting.name for setting in self.tried]
        for name in names:
            if names.count(name) > 1:
                raise ConfigError(f"set: {name} is set twice; write all its values behind one =")
        # Looked at now, so that a seed that is none is told of before anything else.
        _ = self.seeds

    @property
    def settings(self) -> tuple[Setting, ...]:
        """What is tried, but for the seed."""
        return tuple(setting for setting in self.tried if setting.name != SEED)

    @property
    def seeds(self) -> tuple[int, ...]:
        """The run seeds; the file's if none is set.

        Raises:
            ConfigError: If one of them is no seed.
        """
        for setting in self.tried:
            if setting.name == SEED:
                for seed in setting.values():
                    if type(seed) is not int or seed < 0:
                        raise ConfigError(
                            f"set: seed: must be whole numbers from 0 on, such as 0..4; "
                            f"got {seed!r}"
                        )
                return setting.values()
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
            ConfigError: If there are too many, or a range cannot be written out.
        """
        values = [setting.values() for setting in self.settings]
        many = 1
        for choices in values:
            many *= len(choices)
        if many > _MOST_POINTS:
            raise ConfigError(f"set: these are {many} combinations; at most {_MOST_POINTS} go")
        names = [setting.name for setting in self.settings]
        return tuple(
            Point(settings=dict(zip(names, chosen, strict=True)))
            for chosen in itertools.product(*values)
        )


class Plan:
    """Every point's runs, checked and with their tables read before anything is trained.

    Args:
        sweep: What is tried.
        options: How runs will be trained and reported.

    Raises:
        ConfigError: If a package or a device is missing.
    """

    def __init__(self, sweep: Sweep, options: StudyOptions) -> None:
        options.require_there(sweep.device)
        self._sweep = sweep
        self._options = options
        self.store = TableStore(sweep.data_root)
        """Every party's table, read once."""

    def tasks(self, point: Point) -> list[Task]:
        """Return a point's runs, one for each seed.

        Raises:
            ConfigError: If its settings are impossible or do not go together.
            PrivacyError: If the privacy settings contradict one another.
            DataError: If a table is not what it should be.
        """
        recipe, config = point.recipe(self._sweep.source)
        if self._options.elsewhere:
            require_installed(config.family, by="sweeping in other processes")
        return self._tasks(point.name, recipe, self.store.digest_for(config))

    def alone(self) -> list[Task]:
        """Return the runs of the primary alone, one for each seed; none if settings change it."""
        if not self._sweep.has_alone:
            return []
        recipe = Recipe(source=self._sweep.source, method=ALONE)
        return self._tasks(ALONE, recipe, self.store.digest_for(self._sweep.config))

    def _tasks(self, name: str, recipe: Recipe, tables: str) -> list[Task]:
        runs = [Run(name=name, seed=seed) for seed in self._sweep.seeds]
        return [
            Task(
                run=run,
                recipe=recipe,
                digest=run_digest(recipe, run, tables_digest=tables),
                tables=tables,
                data_root=self._sweep.data_root.resolve(),
            )
            for run in runs
        ]

    def study(self) -> Study:
        """Return what trains runs in the sweep's folder."""
        return Study(
            folder=self._sweep.folder,
            device=self._sweep.device,
            tables=self.store.by_digest,
            options=self._options,
        )


def train_grid(
    sweep: Sweep, options: StudyOptions
) -> tuple[list[dict[str, Any]], dict[str, LeftOut]]:
    """Train every point with every seed, or take what was trained before.

    All points are checked and all tables are read first. A point that fails is left out; the others
    go on.

    Returns:
        The results of every point, and of the primary alone, that has all of its runs; and those
        that have not.

    Raises:
        ConfigError: If a setting is impossible, or the folder holds runs of other settings.
        DataError: If a table is not what it should be.
        PrivacyError: If the privacy settings of a point contradict one another.
        SecureVflError: If every point has failed.

    Reveals:
        Everything is inside one organisation: a sweep protects nobody's table.
    """
    plan = Plan(sweep, options)
    rows = [plan.alone(), *(plan.tasks(point) for point in sweep.grid())]
    tasks = [task for of_seed in zip(*filter(None, rows), strict=True) for task in of_seed]
    with plan.study() as study:
        results = study.train(tasks)
        out = study.failed
    if all(point.name in out for point in sweep.grid()):
        raise SecureVflError(f"no run could be trained: {reasons(out.values())}")
    return complete(tasks, results, without=out), out


def complete(
    tasks: Sequence[Task], results: Mapping[Run, dict[str, Any]], *, without: Mapping[str, LeftOut]
) -> list[dict[str, Any]]:
    """Return the results of names with all of their runs, in the order of the tasks."""
    return [results[task.run] for task in tasks if task.run.name not in without]


def reasons(out: Iterable[LeftOut]) -> str:
    """Return why what is left out has no figures, in words."""
    return "; ".join(f"{point.name} {point.status}: {point.reason}" for point in out)
