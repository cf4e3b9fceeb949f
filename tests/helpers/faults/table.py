"""Figures of cells as a table: one row for a fault and a role, with its worst phase."""

import datetime
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from helpers.faults.kinds import FAULTS, PHASES, ROLES
from helpers.faults.stage import JOIN_S, NAMES, SILENCE_S

_COLUMNS: Final = (
    "party",
    "phases",
    "noticed after, worst",
    "what the others read",
    "exit codes under `stop`",
    "goes on with `wait`",
    "rounds again",
    "ledger",
)
_START: Final = "<!-- The table is made by tools/faults.py -->"
_LONGEST: Final = 150
_FOLDER: Final = re.compile(r"/\S*?/(?=[^/\s]+/run\b)")
_WAITING: Final = re.compile(r"^warning: |; waiting (up to )?\d+ s.*$")

Cell = Mapping[str, Any]


def table_of(cells: Sequence[Cell]) -> str:
    """Return the cells' table, a part for each fault."""
    return "\n".join(_part(name, cells) for name in FAULTS if _of(cells, name))


def write_page(path: Path, cells: Sequence[Cell], *, left_out: Sequence[str]) -> None:
    """Put the table under the text of a page.

    Args:
        path: The page; what follows its marker is replaced.
        cells: Figures of all cells.
        left_out: What was not run, and why.
    """
    text = path.read_text(encoding="utf-8").partition(_START)[0]
    today = datetime.datetime.now(datetime.UTC).date()
    # As at the end: a machine that is shared takes longer than its deadlines say.
    machine = f"{os.cpu_count()} cores, no GPU, load {os.getloadavg()[2]:.0f}"
    machine = f"{machine}, {today.day} {today:%B %Y}"
    told = (
        f"{_START}\n\n`python tools/faults.py --page {path}`: {len(cells)} runs; {machine}; "
        f"`silence_timeout_s = {SILENCE_S:g}`, `join_timeout_s = {JOIN_S:g}`.\n\n"
    )
    said = "".join(f"Not run: {one}.\n\n" for one in left_out)
    path.write_text(told.join([text, said + table_of(cells)]), encoding="utf-8")


def _of(cells: Sequence[Cell], fault: str, role: str | None = None) -> list[Cell]:
    return [one for one in cells if one["fault"] == fault and role in (None, one["role"])]


def _part(name: str, cells: Sequence[Cell]) -> str:
    fault = FAULTS[name]
    rows = [[*_COLUMNS], ["---"] * len(_COLUMNS)]
    rows += [_row(_of(cells, name, role)) for role in ROLES if _of(cells, name, role)]
    table = "".join(f"| {' | '.join(row)} |\n" for row in rows)
    return f"**{name}**: {fault.what}.\n\n{table}"


def _row(cells: Sequence[Cell]) -> list[str]:
    victim = NAMES[cells[0]["role"]]
    times = [(*_noticed(victim, one), one) for one in cells if one["noticed"]]
    # By others, where any notice.
    worst = max(times, key=lambda time: time[:2], default=None)
    phases = [phase for phase in PHASES if any(one["phase"] == phase for one in cells)]
    waited = [one for one in cells if one["on_loss"] == "wait"]
    return [
        cells[0]["role"],
        ", ".join(phases),
        "nobody need" if worst is None else _time(worst[0], worst[1], worst[2]["phase"]),
        _read(victim, worst[2] if worst else cells[0]),
        "; ".join(dict.fromkeys(_codes(victim, one) for one in cells if one["on_loss"] == "stop")),
        _went_on(waited),
        str(max(one["repeated"] for one in cells)),
        "right" if all(one["ledger"] for one in cells) else "WRONG",
    ]


def _noticed(victim: str, cell: Cell) -> tuple[bool, float]:
    """Return whether others noticed, and after how long the last of them."""
    others = [after for name, after in cell["noticed"].items() if name != victim]
    return bool(others), max(others or cell["noticed"].values())


def _time(by_others: bool, seconds: float, phase: str) -> str:
    return f"{seconds:.1f} s ({phase}{'' if by_others else ', itself alone'})"


def _read(victim: str, cell: Cell) -> str:
    lines = {name: line for name, line in cell["lines"].items() if line}
    others = [name for name in lines if name != victim]
    if not others:
        return ""
    # Of those who were told, the one that knows least: it has only heard.
    line = _FOLDER.sub("", _WAITING.sub("", lines[others[-1]]))
    line = line if len(line) <= _LONGEST else f"{line[: _LONGEST - 1]}\u2026"
    return f"`{line.replace('|', '/')}`"


def _codes(victim: str, cell: Cell) -> str:
    codes = dict(cell["codes"])
    own = codes.pop(victim, None)
    second = [code for name, code in codes.items() if name.startswith("second ")]
    others = sorted({code for name, code in codes.items() if not name.startswith("second ")})
    told = f"{own}, others {' or '.join(map(str, others))}"
    return f"{told}, the second {second[0]}" if second else told


def _went_on(cells: Sequence[Cell]) -> str:
    if not cells:
        return ""
    by_itself = sum(one["right"] and not one["resumed"] for one in cells)
    resumed = sum(one["right"] and one["resumed"] > 0 for one in cells)
    told = f"{by_itself} of {len(cells)}"
    return f"{told}, {resumed} with `--resume`" if resumed else told


def findings_of(cells: Sequence[Cell]) -> Iterator[str]:
    """Yield what should not be so, with where."""
    for one in cells:
        place = " ".join(one[key] for key in ("fault", "role", "phase", "on_loss"))
        yield from (f"{place}: {finding}" for finding in one["findings"])
