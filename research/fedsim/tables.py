"""FedSim beside its baselines, by the protocol of its paper: tables, ablations, key noise.

    SECUREVFL_DATA=... python research/fedsim/tables.py TABLE [--out DIR] [--methods A,B,...]
        [--seeds 5] [--first-seed 0] [--rows N] [--neighbours K] [--epochs N] [--key-noise X]
        [--jobs N] [--of methods|tau|secondary|parameters] [--tau 1 0.1 ...] [--plot FILE.svg]

Writes the parties' tables and a federation file to DIR/TABLE..., then runs ``securevfl lab
compare`` on it; finished runs are not trained again. Other parts of the paper, by ``--of``:

- ``tau`` (Figure 6): links by Bloom codes, noise on similarities at each bound of ``--tau``, 1
  being none; families that read no similarities are compared once. hdb and house_kc.
- ``secondary`` (Table 2): a perceptron on the primary's features alone, and one on those of the
  secondary's nearest records alone.
- ``parameters`` (Table 9): of each method's network, all parties' together.
"""

import argparse
import dataclasses
import json
import statistics
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import tomli_w
import torch
from scipy.spatial import KDTree

sys.path.append(str(Path(__file__).parents[2]))

from research.common.linked_tables import (
    RANGES,
    Tables,
    fate,
    letter,
    places,
    synthetic,
    write_table,
)
from research.common.panels import panels_of, save
from securevfl.config.reading import parse_federation, read_federation
from securevfl.federation.base import task_head
from securevfl.federation.build import build_bottom, build_top
from securevfl.federation.run_plan import run_facts
from securevfl.lab.methods import method_source_of
from securevfl.lab.pooled_methods import train_in_one_place
from securevfl.lab.study_commands import compare
from securevfl.models.alone.margins import BaselineConfig

METHODS = "solo,solo-tuned,top1sim,featuresim,avgsim,fedsim,fet"
READS_SIMILARITIES = ("featuresim", "fedsim", "fedsim-paper")
# No noise brings tau below 0.4 over the deviation of a distance in bits, 8e-4 on hdb. Codes of four
# times as many bits, the longest, leave a quarter of it, at four times the cost.
CODE_BITS = 16_384
TAUS = [1.0, 0.1, 0.01, 0.003, 0.001]
# The paper's ablations: each gate off, or replaced by what it replaces it with. All of the paper's
# form is the method fedsim-paper; fedsim-gates has its gates alone, fedsim-as-it-comes leaves the
# aggregate's scale, fedsim-lamb has its optimizer, all else being ours.
VARIANTS: dict[str, dict[str, Any]] = {
    "fedsim-gates": {"family": "fedsim", "weight": "learned", "merge": "convolution"},
    "fedsim-as-it-comes": {"family": "fedsim", "pair_scale": "none"},
    "fedsim-lamb": {
        "family": "fedsim",
        "optimizer": "lamb",
        "learning_rate": 1e-2,
        "weight_decay": 1e-5,
    },
    "fedsim-no-weight": {"family": "fedsim", "weight": "similarity"},
    "fedsim-no-sort": {"family": "fedsim", "sort": "none"},
    "fedsim-mlp": {"family": "fedsim", "merge": "perceptron"},
    "fedsim-average": {"family": "fedsim", "merge": "average"},
    "fedsim-no-gates": {"family": "fedsim", "weight": "none", "sort": "none", "merge": "average"},
    # Step sizes that fall along half a cosine.
    "fet-cosine": {"family": "fet", "schedule": "cosine"},
    "fedsim-cosine": {"family": "fedsim", "schedule": "cosine"},
    # Near links that do not start ahead of far ones, or further ahead.
    "fedsim-even": {"family": "fedsim", "rank_prior": 0.0},
    "fedsim-decay-2": {"family": "fedsim", "rank_prior": 2.0},
    "fet-even": {"family": "fet", "rank_prior": 0.0},
    "fet-decay-2": {"family": "fet", "rank_prior": 2.0},
    # FeT's positional encoding with frequencies of one scale, as in its paper, and a finer one.
    "fet-one-scale": {"family": "fet", "fourier_octaves": 0},
    "fet-fine-scale": {"family": "fet", "fourier_octaves": 0, "fourier_scale": 0.1},
}


TABLES: dict[str, Callable[..., Tables]] = {
    "hdb": lambda **more: places("hdb", **more),
    "house_kc": lambda **more: places("house_kc", **more),
    "letter": letter,
    "fate_breast": lambda **more: fate("fate_breast", "binary", **more),
    "fate_vehicle": lambda **more: fate("fate_vehicle", "multiclass", **more),
    "sklearn": lambda **more: synthetic(random_keys=False, **more),
    "sklearn-random": lambda **more: synthetic(random_keys=True, **more),
}


def write_federation(
    folder: Path,
    name: str,
    tables: Tables,
    options: argparse.Namespace,
    linkage: Mapping[str, Any] | None = None,
) -> Path:
    """Write both tables and the federation file that the methods are compared on."""
    folder.mkdir(parents=True, exist_ok=True)
    parties = []
    for number, table in enumerate(tables.parties):
        role = "secondary" if number else "primary"
        write_table(folder, role, table)
        parties.append(
            {
                "name": role,
                "role": role,
                "data": f"{role}.csv",
                "key": list(table.key_names),
                "scaling": tables.scaling,
            }
        )
    parties[0] |= {"label": "y", "address": "127.0.0.1:0"}
    neighbours = options.neighbours or tables.neighbours
    training = {
        "epochs": options.epochs,
        "batch_size": options.batch_size,
        "learning_rate": options.learning_rate,
        "weight_decay": 1e-4,
        "patience": options.patience,
    }
    # Solo at equal settings, and as every run reports it: longer, as it costs next to nothing.
    baselines = {
        "solo": training,
        "combine": training,
        "solo-tuned": {"family": "solo", **dataclasses.asdict(BaselineConfig())},
    }
    source = {
        "federation": {"name": name, "task": tables.task, "seed": options.first_seed},
        "model": {"family": "fedsim", "neighbours": neighbours, "keys_as_features": options.keys},
        "training": {**training, "optimizer": options.optimizer, "split": "random"},
        "base": {"estimator": "none"},
        "privacy": {"mechanism": "none", "encoder": "trained"},
        "linkage": linkage
        or {"protection": "none", **({"truth": "entity"} if tables.truth else {})},
        "methods": {**baselines, **VARIANTS},
        "party": parties,
    }
    path = folder / "fed.toml"
    path.write_text(tomli_w.dumps(source), encoding="utf-8")
    return path


def against_tau(tables: Tables, options: argparse.Namespace) -> None:
    """[FedSim] Figure 6: methods that read similarities, by the bound on one greedy attacker."""
    if options.table not in RANGES:
        raise SystemExit(f"tau: codes need agreed ranges; take {' or '.join(RANGES)}")
    wanted = options.methods.split(",")
    reading = [method for method in wanted if method in READS_SIMILARITIES]
    found: dict[str, dict[float, tuple[float, float]]] = {}
    for tau in options.tau:
        name = f"{options.table}-tau-{tau:g}"
        linkage = {
            "protection": "bloom",
            "ranges": RANGES[options.table],
            "code_bits": CODE_BITS,
            **({"similarity_tau": tau} if tau < 1 else {}),
        }
        path = write_federation(options.out / name, name, tables, options, linkage)
        methods = wanted if tau == 1 else reading
        compared(path, options, ",".join(methods))
        figures = json.loads((path.parent / "compare" / "comparison.json").read_text())
        for method in methods:
            of = figures["methods"][method]
            found.setdefault(method, {})[tau] = of["mean"], of["std"] or 0.0
    print(f"| tau | {' | '.join(found)} |\n| --- |{' --- |' * len(found)}")
    for tau in options.tau:
        cells = [
            f"{of[tau][0]:.4g} ± {of[tau][1]:.2g}" if tau in of else "" for of in found.values()
        ]
        print(f"| {tau:g} | {' | '.join(cells)} |")
    if options.plot is not None:
        figure, (axes,) = panels_of(1, most=1, size=(5.4, 3.2))
        for number, (method, of) in enumerate(found.items()):
            means, spreads = zip(*of.values(), strict=True)
            if len(of) > 1:
                axes.errorbar(list(of), means, yerr=spreads, marker="o", capsize=2, label=method)
            else:
                axes.axhline(means[0], color=f"C{number}", linestyle="--", label=method)
        axes.set_xscale("log")
        axes.set_xlabel("tau, bound on the success of one greedy attacker; 1: no noise")
        axes.set_ylabel("test RMSE")
        axes.set_title(f"{options.table}, links by Bloom codes", fontsize=9)
        axes.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))
        save(figure, options.plot)


def each_alone(path: Path, tables: Tables, options: argparse.Namespace) -> None:
    """[FedSim] Table 2: what the features of either party say of the label by themselves."""
    primary, secondary = tables.parties
    _, nearest = KDTree(secondary.keys).query(primary.keys)
    theirs = dataclasses.replace(
        primary,
        features=secondary.features[nearest],
        feature_names=secondary.feature_names,
        schema=None,
    )
    source = read_federation(path).source
    means = []
    print("| party | test, mean and deviation |\n| --- | --- |")
    for name, table in (("primary", primary), ("secondary", theirs)):
        values = []
        for seed in range(options.first_seed, options.first_seed + options.seeds):
            federation = {**source["federation"], "seed": seed}
            config = parse_federation({**source, "federation": federation}, file=str(path))
            own = dataclasses.replace(table, name="primary")
            solo, _ = train_in_one_place(
                config, {"primary": own}, "solo", BaselineConfig(), torch.device("cpu")
            )
            values.append(solo.test)
        means.append(statistics.mean(values))
        deviation = statistics.stdev(values) if len(values) > 1 else 0.0
        print(f"| {name} | {means[-1]:.4g} ± {deviation:.2g} |", flush=True)
    better = means[1] - means[0] if tables.task == "regression" else means[0] - means[1]
    print(f"| primary better by | {better / means[1]:+.1%} of the secondary's |")


def sizes(path: Path, tables: Tables, options: argparse.Namespace) -> None:
    """[FedSim] Table 9: numbers of parameters, all parties' together."""
    config = read_federation(path)
    primary, secondary = tables.parties
    split, _ = run_facts(config, primary)
    print("| method | primary | secondary | together |\n| --- | --- | --- | --- |")
    for method in options.methods.split(","):
        own = parse_federation(method_source_of(config, method)[0], file=method)
        top = build_top(own, primary, task_head(own, primary, split))
        bottom = build_bottom(own, own.secondaries[0], secondary)
        counts = [sum(one.numel() for one in model.parameters()) for model in (top, bottom)]
        cells = [f"{count:,}" for count in (*counts, sum(counts))]
        print(f"| {method} | {' | '.join(cells)} |")


def compared(path: Path, options: argparse.Namespace, methods: str) -> None:
    compare(
        path,
        methods=methods,
        seeds=options.seeds,
        jobs=options.jobs,
        out=path.parent / "compare",
        as_json=options.json,
    )


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("table", choices=list(TABLES))
    parser.add_argument(
        "--of", choices=("methods", "tau", "secondary", "parameters"), default="methods"
    )
    parser.add_argument("--tau", nargs="+", type=float, default=TAUS)
    parser.add_argument("--plot", type=Path, metavar="FILE.svg", help="with --of tau")
    parser.add_argument("--out", type=Path, default=Path("runs/fedsim"))
    parser.add_argument("--methods", default=METHODS, help=f"variants: {', '.join(VARIANTS)}")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--rows", type=int, default=20_000, help="0 takes all")
    parser.add_argument("--neighbours", type=int, help="K; default: the table's")
    parser.add_argument("--key-noise", type=float, default=0.0, help="in ranges of a key")
    parser.add_argument("--keys", action="store_true", help="keys are inputs of all methods")
    parser.add_argument("--epochs", type=int, default=25)
    parser.add_argument("--patience", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--optimizer", default="adamw")
    parser.add_argument("--json", action="store_true")
    return parser


def main() -> None:
    options = arguments().parse_args()
    tables = TABLES[options.table](rows=options.rows or None, key_noise=options.key_noise)
    if options.of == "tau":
        against_tau(tables, options)
        return
    noise = f"-noise-{options.key_noise:g}" if options.key_noise else ""
    name = f"{options.table}{noise}{'-keys' if options.keys else ''}"
    path = write_federation(options.out / name, name, tables, options)
    if options.of == "methods":
        compared(path, options, options.methods)
    else:
        {"secondary": each_alone, "parameters": sizes}[options.of](path, tables, options)


if __name__ == "__main__":
    main()
