"""The commands with a model that a run has kept."""

from pathlib import Path
from typing import Annotated

import typer

from securevfl.cli.options import DataRoot, Device, Federation, Identity, Listen, RunFolder

app = typer.Typer()

_AsJson = Annotated[
    bool, typer.Option("--json", help="Print one JSON object on stdout and nothing else there.")
]


@app.command()
def predict(
    run: RunFolder,
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
    federation: Federation = None,
    identity: Identity = None,
    listen: Listen = None,
    data_root: DataRoot = None,
    device: Device = "cpu",
    as_json: _AsJson = False,
) -> None:
    """Predict new rows with the model of a run; every party's ledger is charged."""
    from securevfl.cli.predict import run_predict

    run_predict(
        run,
        rows=rows,
        out=out,
        id_column=id_column,
        without=[name.strip() for name in without.split(",")] if without else [],
        federation=federation,
        identity=identity,
        listen=listen,
        data_root=data_root,
        device=device,
        as_json=as_json,
    )


@app.command()
def contribution(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a finished run.")],
    permutations: Annotated[
        int,
        typer.Option("--permutations", help="Orders that Shapley values of many partners take."),
    ] = 32,
    seed: Annotated[
        int | None,
        typer.Option("--seed", help="Of orders and intervals; default: that of the run."),
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE.svg", help="Draw it; the report has it too.")
    ] = None,
    federation: Annotated[
        Path | None,
        typer.Option("--federation", help="Federation file, if it is not RUN/federation.toml."),
    ] = None,
    data_root: DataRoot = None,
    device: Device = "cpu",
    as_json: _AsJson = False,
) -> None:
    """Measure what each partner of a run is worth; it asks nobody and costs nothing."""
    from securevfl.cli.contribution_command import run_contribution

    run_contribution(
        run,
        permutations=permutations,
        seed=seed,
        plot=plot,
        federation=federation,
        data_root=data_root,
        device=device,
        as_json=as_json,
    )


@app.command()
def features(
    run: Annotated[
        Path,
        typer.Argument(metavar="RUN", help="The primary's folder of a run with frozen encoders."),
    ],
    out: Annotated[
        Path,
        typer.Option("--out", help="Where the table goes: .parquet, or .csv with a .csv.json."),
    ] = Path("features.parquet"),
    own: Annotated[
        bool, typer.Option("--own", help="With the primary's own encoded columns and its label.")
    ] = False,
    federation: Annotated[
        Path | None,
        typer.Option("--federation", help="Federation file, if it is not RUN/federation.toml."),
    ] = None,
    data_root: DataRoot = None,
    as_json: _AsJson = False,
) -> None:
    """Write what a frozen run has released as a table for tools of your own; it costs nothing."""
    from securevfl.cli.features import run_features

    run_features(run, out=out, own=own, federation=federation, data_root=data_root, as_json=as_json)
