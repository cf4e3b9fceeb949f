"""Entry points that run a federation: from its file, or simulated on tables in memory."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal, TypedDict, Unpack

# Before torch: skops looks for each of scipy's functions in all modules in the order of loading,
# which takes 0.8 CPU seconds less if it finds them first. Every party with a table uses scipy.
import scipy.special  # noqa: F401

from securevfl.callbacks import Callback, CallbackObserver
from securevfl.config import sections
from securevfl.config.encoder import AUTO, EncoderSettings
from securevfl.config.federation import FederationConfig
from securevfl.config.linkage import LinkageSettings
from securevfl.config.presets import top_source
from securevfl.config.reading import parse_federation, read_federation
from securevfl.core import checks, files, interrupts
from securevfl.core.conventions import Task
from securevfl.core.errors import ConfigError
from securevfl.core.logs import log_event
from securevfl.core.progress import Observer, ProgressEvent, RoundDone, Warned, unheard
from securevfl.core.settings import default_of
from securevfl.core.shown_progress import RunProgress
from securevfl.data.party_tables import from_frame
from securevfl.data.scaling import Bounds, ColumnSettings
from securevfl.data.tables import PartyTable
from securevfl.dp.privacy import Privacy
from securevfl.federation.base import require_estimator
from securevfl.ledger.ledger import lines_of_run
from securevfl.linkage.stage.linking import PROTECTIONS
from securevfl.models.family import FamilySettings, PretrainingSettings
from securevfl.models.registry import family_of
from securevfl.models.task_metrics import metrics_of
from securevfl.runtime import handing_over, launching, run_options
from securevfl.runtime.primary_run import OwnModels
from securevfl.runtime.run_folder import TemporaryFolder, read_figures, read_history
from securevfl.runtime.run_tables import read_tables
from securevfl.runtime.simulation import RunResult, simulate_federation
from securevfl.runtime.trained_run import TrainedRun


def simulate_from_file(config: FederationConfig, options: run_options.RunOptions) -> RunResult:
    """Run a federation file's parties in this process; see :func:`simulate`.

    Raises:
        SecureVflError: As a federated run would.

    Reveals:
        Everything is in one process: a simulation protects nobody's table.
    """
    finished = _finished_result(config, options)
    if finished is not None:
        return finished
    require_estimator(config, None)
    _warn(config, options.observe)
    files.require_writable_folder(options.run_folder)
    tables = read_tables(config, options.data_root, options.observe)
    return simulate_federation(config, tables, options, with_placebo=True)


def finished_metrics(config: FederationConfig, folder: Path) -> dict[str, Any] | None:
    """Return the metrics of a run that has nothing left to do, or None if it is not finished.

    Raises:
        ConfigError: If it is a run of other settings, or its figures lack some.
    """
    if not (folder / "metrics.json").exists():
        return None
    ran = read_federation(folder / "federation.toml")
    if ran.settings_digest != config.settings_digest:
        raise ConfigError(
            f"run folder {folder}: holds a finished run of other settings; restore the federation "
            f"file, or choose another --out"
        )
    return read_figures(folder)


def _simulate(
    config: FederationConfig,
    tables: Mapping[str, PartyTable] | None,
    options: run_options.RunOptions,
    settings: "RunSettings",
) -> RunResult:
    if tables is None:
        return simulate_from_file(config, options)
    given = in_memory_of(None, settings)
    return simulate_federation(
        config,
        tables,
        options,
        own=OwnModels(base=given.base, top=given.top),
        with_alone=given.with_alone,
        with_placebo=given.with_alone,
    )


def _train(
    config: FederationConfig,
    tables: Mapping[str, PartyTable] | None,
    options: run_options.RunOptions,
    settings: "RunSettings",
) -> RunResult:
    options = replace(options, data_root=options.data_root.resolve())
    finished = _finished_result(config, options)
    if finished is not None:
        return finished
    primary = config.primary.name
    in_memory = run_options.of_tables(tables, primary)
    in_memory[primary] = own = in_memory_of(in_memory[primary].table, settings)
    require_estimator(config, own.base, own.top)
    _warn(config, options.observe)
    losses: list[float] = []

    def observe(event: ProgressEvent) -> None:
        if isinstance(event, RoundDone):
            losses.append(event.loss)
        options.observe(event)

    figures = launching.train_in_processes(
        config,
        replace(options, observe=observe),
        extra_figures=settings.get("extra_figures", dict),
        in_memory=in_memory,
    )
    result = result_of(config, options, figures.as_json(), losses)
    assert result.trained is not None, "it has a folder"
    return replace(result, trained=replace(result.trained, tables=tables))


def in_memory_of(table: PartyTable | None, settings: "RunSettings") -> run_options.InMemory:
    """Return what settings, and a table, hand to a party that no file has."""
    base, top = settings.get("base"), settings.get("top")
    return run_options.InMemory(
        table=table,
        base=None if isinstance(base, str) else base,
        top=None if isinstance(top, str) else top,
        with_alone=settings.get("with_alone", True),
    )


def _finished_result(config: FederationConfig, options: run_options.RunOptions) -> RunResult | None:
    """Return the result of a resumed run that has nothing left to do; None if there is none."""
    metrics = finished_metrics(config, options.run_folder) if options.resume else None
    return None if metrics is None else result_of(config, options, metrics, [])


def result_of(
    config: FederationConfig,
    options: run_options.RunOptions,
    metrics: dict[str, Any],
    losses: list[float],
) -> RunResult:
    """Return the result of a run that lies in a folder.

    Args:
        config: The federation.
        options: Of the run.
        metrics: Its figures.
        losses: Of the rounds of this call.
    """
    folder = options.run_folder
    return RunResult(
        metrics=metrics,
        history=read_history(folder),
        losses=losses,
        ledger=lines_of_run(folder / metrics["ledger"], metrics["run"]),
        trained=TrainedRun(
            config=config,
            place=folder,
            data_root=options.data_root,
            device=str(options.device),
        ),
    )


def _warn(config: FederationConfig, observe: Observer) -> None:
    for text in run_options.warnings_about(config):
        observe(Warned(text=text))


_PRIMARY = "primary"


def tables_of_frames(
    settings: Mapping[str, Any], *, primary: Any, secondaries: Any, label: Any, key: Any
) -> Sequence[PartyTable]:
    """Return the primary's table and the secondaries', made of frames.

    Args:
        settings: With the promise and declared ``bounds``, on which it depends what features may
            take from the records.
        primary: The primary's frame, or a table.
        secondaries: The others', in a list or by name.
        label: The primary's label column.
        key: Key columns of all, or by party name.

    Raises:
        ConfigError: If one is missing or of the wrong type, naming the argument.
        DataError: If a frame can't be used.
    """
    if primary is None:
        raise ConfigError("primary: must be given, a DataFrame with the label (or give parties)")
    if isinstance(secondaries, Mapping):
        named = {str(name): table for name, table in secondaries.items()}
    elif isinstance(secondaries, list | tuple):
        named = {f"secondary-{number}": table for number, table in enumerate(secondaries, 1)}
    else:
        raise ConfigError(
            f"secondaries: must be a list of frames, or frames by name, got a "
            f"{type(secondaries).__name__}"
        )
    if not named or _PRIMARY in named:
        raise ConfigError(
            f"secondaries: must have at least one frame, and none called {_PRIMARY!r}"
        )
    if not isinstance(label, str):
        raise ConfigError(
            f"label: must be the name of the primary's label column, got {label!r:.60}"
        )
    frames = {_PRIMARY: primary, **named}
    _require_by_party(settings, frames)
    return [
        from_frame(
            frame,
            name=name,
            key=_key_of(key, name, frames),
            label=label if name == _PRIMARY else None,
            task=settings.get("task") if name == _PRIMARY else None,
            columns=_columns(settings, name),
        )
        for name, frame in frames.items()
    ]


def _key_of(key: Any, name: str, parties: Mapping[str, Any]) -> Any:
    if key is None:
        raise ConfigError('key: must name the columns that parties link by, such as key="id"')
    if not isinstance(key, Mapping) or not set(key) <= set(parties):
        return key
    if name not in key:
        raise ConfigError(f"key: has none for {name!r}; it has {', '.join(map(repr, key))}")
    return key[name]


def _require_by_party(settings: Mapping[str, Any], names: Iterable[str]) -> None:
    """Refuse declarations about unknown parties, which would be ignored in silence.

    Raises:
        ConfigError: Naming the setting, and the name that was probably meant.
    """
    parties = list(names)
    for setting in ("bounds", "missing_columns"):
        declared = settings.get(setting)
        if setting == "missing_columns" and not isinstance(declared, Mapping | None):
            raise ConfigError(
                f'missing_columns: must be lists of columns by party name, such as {{"bank": '
                f'["income"]}}, got a {type(declared).__name__}'
            )
        for name in declared if isinstance(declared, Mapping) else ():
            if name not in parties:
                raise ConfigError(
                    f"{setting}: {name!r} is no party; they are {', '.join(map(repr, parties))}"
                    f"{checks.did_you_mean(name, parties)}"
                )


def _columns(settings: Mapping[str, Any], name: str) -> ColumnSettings:
    bounds, privacy = settings.get("bounds"), settings.get("privacy")
    if name == _PRIMARY or privacy is None or privacy.mechanism == "none":
        return ColumnSettings()
    if not privacy.regime.caps_records and settings.get("encoder") != AUTO:
        return ColumnSettings()
    own = bounds.get(name) if isinstance(bounds, Mapping) else bounds
    missing = (settings.get("missing_columns") or {}).get(name, ())
    return ColumnSettings(bounds=own, missing_columns=missing, own_statistics=False)


class RunSettings(TypedDict, total=False):
    """Keyword arguments of :func:`simulate` and :func:`train` in addition to tables."""

    privacy: Privacy
    """Privacy guarantee; ``Privacy(mechanism="none")`` gives none."""
    encoder: EncoderSettings | Literal["auto"] | None
    """How frozen encoders are made; default: as the family does. ``"auto"`` takes, with tables, a
    promise and what else is given, the settings of :mod:`securevfl.config.encoder`; then ``model``
    may be left out."""
    training: sections.TrainingSettings | None
    """Epochs, batch size and so on."""
    pretraining: PretrainingSettings | None
    """For families that pretrain."""
    linkage: LinkageSettings | None
    """Who chooses links, and by what; default: each row its K nearest records, with the primary's
    keys shown to every secondary."""
    prediction: sections.PredictionSettings | None
    """Limits of what predictions of the model may spend in addition to training."""
    base: Any
    """Base model that is averaged with the joint one: ``"boosting"``, ``"linear"``, ``"best"`` of
    these and a perceptron (the default), any estimator of scikit-learn (a classifier needs
    ``predict_proba``), or ``"none"``, as in the papers."""
    top: Any
    """With frozen encoders, an estimator in place of the family's top network, fitted to own
    columns, keys and released numbers: ``"boosting"``, ``"linear"`` or any of scikit-learn."""
    task: Task | None
    """Learning task; default: binary or multiclass if the labels are classes, regression
    otherwise."""
    bounds: Mapping[str, Bounds] | Sequence[float] | None
    """``[low, high]`` of all features; or by party name such a pair, or pairs by column. Declared
    ranges do not depend on the data, as a frozen encoder's guarantee needs. Without them each party
    standardises its features by its own statistics."""
    missing_columns: Mapping[str, Sequence[str]] | None
    """Columns of frames whose cells may be empty, by party name, known without looking."""
    seed: int
    """Seed of splits, initialisation, shuffling and dropout; never of noise. Default 0."""
    with_alone: bool
    """Also find the local baseline, the primary's best model alone, to compare with.
    Default true."""
    data_root: Path | None
    """With a federation file, where relative data paths start; default: next to the file, and the
    current folder if there is no file."""
    resume: bool
    """With a federation file, continue from the last epoch that was saved in ``out``."""
    device: str
    """``"cpu"`` (the default) or ``"cuda"``."""
    progress: bool | None
    """Show progress on standard error: a bar on a terminal, a line for each stage elsewhere.
    Default true."""
    record_mib: float | None
    """MiB of what each party receives and holds, which it records in its own folder for
    ``securevfl lab audit``; default: none."""
    extra_figures: Callable[[], Mapping[str, Any]]
    """Called at the end of :func:`train`; returns figures to add to the run's: ``no_privacy_test``,
    ``combine_test`` and all metrics of both."""


_OF_FILES: Final = ("data_root", "resume")
_OF_BOTH: Final = ("device", "progress", "record_mib", "extra_figures")


def simulate(
    parties: Any = None,
    model: Any = None,
    *,
    primary: Any = None,
    secondaries: Any = None,
    label: Any = None,
    key: Any = None,
    out: str | Path | None = None,
    observe: Observer = unheard,
    callbacks: Sequence[Callback] = (),
    **settings: Unpack[RunSettings],
) -> RunResult:
    """Run a federation in this process: on frames, on tables, or as its file says.

    :func:`train` takes the same, and gives every party a process of its own.

    Args:
        parties: The primary's table, with labels, then the secondaries', from
            :func:`securevfl.data.from_frame`, a file or a split; or the path of a
            federation file, or what :func:`securevfl.read_federation` returned. None takes frames.
        model: A family's settings, for example ``securevfl.models.FeT(neighbours=50)``; of an
            installed package's family, too. A federation file says it itself.
        primary: In place of ``parties``, the primary's frame (pandas, polars, pyarrow).
        secondaries: The others' frames: a list, or a mapping by name.
        label: The label column of the primary's frame.
        key: The key column of all frames, or a list of them; or such by party name, the primary's
            is ``"primary"`` and those of a list are ``"secondary-1"`` and so on.
        out: Run folder; default: a temporary one, which is removed when the result is no longer
            referred to.
        observe: Called with progress; an exception that it raises ends the run.
        callbacks: Called with progress and at the end, for example
            ``securevfl.callbacks.TensorBoard("logs")``; one that fails is left out with a warning.
        **settings: Those of :class:`RunSettings`; with tables or frames, ``privacy`` must be
            among them.

    Returns:
        Metrics, history, losses and ledger; and the model, for :meth:`RunResult.predict`.

    Raises:
        ConfigError: If a setting is impossible or unknown, or does not go with what is simulated.
        DataError: If a frame can't be used.
        PrivacyError: If the promise does not hold for what would run.

    Reveals:
        Everything is in one process: a simulation protects nobody's table.
    """
    frames = {"primary": primary, "secondaries": secondaries, "label": label, "key": key}
    if "extra_figures" in settings:
        raise ConfigError("extra_figures: goes with securevfl.train; add yours to run.metrics")
    return _run("simulate", parties, model, frames, settings, out, observe, callbacks)


def train(
    parties: Any = None,
    model: Any = None,
    *,
    primary: Any = None,
    secondaries: Any = None,
    label: Any = None,
    key: Any = None,
    out: str | Path | None = None,
    observe: Observer = unheard,
    callbacks: Sequence[Callback] = (),
    **settings: Unpack[RunSettings],
) -> RunResult:
    """Run a federation on this machine, one process per party; see :func:`simulate`.

    Processes are forked from one that has loaded the package, or are programs of their own, so
    neither a notebook nor a script needs a guard. Tables are handed over in memory; identities are
    made for this run. Where noise is off, losses are those of a simulation of the same seed.

    Args:
        parties: As of :func:`simulate`.
        model: As of :func:`simulate`. Of a family of your own, processes import the code by its
            name from the file that holds it; where that is the script which runs, what it runs
            stands under ``if __name__ == "__main__":``.
        primary: As of :func:`simulate`.
        secondaries: As of :func:`simulate`.
        label: As of :func:`simulate`.
        key: As of :func:`simulate`.
        out: Run folder; default: a temporary one, as of :func:`simulate`.
        observe: Called with the primary's progress, and all parties' warnings and spending.
        callbacks: As of :func:`simulate`.
        **settings: Those of :class:`RunSettings`.

    Returns:
        What :func:`simulate` returns. Losses are those of the rounds that this call trained. There
        is no placebo of permuted rows: no party holds all tables.

    Raises:
        SecureVflError: The kind that fits where the failure began, naming the party.

    Reveals:
        Between the processes: what a real federation reveals. This machine holds all of it.
    """
    frames = {"primary": primary, "secondaries": secondaries, "label": label, "key": key}
    return _run("train", parties, model, frames, settings, out, observe, callbacks)


_Tables = Mapping[str, PartyTable] | None


def _run(
    by: Literal["simulate", "train"],
    parties: Any,
    model: Any,
    frames: Mapping[str, Any],
    settings: RunSettings,
    out: str | Path | None,
    observe: Observer,
    callbacks: Sequence[Callback],
) -> RunResult:
    """Run what is asked for, with progress shown, in a folder that goes if it fails."""
    handing_over.require_script_read()
    watching = [observe]

    def tell_all(event: ProgressEvent) -> None:
        for watcher in watching:
            watcher(event)

    hearing = CallbackObserver(callbacks, tell_all)
    with (
        interrupts.unwrap_interrupts(),
        contextlib.ExitStack() as shown,
        hearing.until_the_end(),
        contextlib.ExitStack() as unfinished,
    ):
        config, tables, root = _asked_for(by, parties, model, settings, **frames)
        resume = settings.get("resume", False)
        if resume and out is None:
            raise ConfigError("resume: needs out, the folder of the run to continue")
        if settings.get("progress") is not False:
            metric = metrics_of(config.federation.task, config.training.metric)[0].name
            watching.insert(0, shown.enter_context(RunProgress(metric=metric)))
        else:
            watching.insert(0, log_event)
        place: Path | TemporaryFolder = Path(out) if out is not None else TemporaryFolder()
        if isinstance(place, TemporaryFolder):
            unfinished.callback(place.remove)
        options = run_options.RunOptions(
            run_folder=place.path if isinstance(place, TemporaryFolder) else place,
            data_root=root or Path(),
            device=run_options.device_named(settings.get("device", "cpu")),
            resume=resume,
            observe=hearing.tell,
            record_mib=settings.get("record_mib"),
        )
        if by == "simulate":
            result = _simulate(config, tables, options, settings)
        else:
            result = _train(config, tables, options, settings)
        hearing.keep_figures(result.metrics)
        unfinished.pop_all()
        assert result.trained is not None, "pretraining alone has an entry of its own"
        # Its folder lives as long as the result, which can predict with it.
        return replace(result, trained=replace(result.trained, place=place))


def _asked_for(
    by: str, parties: Any, model: Any, settings: Any, **frames: Any
) -> tuple[FederationConfig, _Tables, Path | None]:
    """Return the federation, its tables (None: as its file says) and where paths start.

    Raises:
        ConfigError: If the arguments cannot be simulated, naming the first that is wrong.
    """
    require_known(settings)
    given = [name for name, value in frames.items() if value is not None]
    if isinstance(parties, run_options.FederationSource):
        of_tables = {"model": model, **settings}
        wrong = [
            name
            for name, value in of_tables.items()
            if value is not None and name not in (*_OF_FILES, *_OF_BOTH)
        ]
        if wrong or given:
            raise ConfigError(f"{(wrong + given)[0]}: the federation file says it; leave it out")
        config, root = run_options.resolve_federation(parties, settings.get("data_root"))
        return config, None, root
    if any(settings.get(name) for name in _OF_FILES):
        raise ConfigError("resume, data_root: go with a federation file, not with tables")
    privacy = settings.get("privacy")
    for name, value, kind in (("model", model, FamilySettings), ("privacy", privacy, Privacy)):
        if value is not None and not isinstance(value, kind):
            raise ConfigError(
                f"{name}: must be {kind.__name__}, got a {type(value).__name__}; frames go "
                f'in by name: primary=..., secondaries=[...], label="y", key="id"'
            )
    if parties is None:
        listed = tables_of_frames(settings, **frames)
    elif given:
        raise ConfigError(f"{given[0]}: goes with frames alone; leave out parties, or {given[0]}")
    elif settings.get("missing_columns") is not None:
        raise ConfigError("missing_columns: goes with frames alone; from_frame declares a table's")
    else:
        listed = _list_tables(parties)
        _require_by_party(settings, [table.name for table in listed])
    names = _key_names(listed[0])
    source = source_of([TableFacts.of(table) for table in listed], model, settings)
    tables = {table.name: with_keys_called(names, table) for table in listed}
    return parse_federation(source, file=f"{by}()"), tables, None


def _list_tables(parties: Any) -> Sequence[PartyTable]:
    tables = parties if isinstance(parties, list | tuple) else [parties]
    for number, table in enumerate(tables):
        if not isinstance(table, PartyTable):
            raise ConfigError(
                f"parties: number {number + 1} is a {type(table).__name__}, and must be a table of "
                f"securevfl.data.from_frame; frames go in by name: primary=..., "
                f'secondaries=[...], label="y", key="id"'
            )
    if len(tables) < 2:
        raise ConfigError(
            f"parties: must be a list with the primary's table and at least one secondary's, got "
            f"{len(tables)}"
        )
    return tables


def require_known(settings: RunSettings) -> None:
    """Refuse an unknown setting.

    Raises:
        ConfigError: Naming it, and the setting that was probably meant.
    """
    for name in settings:
        if name not in RunSettings.__annotations__:
            meant = checks.did_you_mean(name, RunSettings.__annotations__)
            raise ConfigError(f"{name}: no such setting{meant}")


_LEFT_TO_AUTO: Final = (
    ("privacy", "encoder", "trained"),
    ("linkage", "choose", "rows"),
    ("training", "batch_size", sections.TrainingSettings().batch_size),
)
"""Table, field and default of the settings that ``auto`` decides unless they are given."""


def _key_names(table: PartyTable) -> tuple[str, ...]:
    return table.key_names if table.link_columns is None else tuple(table.link_columns.columns)


def with_keys_called(names: tuple[str, ...], table: PartyTable) -> PartyTable:
    """Return a table whose keys for linkage alone are called as the primary's are."""
    keys = table.link_columns
    if keys is None or len(keys.columns) != len(names):
        return table
    columns = dict(zip(names, keys.columns.values(), strict=True))
    return replace(table, link_columns=replace(keys, columns=columns))


@dataclass(frozen=True, kw_only=True, slots=True)
class TableFacts:
    """What a federation file has to say of a table in memory."""

    name: str
    """The party."""
    keys: Sequence[str]
    """Its key columns, in the order that all parties agreed on."""
    classes: int | None
    """How many classes its label has; None of a regression's and of a secondary's."""

    @classmethod
    def of(cls, table: PartyTable) -> "TableFacts":
        """Return those of a table."""
        classes = None if table.classes is None else len(table.classes)
        return cls(name=table.name, keys=_key_names(table), classes=classes)

    @property
    def task(self) -> Task:
        """What the primary's label is, if it is not said."""
        if self.classes is None:
            return "regression"
        return "binary" if self.classes == 2 else "multiclass"


def helpers_of(settings: "RunSettings") -> list[str]:
    """Return the roles of parties without a table that settings need; they are named so."""
    encoder, helpers = (
        settings.get("encoder"),
        PROTECTIONS[_linkage_of(settings).protection].helpers,
    )
    deals = isinstance(encoder, EncoderSettings) and encoder.labels == "shares"
    return list(dict.fromkeys([*helpers, *(["dealer"] if deals else [])]))


def _linkage_of(settings: "RunSettings") -> LinkageSettings:
    return settings.get("linkage") or LinkageSettings(protection="none")


def source_of(
    parties: Sequence[TableFacts], model: FamilySettings | None, settings: RunSettings
) -> dict[str, Any]:
    """Return the federation file that a run on tables in memory stands for."""
    encoder, bounds = settings.get("encoder"), settings.get("bounds")
    base, top = settings.get("base"), settings.get("top")
    auto = encoder == AUTO
    if model is None and not auto:
        raise ConfigError("model: must be given, for example securevfl.models.FeT()")
    privacy = settings.get("privacy")
    if privacy is None:
        raise ConfigError('privacy: must be given; Privacy(mechanism="none") promises nothing')
    tables = []
    for number, party in enumerate(parties):
        own = bounds.get(party.name) if isinstance(bounds, Mapping) else bounds
        tables.append(
            {
                "name": party.name,
                "role": "secondary" if number else "primary",
                "data": sections.IN_MEMORY,
                "key": list(party.keys),
                **({} if number else {"label": "label", "address": "127.0.0.1:0"}),
                **({"scaling": "bounds", "bounds": _plain(own)} if own is not None else {}),
            }
        )
    tables += [{"name": role, "role": role} for role in helpers_of(settings)]
    kind = settings.get("task") or parties[0].task
    several = {"classes": parties[0].classes} if kind == "multiclass" and auto else {}
    family = {} if model is None else {"family": family_of(model).name, **_as_table(model)}
    source: dict[str, Any] = {
        "federation": {
            "name": "simulation",
            "task": kind,
            "seed": settings.get("seed") or 0,
            **several,
        },
        "model": {**family, **({} if top is None else {"top": top_source(top)})},
        "training": _as_table(settings.get("training") or sections.TrainingSettings()),
        "pretraining": _as_table(settings.get("pretraining") or PretrainingSettings()),
        "privacy": _as_table(privacy),
        "prediction": _as_table(settings.get("prediction") or sections.PredictionSettings()),
        "base": sections.base_source(sections.BaseSettings().estimator if base is None else base),
        "linkage": _as_table(_linkage_of(settings)),
        "party": tables,
    }
    if source["linkage"]["metric"] == "exact" and model is not None:
        # As below: of equal ids one is right, unless another K was given.
        default = default_of(type(model), "neighbours")
        if default is not None and model.neighbours == default:
            del source["model"]["neighbours"]
    if encoder is not None:
        source["encoder"] = {"method": AUTO} if auto else _as_table(encoder)
    if auto:
        # Defaults of Python's dataclasses are no settings that were given.
        for table, name, default in _LEFT_TO_AUTO:
            if source[table].get(name) == default:
                del source[table][name]
    return source


def _plain(bounds: Bounds) -> Any:
    """Return bounds as a federation file holds them."""
    if isinstance(bounds, Mapping):
        return {column: list(pair) for column, pair in bounds.items()}
    return list(bounds)


def _as_table(settings: Any) -> dict[str, Any]:
    # TOML has no null: a setting that is None is one that is not there.
    fields = dataclasses.asdict(settings)
    return {name: value for name, value in fields.items() if value is not None}
