"""The commands before a first run: ``columns``, ``init``, ``check`` and ``advise``."""

from pathlib import Path
from typing import Annotated

import typer

from securevfl.core.memory import loading

app = typer.Typer()

_Bounds = Annotated[
    list[str] | None,
    typer.Option(
        "--bounds",
        metavar="COLUMN=LOW,HIGH",
        help="Least and largest value that can occur, known without looking; of dates, as "
        "2015-01-01,2025-12-31. COLUMN may be a pattern (rt_*).",
    ),
]
_Words = Annotated[
    list[str] | None,
    typer.Option(
        "--words",
        metavar="COLUMN=A,B,...",
        help="Words that can occur in a column, known without looking; other stands for the rest.",
    ),
]
_Missing = Annotated[
    list[str] | None,
    typer.Option("--missing", metavar="COLUMN", help="A column whose cells may be empty."),
]
_Exclude = Annotated[
    list[str] | None,
    typer.Option("--exclude", metavar="COLUMN", help="A column that is no feature."),
]
_Reading = Annotated[
    list[str] | None,
    typer.Option(
        "--reading",
        metavar="NAME=VALUE",
        help="How a file is written, as in the federation file: encoding=windows-1252, "
        "dates=%d.%m.%Y. PARTY.NAME=VALUE for one table alone.",
    ),
]
_AsJson = Annotated[
    bool, typer.Option("--json", help="Print one JSON object on stdout and nothing else there.")
]


@app.command()
def columns(
    table: Annotated[Path, typer.Argument(metavar="TABLE", help="Your table.")],
    out: Annotated[
        Path, typer.Option("--out", metavar="COLUMNS.json", help="The list, for your partners.")
    ],
    name: Annotated[
        str | None, typer.Option("--name", help="What the party is called; default: the file.")
    ] = None,
    bounds: _Bounds = None,
    words: _Words = None,
    missing: _Missing = None,
    exclude: _Exclude = None,
    reading: _Reading = None,
) -> None:
    """List a table's columns for partners: names, kinds and what you declare; no value, no count.

    Partners give the list to securevfl init by --columns.
    """
    from securevfl.cli.init_command import run_columns

    run_columns(
        table,
        out=out,
        name=name,
        bounds=bounds,
        words=words,
        missing=missing,
        exclude=exclude,
        reading=reading,
    )


@app.command()
def init(
    primary: Annotated[
        Path,
        typer.Option("--primary", metavar="TABLE", help="The table with the labels, or its list."),
    ],
    label: Annotated[str, typer.Option("--label", metavar="COLUMN", help="What is predicted.")],
    out: Annotated[Path, typer.Option("--out", metavar="FED.toml", help="The federation file.")],
    secondary: Annotated[
        list[Path] | None,
        typer.Option("--secondary", metavar="TABLE", help="A table with further columns."),
    ] = None,
    lists: Annotated[
        list[Path] | None,
        typer.Option(
            "--columns",
            metavar="COLUMNS.json",
            help="Columns that a secondary sent, written by securevfl columns.",
        ),
    ] = None,
    key: Annotated[
        list[str] | None,
        typer.Option(
            "--key",
            metavar="COLUMN",
            help="A key column; lon=longitude where tables call it differently. Default: proposed.",
        ),
    ] = None,
    truth: Annotated[
        str | None,
        typer.Option("--truth", metavar="COLUMN", help="A column that tells true matches."),
    ] = None,
    task: Annotated[
        str | None,
        typer.Option("--task", help="regression, binary or multiclass. Default: by the label."),
    ] = None,
    epsilon: Annotated[float, typer.Option("--epsilon", help="What is promised.")] = 8.0,
    bounds: _Bounds = None,
    words: _Words = None,
    missing: _Missing = None,
    exclude: _Exclude = None,
    reading: _Reading = None,
    bounds_from_data: Annotated[
        bool,
        typer.Option(
            "--bounds-from-data",
            help="Weaker: what nobody declares is taken from the records, rounded, and written "
            "into the file for every party to read. Epsilon does not cover it.",
        ),
    ] = False,
    name: Annotated[
        str | None, typer.Option("--name", help="What the federation is called.")
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace a file that is there.")
    ] = False,
    as_json: _AsJson = False,
) -> None:
    """Look at tables and write a federation file with a reason for every choice."""
    from securevfl.cli.init_command import run_init

    run_init(
        primary,
        secondary or [],
        lists or [],
        out=out,
        label=label,
        key=key or [],
        truth=truth,
        task=task,
        epsilon=epsilon,
        bounds=bounds,
        words=words,
        missing=missing,
        exclude=exclude,
        reading=reading,
        bounds_from_data=bounds_from_data,
        name=name,
        overwrite=overwrite,
        as_json=as_json,
    )


@app.command()
def check(
    federation: Annotated[Path, typer.Argument(metavar="FED.toml", help="The federation file.")],
    name: Annotated[
        str | None,
        typer.Option("--name", help="Look at this party alone; the other tables are not here."),
    ] = None,
    data_root: Annotated[
        Path | None,
        typer.Option(
            "--data-root", help="Where relative data paths start; default: next to the file."
        ),
    ] = None,
    as_json: _AsJson = False,
) -> None:
    """Say what a federation file will do, before anything is done, and all that is wrong with it.

    Exit code 0: nothing is wrong; 2: something is.
    """
    with loading():
        from securevfl.cli.check_command import run_check

    run_check(federation, name=name, data_root=data_root, as_json=as_json)


@app.command()
def advise(
    federation: Annotated[Path, typer.Argument(metavar="FED.toml", help="The federation file.")],
    epsilon: Annotated[
        str,
        typer.Option("--epsilon", metavar="1,2,...", help="What might be promised, in numbers."),
    ] = "1,2,4,8,16",
    seeds: Annotated[
        int, typer.Option(help="Of the rehearsal, counting up from the file's; 0: no rehearsal.")
    ] = 3,
    key_noise: Annotated[
        float,
        typer.Option(
            help="Noise on pretended partners' numeric keys, in deviations of each key; 0: their "
            "keys are the primary's own."
        ),
    ] = 0.0,
    data_root: Annotated[
        Path | None,
        typer.Option(
            "--data-root", help="Where relative data paths start; default: next to the file."
        ),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(metavar="FILE.svg", help="Draw what survives, and what was rehearsed."),
    ] = None,
    as_json: _AsJson = False,
) -> None:
    """Say what a promise leaves of partners' information, before anyone spends anything.

    Reads the federation file and the primary's table alone. Some of the primary's own columns are
    set aside as pretended partners, and trained with as planned: a rehearsal, and no promise.
    """
    from securevfl.cli.advise import run_advise

    run_advise(
        federation,
        epsilon=epsilon,
        seeds=seeds,
        key_noise=key_noise,
        data_root=data_root,
        plot=plot,
        as_json=as_json,
    )
