"""Options that several commands share."""

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
Out = Annotated[
    Path | None,
    typer.Option("--out", metavar="RUN", help="Run folder; default: runs/NAME-TIME."),
]
Resume = Annotated[
    bool, typer.Option("--resume", help="Continue from the last epoch saved in the run folder.")
]
RunFolder = Annotated[
    Path, typer.Argument(metavar="RUN", help="Folder of a run that has trained a model.")
]
RecordViews = Annotated[
    float | None,
    typer.Option(
        "--record-views",
        metavar="MIB",
        help="Record all that a party receives in its own folder, for lab audit RUN to attack.",
    ),
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
RunFederation = Annotated[
    Path | None,
    typer.Option("--federation", help="Federation file, if it is not RUN/federation.toml."),
]
Identity = Annotated[
    Path | None,
    typer.Option(
        "--identity",
        help="The primary's folder of securevfl identity create: the others run party --serve.",
    ),
]
Listen = Annotated[
    str | None,
    typer.Option(
        "--listen", metavar="HOST:PORT", help="Where the primary listens, with --identity."
    ),
]
