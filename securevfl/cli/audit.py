"""The command ``audit``: does the installed code do what it promises?"""

import json
from typing import Annotated

import typer

from securevfl.core.errors import PrivacyError

app = typer.Typer(help="Test what this installation really does.", no_args_is_help=True)


@app.callback()
def audit() -> None:
    """Test what this installation really does."""


@app.command()
def mechanism(
    secondaries: Annotated[
        int, typer.Option(help="Parties that average; the primary comes on top.")
    ] = 4,
    noise_multiplier: Annotated[
        float,
        typer.Option(
            help="Noise of the released average over the clip norm, and of class sums over what "
            "one record moves, 0.25 to 8."
        ),
    ] = 1.0,
    clip_norm: Annotated[float, typer.Option(help="C, what rows are clipped to.")] = 1.0,
    rounds: Annotated[int, typer.Option(help="Releases of each kind, at least 2.")] = 4,
    label_epsilon: Annotated[
        float, typer.Option(help="What votes may tell of one row's label, 0.5 to 8.")
    ] = 2.0,
    timeout: Annotated[float, typer.Option(help="Seconds for all of it.")] = 300.0,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object on stdout and nothing else there.")
    ] = False,
) -> None:
    """Run real rounds between processes on made-up rows, and test the noise and the clip.

    Class sums and drawn labels, which votes are fitted to, are tested beside them.

    Exit code 0 if every test passes, 4 if one fails.
    """
    # Loaded here, so that other commands, and whoever mistypes this one, need not wait for torch.
    from securevfl.lab.audit.settings import AuditSettings

    settings = AuditSettings(
        secondaries=secondaries,
        noise_multiplier=noise_multiplier,
        clip_norm=clip_norm,
        rounds=rounds,
        label_epsilon=label_epsilon,
        timeout_s=timeout,
    )
    from securevfl.lab.audit import audit_report as audit_report

    report = audit_report.audit(settings)
    if as_json:
        print(json.dumps(report.as_dict()))
    else:
        from securevfl.cli.audit_table import print_audit

        print_audit(report)
    if report.verdict == "fail":
        raise typer.Exit(PrivacyError.exit_code)
