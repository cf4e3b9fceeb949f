"""Top models on the releases of frozen encoders: networks and estimators, with and without noise.

    python research/frontier/tops.py --store tops.jsonl

Digits by the protocol and the settings of ``research/frontier/frontier.py``, without a base, so
that the top models themselves are compared: the network ``attention`` (the default of ``fet``), the
network ``additive``, and the estimators ``linear`` and ``boosting`` on the primary's own columns,
keys and released numbers. Prints a table in Markdown; ``--store`` keeps each run as a line and
skips what is there.

    python research/frontier/tops.py --choose earnings visits computers diamonds --store tops.jsonl

Whether released numbers choose between encoders and top models: each candidate's gain over the
local baseline on test rows, that of the one with the best metric of training rows out of fold, and
that of the best in hindsight. An encoder's release is charged, so a run that chooses between
encoders pays for both; here each candidate has the whole epsilon, which flatters that choice.
"""

import argparse
import statistics
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

sys.path.append(str(Path(__file__).parents[2]))

from research.frontier.frontier import SETS, Joint, Store, federation_of
from securevfl.config.reading import parse_federation
from securevfl.federation.base import Base
from securevfl.runtime.run_options import RunOptions
from securevfl.runtime.simulation import simulate_federation

TOPS = ("attention", "additive", "linear", "boosting")
EPSILONS = ("none", "8")
CANDIDATES = (
    ("shares", "mixed"),
    ("shares", "tied"),
    ("shares", "boosting"),
    ("principal", "boosting"),
    ("principal", "linear"),
)
"""Method of ``federation_of`` and ``model.top``; the first is what ``auto`` takes."""


def main() -> None:
    """Run what is not stored yet, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3, help="seeds 1, 2, ...")
    parser.add_argument("--store", type=Path, help="a file that keeps what is done")
    parser.add_argument("--choose", nargs="+", choices=SETS, help="tables to choose on")
    parser.add_argument("--epsilons", nargs="+", default=["8", "4"], help="to choose at")
    asked = parser.parse_args()
    if asked.choose:
        for name in asked.choose:
            for epsilon in asked.epsilons:
                choose(Store(asked.store), name, epsilon, range(1, asked.seeds + 1))
        return
    store, seeds = Store(asked.store), range(1, asked.seeds + 1)
    print("| top | " + " | ".join(f"epsilon {one}" for one in EPSILONS) + " |")
    print("| --- |" + " --- |" * len(EPSILONS))
    alone: dict[int, float] = {}
    for top in TOPS:
        cells = []
        for epsilon in EPSILONS:
            found = [_run(store, top, seed, epsilon) for seed in seeds]
            alone |= dict(zip(seeds, (one["alone"] for one in found), strict=True))
            cells.append(_cell([one["joint"] for one in found]))
        print(f"| `{top}` | " + " | ".join(cells) + " |", flush=True)
    print(f"| the primary alone | {_cell(list(alone.values()))} | |")


def _run(store: Store, top: str, seed: int, epsilon: str) -> dict[str, float]:
    tables = SETS["digits"].make(seed)
    source: dict[str, Any] = federation_of("digits", tables, seed, epsilon, "principal")
    source["model"]["top"] = top
    source["base"] = {"estimator": "none"}
    return store.get(top, source, partial(Joint(tables), source))


def choose(store: Store, name: str, epsilon: str, seeds: range) -> None:
    """Print every candidate's mean gain, and the gains of choosing and of hindsight."""
    gains: dict[str, list[float]] = {}
    for seed in seeds:
        tables, bases = SETS[name].make(seed), list[Base]()
        found = {}
        for method, top in CANDIDATES:
            source = federation_of(name, tables, seed, epsilon, method)
            source["model"]["top"] = top
            made = partial(_measured, tables, source, bases)
            found[f"{method}, {top}"] = store.get(f"{name} seed {seed}", source, made)
        for candidate, one in found.items():
            gains.setdefault(candidate, []).append(one["gain"])
        chosen = max(found.values(), key=lambda one: one["chosen_by"])
        gains.setdefault("any chosen", []).append(chosen["gain"])
        best = max(one["gain"] for one in found.values())
        gains.setdefault("best in hindsight", []).append(best)
    first = np.array(next(iter(gains.values())))
    print(f"{name}, epsilon {epsilon}, {len(first)} seeds: gain; over the first, paired")
    for candidate, values in gains.items():
        more = np.array(values) - first
        print(f"  {candidate:20} {_cell(values)}   {more.mean():+.3f} ± {more.std(ddof=1):.3f}")


def _measured(tables: Any, source: dict[str, Any], bases: list[Base]) -> dict[str, float]:
    """Run one federation; return its gain, and its metric of training rows out of fold."""
    with tempfile.TemporaryDirectory() as folder:
        result = simulate_federation(
            parse_federation(source, file="tops"),
            {table.name: table for table in tables.parties},
            RunOptions(run_folder=Path(folder), fitted_base=bases[0] if bases else None),
            kept=False,
        )
    if result.base is not None:
        bases[:] = [result.base]
    metrics = result.metrics
    sign = 1 if metrics["higher_is_better"] else -1
    gain = sign * (metrics["test"] - metrics["alone_test"])
    return {"gain": gain, "chosen_by": sign * metrics["train"]}


def _cell(values: list[float]) -> str:
    spread = statistics.stdev(values) if len(values) > 1 else 0.0
    return f"{statistics.mean(values):.3f} ± {spread:.3f}"


if __name__ == "__main__":
    main()
