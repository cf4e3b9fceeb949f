"""The ``securevfl`` command: what users type, and how errors reach them.

Commands import what they need when they run: ``securevfl budget`` must not wait for torch.
"""

import io
import os
import sys
from pathlib import Path
from typing import Annotated, TextIO

import typer

from securevfl.cli.audit import app as audit_app
from securevfl.cli.bench import app as bench_app
from securevfl.cli.budget_command import app as budget_app
from securevfl.cli.commands import Commands
from securevfl.cli.export_command import app as export_app
from securevfl.cli.ledger_command import app as ledger_app
from securevfl.cli.options import AsJson, Device, FederationFile, FileDataRoot
from securevfl.cli.serve import serve
from securevfl.cli.starting import app as starting_app
from securevfl.cli.studies import app as studies_app
from securevfl.cli.using import app as using_app
from securevfl.core.errors import SecureVflError, of_this_machine
from securevfl.core.memory import loading
from securevfl.launch.torchrun import require_one_process
from securevfl.version import __version__

app = typer.Typer(
    name="securevfl",
    cls=Commands,
    help=(
        "Vertical federated learning on fuzzily linked tables, with secure averaging and a "
        "privacy budget."
    ),
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(starting_app)
app.add_typer(using_app)
app.add_typer(export_app)
app.add_typer(studies_app)
app.add_typer(audit_app, name="audit")
app.add_typer(budget_app, name="budget")
app.add_typer(bench_app, name="bench")
app.add_typer(ledger_app, name="ledger")
app.command()(serve)

_INTERRUPTED = 130
# What a shell says of other tools whose reader went away: 128 and the number of SIGPIPE.
_UNREAD = 141

Out = Annotated[
    Path | None,
    typer.Option("--out", metavar="RUN", help="Run folder; default: runs/NAME-TIME."),
]
Resume = Annotated[
    bool, typer.Option("--resume", help="Go on from the last epoch saved in the run folder.")
]


def _version(show: bool) -> bool:
    if show:
        print(f"securevfl {__version__}")
        raise typer.Exit
    return show


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_version, is_eager=True, help="Print the version."),
    ] = False,
) -> None:
    """Vertical federated learning on fuzzily linked tables."""


@app.command()
def demo(
    out: Out = None,
    seed: Annotated[int, typer.Option(help="Seed of the split, of models and of shuffling.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Train on real digits: one primary and four secondaries, every party its own process."""
    from securevfl.cli.demo import run_demo

    run_demo(out=out, seed=seed, as_json=as_json)


@app.command()
def train(
    federation: FederationFile,
    out: Out = None,
    resume: Resume = False,
    device: Device = "cpu",
    data_root: FileDataRoot = None,
    as_json: AsJson = False,
) -> None:
    """Run a whole federation on this machine, one process per party."""
    with loading():
        from securevfl.cli.run import run_train

    run_train(
        federation, out=out, resume=resume, device=device, data_root=data_root, as_json=as_json
    )


@app.command()
def simulate(
    federation: FederationFile,
    out: Out = None,
    resume: Resume = False,
    device: Device = "cpu",
    data_root: FileDataRoot = None,
    as_json: AsJson = False,
) -> None:
    """Run the same federation in one process, on CPU or GPU, with the same noise."""
    with loading():
        from securevfl.cli.run import run_simulate

    run_simulate(
        federation, out=out, resume=resume, device=device, data_root=data_root, as_json=as_json
    )


@app.command()
def pretrain(
    federation: FederationFile,
    out: Out = None,
    simulated: Annotated[
        bool, typer.Option("--simulate", help="All parties in one process, for experiments.")
    ] = False,
    resume: Resume = False,
    device: Device = "cpu",
    data_root: FileDataRoot = None,
    as_json: AsJson = False,
) -> None:
    """Pretrain encoders without labels, one process per party; training can start from them."""
    from securevfl.cli.pretrain import run_pretrain

    run_pretrain(
        federation,
        out=out,
        simulated=simulated,
        resume=resume,
        device=device,
        data_root=data_root,
        as_json=as_json,
    )


@app.command()
def party(
    federation: FederationFile,
    name: Annotated[str, typer.Option("--name", help="Which party of the file this process is.")],
    identity: Annotated[
        Path,
        typer.Option("--identity", help="This party's folder, as made by securevfl provision."),
    ],
    out: Out = None,
    resume: Resume = False,
    device: Device = "cpu",
    data_root: FileDataRoot = None,
    listen: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            help="Where the primary listens, if not at its address in the file (behind NAT).",
        ),
    ] = None,
    pretrain: Annotated[
        bool,
        typer.Option("--pretrain", help="For the primary: end when pretraining is done."),
    ] = False,
    serve: Annotated[
        bool,
        typer.Option(
            "--serve",
            help="Answer requests for predictions with the model kept in RUN, for ever.",
        ),
    ] = False,
    once: Annotated[
        bool, typer.Option("--once", help="With --serve: end when the primary is done.")
    ] = False,
    rows: Annotated[Path | None, typer.Option("--rows", hidden=True)] = None,
    predictions: Annotated[Path | None, typer.Option("--predictions", hidden=True)] = None,
    id_column: Annotated[str | None, typer.Option("--id", hidden=True)] = None,
    without: Annotated[str | None, typer.Option("--without", hidden=True)] = None,
    as_json: AsJson = False,
) -> None:
    """Run one party of a federation, on its own machine."""
    with loading():
        from securevfl.cli.run import run_party
        from securevfl.runtime.party_job import NewRows

    asked = None
    if rows is not None and predictions is not None:
        absent = tuple(without.split(",")) if without else ()
        asked = NewRows(path=rows, out=predictions, id_column=id_column, without=absent)

    run_party(
        federation,
        name=name,
        identity=identity,
        out=out,
        resume=resume,
        device=device,
        data_root=data_root,
        listen=listen,
        pretrain_only=pretrain,
        serve=serve,
        once=once,
        new_rows=asked,
        as_json=as_json,
    )


@app.command()
def provision(
    federation: FederationFile,
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Folder for the identities.")],
    name: Annotated[
        str | None,
        typer.Option("--name", help="Make this party's identity only; each party runs it at home."),
    ] = None,
    days: Annotated[int, typer.Option(help="How long the certificates are valid.")] = 365,
    as_json: AsJson = False,
) -> None:
    """Make identities and certificates, and print the lines that the federation file pins."""
    from securevfl.cli.provision import run_provision

    run_provision(federation, out=out, name=name, days=days, as_json=as_json)


@app.command()
def trust(
    certificate: Annotated[
        Path, typer.Argument(metavar="CERTIFICATE", help="The identity.pem that a party sent.")
    ],
    name: Annotated[str, typer.Option("--name", help="Which party sent it.")],
    identity: Annotated[
        Path, typer.Option("--identity", help="One's own folder, as made by securevfl provision.")
    ],
    as_json: AsJson = False,
) -> None:
    """Take another party's certificate in, and print its identity, to be compared with theirs."""
    from securevfl.cli.provision import run_trust

    run_trust(certificate, name=name, identity=identity, as_json=as_json)


@app.command()
def link(
    federation: FederationFile,
    out: Out = None,
    data_root: FileDataRoot = None,
    estimate: Annotated[
        bool, typer.Option("--estimate", help="Estimate FedSim's Delta over simpler linkage.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Link the tables of a federation on this machine, and say how good the links are."""
    from securevfl.cli.link import run_link

    run_link(federation, out=out, data_root=data_root, estimate=estimate, as_json=as_json)


@app.command()
def report(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.")],
    as_json: AsJson = False,
) -> None:
    """Write the run's self-contained HTML report."""
    from securevfl.cli.run import run_report

    run_report(run, as_json=as_json)


@app.command()
def verify(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.")],
    as_json: AsJson = False,
) -> None:
    """Check a run's ledgers, what parties signed of them, and the figures that they give.

    Chains of lines, signatures, what others countersigned of each ledger that is at hand,
    checkpoints, and the figures in metrics.json, computed again. Exit code 0: all good; 4: not;
    2: nothing to check.

    What this cannot show: that a party added the noise that it booked, or booked every release
    that it made; and nothing against all parties together, who can write and sign all of it anew.
    """
    from securevfl.cli.verify_command import run_verify

    run_verify(run, as_json=as_json)


def main() -> None:
    """Run the command line; a user's mistake ends in one line and an exit code, never a traceback.

    Exit codes: 0 done; 2 wrong input; 3 a party was lost or refused; 4 the privacy budget forbids
    it, or what a run left does not hold; 141 nobody reads the output any more, as after `| head`;
    1 a bug.
    """
    _show_every_name(sys.stdout, sys.stderr)
    try:
        if sys.argv[1:2] != ["party"]:
            require_one_process(" ".join(sys.argv[1:2]))
        _run()
    except SecureVflError as error:
        _say(" ".join(str(error).splitlines()))
        sys.exit(error.exit_code)
    except SystemExit as end:
        # Typer turns Ctrl-C into this code and says nothing.
        if end.code == _INTERRUPTED:
            _say("interrupted")
        # Rich and Typer turn a reader that went away into code 1, and say nothing either.
        if isinstance(end.__context__, BrokenPipeError):
            _silence(sys.stdout)
            sys.exit(_UNREAD)
        raise
    except BrokenPipeError:
        _silence(sys.stdout)
        sys.exit(_UNREAD)
    except (OSError, MemoryError, RuntimeError) as error:
        # A table of figures that was written by another library, or what we print itself.
        known = of_this_machine(error, place="standard output")
        if known is None:
            raise
        _say(str(known))
        _silence(sys.stdout)
        sys.exit(known.exit_code)


def _run() -> None:
    """Run the command, and write out what it printed: later, nobody could say that it failed."""
    try:
        app()
    except SecureVflError:
        # Its line says why, whether or not somebody has read what came before.
        try:
            sys.stdout.flush()
        except OSError:
            _silence(sys.stdout)
        raise
    except SystemExit as end:
        if not isinstance(end.__context__, BrokenPipeError):
            sys.stdout.flush()
        raise


def _show_every_name(*streams: object) -> None:
    """Write characters that a terminal or file cannot show as escapes; none ends a command."""
    for stream in streams:
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _say(text: str) -> None:
    try:
        print(f"securevfl: {text}", file=sys.stderr)
    except OSError:
        # A log on a full disk takes no line; the exit code still says what happened.
        _silence(sys.stderr)


def _silence(stream: TextIO) -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


if __name__ == "__main__":
    main()
