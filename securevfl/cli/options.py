"""Arguments and options that several commands take."""

from pathlib import Path
from typing import Annotated

import typer

FederationFile = Annotated[
    Path, typer.Argument(metavar="FED.toml", help="The federation file that all parties share.")
]
FileDataRoot = Annotated[
    Path | None,
    typer.Option("--data-root", help="Where relative data paths start; default: next to the file."),
]
AsJson = Annotated[
    bool, typer.Option("--json", help="Print one JSON object on stdout and nothing else there.")
]
RunFolder = Annotated[
    Path, typer.Argument(metavar="RUN", help="Folder of a run that has trained a model.")
]
Device = Annotated[str, typer.Option("--device", help="cpu, or cuda where there is a GPU.")]
DataRoot = Annotated[
    Path | None,
    typer.Option("--data-root", help="Where relative data paths start; default: here."),
]
Federation = Annotated[
    Path | None,
    typer.Option(
        "--federation", help="Federation file, if its \\[prediction] or \\[runtime] has changed."
    ),
]
Identity = Annotated[
    Path | None,
    typer.Option(
        "--identity",
        help="The primary's folder of securevfl provision: the others run party --serve.",
    ),
]
Listen = Annotated[
    str | None,
    typer.Option(
        "--listen", metavar="HOST:PORT", help="Where the primary listens, with --identity."
    ),
]
