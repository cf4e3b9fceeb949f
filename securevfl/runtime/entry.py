"""Entry points for training and prediction, from Python and from the command line."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from securevfl.callbacks import Callback, CallbackObserver
from securevfl.config.federation import FederationConfig
from securevfl.config.reading import read_federation
from securevfl.core import files
from securevfl.core.errors import ConfigError
from securevfl.core.progress import Observer, ProgressEvent, RoundDone, Warned, unheard
from securevfl.data.tables import PartyTable
from securevfl.federation.base import require_estimator
from securevfl.ledger.ledger import lines_of_run
from securevfl.models.registry import require_installed
from securevfl.runtime.launching import train_in_processes
from securevfl.runtime.predictions import Predictions
from securevfl.runtime.preflight import device_named, warnings_about
from securevfl.runtime.run_folder import read_figures, read_history
from securevfl.runtime.run_tables import read_tables
from securevfl.runtime.simulation import RunResult, simulate_federation
from securevfl.runtime.trained_run import TrainedRun

# Where a run of a whole federation starts, from Python and from the command line alike.

FederationSource = str | Path | FederationConfig
"""A federation: the path of its file, or what :func:`securevfl.read_federation` returned."""


def train(
    federation: FederationSource,
    *,
    out: str | Path,
    data_root: Path | None = None,
    resume: bool = False,
    device: str = "cpu",
    observe: Observer = unheard,
    callbacks: Sequence[Callback] = (),
    beside: Callable[[], Mapping[str, Any]] = dict,
) -> RunResult:
    """Run a whole federation on this machine, one process per party.

    Args:
        federation: The path of a federation file, or what :func:`securevfl.read_federation`
            returned.
        out: Run folder.
        data_root: Where relative data paths start; default: next to the file, and the current
            folder if there is no file.
        resume: Go on from the last epoch that was saved in ``out``. A run that is finished is
            not run again: its figures are returned.
        device: ``"cpu"`` or ``"cuda"``, where each party computes.
        observe: Hears of progress and of warnings; what it raises ends the run.
        callbacks: Hear of progress and of the end, for example
            ``securevfl.callbacks.TensorBoard("logs")``; one that fails is left out with a warning.
        beside: Returns figures that are computed once the run is done and stand beside its own:
            ``no_privacy_test``, ``combine_test`` and all metrics of both.

    Returns:
        Metrics, history, the primary's ledger, and the losses of the rounds that this call
        trained: a run folder keeps one loss an epoch, in its history.

    Raises:
        SecureVflError: The kind that fits where the failure began, naming the party.

    Reveals:
        Between the processes: what a real federation reveals. This machine holds all of it.
    """
    hearing = CallbackObserver(callbacks, observe)
    with hearing.until_the_end():
        result = _train(
            federation,
            Path(out),
            data_root=data_root,
            resume=resume,
            device=device,
            observe=hearing.tell,
            beside=beside,
        )
        hearing.ended(result.metrics)
        return result


def _train(
    federation: FederationSource,
    folder: Path,
    *,
    data_root: Path | None,
    resume: bool,
    device: str,
    observe: Observer,
    beside: Callable[[], Mapping[str, Any]],
) -> RunResult:
    config, root = opened(federation, data_root)
    if resume and (finished := finished_metrics(config, folder)) is not None:
        return _result(config, folder, finished, [], data_root=root, device=device)
    require_installed(config.family, by="train")
    require_estimator(config, None)
    device_named(device)
    _warn(config, observe)
    losses: list[float] = []

    def hear(event: ProgressEvent) -> None:
        if isinstance(event, RoundDone):
            losses.append(event.loss)
        observe(event)

    figures = train_in_processes(
        config,
        folder,
        data_root=root.resolve(),
        resume=resume,
        device=device,
        observe=hear,
        beside=beside,
    )
    return _result(config, folder, figures.as_json(), losses, data_root=root, device=device)


def simulate_from_file(
    federation: FederationSource,
    *,
    out: Path,
    data_root: Path | None = None,
    resume: bool = False,
    device: str = "cpu",
    observe: Observer = unheard,
) -> RunResult:
    """Run a federation file's parties in this process; see :func:`train` for the arguments.

    Raises:
        SecureVflError: As a federated run would.

    Reveals:
        Everything is in one process: a simulation protects nobody's table.
    """
    config, root = opened(federation, data_root)
    if resume and (finished := finished_metrics(config, out)) is not None:
        return _result(config, out, finished, [], data_root=root, device=device)
    require_estimator(config, None)
    torch_device = device_named(device)
    _warn(config, observe)
    files.require_writable_folder(out)
    tables = read_tables(config, root, observe)
    return simulate_federation(
        config,
        tables,
        out,
        device=torch_device,
        resume=resume,
        observe=observe,
        with_placebo=True,
    )


def opened(
    federation: FederationSource, data_root: Path | None, *, only_linkage: bool = False
) -> tuple[FederationConfig, Path]:
    """Return a federation, read if it is a file, and the folder where relative paths start."""
    if isinstance(federation, FederationConfig):
        return federation, data_root or Path()
    path = Path(federation)
    return read_federation(path, only_linkage=only_linkage), data_root or path.parent


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


def _result(
    config: FederationConfig,
    folder: Path,
    metrics: dict[str, Any],
    losses: list[float],
    *,
    data_root: Path,
    device: str,
) -> RunResult:
    return RunResult(
        metrics=metrics,
        history=read_history(folder),
        losses=losses,
        ledger=lines_of_run(folder / metrics["ledger"], metrics["run"]),
        trained=TrainedRun(config=config, place=folder, data_root=data_root, device=device),
    )


def _warn(config: FederationConfig, observe: Observer) -> None:
    for text in warnings_about(config):
        observe(Warned(text=text))


# Where a trained run is used, from Python and from the command line alike.


def predict(
    run: str | Path,
    rows: Any,
    *,
    federation: FederationSource | None = None,
    parties: Iterable[PartyTable] | None = None,
    id_column: str | None = None,
    without: Sequence[str] = (),
    out: str | Path | None = None,
    identity: str | Path | None = None,
    listen: str | None = None,
    data_root: Path | None = None,
    device: str = "cpu",
    observe: Observer = unheard,
) -> Predictions:
    """Predict new rows of the primary with the model that a run has kept.

    Every call is a request: under a promise, every party's ledger is charged for it. A run that was
    simulated predicts in this process, one that was trained on this machine in a process a party;
    with ``identity``, this is the primary, and the others come by themselves
    (``securevfl party --serve``).

    Args:
        run: The run folder.
        rows: A frame (pandas, polars, pyarrow), the path of a file, or, of a simulation, a
            :class:`PartyTable` that is encoded as the table of training was.
        federation: The federation file; default: that of the run.
        parties: The secondaries' tables, of a run that was simulated on tables in memory; others
            are read again.
        id_column: The column that names rows; None numbers them from 1 on.
        without: Secondaries that are absent: they are not asked, and not waited for.
        out: A file that gets the predictions too.
        identity: The primary's own folder, as made by ``securevfl identity create``.
        listen: Where the primary listens, if not at its address in the file.
        data_root: Where relative data paths start; default: the current folder.
        device: ``"cpu"`` or ``"cuda"``.
        observe: Hears of progress.

    Raises:
        BudgetExceededError: If a party's ledger has no room for them; nothing was released then.
        ConfigError: If the run has kept no model, or one that does not fit.
        DataError: If the rows' columns are not those of training.

    Reveals:
        On one machine nothing leaves it. With others: what a request for predictions reveals.
    """
    trained = trained_run(
        run,
        federation=federation,
        parties=parties,
        identity=identity,
        listen=listen,
        data_root=data_root,
        device=device,
    )
    return trained.predict(
        rows,
        id_column=id_column,
        without=without,
        out=None if out is None else Path(out),
        observe=observe,
    )


def features(
    run: str | Path,
    *,
    own: bool = False,
    federation: FederationSource | None = None,
    parties: Iterable[PartyTable] | None = None,
    data_root: Path | None = None,
) -> pd.DataFrame:
    """Return what a frozen run has released, as a table for models of the primary's own.

    It costs nothing, however often it is asked for: see
    :func:`securevfl.runtime.released_table.released_table`, which says what the columns and
    ``attrs["securevfl"]`` are.

    Args:
        run: The run folder.
        own: Whether the primary's own encoded columns and its label come too.
        federation: The federation file; default: that of the run.
        parties: The primary's table, of a run that was simulated on tables in memory; others are
            read again.
        data_root: Where relative data paths start; default: the current folder.

    Raises:
        ConfigError: If the run's encoders are not frozen, the folder is not the primary's, a file
            is damaged, or not all rows are released yet.
        DataError: If the primary's table does not fit.
        PrivacyError: If the primary's ledger was altered.

    Reveals:
        Nothing: it is made of what was released before.
    """
    trained = trained_run(run, federation=federation, parties=parties, data_root=data_root)
    return trained.features(own=own)


def trained_run(
    run: str | Path,
    *,
    federation: FederationSource | None = None,
    parties: Iterable[PartyTable] | None = None,
    identity: str | Path | None = None,
    listen: str | None = None,
    data_root: Path | None = None,
    device: str = "cpu",
) -> TrainedRun:
    """Return a run whose models are to predict; see :func:`predict`.

    Raises:
        ConfigError: If the folder is not that of a run.
    """
    path = Path(run) / "federation.toml"
    if federation is None and not path.exists():
        raise ConfigError(f"run folder {run}: has no {path.name}; is it that of a finished run?")
    config, _ = opened(path if federation is None else federation, None)
    return TrainedRun(
        config=config,
        place=Path(run),
        data_root=data_root or Path(),
        tables=None if parties is None else {table.name: table for table in parties},
        identity=None if identity is None else Path(identity),
        listen=listen,
        device=device,
    )


def predict_file(
    config: FederationConfig,
    run_folder: Path,
    *,
    rows: Path,
    out: Path,
    id_column: str | None = None,
    without: Sequence[str] = (),
    identity: Path | None = None,
    listen: str | None = None,
    data_root: Path | None = None,
    device: str = "cpu",
    observe: Observer = unheard,
) -> Predictions:
    """Predict a file of new rows, and write the predictions; see :func:`predict`.

    Args:
        config: The federation file.
        run_folder: Of the run that trained.
        rows: The file of new rows.
        out: Where predictions go.
        id_column: The column that names rows; None numbers them from 1 on.
        without: Secondaries that are absent.
        identity: The primary's own folder, as made by ``securevfl identity create``.
        listen: Where the primary listens, if not at its address in the file.
        data_root: Where relative data paths start.
        device: ``"cpu"`` or ``"cuda"``.
        observe: Hears of progress.

    Raises:
        BudgetExceededError: If a party's ledger has no room for them; nothing was released then.
        ConfigError: If the run has kept no model, or one that does not fit.
        DataError: If the rows' columns are not those of training.

    Reveals:
        On one machine nothing leaves it. With others: what a request for predictions reveals.
    """
    files.require_writable_folder(out.parent, what="folder of --out")
    if not rows.exists():
        raise ConfigError(f"--rows: there is no file {rows}")
    return predict(
        run_folder,
        rows,
        federation=config,
        id_column=id_column,
        without=without,
        out=out,
        identity=identity,
        listen=listen,
        data_root=data_root,
        device=device,
        observe=observe,
    )
