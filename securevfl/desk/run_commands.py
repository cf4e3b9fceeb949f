"""The commands that use a run: ``predict``, ``report`` and ``model embeddings``."""

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from securevfl.core import command_line as given
from securevfl.core.errors import ConfigError
from securevfl.core.memory import loading

app = typer.Typer()
model_app = typer.Typer(no_args_is_help=True, help="Read a run's released embeddings.")


@app.command(rich_help_panel="Run")
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
        from securevfl.core import files
        from securevfl.core.shown_progress import RunProgress
        from securevfl.desk.command_results import print_predictions
        from securevfl.desk.report.secondary_page import least_left, write_secondary_pages
        from securevfl.runtime.run_folder import federation_of_run
        from securevfl.runtime.trained_run import predict as predict_rows

    config = federation_of_run(run, federation)
    files.output_path(out, [] if federation is None else [federation])
    if not rows.exists():
        raise ConfigError(f"--rows: there is no file {rows}")
    before = least_left(run, config)
    with RunProgress(metric=config.metric) as progress:
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


@model_app.command()
def embeddings(
    run: Annotated[
        Path,
        typer.Argument(metavar="RUN", help="The primary's folder of a run with frozen encoders."),
    ],
    out: Annotated[
        Path,
        typer.Option("--out", help="Where the table goes: .parquet, or .csv with a .csv.json."),
    ] = Path("embeddings.parquet"),
    own: Annotated[
        bool, typer.Option("--own", help="With the primary's own encoded columns and its label.")
    ] = False,
    federation: given.RunFederation = None,
    data_root: given.DataRoot = None,
    as_json: given.AsJson = False,
) -> None:
    """Write the released embeddings of a frozen run as a table; costs nothing."""
    with loading():
        from securevfl.core import files
        from securevfl.data.frames import table_path, write_frame
        from securevfl.runtime.released_table import COST, METADATA
        from securevfl.runtime.trained_run import trained_run

    trained = trained_run(run, federation=federation, data_root=data_root)
    read = [*trained.files_read(), *([] if federation is None else [federation])]
    table_path(out, read)
    if out.suffix != ".parquet":
        files.output_path(out.with_name(f"{out.name}.json"), read)
    frame = trained.features(own=own)
    metadata = frame.attrs[METADATA]
    write_frame(frame, out, about=metadata)
    numbers = int(metadata["shape"][0] * metadata["shape"][1])
    if as_json:
        summary = {"embeddings": str(out), "rows": len(frame), "released": numbers, **metadata}
        print(json.dumps(summary))
        return
    noise = metadata["noise_deviation"]
    print(
        f"securevfl: {len(frame)} rows with {numbers} released numbers each, "
        + (f"noise of deviation {noise:.4g} in each" if noise else "no noise in them")
        + f"; this costs {COST}",
        file=sys.stderr,
    )
    print(f"securevfl: {metadata['statement']}", file=sys.stderr)
    print(out)
