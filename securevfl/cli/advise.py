"""What the command ``advise`` does."""

import json
import sys
from itertools import count
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.table import Table
from rich.text import Text

from securevfl.cli.saying import say
from securevfl.config.reading import read_federation
from securevfl.core.errors import ConfigError
from securevfl.core.files import write_text
from securevfl.core.formatting import written
from securevfl.core.memory import keep_freed_memory
from securevfl.lab.advice import NO_PROMISE, Advice, Bound, advise, epsilons_from
from securevfl.lab.rehearsal import Played
from securevfl.runtime.shown_progress import bars

_HEADINGS: Final = (
    "epsilon",
    "noise",
    "blocks",
    "blocks, spread",
    "shared",
    "partners",
    "rows",
)
_LEGEND: Final = (
    "noise: of a number, over the length of one record in it; blocks, shared: the share of a "
    "signal that survives it in coordinates of a secondary's own (all of the length in one number, "
    "or spread over its numbers) and in coordinates that all share; partners: so many half "
    "survive in shared ones; rows: so many training rows show, by two standard errors, a signal "
    "that explains 1 % of what your own columns leave open"
)


def run_advise(
    path: Path,
    *,
    epsilon: str,
    seeds: int,
    key_noise: float,
    data_root: Path | None,
    plot: Path | None,
    as_json: bool,
) -> None:
    """Print what can survive at each epsilon, and what a rehearsal gained."""
    epsilons = epsilons_from(epsilon)
    if seeds < 0:
        raise ConfigError(f"--seeds: must be at least 0, got {seeds}")
    if not 0 <= key_noise < float("inf"):
        raise ConfigError(f"--key-noise: must be a number from 0 on, got {key_noise}")
    if plot is not None and plot.suffix != ".svg":
        raise ConfigError(f"--plot: the file's name must end in .svg, got {plot}")
    config = read_federation(path)
    keep_freed_memory()
    runs, console = seeds * (len(set(epsilons)) + 1), Console(stderr=True)
    with bars(console, name_width=22) as shown:
        task = shown.add_task("rehearsal", total=runs, figures="")
        done = count(1)

        def progress(run: Played) -> None:
            number = next(done)
            text = f"seed {run.seed}, {_epsilon(run.epsilon)}: {run.metric} {written(run.test)}"
            shown.update(task, completed=number, figures=text)
            if not console.is_terminal:
                print(f"done {number}/{runs}: {text}", file=sys.stderr, flush=True)

        found = advise(
            path,
            config,
            epsilons=epsilons,
            seeds=seeds,
            key_noise=key_noise,
            data_root=data_root or path.parent,
            done=progress,
        )
    if plot is not None:
        # Loaded here: plots take most of a second to load.
        from securevfl.report.plots import advice_plot

        write_text(plot, advice_plot(found.as_json()), for_others=True)
    if as_json:
        print(json.dumps(found.as_json(), allow_nan=False))
    else:
        _print(Console(), found)


def _epsilon(value: float | None) -> str:
    return "without noise" if value is None else f"epsilon {value:g}"


def _print(console: Console, found: Advice) -> None:
    privacy, secondaries = found.config.privacy, len(found.config.secondaries)
    say(
        console,
        "what can survive: ",
        f"unit {privacy.unit}, delta {privacy.delta:g}, "
        f"{_counted(secondaries, 'secondary', 'secondaries')}, "
        f"{found.training_rows:,} training rows",
    )
    table = Table()
    for heading in _HEADINGS:
        table.add_column(heading, justify="right")
    for one in found.bounds:
        table.add_row(*_cells(one))
    console.print(table)
    say(console, "", _LEGEND)
    _print_settings(console, found)
    if found.rehearsed:
        _print_rehearsal(console, found)
    for note in found.notes:
        say(console, "note: ", note)
    say(console, "is it worth it? ", found.worth())


def _cells(one: Bound) -> list[str]:
    return [
        "none" if one.epsilon is None else f"{one.epsilon:g}",
        f"{one.noise:.2f}",
        f"{one.blocks:.2f}",
        f"{one.blocks_spread:.2f}",
        f"{one.shared:.2f}",
        "no number" if one.partners is None else f"{one.partners:,}",
        "no number" if one.rows is None else f"{one.rows:,}",
    ]


def _print_settings(console: Console, found: Advice) -> None:
    told: dict[str, list[str]] = {}
    for one in found.bounds:
        text = ", ".join(f"{name} = {value}" for name, value in one.settings.items())
        told.setdefault(text, []).append("none" if one.epsilon is None else f"{one.epsilon:g}")
    for text, epsilons in told.items():
        say(console, f"settings at epsilon {', '.join(epsilons)}: ", text)


def _print_rehearsal(console: Console, found: Advice) -> None:
    first, metric = found.casts[0], found.rehearsed[0].metric
    aside = sum(map(len, first.aside.values()))
    drawn = f", drawn anew with each of {len(found.casts)} seeds" if len(found.casts) > 1 else ""
    say(
        console,
        "rehearsal: ",
        f"{aside} of {len(first.own) + aside} columns set aside for "
        f"{_counted(len(first.aside), 'pretended secondary', 'pretended secondaries')}{drawn}; "
        f"alone is the primary on the columns that were left",
    )
    table = Table(title=Text(f"rehearsed test {metric}"), title_justify="left")
    for heading in ("epsilon", "alone", "with partners", "gain", "gain by seed", "joint answers"):
        table.add_column(heading, justify="right")
    for one in found.rehearsed:
        deviation = "" if one.deviation is None else f" ± {written(one.deviation, digits=3)}"
        table.add_row(
            "none" if one.epsilon is None else f"{one.epsilon:g}",
            written(one.alone, digits=3),
            written(one.test, digits=3),
            f"{written(one.gain, sign='+', digits=3)}{deviation}",
            " ".join(written(gain, sign="+", digits=3) for gain in one.gains),
            f"{one.used} of {len(one.gains)}",
        )
    console.print(table)
    for one in found.rehearsed:
        say(console, "", one.verdict())
    say(console, "", NO_PROMISE)


def _counted(number: int, one: str, more: str) -> str:
    return f"{number} {one if number == 1 else more}"
