"""Top models on the releases of frozen encoders: networks and estimators, with and without noise.

    python benchmarks/tops.py --store tops.jsonl

Digits by the protocol and the settings of ``benchmarks/frontier.py``, without a base, so that the
top models themselves are compared: the network ``attention`` (the default of ``fet``), the network
``additive``, and the estimators ``linear`` and ``boosting`` on the primary's own columns, keys and
released numbers. Prints a table in Markdown; ``--store`` keeps each run as a line and skips what is
there.
"""

import argparse
import statistics
from functools import partial
from pathlib import Path
from typing import Any

from frontier import SETS, Joint, Store, federation_of

TOPS = ("attention", "additive", "linear", "boosting")
EPSILONS = ("none", "8")


def main() -> None:
    """Run what is not stored yet, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3, help="seeds 1, 2, ...")
    parser.add_argument("--store", type=Path, help="a file that keeps what is done")
    asked = parser.parse_args()
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


def _cell(values: list[float]) -> str:
    spread = statistics.stdev(values) if len(values) > 1 else 0.0
    return f"{statistics.mean(values):.3f} ± {spread:.3f}"


if __name__ == "__main__":
    main()
