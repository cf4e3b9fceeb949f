"""Where a run of a whole federation starts, from Python and from the command line alike."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from securevfl.callbacks import Callback, Hearing
from securevfl.config.federation import FederationConfig
from securevfl.config.reading import read_federation
from securevfl.core import files
from securevfl.core.errors import ConfigError
from securevfl.core.progress import Observer, ProgressEvent, RoundDone, Warned, unheard
from securevfl.federation.base import require_estimator
from securevfl.federation.ledger_summary import lines_of_run
from securevfl.models.registry import require_installed
from securevfl.runtime.device import device_named
from securevfl.runtime.launching import train_in_processes
from securevfl.runtime.preflight import warnings_about
from securevfl.runtime.run_folder import read_figures, read_history
from securevfl.runtime.simulation import RunResult, simulate_federation
from securevfl.runtime.tables import read_tables
from securevfl.runtime.trained_run import TrainedRun

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
    hearing = Hearing(callbacks, observe)
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
