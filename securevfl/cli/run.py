"""The commands that run a federation: ``simulate``, ``train``, ``party`` and ``mpc``.

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
            from securevfl.config.reading import read_federation
            from securevfl.desk import command_results as results
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
        from securevfl.core.progress import event_fields
        from securevfl.core.shown_progress import RunProgress
        from securevfl.desk import command_results as results
        from securevfl.desk.printing import wrap_text
        from securevfl.launch.child import is_launched
        from securevfl.launch.child import report as report_to_launcher
        from securevfl.runtime.launching import OUTCOME_EVENT, run_party
        from securevfl.runtime.predictions import Predictions
        from securevfl.runtime.run_folder import RunFigures, write_figures
        from securevfl.runtime.run_options import warnings_about

    for warning in warnings_about(job.config):
        print(wrap_text(f"securevfl: warning: {warning}"), file=sys.stderr)
    with RunProgress(metric=job.config.metric) as progress:

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
