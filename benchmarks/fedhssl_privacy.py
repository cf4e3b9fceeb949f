"""FedHSSL's section VI on stand-ins: what ISO noise costs in accuracy, at each of its places.

    python benchmarks/fedhssl_privacy.py run --results iso.jsonl     # goes on where it was
    python benchmarks/fedhssl_privacy.py tables --results iso.jsonl
    python benchmarks/fedhssl_privacy.py cap --point 1 0.538 0.471 --point 5 0.519 0.449

The paper's Tables VI, VII, XI and XII hold what the model completion attack recovers beside the
main task. That attack is not built: the tables here have the main task alone, and ``cap`` takes the
attack's figures from whoever has them.
"""

import argparse
import dataclasses
import itertools
import math
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import fedhssl_methods as methods
import torch
from aligned.views import scarce_rows
from fedhssl import PAPER_SETS, SETS, Results, timed
from scipy.stats import t

from securevfl.lab.trade_off import Protected, calibrated_averaged_performance

Line = dict[str, Any]

# [FedHSSL] section VI and Tables VI, VII and XI: the strengths, labels and aligned shares there; of
# weights 1 as well.
PRETRAINING = {
    "projections": (0.1, 0.4, 5.0),
    "weights": (0.1, 0.4, 1.0, 5.0),
    "both": (0.1, 0.4, 1.0, 5.0),
}
FINE_TUNING = (0.0, 1.0, 5.0, 25.0)
LABELLED = 200
PLACES = {
    "projections": ("iso_projections",),
    "weights": ("iso_weights",),
    "both": ("iso_projections", "iso_weights"),
}


def run(args: argparse.Namespace) -> None:
    results = Results(args.results)
    for name, seed in itertools.product(args.set, range(args.first_seed, args.seeds)):
        load, setting = SETS[name]
        prepared = methods.prepare(load(args.folder), args.device)
        for algorithm, method, share, places, strength, tuned in grid():
            cell = {
                "set": name, "seed": seed, "method": method, "labelled": LABELLED,
                "algorithm": algorithm, "aligned": share, "places": places, "lambda_p": strength,
            }  # fmt: skip
            left = [one for one in tuned if not results.has(**cell, lambda_f=one)]
            if left:
                measure(results, prepared, setting, cell, left)


def grid() -> Iterable[tuple[str | None, str, float | None, str | None, float, tuple[float, ...]]]:
    """Yield algorithm, method, aligned share, places, lambda_p, and values of lambda_f."""
    yield None, "fedsplitnn", None, None, 0.0, FINE_TUNING
    yield "simsiam", "fedlocalssl", None, None, 0.0, FINE_TUNING
    yield "simsiam", "fedhssl", 0.2, None, 0.0, FINE_TUNING
    for strength in PRETRAINING["both"]:
        yield "simsiam", "fedhssl", 0.2, "both", strength, FINE_TUNING
    yield "simsiam", "fedhssl", 0.4, "both", PRETRAINING["both"][0], FINE_TUNING
    for places in ("projections", "weights"):
        for strength in PRETRAINING[places]:
            yield "simsiam", "fedhssl", 0.2, places, strength, (0.0,)
    yield "byol", "fedhssl", 0.2, None, 0.0, (0.0,)
    for strength in PRETRAINING["both"]:
        yield "byol", "fedhssl", 0.2, "both", strength, (0.0,)


def measure(
    results: Results,
    prepared: methods.Prepared,
    setting: methods.Setting,
    cell: dict[str, Any],
    tuned: Iterable[float],
) -> None:
    """Pretrain once, if the method does, and fine-tune at each strength."""
    rows = scarce_rows(
        prepared.data, aligned=cell["aligned"] or 0.2, labelled=LABELLED, seed=cell["seed"]
    )
    at = dict.fromkeys(PLACES.get(cell["places"], ()), cell["lambda_p"])
    encoders, seconds = None, 0.0
    if cell["algorithm"]:
        (encoders, _), seconds = timed(
            methods.pretrain,
            prepared,
            methods.with_pretraining(setting, **at),
            cell["method"],
            cell["algorithm"],
            rows,
            cell["seed"],
        )
    for scale in tuned:
        tuning = dataclasses.replace(setting, iso_gradients=scale)
        measured, more = timed(
            methods.fine_tune, prepared, tuning, cell["method"], encoders, rows.labelled,
            cell["seed"],
        )  # fmt: skip
        metric = prepared.data.metric
        results.add(**cell, lambda_f=scale, metric=metric, **measured, seconds=seconds + more)
        seconds = 0.0


def tables(args: argparse.Namespace) -> None:
    lines = [line for path in args.results for line in Results(path).lines]
    for name in dict.fromkeys(line["set"] for line in lines):
        own = [line for line in lines if line["set"] == name]
        print(f"\n**{name}**, {own[0]['metric']}, {LABELLED} labels\n")
        print_pretraining(own)
        print()
        print_fine_tuning(own)
    print(f"\n{sum(line['seconds'] for line in lines):.0f} CPU-seconds")


def print_pretraining(lines: list[Line]) -> None:
    """Print Table VI's main-task columns, and what noise at each place changes."""
    print("| FedHSSL, 20 % aligned: noise on | lambda_p | accuracy | points against no noise |")
    print("| --- | --- | --- | --- |")
    for algorithm in ("simsiam", "byol"):
        of = {"method": "fedhssl", "algorithm": algorithm, "aligned": 0.2, "lambda_f": 0.0}
        base = chosen(lines, **of, places=None)
        rows = [("nothing", 0.0, base)]
        for places, strengths in PRETRAINING.items():
            for strength in strengths:
                own = chosen(lines, **of, places=places, lambda_p=strength)
                rows.append((places, strength, own))
        for places, strength, own in rows:
            if own and own.keys() == base.keys():
                difference = gain(own, base) if strength else ""
                print(f"| {algorithm}: {places} | {strength:g} | {mean(own)} | {difference} |")


def print_fine_tuning(lines: list[Line]) -> None:
    """Print the main-task columns of Tables VII and XI."""
    heads = [f"lambda_f = {scale:g}" for scale in FINE_TUNING]
    print(f"| method | lambda_p | {' | '.join(heads)} | points at {FINE_TUNING[-1]:g} |")
    print("| --- | --- |" + " --- |" * (len(heads) + 1))
    seeds = {line["seed"] for line in lines}
    for algorithm, method, share, places, strength, tuned in grid():
        if len(tuned) == 1:
            continue
        cell = {
            "method": method, "algorithm": algorithm, "aligned": share, "places": places,
            "lambda_p": strength,
        }  # fmt: skip
        rows = [chosen(lines, **cell, lambda_f=scale) for scale in tuned]
        if not all(row.keys() == seeds for row in rows):
            continue
        label = ", ".join(part for part in (method, algorithm) if part)
        label += f", {share:.0%} aligned" if share else ""
        cells = " | ".join(mean(row) for row in rows)
        print(f"| {label} | {strength:g} | {cells} | {gain(rows[-1], rows[0])} |")


def chosen(lines: list[Line], **cell: Any) -> dict[int, float]:
    """Return the values of a cell by seed."""
    return {
        line["seed"]: line["value"]
        for line in lines
        if all(line[name] == value for name, value in cell.items())
    }


def mean(values: dict[int, float]) -> str:
    """Return mean and standard deviation."""
    return f"{statistics.mean(values.values()):.3f} ± {statistics.stdev(values.values()):.3f}"


def gain(values: dict[int, float], base: dict[int, float]) -> str:
    """Return the mean difference in points, paired by seed, with half its 95 % t interval."""
    found = [100 * (values[seed] - base[seed]) for seed in values.keys() & base.keys()]
    half = t.ppf(0.975, len(found) - 1) * statistics.stdev(found) / math.sqrt(len(found))
    return f"{statistics.mean(found):+.1f} ± {half:.1f}"


def cap(args: argparse.Namespace) -> None:
    """Print the calibrated averaged performance of measured strengths."""
    points = [Protected(strength=s, utility=u, recovered=r) for s, u, r in args.point]
    print(f"{calibrated_averaged_performance(points):.3f}")


def main() -> None:
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    commands = parser.add_subparsers(required=True)
    running = commands.add_parser("run", help="measure what is not in the results yet")
    running.add_argument("--set", nargs="+", choices=list(SETS), default=["digits", "mfeat"])
    running.add_argument("--folder", type=Path, help=f"of one of {', '.join(PAPER_SETS)}")
    running.add_argument("--seeds", type=int, default=3)
    running.add_argument("--first-seed", type=int, default=0)
    running.add_argument("--device", default="cpu")
    running.add_argument("--results", type=Path, required=True)
    showing = commands.add_parser("tables", help="print what was measured")
    showing.add_argument("--results", type=Path, required=True, nargs="+")
    averaging = commands.add_parser("cap", help="the figure of the paper's Tables VII and XII")
    averaging.add_argument(
        "--point",
        nargs=3,
        type=float,
        action="append",
        required=True,
        metavar=("LAMBDA", "ACCURACY", "RECOVERED"),
        help="what was measured at one strength; once for each",
    )
    for command, function in ((running, run), (showing, tables), (averaging, cap)):
        command.set_defaults(function=function)
    args = parser.parse_args()
    args.function(args)


if __name__ == "__main__":
    main()
