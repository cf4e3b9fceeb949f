"""``securevfl export``: each party's half of a trained network as a file for other programs."""

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from securevfl.core.errors import ConfigError

app = typer.Typer()


@app.command()
def export(
    run: Annotated[
        Path, typer.Argument(metavar="RUN", help="Folder of a run that has trained a model.")
    ],
    party: Annotated[
        str | None,
        typer.Option("--party", metavar="NAME", help="This party's part alone; default: all."),
    ] = None,
    kind: Annotated[str, typer.Option("--format", help="onnx or torchscript.")] = "onnx",
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", metavar="DIR", help="Folder for the files; default: parties/NAME/export."
        ),
    ] = None,
    federation: Annotated[
        Path | None,
        typer.Option("--federation", help="Federation file, if it is not RUN/federation.toml."),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object on stdout and nothing else there.")
    ] = False,
) -> None:
    """Write each party's kept model as ONNX or TorchScript, checked against torch.

    A secondary's file gives representations of single records before noise: it is NOT private.
    """
    from securevfl.config.reading import read_federation
    from securevfl.exporting.export import export_run
    from securevfl.exporting.parts import NOT_PRIVATE

    path = run / "federation.toml" if federation is None else federation
    if not path.exists():
        raise ConfigError(
            f"run folder {run}: has no federation.toml; is it the folder of a finished run?"
        )
    exported = export_run(read_federation(path), run, party=party, kind=kind, out=out)
    if any(one.role == "secondary" for one in exported):
        print(f"securevfl: {NOT_PRIVATE}", file=sys.stderr)
    if as_json:
        print(json.dumps({"format": kind, "exported": [one.as_json() for one in exported]}))
        return
    for one in exported:
        print(
            f"securevfl: {one.party}: differs from torch by at most {one.difference:.2g} "
            f"(allowed: {one.allowed:.2g})",
            file=sys.stderr,
        )
        print(one.path)
