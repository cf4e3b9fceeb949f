"""What ``securevfl lab advise`` says, beside what then happens with the real partners.

    python research/advise/advised.py --data digits diabetes breast_cancer

A table that comes with scikit-learn is dealt out to parties by FeT's protocol, whose keys are made
of the primary's columns; or, with ``--keys ids``, with an id as the key, which tells nothing. The
rehearsal sees the federation file and the primary's table; the real runs see every party's. Both
are paired with alone, each on its own columns, over the same seeds.
"""

import argparse
import json
import os
import statistics
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from securevfl.config.federation import FederationConfig
from securevfl.config.reading import parse_federation
from securevfl.data.tables import PartyTable
from securevfl.lab.advice import advise
from securevfl.lab.datasets import load_builtin, split_table, write_tables
from securevfl.lab.rehearsal import merge_settings, settings_for
from securevfl.runtime.run_options import RunOptions
from securevfl.runtime.simulation import simulate_federation

PARTIES = {"digits": 5, "diabetes": 3, "breast_cancer": 4, "wine": 3}
_KEY_NOISE = 2**0.5 * 0.05
KEYS = {"digits": 4, "diabetes": 2, "breast_cancer": 3, "wine": 2}


def tables_of(data: str, seed: int, *, ids: bool) -> list[PartyTable]:
    """Deal a table out; every seed draws columns, keys and orders anew."""
    full = load_builtin(data)
    tables = split_table(
        full.X, full.y, parties=PARTIES[data], key_dim=KEYS[data], seed=seed, task=full.task
    )
    if not ids:
        return tables
    number = np.random.default_rng(seed).permutation(len(full.X)).astype(np.float64)
    return [
        replace(table, key_names=("id",), keys=number[table.entities][:, None]) for table in tables
    ]


def federation_of(
    data: str, tables: list[PartyTable], settings: dict[str, Any], *, ids: bool
) -> dict[str, Any]:
    """Return README's template for these tables; ranges stand in for what would be declared."""
    numbers = 2
    model = {
        "family": "fet",
        "neighbours": 4,
        "hidden": numbers * (len(tables) - 1),
        "release": "pooled",
        "top": "additive",
        "keys_as_features": not ids,
    }
    return {
        "federation": {"name": data, "task": load_builtin(data).task},
        "model": {**model, **settings.get("model", {})},
        "encoder": settings.get("encoder", {"method": "principal"}),
        "training": {"epochs": 50},
        "privacy": {"epsilon": 8.0, "delta": 1e-6, "encoder": "frozen", "links_per_record": 1},
        "linkage": {"protection": "none", "choose": "records", "truth": "entity"},
        "party": [
            {
                "name": table.name,
                "role": "secondary" if number else "primary",
                "data": f"{table.name}.csv",
                "key": list(table.key_names),
                "scaling": "bounds",
                "bounds": {
                    name: [float(low), float(high) if high > low else float(low) + 1]
                    for name, low, high in zip(
                        table.feature_names,
                        table.features.min(axis=0),
                        table.features.max(axis=0),
                        strict=True,
                    )
                },
                **({} if number else {"label": "y", "address": "127.0.0.1:0"}),
            }
            for number, table in enumerate(tables)
        ],
    }


def really(
    config: FederationConfig, tables: list[PartyTable], epsilons: list[float | None], seed: int
) -> dict[float | None, tuple[float, float]]:
    """Return alone's test figure and the gain over it, by epsilon, with the real partners."""
    found: dict[float | None, tuple[float, float]] = {}
    alone: float | None = None
    for epsilon in epsilons:
        source = merge_settings(config.source, settings_for(config, epsilon))
        source["federation"] = {**source["federation"], "seed": seed}
        with tempfile.TemporaryDirectory() as folder:
            metrics = simulate_federation(
                parse_federation(source, file=config.federation.name),
                {table.name: table for table in tables},
                RunOptions(run_folder=Path(folder)),
                with_alone=alone is None,
            ).metrics
        alone = metrics["alone_test"] if alone is None else alone
        assert alone is not None
        sign = 1 if metrics["higher_is_better"] else -1
        found[epsilon] = (alone, sign * (metrics["test"] - alone))
    return found


def measure(data: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return rehearsed and real gains, an entry an epsilon."""
    asked = [*options.epsilons, None]
    rehearsed: dict[float | None, list[tuple[float, float]]] = {one: [] for one in asked}
    real: dict[float | None, list[tuple[float, float]]] = {one: [] for one in asked}
    told: list[float] = []
    for seed in range(1, options.seeds + 1):
        ids = options.keys == "ids"
        tables = tables_of(data, seed, ids=ids)
        source = federation_of(data, tables, json.loads(options.settings), ids=ids)
        source["federation"] = {**source["federation"], "seed": seed}
        config = parse_federation(source, file=data)
        with tempfile.TemporaryDirectory() as folder:
            write_tables(tables[:1], Path(folder))
            advice = advise(
                Path(folder) / "fed.toml",
                config,
                epsilons=options.epsilons,
                seeds=1,
                # Pretended and own keys are as far apart as two parties' are.
                key_noise=0.0 if ids else _KEY_NOISE,
                data_root=Path(folder),
            )
        for one in advice.rehearsed:
            rehearsed[one.epsilon].append((one.alone, one.gain))
        told.append(advice.casts[0].predictable_share)
        for epsilon, figures in really(config, tables, asked, seed).items():
            real[epsilon].append(figures)
    return [
        {
            "epsilon": epsilon,
            "told": statistics.mean(told),
            **{
                name: {
                    "alone": statistics.mean(alone for alone, _ in found[epsilon]),
                    "gain": statistics.mean(gain for _, gain in found[epsilon]),
                    "deviation": statistics.stdev(gain for _, gain in found[epsilon]),
                    "gains": [gain for _, gain in found[epsilon]],
                }
                for name, found in (("rehearsed", rehearsed), ("real", real))
            },
        }
        for epsilon in asked
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", nargs="+", choices=PARTIES, default=list(PARTIES))
    parser.add_argument("--epsilons", nargs="+", type=float, default=[8.0])
    parser.add_argument("--seeds", type=int, default=5, help="how many, from 1 on; at least 2")
    parser.add_argument("--keys", choices=("fet", "ids"), default="fet")
    parser.add_argument("--settings", default="{}", help="JSON: model and encoder of the file")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    results = {data: measure(data, options) for data in options.data}
    if options.json:
        print(json.dumps(results))
        return
    print(
        "| table, keys | epsilon | told already | rehearsed: alone | rehearsed gain "
        "| real: alone | real gain |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for data, rows in results.items():
        for row in rows:
            word = "none" if row["epsilon"] is None else f"{row['epsilon']:g}"
            cells = [
                f"{one['alone']:.3f} | {one['gain']:+.3f} ± {one['deviation']:.3f}"
                for one in (row["rehearsed"], row["real"])
            ]
            head = f"{data}, {options.keys} | {word} | {row['told']:.0%}"
            print(f"| {head} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
