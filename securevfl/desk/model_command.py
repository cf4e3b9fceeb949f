"""``securevfl model``: what a run released, as a table for other programs."""

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from securevfl.core.command_line import AsJson, DataRoot, RunFederation
from securevfl.core.memory import loading

app = typer.Typer(no_args_is_help=True, help="Read a run's released embeddings.")


@app.command()
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
    federation: RunFederation = None,
    data_root: DataRoot = None,
    as_json: AsJson = False,
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
