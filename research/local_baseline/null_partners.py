"""How often a verdict says that partners help when they know nothing, and when they do.

    python research/local_baseline/null_partners.py [--runs 200]
        [--methods fedsim,top1sim,fet,auto@8]
        [--partners noise,constant,permuted,weak,real] [--rows 360] [--test 0.4]
        [--validation 0.12] [--seeds-from 0]

Each run makes a table of its own: six columns of the primary, six of one partner, linked by an
exact position; regression and binary labels in turns. The partner's columns are pure noise,
constant, real ones whose rows are permuted, real, or real and half as strong (weak). The verdict is
that of ``securevfl simulate``, with its placebo. A method is a family without noise, or
FAMILY@EPSILON; the family ``auto`` is what ``encoder.method = "auto"`` chooses. A line a run goes
to ``--out`` as JSON, and a run that has a line is not done again. ``--keep`` writes counts to
``figures/null-partners.json``, ``--keep NAME`` to NAME there.
"""

import argparse
import contextlib
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

sys.path.append(str(Path(__file__).parents[2]))

from research.common.figure_files import keep
from securevfl.config.reading import parse_federation
from securevfl.data.tables import PartyTable
from securevfl.federation.base import Base
from securevfl.runtime.run_options import RunOptions
from securevfl.runtime.simulation import simulate_federation

PARTNERS = ("noise", "constant", "permuted", "weak", "real")
METHODS = ("fedsim", "top1sim", "fet", "auto@8")
COLUMNS = 6


def tables(partner: str, *, rows: int, seed: int) -> tuple[str, list[PartyTable]]:
    """Return the task and both parties' tables."""
    drawn = np.random.default_rng(seed)
    own, theirs = drawn.normal(size=(2, rows, COLUMNS)).astype(np.float32)
    keys = drawn.uniform(0, 100, size=(rows, 2))
    signal = own[:, 0] + own[:, 1] * own[:, 2] + 0.5 * np.abs(own[:, 3])
    if partner in ("real", "permuted"):
        signal = signal + theirs[:, 0] + theirs[:, 1]
    if partner == "weak":
        signal = signal + 0.5 * theirs[:, 0] + 0.4 * theirs[:, 1]
    label = signal + drawn.normal(size=rows)
    if partner == "constant":
        theirs = np.zeros_like(theirs)
    if partner == "permuted":
        theirs = theirs[drawn.permutation(rows)]
    task = "regression" if seed % 2 else "binary"
    names = tuple(f"x{i}" for i in range(COLUMNS))
    primary = PartyTable(
        name="own",
        key_names=("east", "north"),
        keys=keys,
        feature_names=names,
        features=own,
        labels=label if task == "regression" else (label > np.median(label)).astype(np.int64),
        classes=None if task == "regression" else (0, 1),
    )
    secondary = PartyTable(
        name="partner", key_names=("east", "north"), keys=keys, feature_names=names, features=theirs
    )
    return task, [primary, secondary]


def source(method: str, task: str, seed: int, test: float, validation: float) -> dict[str, Any]:
    """Return the federation file of a method."""
    family, _, epsilon = method.partition("@")
    model: dict[str, Any] = {"family": family}
    if family not in ("top1sim", "fedhssl", "fedlocalssl"):
        model["neighbours"] = 2
    privacy: dict[str, Any] = {"mechanism": "none"}
    extra: dict[str, Any] = {}
    if epsilon:
        privacy = {"epsilon": float(epsilon), "delta": 1e-5}
        if family == "fedlocalssl":
            model["norm"] = "layer"
    if family == "auto":
        model, extra = {}, {"encoder": {"method": "auto"}}
    return {
        "federation": {"name": "null", "task": task, "seed": seed},
        **({"model": model} if model else {}),
        **extra,
        "privacy": privacy,
        "training": {
            "test_fraction": test,
            "validation_fraction": validation,
            "split": "random",
        },
        "linkage": {"protection": "none"},
        "party": [
            {
                "name": "own", "role": "primary", "data": "own.csv", "key": ["east", "north"],
                "label": "y", "address": "127.0.0.1:0",
            },
            {
                "name": "partner", "role": "secondary", "data": "partner.csv",
                "key": ["east", "north"], "scaling": "bounds", "bounds": [-4, 4],
            },
        ],
    }  # fmt: skip


_bases: dict[tuple[int, int, bool | str], Base | None] = {}
"""Of this seed: the primary's table is the same beside every partner who says nothing of labels."""


def run(
    method: str, partner: str, *, rows: int, test: float, validation: float, seed: int
) -> dict[str, Any]:
    """Return one run's verdict and figures."""
    task, parties = tables(partner, rows=rows, seed=seed)
    config = parse_federation(source(method, task, seed, test, validation), file="null_partners")
    known = (seed, rows, partner if partner == "weak" else partner in ("real", "permuted"))
    if known not in _bases:
        for other in [one for one in _bases if one[0] != seed]:
            del _bases[other]
    with tempfile.TemporaryDirectory() as folder:
        result = simulate_federation(
            config,
            {table.name: table for table in parties},
            RunOptions(run_folder=Path(folder), fitted_base=_bases.get(known)),
            with_placebo=True,
        )
    _bases[known] = result.base
    metrics = result.metrics
    gain = metrics["gain"]
    return {
        "method": method,
        "partner": partner,
        "rows": rows,
        "test": test,
        "validation": validation,
        "decision": {name: metrics["base"][name] for name in ("gain", "error", "lambda")},
        "seed": seed,
        "task": task,
        "seconds": metrics["seconds"],
        **{name: gain[name] for name in ("value", "interval", "used", "outcome", "placebo")},
        **{name: gain[name] for name in ("partners", "partners_interval")},
    }


def counted(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return how often each verdict was said: a line a method and partner."""
    found = []
    for method, partner in dict.fromkeys((one["method"], one["partner"]) for one in lines):
        some = [one for one in lines if (one["method"], one["partner"]) == (method, partner)]
        used = [one for one in some if one["used"] == "joint"]
        found.append(
            {
                "method": method,
                "partner": partner,
                "runs": len(some),
                "used": len(used),
                "improves": sum(one["outcome"] == "better" for one in used),
                "without_placebo": sum((one["interval"] or [0])[0] > 0 for one in used),
                "worse": sum(one["outcome"] == "worse" for one in used),
            }
        )
    return found


def table(lines: list[dict[str, Any]]) -> str:
    """Return how often each verdict was said, as Markdown."""
    found = [
        "| method | partner | runs | joint used | **improves** | better than the local baseline "
        "alone | worse |\n| --- | --- | --- | --- | --- | --- | --- |"
    ]
    for one in counted(lines):
        counts = [one[name] for name in ("used", "improves", "without_placebo", "worse")]
        shares = " | ".join(f"{count} ({count / one['runs']:.1%})" for count in counts)
        found.append(f"| {one['method']} | {one['partner']} | {one['runs']} | {shares} |")
    return "\n".join(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=200, help="of each method and partner")
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--partners", default=",".join(PARTNERS))
    parser.add_argument("--rows", type=int, default=360)
    parser.add_argument("--test", type=float, default=0.4, help="share of the rows")
    parser.add_argument("--validation", type=float, help="share; default: 0.2 of the others")
    parser.add_argument("--seeds-from", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("runs/null-partners.jsonl"))
    parser.add_argument(
        "--keep", nargs="?", const="null-partners", metavar="NAME", help="file in figures/"
    )
    options = parser.parse_args()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    lines: list[dict[str, Any]] = []
    with contextlib.suppress(FileNotFoundError):
        lines = [json.loads(line) for line in options.out.read_text().splitlines()]
    validation = options.validation or round(0.2 * (1 - options.test), 4)
    sizes = {"rows": options.rows, "test": options.test, "validation": validation}
    lines = [one for one in lines if sizes.items() <= one.items()]
    done = {(one["method"], one["partner"], one["seed"]) for one in lines}
    seeds = list(range(options.seeds_from, options.seeds_from + options.runs))
    methods, partners = options.methods.split(","), options.partners.split(",")
    for seed in seeds:
        for method in methods:
            for partner in partners:
                if (method, partner, seed) in done:
                    continue
                lines.append(run(method, partner, seed=seed, **sizes))
                with options.out.open("a") as file:
                    file.write(json.dumps(lines[-1]) + "\n")
    lines = [
        one
        for one in lines
        if one["method"] in methods and one["partner"] in partners and one["seed"] in seeds
    ]
    print(table(lines))
    if options.keep:
        keep(options.keep, counted(lines), seeds=seeds)


if __name__ == "__main__":
    main()
