"""What the commands ``train``, ``simulate``, ``party`` and ``report`` do.

``party`` is started once a party: runs of whole federations, plots, and what other roles alone
need are imported where they are used, so that fifty parties fit one machine.
"""

import gc
import json
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from securevfl.cli.results import print_pretraining, print_results
from securevfl.config.federation import FederationConfig
from securevfl.config.reading import read_federation
from securevfl.core.errors import ConfigError, ProtocolError, SecureVflError
from securevfl.core.memory import keep_freed_memory, loading
from securevfl.core.progress import ProgressEvent, told
from securevfl.launch.child import end_with_launcher, is_launched, report_failure, report_memory
from securevfl.launch.child import report as report_to_launcher
from securevfl.models.task_metrics import metrics_of
from securevfl.runtime.figures import RunFigures
from securevfl.runtime.launching import OUTCOME_EVENT
from securevfl.runtime.own_processes import (
    help_party,
    leave_at_once,
    own_processes,
    require_network,
)
from securevfl.runtime.party_job import NewRows, PartyJob
from securevfl.runtime.predictions import Predictions
from securevfl.runtime.preflight import device_named, warnings_about
from securevfl.runtime.run_folder import write_figures
from securevfl.runtime.shown_progress import RunProgress


def run_folder_for(config: FederationConfig, out: Path | None, *, resume: bool = False) -> Path:
    """Return the run folder: the one that was asked for, or a new one under ``runs/``.

    Raises:
        ConfigError: If a run is to go on, and there is none.
    """
    if resume and out is None:
        raise ConfigError("--resume: needs --out RUN, the folder of the run that should go on")
    if resume and out is not None and not (out / "parties").is_dir():
        raise ConfigError(f"run folder {out}: holds no run to go on with; run without --resume")
    if out is not None:
        return out
    return Path("runs") / f"{config.federation.name}-{time.strftime('%Y%m%d-%H%M%S')}"


def run_train(
    path: Path,
    *,
    out: Path | None,
    resume: bool,
    device: str,
    data_root: Path | None,
    as_json: bool,
) -> dict[str, Any]:
    """Run a federation on this machine, one process per party; print its metrics."""
    config = read_federation(path)
    folder = run_folder_for(config, out, resume=resume)
    metrics = _finished(config, folder) if resume else None
    if metrics is None:
        metrics = train_and_report(
            config, folder, data_root=data_root or path.parent, resume=resume, device=device
        )
    print_results(metrics, folder, as_json=as_json)
    return metrics


def train_and_report(
    config: FederationConfig,
    folder: Path,
    *,
    data_root: Path,
    resume: bool,
    device: str,
    beside: Callable[[], Mapping[str, Any]] = dict,
) -> dict[str, Any]:
    """Run a federation in processes, with progress on stderr, and write its report."""
    with loading():
        from securevfl.runtime.entry import train

    with RunProgress(metric=_metric_name(config)) as progress:
        result = train(
            config,
            out=folder,
            data_root=data_root,
            resume=resume,
            device=device,
            observe=progress,
            beside=beside,
        )
    _write_report(folder)
    return result.metrics


def run_simulate(
    path: Path,
    *,
    out: Path | None,
    resume: bool,
    device: str,
    data_root: Path | None,
    as_json: bool,
) -> dict[str, Any]:
    """Run a federation in this process; print its metrics."""
    with loading():
        from securevfl.runtime.entry import simulate_from_file

    config = read_federation(path)
    folder = run_folder_for(config, out, resume=resume)
    metrics = _finished(config, folder) if resume else None
    if metrics is None:
        keep_freed_memory()
        with RunProgress(metric=_metric_name(config)) as progress:
            metrics = simulate_from_file(
                config,
                out=folder,
                data_root=data_root or path.parent,
                resume=resume,
                device=device,
                observe=progress,
            ).metrics
        _write_report(folder)
    print_results(metrics, folder, as_json=as_json)
    return metrics


def run_party(
    path: Path,
    *,
    name: str,
    identity: Path,
    out: Path | None,
    resume: bool,
    device: str,
    data_root: Path | None,
    listen: str | None,
    pretrain_only: bool,
    serve: bool,
    once: bool,
    new_rows: NewRows | None,
    as_json: bool,
) -> None:
    """Run one party: for the launcher, or by hand on the party's own machine."""
    end_with_launcher()
    keep_freed_memory()
    try:
        config = read_federation(path)
        if serve and out is None:
            raise ConfigError("--serve: needs --out RUN, the folder of the run that has trained")
        if serve and new_rows is None and config.party(name).role == "primary":
            raise ConfigError("--serve: the primary asks; run securevfl predict RUN --identity DIR")
        torch_device = device_named(device)
        require_network(config, name, serves=serve)
        with own_processes(out, device=torch_device) as group:
            if group is not None and group.rank:
                help_party(group, device=torch_device)
            else:
                job = PartyJob(
                    config=config,
                    name=name,
                    run_folder=run_folder_for(config, out, resume=resume),
                    identity_folder=identity,
                    data_root=data_root or path.parent,
                    device=torch_device,
                    resume=resume,
                    listen=listen,
                    pretrain_only=pretrain_only,
                    serves=serve,
                    serves_on=serve and not once,
                    new_rows=new_rows,
                    group=group,
                )
                _live(job, as_json=as_json)
    except SecureVflError as error:
        origin = getattr(error, "party", None) if isinstance(error, ProtocolError) else None
        report_failure(party=origin or name, reason=str(error), exit_code=error.exit_code)
        raise
    finally:
        report_memory()
        # Python's last collection would walk all of torch: a second of CPU in which a party that
        # has failed is still there.
        gc.freeze()
    leave_at_once()


def _live(job: PartyJob, *, as_json: bool) -> None:
    """Run a party's process to the end, and tell its launcher or its user what came of it."""
    # Loaded here: a simulation needs neither CrypTen nor certificates.
    with loading():
        from securevfl.runtime.party import run_party as run_one_party

    _warn(job.config)
    with RunProgress(metric=_metric_name(job.config)) as progress:

        def observe(event: ProgressEvent) -> None:
            report_to_launcher(event.EVENT, **told(event))
            progress(event)

        try:
            outcome = run_one_party(job, observe)
        finally:
            # One that failed has released something too, and one that serves for ever ends by ^C.
            if not is_launched():
                _write_own_page(job.folder)
    if isinstance(outcome, RunFigures):
        figures = outcome.as_json()
        if is_launched():
            # The launcher writes them, with what it alone knows.
            report_to_launcher(OUTCOME_EVENT, **figures)
        else:
            write_figures(job.run_folder, outcome)
            _write_report(job.run_folder)
        print_results(figures, job.run_folder, as_json=as_json)
    elif isinstance(outcome, Predictions):
        report_to_launcher(OUTCOME_EVENT, **outcome.told())
    elif outcome is not None:
        report_to_launcher(OUTCOME_EVENT, **outcome)
        print_pretraining(outcome, job.run_folder, as_json=as_json)
    else:
        print(f"securevfl: {job.name} is done; its log and ledger: {job.folder}", file=sys.stderr)
        if not is_launched() and not job.serves:
            _write_pictures(job.folder)


def run_report(folder: Path, *, as_json: bool) -> None:
    """Write a run's report, or that of the secondary whose folder it is, and say where it is."""
    from securevfl.report.secondary_page import write_secondary_pages

    # A run folder on a secondary's own machine has no figures of the run.
    own = [] if (folder / "metrics.json").exists() else write_secondary_pages(folder)
    path = own[-1] if own else _write_report(folder)
    print(json.dumps({"report": str(path)}) if as_json else path)


def _finished(config: FederationConfig, folder: Path) -> dict[str, Any] | None:
    from securevfl.runtime.entry import finished_metrics

    metrics = finished_metrics(config, folder)
    if metrics is not None:
        print(f"securevfl: {folder} is finished already; these are its figures", file=sys.stderr)
    return metrics


def _write_report(folder: Path) -> Path:
    # Loaded here: plots take most of a second to load, in every party's process.
    from securevfl.report.page import write_report

    return write_report(folder)


def _write_pictures(party: Path) -> None:
    """Draw what a secondary's model learned, where there is anything: for this party alone."""
    from securevfl.runtime.run_folder import EXPLANATION

    if (party / EXPLANATION).exists():
        from securevfl.report.page import write_pictures

        path = write_pictures(party)
        print(f"securevfl: what its model learned, for you alone: {path}", file=sys.stderr)


def _write_own_page(party: Path) -> None:
    """Write a secondary's own page, where it was linked; one that can't be made ends nothing."""
    from securevfl.runtime.run_folder import own_folders

    if not own_folders(party):
        return
    from securevfl.report.secondary_page import write_secondary_page

    try:
        path = write_secondary_page(party)
    except SecureVflError as error:
        print(f"securevfl: warning: no page for {party.name}: {error}", file=sys.stderr)
    else:
        print(f"securevfl: what left {party.name} and what it cost: {path}", file=sys.stderr)


def _warn(config: FederationConfig) -> None:
    for warning in warnings_about(config):
        print(f"securevfl: warning: {warning}", file=sys.stderr)


def _metric_name(config: FederationConfig) -> str:
    return metrics_of(config.federation.task, config.training.metric)[0].name
