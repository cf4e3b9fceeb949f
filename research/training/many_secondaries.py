"""CPU time and memory of one secondary more, in a simulation of many: alone and computed together.

    python research/training/many_secondaries.py [--shape B K H] [--beside OTHER_CHECKOUT]
    python research/training/many_secondaries.py --at-once 2 4 8 16 49  # for the size rule

Rounds of simulated runs of FeT are timed at the exchange: links, bottom models both ways, clips,
fixed point, ledgers and optimizer steps of all secondaries, without the primary's half; divided by
the secondaries. One run's rounds take turns: each secondary by itself, then as the package does it
(or so many at once). Runs with 5, 20 and 49 secondaries take turns as well, each in a process of
its own with one thread; figures are medians. Memory is the growth of a process's peak from the
fewest secondaries to the most, for each one added.
"""

import argparse
import contextlib
import inspect
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

import securevfl as sv
from securevfl.core.memory import keep_freed_memory
from securevfl.data.tables import PartyTable

SHAPES: Final = ((128, 20, 64), (128, 8, 32), (32, 4, 32))
"""Rows of a batch, links of a row, width."""

SECONDARIES: Final = (5, 20, 49)
RECORDS: Final = 2_000
FEATURES: Final = 16
ROUNDS: Final = 10
"""Of each way that are measured; two more come first."""

ALONE: Final = "alone"
TOGETHER: Final = "together"


class _Enough(Exception):
    """Ends a simulation from within: nothing after it is measured."""


def made_up(rows: int, *, name: str, labels: bool) -> PartyTable:
    """Return a table of points in a square with random columns."""
    random = np.random.default_rng([rows, len(name), *name.encode()])
    return PartyTable(
        name=name,
        key_names=("lon", "lat"),
        keys=random.uniform(size=(rows, 2)),
        feature_names=tuple(f"x{axis}" for axis in range(FEATURES)),
        features=random.normal(size=(rows, FEATURES)).astype(np.float32),
        labels=random.normal(size=rows) if labels else None,
    )


class Ways:
    """Lets rounds compute secondaries alone, together as the package does, or so many at once."""

    def __init__(self, shape: Sequence[int]) -> None:
        rows, links, width = shape
        # FeT's widest layers have 2 H outputs.
        self._of_one = rows * links * 2 * width
        self._stacked: Any = import_module("securevfl.federation.rounds.exchanges")
        self._rule = (self._stacked.LARGEST, self._stacked.FEWEST)

    def take(self, way: str) -> None:
        """Go this way from now on."""
        of_way = self._rule if way == TOGETHER else (0, 2)
        if way not in (ALONE, TOGETHER):
            of_way = (int(way) * self._of_one, 2)
        self._stacked.LARGEST, self._stacked.FEWEST = of_way


def one(shape: Sequence[int], secondaries: int, ways: Sequence[str]) -> dict[str, Any]:
    """Time rounds in this process: CPU ms a secondary and round by way, and the peak of memory."""
    torch.set_num_threads(1)
    keep_freed_memory()
    rows, links, width = shape
    # Other checkouts know one way only.
    known = Ways(shape) if ways != [ALONE] else None
    times: dict[str, list[float]] = {way: [] for way in ways}
    began = [0.0]
    exchange = _simulated_exchange()
    release, learn = exchange.release, exchange.return_gradient

    def timed_release(self: Any, plan: Any) -> Any:
        if known:
            known.take(ways[sum(map(len, times.values())) % len(ways)])
        began[0] = time.process_time()
        return release(self, plan)

    def timed_learn(self: Any, plan: Any, gradient: Any) -> None:
        learn(self, plan, gradient)
        done = sum(map(len, times.values()))
        took = time.process_time() - began[0]
        times[ways[done % len(ways)]].append(1e3 * took / secondaries)
        if done + 1 == (ROUNDS + 2) * len(ways):
            raise _Enough

    exchange.release, exchange.return_gradient = timed_release, timed_learn
    train = rows * len(ways) * (ROUNDS + 3)
    tables = [made_up(round(train / 0.98), name="primary", labels=True)]
    tables += [made_up(RECORDS, name=f"s{i}", labels=False) for i in range(secondaries)]
    # Other checkouts may have no base to switch off.
    more: dict[str, Any] = (
        {"base": "none"} if "base" in inspect.signature(sv.simulate).parameters else {}
    )
    with contextlib.suppress(_Enough):
        sv.simulate(
            tables,
            sv.models.FeT(neighbours=links, hidden=width),
            privacy=sv.dp.Privacy(mechanism="none"),
            training=sv.TrainingSettings(
                epochs=1, batch_size=rows, test_fraction=0.01, validation_fraction=0.01
            ),
            **more,
        )
    return {
        "ms": {way: statistics.median(found[2:]) for way, found in times.items()},
        "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6,
    }


def _simulated_exchange() -> Any:
    """Return the class; older checkouts have it elsewhere."""
    try:
        return import_module("securevfl.federation.rounds.exchanges").Exchange
    except ImportError:
        return import_module("securevfl.federation.simulated").SimulatedExchange


def elsewhere(
    checkout: Path, shape: Sequence[int], secondaries: int, ways: Sequence[str]
) -> dict[str, Any]:
    """Time rounds with the package of a checkout, in a process of its own."""
    command = [sys.executable, __file__, "--one", json.dumps([shape, secondaries, ways])]
    environment = {**os.environ, "PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def figures(
    shape: Sequence[int], ways: Sequence[str], *, here: Path, beside: Path | None, turns: int
) -> dict[int, dict[str, float]]:
    """Return medians over the turns for each number of secondaries."""
    found: dict[int, list[dict[str, float]]] = {k: [] for k in SECONDARIES}
    grown: dict[str, float] = {}
    for _ in range(turns):
        for k in SECONDARIES:
            took = elsewhere(here, shape, k, ways)["ms"]
            if beside:
                took["before"] = elsewhere(beside, shape, k, [ALONE])["ms"][ALONE]
            found[k].append(took)
    least, most = SECONDARIES[0], SECONDARIES[-1]
    for name, checkout, way in (("before", beside, ALONE), ("now", here, TOGETHER)):
        if checkout and TOGETHER in ways:
            peaks = [elsewhere(checkout, shape, k, [way])["peak_mb"] for k in (least, most)]
            grown[f"MB a secondary, {name}"] = (peaks[1] - peaks[0]) / (most - least)
    return {
        k: {
            **{way: statistics.median(one[way] for one in of_k) for way in of_k[0]},
            **{f"{way} / {ALONE}": ratio(of_k, way) for way in ways if way != ALONE},
            **(grown if k == most else {}),
        }
        for k, of_k in found.items()
    }


def ratio(found: Sequence[Mapping[str, float]], way: str) -> float:
    """Return the median over runs of a way's time over that of each alone, in the same run."""
    return statistics.median(one[way] / one[ALONE] for one in found)


def main() -> None:
    """Measure, or be one of the measured processes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--beside", type=Path, help="another checkout, to compare with")
    parser.add_argument("--at-once", nargs="+", type=int, default=[], help="not by the size rule")
    parser.add_argument("--shape", nargs=3, type=int, metavar=("B", "K", "H"), help="not all three")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--one", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(one(*options.one)))
        return
    here = Path(sv.__file__).parents[1]
    ways = [ALONE, *([str(n) for n in options.at_once] or [TOGETHER])]
    beside = options.beside and options.beside.resolve()
    for shape in [options.shape] if options.shape else SHAPES:
        found = figures(shape, ways, here=here, beside=beside, turns=options.turns)
        for k, line in found.items():
            load = round(os.getloadavg()[0], 1)
            if options.json:
                print(json.dumps({"shape": shape, "secondaries": k, "load": load, **line}))
            else:
                cells = ", ".join(f"{name} {value:.2f}" for name, value in line.items())
                print(f"B, K, H = {shape}, k = {k}: {cells} (load {load})", flush=True)


if __name__ == "__main__":
    main()
