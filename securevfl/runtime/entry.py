"""Entry points that run a federation: from its file, or on tables in memory."""

# A notebook shows a signature's types as they are written here, not all that they stand for.
from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, ParamSpec

# Before torch: skops looks for each of scipy's functions in all modules in the order of loading,
# which takes 0.8 CPU seconds less if it finds them first. Every party with a table uses scipy.
import scipy.special  # noqa: F401

from securevfl.callbacks import Callback, CallbackObserver
from securevfl.config.encoder import EncoderSettings
from securevfl.config.federation import FederationConfig
from securevfl.config.linkage import LinkageSettings
from securevfl.config.presets import PresetSettings
from securevfl.config.reading import read_federation
from securevfl.config.sections import (
    MpcSettings,
    PredictionSettings,
    RuntimeSettings,
    TrainingSettings,
)
from securevfl.core import files, interrupts
from securevfl.core.conventions import Task
from securevfl.core.errors import ConfigError
from securevfl.core.logs import log_event
from securevfl.core.progress import Observer, ProgressEvent, RoundDone, Warned, unheard
from securevfl.core.shown_progress import RunProgress
from securevfl.data.scaling import Bounds
from securevfl.data.tables import PartyTable
from securevfl.dp.privacy import Privacy
from securevfl.federation.base import require_estimator
from securevfl.ledger.ledger_file import lines_of_run
from securevfl.models.family import FamilySettings, PretrainingSettings
from securevfl.models.task_metrics import metrics_of
from securevfl.runtime import handing_over, launching
from securevfl.runtime.run_folder import (
    TemporaryFolder,
    read_figures,
    read_history,
    require_own_folder,
)
from securevfl.runtime.run_options import FederationSource, RunOptions, device_named, warnings_about
from securevfl.runtime.run_settings import estimators_of, in_python_words, resolve_run
from securevfl.runtime.run_tables import read_tables
from securevfl.runtime.simulation import RunResult, simulate_federation
from securevfl.runtime.trained_run import TrainedRun


def simulate(
    parties: FederationSource | Sequence[PartyTable] | None = None,
    model: FamilySettings | PresetSettings | str | None = None,
    *,
    primary: Any = None,
    secondaries: Sequence[Any] | Mapping[str, Any] | None = None,
    label: str | None = None,
    key: str | Sequence[str] | Mapping[str, Any] | None = None,
    privacy: Privacy | None = None,
    encoder: EncoderSettings | Literal["auto"] | None = None,
    linkage: LinkageSettings | None = None,
    training: TrainingSettings | None = None,
    pretraining: PretrainingSettings | None = None,
    prediction: PredictionSettings | None = None,
    base: Any = None,
    top: Any = None,
    mpc: MpcSettings | None = None,
    runtime: RuntimeSettings | None = None,
    task: Task | None = None,
    bounds: Mapping[str, Bounds] | Sequence[float] | None = None,
    missing_columns: Mapping[str, Sequence[str]] | None = None,
    seed: int | None = None,
    with_alone: bool = True,
    data_root: Path | None = None,
    resume: bool = False,
    device: str = "cpu",
    record_mib: float | None = None,
    out: str | Path | None = None,
    progress: bool | None = None,
    observe: Observer | None = None,
    callbacks: Sequence[Callback] = (),
) -> RunResult:
    """Run a federation in this process: on frames, on tables, or as its file says.

    :func:`train` takes the same, and gives every party a process of its own. A keyword that is left
    out has the default of its section of the federation file.

    Args:
        parties: The primary's table, with labels, then the secondaries', from
            :func:`securevfl.data.from_frame`, a file or a split; or the path of a
            federation file, or what :func:`securevfl.read_federation` returned. None takes frames.
        model: A family's settings, for example ``securevfl.models.FeT(neighbours=50)``, or its
            name, ``"fet"``; a preset, :func:`securevfl.preset`, or its name, ``"fedsim-paper"``,
            which also fills in ``privacy`` (none), ``training``, ``pretraining`` and ``base``
            where they are not given. A federation file says it itself.
        primary: In place of ``parties``, the primary's frame (pandas, polars, pyarrow).
        secondaries: The others' frames: a list, or a mapping by name.
        label: The label column of the primary's frame.
        key: The key column of all frames, or a list of them; or such by party name, the primary's
            is ``"primary"`` and those of a list are ``"secondary-1"`` and so on.
        privacy: Promise, :class:`securevfl.dp.Privacy`, which tables and frames need;
            ``Privacy(mechanism="none")`` gives none.
        encoder: How frozen encoders are made, :class:`securevfl.EncoderSettings`; ``"auto"`` takes
            the settings that suit tables and promise, and then ``model`` may be left out.
        linkage: Who chooses links, and by what, :class:`securevfl.LinkageSettings`; default: each
            row its K nearest records, with the primary's keys shown to every secondary.
        training: Epochs, batch size and so on, :class:`securevfl.TrainingSettings`.
        pretraining: For families that pretrain, :class:`securevfl.PretrainingSettings`.
        prediction: Limits of what predictions may spend, :class:`securevfl.PredictionSettings`.
        base: Base model that is averaged with the joint one: ``"boosting"``, ``"linear"``,
            ``"best"`` of these and a perceptron (the default), an estimator of scikit-learn (a
            classifier needs ``predict_proba``), or ``"none"``, as in the papers.
        top: With frozen encoders, an estimator in place of the family's top network:
            ``"boosting"``, ``"linear"`` or one of scikit-learn.
        mpc: What parties compute on shares, and with what, :class:`securevfl.MpcSettings`.
        runtime: How long parties wait for one another, :class:`securevfl.RuntimeSettings`.
        task: Learning task; default: binary or multiclass if labels are classes, regression
            otherwise.
        bounds: ``[low, high]`` of all features; or by party name such a pair, or pairs by column.
            A frozen encoder's guarantee needs them, since they do not depend on the data; without
            them each party standardises features by its own statistics.
        missing_columns: Columns of frames whose cells may be empty, by party name.
        seed: Seed of splits, initialisation, shuffling and dropout, never of noise. Default 0.
        with_alone: Whether the local baseline, the primary's best model alone, is found too.
        data_root: With a federation file, where relative data paths start; default: next to it.
        resume: Whether to continue from the last epoch saved in ``out``, with a federation file.
        device: ``"cpu"`` or ``"cuda"``.
        record_mib: MiB of what each party receives and holds, which it records in its own folder
            for ``securevfl lab audit``; None: nothing.
        out: Run folder; default: a temporary one, which is removed when the result is no longer
            referred to.
        progress: False hides the bar (a line for each stage where there is no terminal) on
            standard error.
        observe: Called with progress; an exception that it raises ends the run.
        callbacks: Called with progress and at the end, for example
            ``securevfl.callbacks.TensorBoard("logs")``; one that fails is left out with a warning.

    Returns:
        Metrics, history, losses and ledger; and the model, for :meth:`RunResult.predict`.

    Raises:
        ConfigError: If a setting is impossible, or does not go with what is simulated.
        DataError: If a frame can't be used.
        PrivacyError: If the promise does not hold for what would run.

    Reveals:
        Everything is in one process: a simulation protects nobody's table.
    """
    with _started("simulate", locals()) as run:
        finished = run.finished_result()
        if finished is not None:
            return run.end(finished)
        result = simulate_federation(
            run.config,
            run.read_tables(),
            run.options,
            with_alone=with_alone,
            with_placebo=with_alone,
        )
        return run.end(result)


P = ParamSpec("P")


def _like(
    other: Callable[P, RunResult],
) -> Callable[[Callable[[_StartedRun], RunResult]], Callable[P, RunResult]]:
    """Give a function the arguments of another one, and their description."""
    signature, text = inspect.signature(other), other.__doc__ or ""
    arguments = text[text.find("Args:") : text.find("Returns:")]

    def decorate(run_started: Callable[[_StartedRun], RunResult]) -> Callable[P, RunResult]:
        def called(*args: P.args, **kwargs: P.kwargs) -> RunResult:
            given = signature.bind(*args, **kwargs)
            given.apply_defaults()
            with _started(run_started.__name__, given.arguments) as run:
                return run_started(run)

        functools.update_wrapper(called, run_started)
        called.__signature__ = signature  # type: ignore[attr-defined]
        called.__doc__ = (run_started.__doc__ or "").replace("Returns:", f"{arguments}Returns:", 1)
        return called

    return decorate


@_like(simulate)
def train(run: _StartedRun) -> RunResult:
    """Run a federation on this machine, one process per party; see :func:`simulate`.

    Processes are forked from one that has loaded the package, or are programs of their own, so
    neither a notebook nor a script needs a guard; but of a family of your own, processes import the
    code by its name from the file that holds it: where that is the script which runs, what it runs
    stands under ``if __name__ == "__main__":``. Tables are handed over in memory; identities are
    made for this run. Where noise is off, losses are those of a simulation of the same seed.

    Returns:
        What :func:`simulate` returns. Losses are those of the rounds that this call trained. There
        is no placebo of permuted rows: no party holds all tables.

    Raises:
        SecureVflError: The kind that fits where the failure began, naming the party.

    Reveals:
        Between the processes: what a real federation reveals. This machine holds all of it.
    """
    run.options = replace(run.options, data_root=run.options.data_root.resolve())
    finished = run.finished_result()
    if finished is not None:
        return run.end(finished)
    run.warn()
    losses: list[float] = []

    def note_loss(event: ProgressEvent) -> None:
        if isinstance(event, RoundDone):
            losses.append(event.loss)
        run.options.observe(event)

    figures = launching.train_in_processes(
        run.config,
        replace(run.options, observe=note_loss),
        tables=run.tables or {},
        with_alone=run.with_alone,
    )
    return run.end(result_of(run.config, run.options, figures.as_json(), losses))


@dataclass(kw_only=True, eq=False)
class _StartedRun:
    """A requested run, with its folder and its observers."""

    config: FederationConfig
    tables: Mapping[str, PartyTable] | None
    """Every party's table by name; None: they lie where the federation file says."""
    options: RunOptions
    with_alone: bool
    place: Path | TemporaryFolder
    callbacks: CallbackObserver
    unfinished: contextlib.ExitStack
    """Removes a temporary folder, unless the run ends well."""

    def finished_result(self) -> RunResult | None:
        """Return the result of a resumed run that has nothing left to do; None of any other."""
        if not self.options.resume:
            return None
        metrics = finished_metrics(self.config, self.options.run_folder)
        return None if metrics is None else result_of(self.config, self.options, metrics, [])

    def read_tables(self) -> Mapping[str, PartyTable]:
        """Return every party's table, read where they are not in memory."""
        if self.tables is None:
            self.warn()
            files.require_writable_folder(self.options.run_folder)
            self.tables = read_tables(self.config, self.options.data_root, self.options.observe)
        return self.tables

    def warn(self) -> None:
        """Refuse estimators that are missing, and warn about the federation file."""
        require_estimator(self.config, self.options.base, self.options.top)
        for text in warnings_about(self.config):
            self.options.observe(Warned(text=text))

    def end(self, result: RunResult) -> RunResult:
        """Keep the run's folder and figures; return the result, which can predict from there."""
        self.callbacks.keep_figures(result.metrics)
        self.unfinished.pop_all()
        trained = TrainedRun(
            config=self.config,
            # As long as the result lives.
            place=self.place,
            tables=self.tables,
            data_root=self.options.data_root,
            device=str(self.options.device),
        )
        return replace(result, trained=trained)


@contextlib.contextmanager
def _started(by: str, given: Mapping[str, Any]) -> Iterator[_StartedRun]:
    """Start a run of the given arguments, with progress shown, in a folder that goes if it fails.

    Args:
        by: The function that was called.
        given: Its arguments by name.
    """
    handing_over.require_script_read()
    # What is not given is not there: a federation file says the rest itself.
    settings = {name: value for name, value in given.items() if value is not None}
    out, shows = settings.pop("out", None), settings.pop("progress", True)
    watching: list[Observer] = [settings.pop("observe", unheard)]

    def tell_all(event: ProgressEvent) -> None:
        for watcher in watching:
            watcher(event)

    hearing = CallbackObserver(settings.pop("callbacks"), tell_all)
    with (
        in_python_words(settings),
        interrupts.unwrap_interrupts(),
        contextlib.ExitStack() as shown,
        hearing.until_the_end(),
        contextlib.ExitStack() as unfinished,
    ):
        config, tables, root = resolve_run(by, settings)
        resume = settings["resume"]
        if resume and out is None:
            raise ConfigError("resume: needs out, the folder of the run to continue")
        if shows:
            metric = metrics_of(config.federation.task, config.training.metric)[0].name
            watching.insert(0, shown.enter_context(RunProgress(metric=metric)))
        else:
            watching.insert(0, log_event)
        if out is not None:
            require_own_folder(config, Path(out), resume=resume)
        place: Path | TemporaryFolder = Path(out) if out is not None else TemporaryFolder()
        if isinstance(place, TemporaryFolder):
            unfinished.callback(place.remove)
        options = RunOptions(
            run_folder=place.path if isinstance(place, TemporaryFolder) else place,
            data_root=root or Path(),
            device=device_named(settings["device"]),
            resume=resume,
            observe=hearing.tell,
            record_mib=settings.get("record_mib"),
            **estimators_of(settings),
        )
        yield _StartedRun(
            config=config,
            tables=tables,
            options=options,
            with_alone=settings["with_alone"],
            place=place,
            callbacks=hearing,
            unfinished=unfinished,
        )


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


def result_of(
    config: FederationConfig,
    options: RunOptions,
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
