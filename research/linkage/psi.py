"""Private set intersection: CPU time of each party and bytes, beside ``openmined-psi``.

    python research/linkage/psi.py [--sizes 10000 100000 1000000]

Both parties have so many ids, half of them in common. Each party's steps run one after another in
this process, on one core, so the figures are CPU seconds of the party that does them. Three
messages cross, one way after another, whatever the sizes: a line of 50 ms adds 0.15 s.

``openmined-psi`` is left out where it is not installed. Its client learns which of its elements the
server has, not where: it could not put records into the primary's order. Its server is told
nothing; its setup message is compressed (a Golomb set with false positives of 1e-9).
"""

import argparse
import importlib
import os
import random
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, TypeVar

from securevfl.linkage.cores import parts_of
from securevfl.stages.psi import oprf

T = TypeVar("T")


def timed(step: Callable[[], T]) -> tuple[T, float]:
    """Return what a step gives, and its CPU seconds."""
    began = time.process_time()
    found = step()
    return found, time.process_time() - began


def ours(mine: list[str], theirs: list[str]) -> dict[str, Any]:
    """Return what the protection costs."""
    context, key = os.urandom(16), oprf.fresh_scalar()
    rows, first = timed(lambda: oprf.evaluate((key, context, mine)))
    shuffled = random.sample(theirs, len(theirs))
    (points, inverses), second = timed(lambda: oprf.blind((context, shuffled)))
    answers, third = timed(lambda: oprf.evaluate_blinded((key, points)))

    def match() -> int:
        values = oprf.unblind((context, shuffled, inverses, answers))
        keys = dict(zip(parts_of(values, oprf.VALUE_BYTES), shuffled, strict=True))
        return sum(value in keys for value in parts_of(rows, oprf.VALUE_BYTES))

    found, fourth = timed(match)
    return {
        "found": found,
        "primary s": first + third,
        "secondary s": second + fourth,
        "MB": (len(rows) + len(points) + len(answers)) / 1e6,
    }


def openmined(mine: list[str], theirs: list[str]) -> dict[str, Any]:
    """Return what the library's protocol costs, the secondary being its client."""
    library = importlib.import_module("private_set_intersection.python")
    server = library.server.CreateWithNewKey(True)
    client = library.client.CreateWithNewKey(True)
    setup, first = timed(
        lambda: server.CreateSetupMessage(1e-9, len(theirs), mine, library.DataStructure.GCS)
    )
    request, second = timed(lambda: client.CreateRequest(theirs))
    response, third = timed(lambda: server.ProcessRequest(request))
    found, fourth = timed(lambda: client.GetIntersection(setup, response))
    sizes = [len(one.SerializeToString()) for one in (setup, request, response)]
    return {
        "found": len(found),
        "primary s": first + third,
        "secondary s": second + fourth,
        "MB": sum(sizes) / 1e6,
    }


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", type=int, nargs="+", default=[10_000, 100_000, 1_000_000])
    methods = {"psi": ours}
    if find_spec("private_set_intersection"):
        methods["openmined-psi"] = openmined
    print("| ids at each | method | primary, CPU s | secondary, CPU s | MB | found |")
    print("| --- | --- | --- | --- | --- | --- |")
    for size in parser.parse_args().sizes:
        mine = [f"id {number}" for number in range(size)]
        theirs = [f"id {number}" for number in range(size // 2, size + size // 2)]
        for name, method in methods.items():
            row = method(mine, theirs)
            print(
                f"| {size:,} | {name} | {row['primary s']:.1f} | {row['secondary s']:.1f} "
                f"| {row['MB']:.1f} | {row['found']:,} |"
            )
            sys.stdout.flush()


if __name__ == "__main__":
    main()
