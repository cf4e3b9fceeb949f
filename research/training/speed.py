"""Samples per CPU-second of training rounds, one thread, beside another checkout if one is named.

Rounds of the second epoch of a simulated run are timed: links, both halves, clipping, fixed point,
ledger, optimizer steps; not the start, linking, baselines and evaluation. The losses of the first
rounds are taken with every dropout at zero, where they do not depend on how units are drawn: with
``--beside`` their largest relative difference is printed, and the two checkouts take turns.

    SECUREVFL_DATA=... python research/training/speed.py [--settings hdb-64 ...] [--rows 6000]
        [--turns 3] [--beside OTHER_CHECKOUT] [--profile] [--json]

Settings: FeT on hdb and house_kc, K = 50, at H = 64 and at the sizes of the authors' scripts;
FedSim on hdb with its paper's gates and with the defaults; FeT on MNIST among ten parties.
``--profile`` prints the operations that take the most time instead.
"""

import argparse
import contextlib
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

import securevfl as sv
from research.common.folder_tables import load_folder

sys.path.append(str(Path(__file__).parents[2]))

from research.common.full_tables import load_full
from securevfl.core.memory import keep_freed_memory
from securevfl.core.progress import ProgressEvent, RoundDone
from securevfl.data.tables import PartyTable
from securevfl.lab.datasets import split_table
from securevfl.models.fedsim import FedSimConfig
from securevfl.models.fet.settings import FeTConfig

BATCH: Final = 128
CHECKED: Final = 12
"""Rounds whose losses are compared."""

_PUBLISHED: Final[dict[str, Any]] = {
    "hidden": 100,
    "heads": 4,
    "dropout": 0.3,
    "fourier_features": 100,
    "fourier_width": 200,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """A table, a model and what is wanted of them."""

    tables: Callable[[int], list[PartyTable]]
    """Makes the parties' tables, with so many of the primary's rows."""
    model: FeTConfig | FedSimConfig
    wanted: int
    """Samples per CPU-second."""


def two_parties(name: str, rows: int) -> list[PartyTable]:
    primary, secondary = load_folder(name)
    chosen = np.sort(np.random.RandomState(0).permutation(primary.num_rows)[:rows])
    assert primary.labels is not None, "the primary has labels"
    return [
        dataclasses.replace(
            primary,
            keys=primary.keys[chosen],
            features=primary.features[chosen],
            labels=primary.labels[chosen],
        ),
        secondary,
    ]


def mnist(rows: int, *, parties: int) -> list[PartyTable]:
    table = load_full("mnist")
    chosen = np.random.RandomState(0).permutation(len(table.y))[:rows]
    return split_table(table.X[chosen], table.y[chosen], parties=parties, seed=0)


def ten_parties(rows: int) -> list[PartyTable]:
    return mnist(rows, parties=10)


def hdb(rows: int) -> list[PartyTable]:
    return two_parties("hdb", rows)


def house(rows: int) -> list[PartyTable]:
    return two_parties("house_kc", rows)


SETTINGS: Final[dict[str, Setting]] = {
    "hdb-64": Setting(tables=hdb, model=FeTConfig(), wanted=2_800),
    "house-64": Setting(tables=house, model=FeTConfig(), wanted=2_500),
    "hdb-published": Setting(
        tables=hdb,
        model=FeTConfig(encoder_blocks=1, decoder_blocks=2, **_PUBLISHED),
        wanted=1_800,
    ),
    "house-published": Setting(
        tables=house,
        model=FeTConfig(encoder_blocks=3, decoder_blocks=3, **_PUBLISHED),
        wanted=520,
    ),
    "fedsim-paper": Setting(
        tables=hdb, model=FedSimConfig(weight="learned", merge="convolution"), wanted=6_850
    ),
    "fedsim-default": Setting(tables=hdb, model=FedSimConfig(), wanted=6_850),
    "mnist-64": Setting(tables=ten_parties, model=FeTConfig(neighbours=20), wanted=436),
    "mnist-published": Setting(
        tables=ten_parties,
        model=FeTConfig(neighbours=20, hidden=200, heads=1, dropout=0.0),
        wanted=436,
    ),
}


COLUMNS: Final = ("before", "now", "ratio", "wanted", "losses_apart", "load")


class _Enough(Exception):
    """Ends a simulation from within: nothing after it is measured."""


def simulate(
    tables: list[PartyTable],
    model: FeTConfig | FedSimConfig,
    observe: Callable[[RoundDone], None],
) -> None:
    """Simulate until ``observe`` has had enough of rounds."""

    def heard(event: ProgressEvent) -> None:
        if isinstance(event, RoundDone):
            observe(event)

    with contextlib.suppress(_Enough):
        sv.simulate(
            tables,
            model,
            privacy=sv.dp.Privacy(mechanism="none"),
            training=sv.TrainingSettings(epochs=2, batch_size=BATCH),
            base="none",
            observe=heard,
        )


def speed(setting: Setting, tables: list[PartyTable]) -> float:
    """Return samples per CPU-second of the second epoch's rounds."""
    marks: list[float] = []

    def observe(event: RoundDone) -> None:
        if event.epoch == 2:
            marks.append(time.process_time())
            if event.done == event.of:
                raise _Enough

    simulate(tables, setting.model, observe)
    # The last batch is not full; the first mark comes after the first round.
    return (len(marks) - 2) * BATCH / (marks[-2] - marks[0])


def losses(setting: Setting, tables: list[PartyTable]) -> list[float]:
    """Return the losses of the first rounds, without dropout."""
    found: list[float] = []

    def observe(event: RoundDone) -> None:
        found.append(event.loss)
        if len(found) == CHECKED:
            raise _Enough

    simulate(tables, dataclasses.replace(setting.model, dropout=0.0), observe)
    return found


def profile(setting: Setting, tables: list[PartyTable]) -> str:
    """Return the operations of the second epoch's rounds that take the most CPU time."""
    profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])

    def observe(event: RoundDone) -> None:
        if event.epoch == 2 and event.done == 1:
            profiler.start()
        elif event.epoch == 2 and event.done == 1 + CHECKED:
            profiler.stop()
            raise _Enough

    simulate(tables, setting.model, observe)
    return profiler.key_averages().table(
        sort_by="self_cpu_time_total", row_limit=24, max_name_column_width=48
    )


def one(name: str, rows: int, *, checked: bool) -> dict[str, Any]:
    """Measure a setting in this process."""
    torch.set_num_threads(1)
    keep_freed_memory()  # as every command does
    setting = SETTINGS[name]
    tables = setting.tables(rows)
    return {
        "speed": speed(setting, tables),
        "losses": losses(setting, tables) if checked else [],
    }


def elsewhere(name: str, rows: int, checkout: Path, *, checked: bool) -> dict[str, Any]:
    """Measure a setting with the package of a checkout, in a process of its own."""
    command = [sys.executable, __file__, "--settings", name, "--rows", str(rows), "--one"]
    environment = {**os.environ, "PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, *(["--checked"] if checked else [])],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def compare(name: str, rows: int, checkouts: Sequence[Path], turns: int) -> dict[str, Any]:
    """Return medians over the turns, ratios within a turn, and how far losses lie apart."""
    found = [
        [elsewhere(name, rows, checkout, checked=turn == 0) for checkout in checkouts]
        for turn in range(turns)
    ]
    columns = [[turn[side]["speed"] for turn in found] for side in range(len(checkouts))]
    figures: dict[str, Any] = {
        "now": round(statistics.median(columns[0])),
        "wanted": SETTINGS[name].wanted,
    }
    if len(checkouts) > 1:
        now, before = (np.array(side["losses"]) for side in found[0])
        figures |= {
            "before": round(statistics.median(columns[1])),
            "ratio": round(statistics.median(a / b for a, b in zip(*columns, strict=True)), 3),
            "losses_apart": float(np.max(np.abs(now - before) / np.abs(before))),
        }
    return {**figures, "load": round(os.getloadavg()[0], 1)}


def print_line(name: str, figures: Mapping[str, Any]) -> None:
    """Print a setting's figures as a line of a table."""
    cells = " | ".join(f"{figures[one]:g}" if one in figures else "" for one in COLUMNS)
    print(f"| {name} | {cells} |", flush=True)


def main() -> None:
    """Measure, or be one of the measured processes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument("--rows", type=int, default=6_000, help="of the primary")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--beside", type=Path, help="another checkout, to compare with")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--checked", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(one(options.settings[0], options.rows, checked=options.checked)))
        return
    if options.profile:
        torch.set_num_threads(1)
        keep_freed_memory()
        for name in options.settings:
            print(name, profile(SETTINGS[name], SETTINGS[name].tables(options.rows)), sep="\n")
        return
    here = Path(sv.__file__).parents[1]
    checkouts = [here, *([options.beside.resolve()] if options.beside else [])]
    if not options.json:
        print(f"| setting | {' | '.join(COLUMNS)} |", "| --- " * (1 + len(COLUMNS)) + "|", sep="\n")
    found = {}
    for name in options.settings:
        found[name] = compare(name, options.rows, checkouts, options.turns)
        if not options.json:
            print_line(name, found[name])
    if options.json:
        print(json.dumps(found))


if __name__ == "__main__":
    main()
