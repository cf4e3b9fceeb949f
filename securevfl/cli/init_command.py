"""What the commands ``columns`` and ``init`` do."""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table as Grid
from rich.text import Text

from securevfl.core import checks, files
from securevfl.core.conventions import Task
from securevfl.core.errors import ConfigError
from securevfl.core.settings import read_settings
from securevfl.data.sources.settings import Reading
from securevfl.setup.estimates import LIMITS
from securevfl.setup.init import look_at, party_name, proposed
from securevfl.setup.proposal import ColumnUse, Proposal, Wishes, excluded_because
from securevfl.setup.proposed_columns import (
    Declared,
    checked_bounds,
    require_columns,
    write_column_list,
)

_TASKS: dict[str, Task] = {
    "regression": "regression",
    "binary": "binary",
    "multiclass": "multiclass",
}


def run_columns(
    path: Path,
    *,
    out: Path,
    name: str | None,
    bounds: Sequence[str] | None,
    words: Sequence[str] | None,
    missing: Sequence[str] | None,
    exclude: Sequence[str] | None,
    reading: Sequence[str] | None,
) -> None:
    """Write a table's column list."""
    declared = _declared(bounds, words, missing, exclude)
    declared = dataclasses.replace(declared, readings=_readings(reading or (), [path]))
    table = look_at(path, declared=declared, root=path.parent)
    require_columns([table], declared)
    if name is not None:
        table = dataclasses.replace(table, name=name)
    write_column_list(table, out)
    console = Console()
    console.print(f"{out}: {len(table.columns)} columns of {table.name}", highlight=False)
    undeclared = [
        column.name
        for column in table.columns
        if column.kind in ("number", "words", "date")
        and column.bounds is None
        and column.words is None
        and excluded_because(column) is None
    ]
    left_out = {
        column.name: why
        for column in table.columns
        if (why := excluded_because(column)) is not None
    }
    for column, why in left_out.items():
        _say(console, f"{column}: no feature: {why}")
    if undeclared:
        console.print(
            Text(
                "nothing is declared of: "
                + ", ".join(undeclared)
                + ". Of those that become features, a promise needs bounds (--bounds) or words "
                "(--words); keys need none."
            )
        )


def run_init(
    primary: Path,
    secondaries: Sequence[Path],
    lists: Sequence[Path],
    *,
    out: Path,
    label: str,
    key: Sequence[str],
    truth: str | None,
    task: str | None,
    epsilon: float,
    bounds: Sequence[str] | None,
    words: Sequence[str] | None,
    missing: Sequence[str] | None,
    exclude: Sequence[str] | None,
    reading: Sequence[str] | None,
    bounds_from_data: bool,
    name: str | None,
    overwrite: bool,
    as_json: bool,
) -> None:
    """Write a federation file, and say what it has of each column."""
    if out.exists() and not overwrite:
        raise ConfigError(f"--out {out}: is there already; add --overwrite, or choose another name")
    checks.positive(epsilon=epsilon)
    if task is not None and task not in _TASKS:
        raise ConfigError(f"--task: must be one of {', '.join(_TASKS)}; got {task!r}")
    wishes = Wishes(
        label=label,
        keys=tuple(key),
        truth=truth,
        task=None if task is None else _TASKS[task],
        epsilon=epsilon,
        bounds_from_data=bounds_from_data,
        name=name or out.name.removesuffix(".toml"),
    )
    declared = _declared(bounds, words, missing, exclude)
    tables = [path for path in (primary, *secondaries) if path.suffix != ".json"]
    declared = dataclasses.replace(declared, readings=_readings(reading or (), tables))
    proposal, text = proposed(
        primary, secondaries, lists, wishes=wishes, declared=declared, root=out.parent
    )
    files.write_text(out, text, for_others=True)
    if as_json:
        print(json.dumps(_as_json(proposal, out)))
    else:
        _print(proposal, out)


def _declared(
    bounds: Sequence[str] | None,
    words: Sequence[str] | None,
    missing: Sequence[str] | None,
    exclude: Sequence[str] | None,
) -> Declared:
    pairs = {}
    for column, said in (_split(text, "--bounds", "COLUMN=LOW,HIGH") for text in bounds or ()):
        try:
            pairs[column] = checked_bounds(said.split(","))
        except ConfigError as error:
            raise ConfigError(f"--bounds {column}: {error}") from None
    lists = dict(_split(text, "--words", "COLUMN=A,B,...") for text in words or ())
    return Declared(
        bounds=pairs,
        words={column: tuple(said.split(",")) for column, said in lists.items()},
        missing=missing or (),
        excluded=exclude or (),
    )


def _readings(texts: Sequence[str], tables: Sequence[Path]) -> dict[str, Reading]:
    """Return how files are written, by party; ``""`` stands for those that are not named."""
    parties = list(dict.fromkeys(map(party_name, tables)))
    said: dict[str, dict[str, object]] = {"": {}}
    for text in texts:
        setting, sign, value = text.partition("=")
        party, dot, name = setting.rpartition(".")
        if not sign or not name or not value:
            raise ConfigError(
                f"--reading: must be NAME=VALUE such as encoding=windows-1252, or "
                f"PARTY.NAME=VALUE; got {text!r}"
            )
        if dot and party not in parties:
            near = checks.did_you_mean(party, parties) or f"; there are {', '.join(parties)}"
            raise ConfigError(f"--reading {setting}: no party is called so{near}")
        said.setdefault(party, {})[name] = _reading_value(name, value)
    return {
        party: read_settings(Reading, {**said[""], **own}, where=f"--reading {party}".rstrip())
        for party, own in said.items()
    }


def _reading_value(name: str, value: str) -> object:
    if name in ("header", "empty"):
        return value.split(",")
    return int(value) if name == "skip_lines" and value.isdecimal() else value


def _split(text: str, option: str, form: str) -> tuple[str, str]:
    column, sign, said = text.rpartition("=")
    if not sign or not column or not said:
        raise ConfigError(f"{option}: must be {form}, got {text!r}")
    return column, said


def _print(proposal: Proposal, out: Path) -> None:
    console = Console()
    for table in proposal.tables:
        rows = "columns by its list" if table.rows is None else f"{table.rows:,} rows"
        role = "primary" if table is proposal.tables[0] else "secondary"
        grid = Grid(title=Text(f"{table.name}: {role}, {rows}"), title_justify="left")
        for heading in ("column", "becomes", "why"):
            grid.add_column(heading)
        for use in proposal.uses[table.name]:
            grid.add_row(Text(use.column.name), use.use, Text(_why(use)))
        console.print(grid)
    if (warning := proposal.keys.shown) is not None:
        _say(console, f"warning: {warning}", style="yellow")
    for reason in (*proposal.keys.reasons, *proposal.spelling_shares):
        _say(console, f"keys: {reason}")
    _say(console, f"task: {proposal.task} ({proposal.task_reason})")
    for name, served in proposal.served.items():
        _say(console, f"links: of {name}, {served.in_words()}")
        if (warning := served.warning(name)) is not None:
            _say(console, warning, style="yellow")
    for doubt in proposal.doubts:
        _say(console, f"keys: {doubt}", style="yellow")
    _say(
        console,
        f"epsilon {proposal.epsilon:g}, delta {proposal.delta:g}: the file has the sentence",
    )
    console.print(f"written: {out}", highlight=False, soft_wrap=True)
    if proposal.bounds_from_data:
        _say(
            console,
            "some ranges, words and gaps were taken from the records: they are rounded, the file "
            "shows them to every party, and epsilon does not cover them",
            style="yellow",
        )
    if not proposal.ready:
        names = sorted({f"{party}.{column}" for party, column in proposal.left_open})
        _say(
            console,
            f"before it can run, somebody who knows must declare: {', '.join(names)}. Fill in the "
            f"lines marked so, or run init again with --bounds, --words and --missing; "
            f"--bounds-from-data takes what is missing from the records, which epsilon does not "
            f"cover",
            style="yellow",
        )
    console.print(f"next: securevfl check {out}", highlight=False, soft_wrap=True)


def _why(use: ColumnUse) -> str:
    if use.use != "feature" or not use.source:
        return use.why
    if use.words is not None:
        return f"{use.why}: {len(use.words)} words, {use.source}"
    if use.bounds is not None:
        low, high = (end if isinstance(end, str) else f"{end:.12g}" for end in use.bounds)
        return f"{use.why}: {low} to {high}, {use.source}"
    return f"{use.why}: {use.source}"


def _say(console: Console, text: str, *, style: str = "") -> None:
    console.print(Text(text, style=style))


def _as_json(proposal: Proposal, out: Path) -> dict[str, object]:
    return {
        "file": str(out),
        "ready": proposal.ready,
        "open": [f"{party}.{column}" for party, column in proposal.left_open],
        "task": proposal.task,
        "metric": proposal.keys.metric,
        "keys": {party: list(names) for party, names in proposal.keys.columns.items()},
        "reasons": [*proposal.keys.reasons, *proposal.spelling_shares],
        "warnings": list(proposal.doubts),
        "spelling": dict(proposal.spelling),
        "columns": {
            party: {use.column.name: {"use": use.use, "why": _why(use)} for use in uses}
            for party, uses in proposal.uses.items()
        },
        "epsilon": proposal.epsilon,
        "delta": proposal.delta,
        "bounds_from_data": proposal.bounds_from_data,
        "rows_served": {
            name: {
                "median": served.median,
                "nine_in_ten": served.often,
                "linked": dict(zip(map(str, LIMITS), served.linked, strict=True)),
                "warning": served.warning(name),
            }
            for name, served in proposal.served.items()
        },
    }
