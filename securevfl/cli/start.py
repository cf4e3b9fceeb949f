"""The commands before a first run: ``demo``, ``init``, ``columns`` and ``check``."""

import dataclasses
import json
import sys
from functools import partial
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from securevfl.core.command_line import AsJson, FederationFile, FileDataRoot, Out, say
from securevfl.core.errors import ConfigError, ProtocolError
from securevfl.core.memory import loading

if TYPE_CHECKING:
    from securevfl.desk.setup.proposal import Proposal

app = typer.Typer()

_PANEL: Final = "Start"

_Bounds = Annotated[
    list[str] | None,
    typer.Option(
        "--bounds",
        metavar="COLUMN=LOW,HIGH",
        help="Least and largest possible value, known without the records; dates as "
        "2015-01-01,2025-12-31. COLUMN may be a pattern (rt_*).",
    ),
]
_Words = Annotated[
    list[str] | None,
    typer.Option(
        "--words",
        metavar="COLUMN=A,B,...",
        help="Possible words of a column, known without the records; other stands for the rest.",
    ),
]
_Missing = Annotated[
    list[str] | None,
    typer.Option("--missing", metavar="COLUMN", help="A column whose cells may be empty."),
]
_Exclude = Annotated[
    list[str] | None,
    typer.Option("--exclude", metavar="COLUMN", help="A column that is not a feature."),
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


@app.command(rich_help_panel=_PANEL)
def demo(
    out: Out = None,
    seed: Annotated[int, typer.Option(help="Seed of the split, of models and of shuffling.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Train on handwritten digits with five parties, one process each."""
    with loading():
        from securevfl.cli.results import print_results, train_and_report
        from securevfl.config.reading import parse_federation
        from securevfl.core import files
        from securevfl.lab import datasets
        from securevfl.runtime.run_folder import run_folder_for

    source = datasets.demo_federation(seed=seed)
    config = parse_federation(source, file="demo")
    folder = run_folder_for(config, out)
    files.require_writable_folder(folder)
    tables = datasets.digits_tables(seed=seed)
    datasets.write_tables(tables, folder / "tables")
    metrics = train_and_report(
        config,
        folder,
        simulated=False,
        data_root=folder,
        more_figures=lambda: datasets.demo_baselines(
            source, tables, tell=partial(print, file=sys.stderr)
        ),
    )
    print_results(metrics, folder, as_json=as_json)


@app.command(rich_help_panel=_PANEL)
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
        typer.Option("--truth", metavar="COLUMN", help="A column with the true matches."),
    ] = None,
    task: Annotated[
        str | None,
        typer.Option("--task", help="regression, binary or multiclass. Default: by the label."),
    ] = None,
    positive: Annotated[
        str | None,
        typer.Option(
            "--positive",
            metavar="WORD",
            help="Of a label with two values, the one that probabilities are about; default: the "
            "one that sorts last.",
        ),
    ] = None,
    epsilon: Annotated[float, typer.Option("--epsilon", help="What is promised.")] = 2.0,
    bounds: _Bounds = None,
    words: _Words = None,
    missing: _Missing = None,
    exclude: _Exclude = None,
    reading: _Reading = None,
    bounds_from_data: Annotated[
        bool,
        typer.Option(
            "--bounds-from-data",
            help="Weaker: undeclared ranges and words are taken from the records, rounded, and "
            "written into the file for every party to read. Epsilon does not cover them.",
        ),
    ] = False,
    name: Annotated[str | None, typer.Option("--name", help="Name of the federation.")] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace a file that is there.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Write a federation file from tables, with a reason for every choice."""
    with loading():
        from securevfl.core import checks, files
        from securevfl.core.conventions import TASKS
        from securevfl.desk.setup.init import declared_by_options, own_files, propose_file
        from securevfl.desk.setup.proposal import Wishes

    def require_free(file: Path, option: str = "") -> None:
        if file.exists() and not overwrite:
            raise ConfigError(
                f"{option}{file}: is there already; add --overwrite, or choose another name"
            )

    read = [primary, *(secondary or []), *(lists or [])]
    files.output_path(out, read, endings=[".toml"])
    require_free(out, "--out ")
    checks.positive(epsilon=epsilon)
    if task is not None and task not in TASKS:
        raise ConfigError(f"--task: must be one of {', '.join(TASKS)}; got {task!r}")
    wishes = Wishes(
        label=label,
        keys=tuple(key or ()),
        truth=truth,
        task=None if task is None else TASKS[task],
        positive=positive,
        epsilon=epsilon,
        bounds_from_data=bounds_from_data,
        name=name or out.name.removesuffix(".toml"),
    )
    secondaries = secondary or []
    here = [path for path in (primary, *secondaries) if path.suffix != ".json"]
    declared = declared_by_options(bounds, words, missing, exclude, reading, tables=here)
    proposal, text = propose_file(
        primary, secondaries, lists or [], wishes=wishes, declared=declared, root=out.parent
    )
    own = {out.parent / file: content for file, content in own_files(proposal).items()}
    for file in own:
        require_free(files.output_path(file, [*read, out], option="the source file"))
    for file, content in own.items():
        files.write_text(file, content)
    files.write_output(out, text)
    if as_json:
        print(json.dumps({"file": str(out), **proposal.as_json()}))
    else:
        _print_proposal(proposal, out)
        for file in own:
            print(f"written: {file}, which stays on this machine")


def _print_proposal(proposal: "Proposal", out: Path) -> None:
    console = Console()
    tell = partial(say, console, "")
    warn = partial(tell, style="yellow")
    for table in proposal.tables:
        rows = "columns by its list" if table.rows is None else f"{table.rows:,} rows"
        role = "primary" if table is proposal.tables[0] else "secondary"
        title = Text(f"{table.name}: {role}, {rows}")
        grid = Table("column", "becomes", "why", title=title, title_justify="left")
        for use in proposal.uses[table.name]:
            grid.add_row(Text(use.column.name), use.use, Text(use.reason))
        console.print(grid)
    for reason in (*proposal.keys.reasons, *proposal.spelling_shares):
        tell(f"keys: {reason}")
    tell(f"protection: {proposal.keys.protection}: {proposal.keys.protection_reason}")
    if proposal.keys.key_warning is not None:
        warn(f"warning: {proposal.keys.key_warning}")
    tell(f"task: {proposal.task} ({proposal.task_reason})")
    if proposal.positive_in_words:
        tell(proposal.positive_in_words)
    for name, served in proposal.served.items():
        tell(f"links: of {name}, {served.in_words()}")
        if (warning := served.warning(name)) is not None:
            warn(warning)
    for doubt in proposal.doubts:
        warn(f"warning: {doubt}")
    tell(f"epsilon {proposal.epsilon:g}, delta {proposal.delta:g}: check has the sentence")
    console.print(f"written: {out}", highlight=False, soft_wrap=True)
    if proposal.bounds_from_data:
        warn(
            "some ranges, words and gaps were taken from the records: they are rounded, the file "
            "shows them to every party, and epsilon does not cover them"
        )
    if not proposal.ready:
        names = sorted({f"{party}.{column}" for party, column in proposal.left_open})
        warn(
            f"missing declarations, without which it does not run: {', '.join(names)}. Fill in "
            f"the lines marked so, or run init again with --bounds, --words and --missing; "
            f"--bounds-from-data takes what is missing from the records, which epsilon does not "
            f"cover"
        )
    console.print(f"next: securevfl check {out}", highlight=False, soft_wrap=True)


@app.command(rich_help_panel=_PANEL)
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
    """Write a table's card for partners: names, kinds, declarations, form of keys; no values.

    Partners give the list to securevfl init by --columns.
    """
    with loading():
        import dataclasses

        from securevfl.core import files
        from securevfl.data.sources.settings import file_behind
        from securevfl.desk.setup.init import declared_by_options, look_at, warnings_of
        from securevfl.desk.setup.proposal import table_in_use
        from securevfl.desk.setup.proposed_columns import (
            excluded_because,
            require_columns,
            write_column_list,
        )

    declared = declared_by_options(bounds, words, missing, exclude, reading, tables=[table])
    described = look_at(table, declared=declared, root=table.parent)
    require_columns([described], declared)
    files.output_path(out, [table, file_behind(table)], endings=[".json"])
    if name is not None:
        described = dataclasses.replace(described, name=name)
    in_use = table_in_use(described)
    doubts = () if in_use is None else warnings_of(in_use, described.name)
    write_column_list(described, out)
    console = Console()
    console.print(f"{out}: {len(described.columns)} columns of {described.name}", highlight=False)
    left_out = {
        column.name: why
        for column in described.columns
        if (why := excluded_because(column)) is not None
    }
    undeclared = [
        column.name
        for column in described.columns
        if column.name not in left_out
        and column.kind in ("number", "words", "date")
        and column.bounds is None
        and column.words is None
    ]
    for name, why in left_out.items():
        say(console, "", f"{name}: no feature: {why}")
    for key in described.columns:
        if key.form is not None and key.form.texts:
            say(console, "", f"{key.name}: as a key of the form {' or '.join(key.form.texts)}")
    gaps = [
        column.name
        for column in described.columns
        if column.name not in left_out
        and column.inferred is not None
        and column.inferred.missing
        and not column.may_be_missing
    ]
    if gaps:
        text = f"values are missing in {', '.join(gaps)}: say so by --missing, or fill them in"
        say(console, "", text)
    for doubt in doubts:
        say(console, "warning: ", doubt, style="yellow")
    if undeclared:
        text = (
            f"nothing is declared of: {', '.join(undeclared)}. Of those that become features, a "
            f"promise needs bounds (--bounds) or words (--words); keys need none."
        )
        console.print(Text(text))


def _print_schema(wanted: bool) -> bool:
    """Print the JSON Schema of the federation file, and end."""
    if wanted:
        schema = resources.files("securevfl.config") / "federation-file.schema.json"
        print(schema.read_text(encoding="utf-8"), end="")
        raise typer.Exit
    return wanted


@app.command(rich_help_panel=_PANEL)
def check(
    federation: FederationFile,
    name: Annotated[
        str | None,
        typer.Option("--name", help="Look at this party alone; the other tables are not here."),
    ] = None,
    data_root: FileDataRoot = None,
    peers: Annotated[
        bool,
        typer.Option(
            "--peers",
            help="Meet the other parties, who do the same now; needs --name and --identity.",
        ),
    ] = False,
    identity: Annotated[
        Path | None, typer.Option("--identity", help="With --peers: your own folder with the key.")
    ] = None,
    listen: Annotated[
        str | None,
        typer.Option("--listen", metavar="HOST:PORT", help="With --peers, as party has it."),
    ] = None,
    wait_s: Annotated[
        float, typer.Option("--wait", help="With --peers: seconds that the others have to come.")
    ] = 120.0,
    long: Annotated[
        bool,
        typer.Option("--long", help="Every column, channel and sentence; else the short form."),
    ] = False,
    as_json: AsJson = False,
    _schema: Annotated[
        bool,
        typer.Option(
            "--schema",
            callback=_print_schema,
            is_eager=True,
            help="Print the JSON Schema of federation files, for editors, and exit.",
        ),
    ] = False,
) -> None:
    """Check a federation file: report all errors, links, costs and who learns what.

    Exit code 0: nothing is wrong; 2: something is; 3: something is between parties (--peers).
    """
    if peers:
        if name is None or identity is None:
            raise ConfigError("--peers: needs --name and --identity")
        root = data_root or federation.parent
        _check_peers(federation, name, identity, listen, wait_s, root, as_json=as_json)
        return
    with loading():
        # It registers the section that comparisons read.
        import securevfl.lab.methods  # noqa: F401
        from securevfl.cli.check_output import print_check
        from securevfl.desk.setup.check import check_federation

    show = partial(print, file=sys.stderr, flush=True)
    checked = check_federation(federation, name=name, data_root=data_root, show=show)
    if as_json:
        print(json.dumps(checked.as_json()))
    else:
        print_check(Console(), checked, name, long=long)
    if not checked.fine:
        count = len(checked.problems)
        raise ConfigError(f"{federation}: {count} problem{'' if count == 1 else 's'}")


def _check_peers(
    federation: Path,
    name: str,
    identity: Path,
    listen: str | None,
    wait_s: float,
    data_root: Path,
    *,
    as_json: bool,
) -> None:
    with loading():
        from securevfl.config.reading import read_federation
        from securevfl.desk.setup.kit import run_peer_checks

    console, results = Console(), []
    config = read_federation(federation)
    for result in run_peer_checks(
        config,
        name,
        identity,
        runs=Path("runs"),
        wait_s=wait_s,
        listen=listen,
        data_root=data_root,
    ):
        results.append(result)
        if not as_json:
            how = "wrong" if result.exit_code else "warning" if result.warns else "fine"
            how = "now" if result.what == "wait" else how
            style = {"wrong": "red", "warning": "yellow"}.get(how, "")
            say(console, f"{how}: ", result.text, style=style)
    if as_json:
        print(json.dumps([dataclasses.asdict(result) for result in results]))
    wrong = [result for result in results if result.exit_code]
    if wrong:
        kind = ConfigError if wrong[0].exit_code == ConfigError.exit_code else ProtocolError
        raise kind(f"{federation}: {len(wrong)} problem{'' if len(wrong) == 1 else 's'}")
