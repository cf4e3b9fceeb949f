"""Measure SplitAvg beside its baselines over a grid of sizes; print a Markdown table or JSON.

    python research/splitavg/splitavg.py                          # the whole grid, some ten minutes
    python research/splitavg/splitavg.py --parties 5 --elements 640000 --json

All variants of one grid point run interleaved in one set of processes, so that their ratios hold
on a busy machine too. What each variant is: ``research/splitavg/variants.py``.
"""

import argparse
import itertools
import json
import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[2]))

from research.splitavg.bench import SplitAvgBenchmark, measure

PARTIES = (2, 5, 10)
ELEMENTS = (8_000, 82_000, 640_000, 2_560_000)


def main() -> None:
    """Run the grid, or the one point that is asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parties", type=int, nargs="+", default=PARTIES, help="secondaries")
    parser.add_argument("--elements", type=int, nargs="+", default=ELEMENTS)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument(
        "--keep-memory",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="all variants keep freed memory, as parties of a run do; or none does",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object a grid point")
    arguments = parser.parse_args()
    if not arguments.json:
        print("| k | elements | variant | wall ms | CPU ms | sent kB | received kB | max error |")
        print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for parties, elements in itertools.product(arguments.parties, arguments.elements):
        settings = SplitAvgBenchmark(
            parties=parties,
            elements=elements,
            repeats=arguments.repeats,
            keeps_memory=arguments.keep_memory,
        )
        result = measure(settings)
        if arguments.json:
            print(json.dumps(result), flush=True)
        else:
            for name, figures in result["variants"].items():
                print(row(parties, elements, name, figures), flush=True)


def row(parties: int, elements: int, name: str, figures: dict[str, Any]) -> str:
    """Return one line of the table; bytes are those of one secondary and of the primary."""
    sent = figures["bytes_sent"]["secondary1"] / 1000
    received = figures["bytes_received"]["primary"] / 1000
    return (
        f"| {parties} | {elements:,} | {name} | {figures['wall_ms']:.1f} | "
        f"{figures['cpu_ms']:.1f} | {sent:,.0f} | {received:,.0f} | {figures['max_error']:.1e} |"
    )


if __name__ == "__main__":
    main()
