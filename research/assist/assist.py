"""Assisted boosting beside FeT, boosted trees of the primary alone, and pooled trees.

    [SECUREVFL_DATA=...] python research/assist/assist.py TABLE [--seeds 3] [--estimators A,B]
        [--rounds T] [--neighbours K] [--rows N] [--no-fet] [--label-epsilon none,4,2]

Prints a line a method: the test figure of every seed. ``pooled`` are boosted trees on the primary's
columns and, of every secondary, those of the record whose key is nearest: what links can give to
trees that see everything. Tables: ``digits`` (README's ten lines), ``exact`` (made up, linked
exactly), ``mfeat`` (six views, linked exactly) and ``house_kc``. With label epsilons rows are split
at random in every method, as these ask for.
"""

import argparse
import dataclasses
import itertools
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.spatial import cKDTree
from sklearn.datasets import make_classification

import securevfl as sv

sys.path.append(str(Path(__file__).parents[2]))

from research.common.full_tables import load_full
from securevfl.data.tables import PartyTable
from securevfl.federation.base import own_inputs, targets_of, task_head
from securevfl.federation.run_plan import run_facts
from securevfl.lab.datasets import load_folder
from securevfl.models.alone.margins import OwnInputs, fit_margins


def digits(_rows: int) -> list[PartyTable]:
    table = sv.datasets.load_builtin("digits")
    return sv.datasets.split_table(table.X, table.y, parties=5, key_dim=4, key_noise=0.05, seed=0)


def exact(rows: int) -> list[PartyTable]:
    """Two classes by 24 columns of four parties, and keys that say who is who."""
    X, y = make_classification(
        rows, 24, n_informative=16, n_redundant=4, n_clusters_per_class=3, random_state=0
    )
    return with_ids(
        sv.datasets.split_table(X, y, parties=4, key_dim=1, key_noise=0.0, task="binary")
    )


def mfeat(rows: int) -> list[PartyTable]:
    """Six kinds of features of the same digits, a party each."""
    table = load_full("mfeat")
    chosen = np.random.RandomState(0).permutation(len(table.y))[:rows]
    parties = sv.datasets.split_table(table.X[chosen], table.y[chosen], parties=6, key_dim=1)
    edges = np.cumsum([0, *(len(columns) for columns in views(table))])
    order = np.concatenate(views(table))
    wide = table.X[chosen][:, order]
    return with_ids(
        [
            dataclasses.replace(
                party,
                features=wide[:, edges[n] : edges[n + 1]][party.entities].astype(np.float32),
                feature_names=tuple(f"x{axis}" for axis in range(edges[n + 1] - edges[n])),
            )
            for n, party in enumerate(parties)
        ]
    )


def views(table: Any) -> list[list[int]]:
    return [list(columns) for columns in table.views.values()]


def with_ids(parties: list[PartyTable]) -> list[PartyTable]:
    """Give all parties one key, the number of the row that the table was split from."""
    return [
        dataclasses.replace(
            party, key_names=("id",), keys=np.asarray(party.entities, dtype=float)[:, None]
        )
        for party in parties
    ]


def house_kc(rows: int) -> list[PartyTable]:
    primary, secondary = load_folder("house_kc")
    assert primary.labels is not None
    chosen = np.sort(np.random.RandomState(0).permutation(primary.num_rows)[:rows])
    sample = {name: getattr(primary, name)[chosen] for name in ("keys", "features", "labels")}
    return [dataclasses.replace(primary, **sample), secondary]


TABLES: dict[str, Callable[[int], list[PartyTable]]] = {
    "digits": digits,
    "exact": exact,
    "mfeat": mfeat,
    "house_kc": house_kc,
}


RANGES = {"house_kc": (0.0, 2_000_000.0)}
"""Of labels, where they have an epsilon: what anybody would say of the prices of houses."""


def pooled_inputs(parties: list[PartyTable], *, linked: bool) -> OwnInputs:
    """Return the primary's columns, and the nearest records' of all others."""
    primary, *others = parties
    columns = [own_inputs(primary).values]
    for party in others if linked else []:
        _, nearest = cKDTree(party.keys).query(primary.keys)
        columns.append(party.features[nearest].astype(float))
    return OwnInputs(values=np.hstack(columns))


def trees(parties: list[PartyTable], run: Any, *, linked: bool, seed: int) -> float:
    """Return the test figure of boosted trees, on the rows of a run."""
    config = run.trained.config
    table = run.trained.tables[config.primary.name]
    split, _ = run_facts(config, table)
    head = task_head(config, table, split)
    targets = targets_of(table, split, head)
    inputs = pooled_inputs([table, *parties[1:]], linked=linked)
    model = fit_margins(
        "boosting", inputs.take(split.train), targets.numpy()[split.train], head, seed=seed
    )
    margins = torch.from_numpy(model.margins(inputs.take(split.test)))
    return head.metric(margins, targets[torch.from_numpy(split.test)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("table", choices=list(TABLES))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rows", type=int, default=4000)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--neighbours", type=int, default=1)
    parser.add_argument("--estimators", default="boosting,forest,linear")
    parser.add_argument("--no-fet", action="store_true")
    parser.add_argument("--label-epsilon", default="none")
    options = parser.parse_args()
    parties = TABLES[options.table](options.rows)
    names = {"digits": 10, "mfeat": 10}
    task = {"exact": "binary", "house_kc": "regression"}.get(options.table, "multiclass")
    common: dict[str, Any] = {"privacy": sv.dp.Privacy(mechanism="none"), "task": task}
    epsilons = [None if one == "none" else float(one) for one in options.label_epsilon.split(",")]
    split: Any = "random" if any(epsilons) else None
    lower, upper = RANGES.get(options.table, (None, None))
    run: Any = None
    found: dict[str, list[float]] = {}
    seconds: dict[str, float] = {}

    def took(name: str, start: float, value: float) -> None:
        found.setdefault(name, []).append(value)
        seconds[name] = seconds.get(name, 0.0) + time.monotonic() - start
        print(name, round(value, 4), flush=True)

    for seed in range(options.seeds):
        settings = {**common, "seed": seed, "with_alone": False}
        pairs = itertools.product(options.estimators.split(","), epsilons)
        for estimator, epsilon in pairs:
            model = sv.models.Assist(
                outputs=names.get(options.table, 1),
                rounds=options.rounds,
                neighbours=options.neighbours,
                estimator=estimator,
                label_epsilon=epsilon,
                label_lower=lower if epsilon else None,
                label_upper=upper if epsilon else None,
            )
            start = time.monotonic()
            training = sv.TrainingSettings(batch_size=1024, split=split)
            run = sv.simulate(parties, model, training=training, base="boosting", **settings)
            joint = run.metrics["joint_test_metrics"][run.metrics["metric"]]
            labels = f", labels at {epsilon:g}" if epsilon else ""
            took(f"assist, {estimator}{labels}", start, joint)
            rounds = [line["validation"] for line in run.history]
            print("   validation by round", [round(one, 4) for one in rounds])
        for name, linked in (("alone", False), ("pooled", True)):
            start = time.monotonic()
            took(name, start, trees(parties, run, linked=linked, seed=seed))
        if not options.no_fet:
            start = time.monotonic()
            fet = sv.models.FeT(neighbours=4, release="pooled")
            training = sv.TrainingSettings(
                epochs=15, batch_size=64, learning_rate=3e-3, split=split
            )
            run = sv.simulate(parties, fet, training=training, base="none", **settings)
            took("fet", start, run.metrics["test"])
            start = time.monotonic()
            run = sv.simulate(parties, fet, training=training, base="boosting", **settings)
            took("fet on the base", start, run.metrics["joint_test_metrics"][run.metrics["metric"]])
    print(f"\n{options.table}, {run.metrics['metric']}, {options.seeds} seeds")
    for name, values in found.items():
        spread = np.std(values, ddof=1) if len(values) > 1 else 0.0
        each = " ".join(f"{one:.4f}" for one in values)
        print(
            f"| {name} | {np.mean(values):.4f} | {spread:.4f} | {each} | "
            f"{seconds[name] / len(values):.0f} s |"
        )


if __name__ == "__main__":
    main()
