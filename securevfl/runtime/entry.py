"""Entry points that run a federation: from its file, or on tables in memory."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Unpack

# Before torch: skops looks for each of scipy's functions in all modules in the order of loading,
# which takes 0.8 CPU seconds less if it finds them first. Every party with a table uses scipy.
import scipy.special  # noqa: F401

from securevfl.callbacks import Callback, CallbackObserver
from securevfl.config.federation import FederationConfig
from securevfl.config.reading import read_federation
from securevfl.core import files, interrupts
from securevfl.core.errors import ConfigError
from securevfl.core.logs import log_event
from securevfl.core.progress import Observer, ProgressEvent, RoundDone, Warned, unheard
from securevfl.core.shown_progress import RunProgress
from securevfl.data.tables import PartyTable
from securevfl.federation.base import require_estimator
from securevfl.ledger.ledger_file import lines_of_run
from securevfl.models.task_metrics import metrics_of
from securevfl.runtime import handing_over, launching
from securevfl.runtime.run_folder import (
    TemporaryFolder,
    read_figures,
    read_history,
    require_own_folder,
)
from securevfl.runtime.run_options import RunOptions, device_named, warnings_about
from securevfl.runtime.run_settings import RunSettings, estimators_of, resolve_run
from securevfl.runtime.run_tables import read_tables
from securevfl.runtime.simulation import RunResult, simulate_federation
from securevfl.runtime.trained_run import TrainedRun


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
    with _started("simulate", parties, model, frames, settings, out, observe, callbacks) as run:
        finished = run.finished_result()
        if finished is not None:
            return run.end(finished)
        with_alone = settings.get("with_alone", True)
        result = simulate_federation(
            run.config,
            run.read_tables(),
            run.options,
            with_alone=with_alone,
            with_placebo=with_alone,
        )
        return run.end(result)


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
    with _started("train", parties, model, frames, settings, out, observe, callbacks) as run:
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
            extra_figures=settings.get("extra_figures", dict),
            tables=run.tables or {},
            with_alone=settings.get("with_alone", True),
        )
        return run.end(result_of(run.config, run.options, figures.as_json(), losses))


@dataclass(kw_only=True, eq=False)
class _StartedRun:
    """A requested run, with its folder and its observers."""

    config: FederationConfig
    tables: Mapping[str, PartyTable] | None
    """Every party's table by name; None: they lie where the federation file says."""
    options: RunOptions
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
def _started(
    by: Literal["simulate", "train"],
    parties: Any,
    model: Any,
    frames: Mapping[str, Any],
    settings: RunSettings,
    out: str | Path | None,
    observe: Observer,
    callbacks: Sequence[Callback],
) -> Iterator[_StartedRun]:
    """Start what is asked for, with progress shown, in a folder that goes if it fails."""
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
        config, tables, root = resolve_run(by, parties, model, settings, **frames)
        resume = settings.get("resume", False)
        if resume and out is None:
            raise ConfigError("resume: needs out, the folder of the run to continue")
        if settings.get("progress") is not False:
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
            device=device_named(settings.get("device", "cpu")),
            resume=resume,
            observe=hearing.tell,
            record_mib=settings.get("record_mib"),
            **estimators_of(settings),
        )
        yield _StartedRun(
            config=config,
            tables=tables,
            options=options,
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
