"""Grid of settings in the simulator, on equal rows and seeds; finished runs are read again."""

import hashlib
import itertools
import math
import re
import tomllib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from securevfl.config.disclosure import require_covered_channels
from securevfl.config.encoder import AUTO
from securevfl.config.federation import FederationConfig
from securevfl.config.reading import parse_federation
from securevfl.core import files
from securevfl.core.errors import ConfigError, PrivacyError, SecureVflError
from securevfl.federation.base import require_estimator
from securevfl.lab.one_run import (
    LeftOut,
    Recipe,
    Run,
    Study,
    StudyOptions,
    StudyPlan,
    Task,
    by_name,
    cell,
    csv_of_runs,
    kept_or_temporary,
    markdown,
    over_seeds,
    run_digest,
)
from securevfl.lab.study_outputs import TableStore
from securevfl.models.registry import require_installed
from securevfl.runtime.run_folder import require_own_folder
from securevfl.runtime.run_options import FederationSource, device_named, resolve_federation
from securevfl.version import __version__

SEED: Final = "federation.seed"
"""Full name of the setting ``seed``."""

_MOST_VALUES: Final = 10_000
_RANGE: Final = re.compile(r"([+-]?\d+)\.\.([+-]?\d+)")
_WORD: Final = re.compile(r"[A-Za-z_][\w-]*")

_SAME_FOR_ALL: Final = ("federation.name", "federation.task", "training.metric")
_OF_ALONE: Final = (
    "training.validation_fraction",
    "training.test_fraction",
    "training.split",
    "training.split_column",
    "training.labelled_rows",
    "training.rows",
    "training.empty_labels",
    "training.threshold",
    "linkage.metric",
    "linkage.fields",
)
"""Settings that change the rows or the columns of the primary alone."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """A setting of the federation file, and the values to try."""

    name: str
    """``table.field``, ``party.NAME.field``."""

    values: tuple[Any, ...]
    """Values of TOML."""

    def __post_init__(self) -> None:
        first, _, rest = self.name.partition(".")
        if not rest:
            raise ConfigError(
                f"set: {self.name!r}: is no setting; write TABLE.FIELD, such as model.neighbours, "
                f"or seed"
            )
        if first == "methods":
            raise ConfigError(
                f"set: {self.name}: is for securevfl lab compare; a sweep trains no methods"
            )
        if self.name in _SAME_FOR_ALL:
            raise ConfigError(f"set: {self.name}: must be the same for all runs")
        if not self.values:
            raise ConfigError(f"set: {self.name}: name at least one value")
        texts = [text_of(value) for value in self.values]
        twice = [text for text in texts if texts.count(text) > 1] if len(texts) < 1000 else []
        if twice:
            raise ConfigError(f"set: {self.name}: {twice[0]} is named twice")

    @property
    def changes_alone(self) -> bool:
        """Whether the value may change the primary alone: its rows or its columns."""
        return self.name in _OF_ALONE or self.name.startswith(("federation.", "party."))


def parse_setting(text: str) -> Setting:
    """Read ``NAME=VALUES``.

    Commas separate values. Each is a value of TOML (numbers, ``true``, ``"text"``, lists), a word
    without quotes, or all whole numbers ``a..b`` from ``a`` to ``b``.

    Raises:
        ConfigError: If the text has another form.
    """
    name, equals, values = text.partition("=")
    if not equals or not name.strip() or not values.strip():
        raise ConfigError(
            f"set: must be NAME=VALUES, such as model.neighbours=1,10,50; got {text!r}"
        )
    return setting_of(name.strip(), values)


def setting_of(name: str, values: str | Sequence[Any]) -> Setting:
    """Return a setting with its values, from a text as for :func:`parse_setting` or a list.

    Raises:
        ConfigError: If the text cannot be read.
    """
    name = SEED if name == "seed" else name
    if isinstance(values, str):
        parts = [_read(part, name) for part in _parts(values)]
        return Setting(name=name, values=tuple(itertools.chain.from_iterable(parts)))
    return Setting(name=name, values=tuple(values))


def text_of(value: Any) -> str:
    """Return a value as people would write it."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return f"[{','.join(map(text_of, value))}]"
    return str(value)


def _parts(text: str) -> Iterator[str]:
    """Yield the parts between commas that are not within quotes or brackets."""
    depth, quote, start = 0, "", 0
    for place, letter in enumerate(text):
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "\"'":
            quote = letter
        elif letter in "[{":
            depth += 1
        elif letter in "]}":
            depth -= 1
        elif letter == "," and not depth:
            yield text[start:place].strip()
            start = place + 1
    yield text[start:].strip()


def _read(part: str, name: str) -> Sequence[Any]:
    """Return the value that a part of a setting's text names, or the numbers of its range."""
    ends = _RANGE.fullmatch(part)
    if ends is not None:
        return _range(name, int(ends[1]), int(ends[2]))
    try:
        return [tomllib.loads(f"value = {part}")["value"]]
    except (tomllib.TOMLDecodeError, KeyError):
        if _WORD.fullmatch(part):
            return [part]
    raise ConfigError(
        f"set: {name}: {part!r} is no value of TOML, no word and no range such as 0..4"
    )


def _range(name: str, low: int, high: int) -> range:
    if low >= high:
        raise ConfigError(f"set: {name}: {low}..{high}: the second must be larger than the first")
    if high - low >= _MOST_VALUES:
        raise ConfigError(f"set: {name}: {low}..{high} are more than {_MOST_VALUES} values")
    return range(low, high + 1)


_AS_WRITTEN: Final = "as-written"
_LONGEST_NAME: Final = 120
_ODD: Final = re.compile(r"[^A-Za-z0-9._=,+\[\]-]+")


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """Values of the swept settings, except the seed."""

    settings: Mapping[str, Any]
    """Value by ``table.field``."""

    @property
    def text(self) -> str:
        """Settings as readable text."""
        return ", ".join(f"{name}={text_of(value)}" for name, value in self.settings.items())

    @property
    def name(self) -> str:
        """Unique folder name of the settings."""
        text = self.text.replace(", ", ",") or _AS_WRITTEN
        plain = _ODD.sub("-", text)
        if plain == text and len(text) <= _LONGEST_NAME:
            return text
        return f"{plain[:_LONGEST_NAME]}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"

    def recipe(self, source: Mapping[str, Any]) -> tuple[Recipe, FederationConfig]:
        """Return the recipe and the checked federation of this point.

        Args:
            source: Federation file, from :func:`source_of`.

        Raises:
            ConfigError: If a setting is impossible or contradicts another; the text names the
                point.
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
    """Return a file as it was before ``auto`` chose, so that it can be resolved again.

    Args:
        source: The file with the chosen values.
        chosen: The chosen values, by ``table.field``.
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
    """Return a federation file as it was written, without ``[methods]``.

    Values that ``auto`` chose become ``auto`` again, so that each point's settings decide them.
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


ALONE: Final = "alone"
"""Name of the runs of the primary alone."""

_MOST_POINTS: Final = 10_000

_DEFAULTS: Final = StudyOptions()


@dataclass(frozen=True, kw_only=True)
class Sweep(StudyPlan):
    """Settings to try on one federation file, and the folder of the runs."""

    tried: tuple[Setting, ...]
    """Settings to try, ``federation.seed`` among them."""

    def __post_init__(self) -> None:
        StudyPlan.__post_init__(self)
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
    *("seed", "metric", "test", "validation", "train", "epsilon"),
    *("epochs", "best_epoch", "seconds", "cpu_seconds"),
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


def sweep(
    federation: FederationSource,
    settings: Mapping[str, str | Sequence[Any]],
    *,
    out: Path | None = None,
    metric: str | None = None,
    device: str = "cpu",
    data_root: Path | None = None,
    options: StudyOptions = _DEFAULTS,
) -> dict[str, Any]:
    """Compare settings of one federation file in the simulator.

    Args:
        federation: Path of a federation file, or result of :func:`securevfl.read_federation`.
        settings: Values by ``table.field``, or by ``seed``: a list, or a text such as
            ``"1,10,50"`` or ``"0..4"``.
        out: Folder for the table and the runs, from which a later call continues; default: a
            temporary one.
        metric: Metric to compare by; default: ``training.metric``.
        device: ``"cpu"`` or ``"cuda"``.
        data_root: Folder at which relative data paths start; default: that of the file, or the
            current one.
        options: Number of parallel runs, and callbacks.

    Returns:
        Contents of ``sweep.json``; see :func:`securevfl.lab.sweep.summary`.

    Raises:
        ConfigError: If a setting is impossible, or ``out`` holds runs of other settings.
        DataError: If a table can't be read.
        PrivacyError: If the privacy settings of a point contradict one another.
        SecureVflError: If every point has failed.

    Reveals:
        Everything is inside one organisation: a sweep protects no party's table.
    """
    config, root = resolve_federation(federation, data_root)
    tried = tuple(setting_of(name, values) for name, values in settings.items())
    with kept_or_temporary(out) as folder:
        asked = Sweep(
            config=config, tried=tried, data_root=root, folder=folder, device=device, metric=metric
        )
        figures = sweep_and_write(asked, options)
        if out is None:
            del figures["folder"]
        return figures


def sweep_and_write(sweep: Sweep, options: StudyOptions) -> dict[str, Any]:
    """Train a sweep, and write ``sweep.json``, ``.csv`` and ``.md``.

    Args:
        sweep: The settings to try, and the folder.
        options: Number of parallel runs, and callbacks.

    Returns:
        Contents of ``sweep.json``.

    Raises:
        SecureVflError: As :func:`securevfl.lab.sweep.train_grid`.
    """
    require_own_folder(sweep.config, sweep.folder, resume=True)
    results, failed = train_grid(sweep, options)
    figures = summary(sweep, results, left_out=failed)
    figures["folder"] = str(sweep.folder)
    write_sweep(sweep.folder, figures, results)
    return figures
