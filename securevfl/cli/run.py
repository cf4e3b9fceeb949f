"""The commands that run a federation or use a run: from ``simulate`` to ``report``.

``party`` is started once for each party, so what one role alone needs is imported where it is used.
"""

import gc
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from securevfl.core import command_line as given
from securevfl.core import interrupts
from securevfl.core.errors import ConfigError, ProtocolError, SecureVflError
from securevfl.core.memory import keep_freed_memory, loading

if TYPE_CHECKING:
    from securevfl.core.progress import ProgressEvent
    from securevfl.runtime.run_options import PartyJob

app = typer.Typer()

_PANEL: Final = "Run"


def _training_command(name: str, help_text: str, *, simulated: bool) -> None:
    """Add a command that trains a federation, and prints its figures.

    Args:
        name: Of the command.
        help_text: One line about it.
        simulated: Whether all parties are in this process; otherwise each has its own.
    """

    @app.command(name, help=help_text, rich_help_panel=_PANEL)
    def run(
        federation: given.FederationFile,
        out: given.Out = None,
        resume: given.Resume = False,
        device: given.Device = "cpu",
        data_root: given.FileDataRoot = None,
        record_views: given.RecordViews = None,
        as_json: given.AsJson = False,
    ) -> None:
        with loading():
            from securevfl.cli import results
            from securevfl.config.reading import read_federation
            from securevfl.runtime.run_folder import run_folder_for

        config = read_federation(federation)
        root = data_root or federation.parent
        reads = [federation, *(root / party.data for party in config.table_parties)]
        folder = run_folder_for(config, out, reads=reads, resume=resume)
        metrics = results.report_finished(config, folder) if resume else None
        if metrics is None:
            metrics = results.train_and_report(
                config,
                folder,
                simulated,
                data_root=root,
                resume=resume,
                device=device,
                record_mib=record_views,
            )
        results.print_results(metrics, folder, as_json=as_json)


_training_command(
    "simulate",
    "Train a federation in one process, on CPU or GPU, with the same noise.",
    simulated=True,
)
_training_command(
    "train", "Train a federation on this machine, one process per party.", simulated=False
)


@app.command(rich_help_panel=_PANEL)
def party(
    federation: given.FederationFile,
    name: Annotated[str, typer.Option("--name", help="Which party of the file this process is.")],
    identity: Annotated[
        Path,
        typer.Option("--identity", help="This party's folder, made by securevfl identity create."),
    ],
    out: given.Out = None,
    resume: given.Resume = False,
    device: given.Device = "cpu",
    data_root: given.FileDataRoot = None,
    listen: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            help="Where the primary listens, if not at its address in the file (behind NAT).",
        ),
    ] = None,
    record_views: given.RecordViews = None,
    serve: Annotated[
        bool,
        typer.Option(
            "--serve",
            help="Answer requests for predictions with the model saved in RUN, until interrupted.",
        ),
    ] = False,
    once: Annotated[
        bool, typer.Option("--once", help="With --serve: end when the primary is done.")
    ] = False,
    handed: Annotated[Path | None, typer.Option("--handed", hidden=True)] = None,
    program: Annotated[
        Path | None,
        typer.Option(
            "--program", metavar="PROGRAM.py", help="Run this program, the same at all parties."
        ),
    ] = None,
    function: Annotated[str, typer.Option("--function", hidden=True)] = "program",
    as_json: given.AsJson = False,
) -> None:
    """Run one party of a federation, on its own machine."""
    with loading():
        from securevfl.config.reading import read_federation
        from securevfl.launch.child import end_with_launcher, report_failure, report_memory
        from securevfl.runtime import handing_over
        from securevfl.runtime.run_folder import run_folder_for
        from securevfl.runtime.run_options import PartyJob, Program, device_named

    end_with_launcher()
    keep_freed_memory()
    try:
        in_memory = {} if handed is None else handing_over.load(handed)
        config = read_federation(federation, only_linkage=program is not None)
        agreed = None
        if program is not None:
            with loading():
                from securevfl.stages.programs.session import with_program
            agreed = Program.of(program, function)
            config = with_program(config, agreed)
        if serve and out is None:
            raise ConfigError("--serve: needs --out RUN, the folder of the run that has trained")
        if serve and "prediction" not in in_memory and config.party(name).role == "primary":
            raise ConfigError("--serve: the primary asks; run securevfl predict RUN --identity DIR")
        torch_device = device_named(device)
        job = PartyJob(
            config=config,
            name=name,
            # A party that never came as far as to begin a run has not left its folder.
            run_folder=run_folder_for(
                config, out, reads=[federation], resume=resume or serve, may_begin=True
            ),
            identity_folder=identity,
            data_root=data_root or federation.parent,
            device=torch_device,
            resume=resume,
            listen=listen,
            record_mib=record_views,
            serves=serve,
            serves_on=serve and not once,
            program=agreed,
            **in_memory,
        )
        _run_to_the_end(job, as_json=as_json)
    except SecureVflError as error:
        interrupts.check()
        origin = getattr(error, "party", None) if isinstance(error, ProtocolError) else None
        report_failure(party=origin or name, reason=str(error), exit_code=error.exit_code)
        raise
    finally:
        report_memory()
        # Python's last collection would walk all of torch: a second of CPU in which a party that
        # has failed is still there.
        gc.freeze()


def _run_to_the_end(job: "PartyJob", *, as_json: bool) -> None:
    """Run a party's process to the end, and report the outcome to its launcher or its user."""
    with loading():
        from securevfl.cli import results
        from securevfl.core.progress import event_fields
        from securevfl.core.shown_progress import RunProgress
        from securevfl.launch.child import is_launched
        from securevfl.launch.child import report as report_to_launcher
        from securevfl.runtime.launching import OUTCOME_EVENT, run_party
        from securevfl.runtime.predictions import Predictions
        from securevfl.runtime.run_folder import RunFigures, write_figures

    results.warn(job.config)
    with RunProgress(metric=results.metric_name(job.config)) as progress:

        def observe(event: "ProgressEvent") -> None:
            report_to_launcher(event.EVENT, **event_fields(event))
            progress(event)

        try:
            outcome = run_party(replace(job, observe=observe))
        finally:
            # One that failed has released something too, and one that serves for ever ends by ^C.
            if not is_launched():
                results.write_own_page(job.folder)
    if isinstance(outcome, RunFigures):
        figures = outcome.as_json()
        if is_launched():
            # The launcher writes them, with what it alone knows.
            report_to_launcher(OUTCOME_EVENT, **figures)
        else:
            write_figures(job.run_folder, outcome)
            results.write_page(job.run_folder, job.config)
        results.print_results(figures, job.run_folder, as_json=as_json)
    elif isinstance(outcome, Predictions):
        report_to_launcher(OUTCOME_EVENT, **outcome.metadata())
    else:
        print(f"securevfl: {job.name} is done; its log and ledger: {job.folder}", file=sys.stderr)


@app.command(rich_help_panel=_PANEL)
def mpc(
    federation: given.FederationFile,
    program: Annotated[
        Path, typer.Argument(metavar="PROGRAM.py", help="A file with def program(party).")
    ],
    out: given.Out = None,
    data_root: given.FileDataRoot = None,
    as_json: given.AsJson = False,
) -> None:
    """Run a CrypTen program between the parties, on this machine, one process per party."""
    with loading():
        from securevfl.config.reading import read_federation
        from securevfl.core.shown_progress import RunProgress
        from securevfl.runtime.run_folder import run_folder_for
        from securevfl.stages.programs.session import run as run_program

    config = read_federation(federation, only_linkage=True)
    folder = run_folder_for(config, out, reads=[federation, program])
    with RunProgress(metric="") as progress:
        results = run_program(
            config, program, out=folder, data_root=data_root or federation.parent, observe=progress
        )
    if as_json:
        print(json.dumps({"run": str(folder), "results": results}))
        return
    for name, result in results.items():
        print(f"{name}: {json.dumps(result)}")
    print(f"securevfl: logs and results: {folder}", file=sys.stderr)


@app.command(rich_help_panel=_PANEL)
def predict(
    run: given.RunFolder,
    rows: Annotated[
        Path, typer.Option("--rows", help="New rows of the primary: columns as in training.")
    ],
    out: Annotated[Path, typer.Option("--out", help="Where the predictions go, as CSV.")] = Path(
        "predictions.csv"
    ),
    id_column: Annotated[
        str | None,
        typer.Option("--id", help="Column that names rows; default: their numbers from 1 on."),
    ] = None,
    without: Annotated[
        str | None,
        typer.Option("--without", metavar="NAME[,NAME]", help="Secondaries that are absent."),
    ] = None,
    federation: given.Federation = None,
    identity: given.Identity = None,
    listen: given.Listen = None,
    data_root: given.DataRoot = None,
    device: given.Device = "cpu",
    as_json: given.AsJson = False,
) -> None:
    """Predict new rows with the model of a run; every party's ledger is charged."""
    with loading():
        from securevfl.cli.results import metric_name, print_predictions
        from securevfl.core import files
        from securevfl.core.shown_progress import RunProgress
        from securevfl.desk.report.secondary_page import least_left, write_secondary_pages
        from securevfl.runtime.run_folder import federation_of_run
        from securevfl.runtime.trained_run import predict as predict_rows

    config = federation_of_run(run, federation)
    files.output_path(out, [] if federation is None else [federation])
    if not rows.exists():
        raise ConfigError(f"--rows: there is no file {rows}")
    before = least_left(run, config)
    with RunProgress(metric=metric_name(config)) as progress:
        predictions = predict_rows(
            run,
            rows,
            out=out,
            federation=config,
            id_column=id_column,
            without=[name.strip() for name in without.split(",")] if without else [],
            identity=identity,
            listen=listen,
            data_root=data_root,
            device=device,
            observe=progress,
        )
    left = least_left(run, config)
    print_predictions(predictions, out, before=before, left=left, as_json=as_json)
    # What was spent stands on the pages of the secondaries of this machine.
    write_secondary_pages(run)


@app.command(rich_help_panel="Check and audit")
def report(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.")],
    as_json: given.AsJson = False,
) -> None:
    """Write a run's self-contained HTML report."""
    with loading():
        from securevfl.desk.report.page import write_report
        from securevfl.desk.report.secondary_page import write_secondary_pages

    # A run folder on a secondary's own machine has no figures of the run.
    own = [] if (run / "metrics.json").exists() else write_secondary_pages(run)
    path = own[-1] if own else write_report(run)
    print(json.dumps({"report": str(path)}) if as_json else path)
