"""FedHSSL's section VI on stand-ins: what ISO noise hides of labels, and what it costs.

    python research/fedhssl/privacy.py run --results iso.jsonl     # goes on where it was
    python research/fedhssl/privacy.py tables --results iso.jsonl
    python research/fedhssl/privacy.py cap --point 1 0.538 0.471 --point 5 0.519 0.449

The paper's Tables VI, VII, XI and XII hold what the model completion attack recovers beside the
main task, and ``tables`` prints them. The attacker is a secondary that fits a head to its own
representations of 80 training rows with known labels, and guesses test rows; of several secondaries
the one that recovers most counts. ``cap`` takes figures from elsewhere.
"""

import argparse
import dataclasses
import itertools
import math
import statistics
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.stats import t

sys.path.append(str(Path(__file__).parents[2]))

from research.common.aligned.views import scarce_rows
from research.fedhssl import methods
from research.fedhssl.fedhssl import PAPER_SETS, SETS, Results, timed
from research.fedhssl.trade_off import Protected, calibrated_averaged_performance
from securevfl.lab.attacks.labels import KNOWN, completed_head, standardise
from securevfl.models.fedhssl.family import FedHSSLBottom

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
            dataclasses.replace(setting, **at),
            cell["method"],
            cell["algorithm"],
            rows,
            cell["seed"],
        )
    before = (
        None
        if encoders is None
        else recovered(prepared, untuned(prepared, setting, cell["method"], encoders), cell["seed"])
    )
    for scale in tuned:
        tuning = dataclasses.replace(setting, iso_gradients=scale)
        bottoms: list[FedHSSLBottom] = []
        measured, more = timed(
            methods.fine_tune, prepared, tuning, cell["method"], encoders, rows.labelled,
            cell["seed"], bottoms,
        )  # fmt: skip
        found = {"pretrained": before, "recovered": recovered(prepared, bottoms, cell["seed"])}
        metric = prepared.data.metric
        results.add(
            **cell, lambda_f=scale, metric=metric, **measured, **found, seconds=seconds + more
        )
        seconds = 0.0


def untuned(
    prepared: methods.Prepared,
    setting: methods.Setting,
    method: str,
    encoders: list[methods.Encoders],
) -> list[FedHSSLBottom]:
    """Return the secondaries' models as pretraining leaves them."""
    config = methods.family_config(method, setting)
    found = []
    for number, own in enumerate(encoders[1:], 1):
        bottom = FedHSSLBottom(
            config,
            num_features=prepared.views[number].shape[1],
            columns=prepared.columns[number],
        )
        bottom.encoders.load_pretrained(own)
        found.append(bottom.to(prepared.views[number].device).eval())
    return found


def recovered(prepared: methods.Prepared, bottoms: list[FedHSSLBottom], seed: int) -> float:
    """Return the share of test rows' labels that the best of the secondaries guesses.

    [FedHSSL] section VI-B: a head on the own model, fitted to rows with known labels.
    """
    labels, test = prepared.labels.cpu().numpy(), prepared.data.test
    classes = int(labels.max()) + 1
    random = np.random.default_rng(seed)
    train = random.permutation(prepared.data.train)
    each = max(2, KNOWN // classes)
    known = np.concatenate([train[labels[train] == label][:each] for label in range(classes)])
    found = []
    for bottom, view in zip(bottoms, prepared.views[1:], strict=True):
        numbers = standardise(methods.represented(bottom, view, np.concatenate([known, test])))
        taught, asked = numbers[: len(known)], numbers[len(known) :]
        scores = completed_head(taught, labels[known], asked, classes)
        found.append(float((scores.argmax(axis=1) == labels[test]).mean()))
    return max(found)


def tables(args: argparse.Namespace) -> None:
    lines = [line for path in args.results for line in Results(path).lines]
    for name in dict.fromkeys(line["set"] for line in lines):
        own = [line for line in lines if line["set"] == name]
        print(f"\n**{name}**, {own[0]['metric']}, {LABELLED} labels\n")
        print_pretraining(own)
        print()
        print_fine_tuning(own)
        print()
        print_attack(own)
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


def print_attack(lines: list[Line]) -> None:
    """Print what the attack recovers: Table VI, and Tables XI, VII and XII."""
    print("| attack after pretraining, 20 % aligned | lambda_p | recovered | main task |")
    print("| --- | --- | --- | --- |")
    of: dict[str, Any] = {"algorithm": "simsiam", "lambda_f": 0.0}
    rows = [("SimSiam alone", {**of, "method": "fedlocalssl", "lambda_p": 0.0})]
    for strength in (0.0, *PRETRAINING["both"]):
        places = "both" if strength else None
        cell: dict[str, Any] = {
            **of,
            "method": "fedhssl",
            "aligned": 0.2,
            "places": places,
            "lambda_p": strength,
        }
        rows.append(("FedHSSL", cell))
    for label, cell in rows:
        found = chosen(lines, "pretrained", **cell)
        if found:
            main_task = mean(chosen(lines, **cell))
            print(f"| {label} | {cell['lambda_p']:g} | {mean(found)} | {main_task} |")
    print()
    strengths = FINE_TUNING[1:]
    heads = [f"recovered (main task) at lambda_f = {scale:g}" for scale in FINE_TUNING]
    print(f"| attack after fine-tuning | lambda_p | {' | '.join(heads)} | CAP |")
    print("| --- | --- |" + " --- |" * (len(heads) + 1))
    for algorithm, method, share, places, strength, tuned in grid():
        cell = {
            "method": method, "algorithm": algorithm, "aligned": share, "places": places,
            "lambda_p": strength,
        }  # fmt: skip
        if len(tuned) == 1 or not chosen(lines, "recovered", **cell, lambda_f=strengths[-1]):
            continue
        by_strength = {
            scale: (
                chosen(lines, "recovered", **cell, lambda_f=scale),
                chosen(lines, **cell, lambda_f=scale),
            )
            for scale in FINE_TUNING
        }
        caps = {
            seed: calibrated_averaged_performance(
                [
                    Protected(
                        strength=scale,
                        utility=by_strength[scale][1][seed],
                        recovered=by_strength[scale][0][seed],
                    )
                    for scale in strengths
                ]
            )
            for seed in by_strength[strengths[-1]][0]
        }
        cells = " | ".join(f"{mean(found)} ({mean(task)})" for found, task in by_strength.values())
        label = method + (f", {share:.0%} aligned" if share else "")
        print(f"| {label} | {strength:g} | {cells} | {mean(caps)} |")


def chosen(lines: list[Line], figure: Any = "value", /, **cell: Any) -> dict[int, float]:
    """Return a figure of a cell by seed."""
    return {
        line["seed"]: line[figure]
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
