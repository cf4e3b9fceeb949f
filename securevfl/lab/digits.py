"""The demo's federation: real handwritten digits, split between five parties by FeT's protocol."""

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch

from securevfl.config.federation import FederationConfig, link_spec
from securevfl.config.reading import parse_federation
from securevfl.data.tables import PartyTable
from securevfl.federation.base import features_of
from securevfl.federation.build import primary_data
from securevfl.federation.run_plan import run_facts
from securevfl.lab.datasets import load_builtin, split_table
from securevfl.lab.pooled_methods import MethodFigures, train_combined
from securevfl.linkage.stage.linking import Linker
from securevfl.linkage.stage.party_keys import keys_of
from securevfl.runtime.run_options import RunOptions
from securevfl.runtime.simulation import simulate_federation

PARTIES = ("clinic", "lab-a", "lab-b", "lab-c", "lab-d")
"""The primary, then the secondaries."""


def digits_tables(*, seed: int) -> list[PartyTable]:
    """Return the tables of the five parties; ``entities`` holds the true matches."""
    digits = load_builtin("digits")
    return split_table(digits.X, digits.y, parties=len(PARTIES), seed=seed, names=PARTIES)


def write_tables(tables: Sequence[PartyTable], folder: Path) -> None:
    """Write each party's table as ``NAME.csv``; labels are called ``y``, truth ``entity``."""
    folder.mkdir(parents=True, exist_ok=True)
    for table in tables:
        frame = pd.DataFrame(
            {
                **dict(zip(table.key_names, table.keys.T, strict=True)),
                **dict(zip(table.feature_names, table.features.T, strict=True)),
                "entity": table.entities,
            }
        )
        if table.labels is not None:
            classes = table.classes
            frame["y"] = table.labels if classes is None else np.asarray(classes)[table.labels]
        frame.to_csv(folder / f"{table.name}.csv", index=False)


def digits_federation(
    *, seed: int, model: dict[str, Any], training: dict[str, Any], privacy: dict[str, Any]
) -> dict[str, Any]:
    """Return the federation file of the demo as a mapping, for ``tables`` next to it."""
    keys = [f"key_{axis}" for axis in range(4)]
    parties = [
        {
            "name": name,
            "role": "secondary" if number else "primary",
            "data": f"tables/{name}.csv",
            "key": keys,
            # Pixels count ink from 0 to 16. The lower bound makes 5, about what a pixel of any
            # scanned digit holds, the centre: public knowledge, no statistic of this table.
            "scaling": "bounds",
            "bounds": [-6.0, 16.0],
            **({} if number else {"label": "y", "address": "127.0.0.1:0"}),
        }
        for number, name in enumerate(PARTIES)
    ]
    return {
        "federation": {"name": "digits", "task": "multiclass", "seed": seed},
        "model": {"family": "fet", **model},
        # The digits are as many of each kind: a random split has all of them everywhere.
        "training": {**training, "split": "random"},
        "privacy": privacy,
        "linkage": {"metric": "euclidean", "protection": "none", "truth": "entity"},
        "party": parties,
    }


def demo_federation(*, seed: int) -> dict[str, Any]:
    """Return the demo's federation file.

    Encoders are class means: every secondary's ten numbers point at digits, and agreeing ones
    add up. What this gains at which epsilon is printed by ``research/results/digits_privacy.py``.
    """
    source = digits_federation(
        seed=seed,
        model={
            "neighbours": 4,
            "hidden": 10,
            "heads": 1,
            "release": "pooled",
            "top": "tied",
            "keys_as_features": False,
        },
        training={"batch_size": 64},
        privacy={
            "mechanism": "gaussian",
            "epsilon": 8.0,
            "delta": 1e-5,
            "unit": "secondary-record",
            "encoder": "frozen",
            "links_per_record": 1,
        },
    )
    source["encoder"] = {"method": "class-means", "labels": "shares"}
    source["linkage"]["choose"] = "records"
    source["party"].append({"name": "dealer", "role": "dealer"})
    return source


def demo_baselines(
    source: dict[str, Any], tables: list[PartyTable], *, tell: Callable[[str], None]
) -> dict[str, Any]:
    """Return test figures of the demo without noise, and with all features in one place.

    Args:
        source: The demo's federation file, as a mapping.
        tables: The primary's table, then the secondaries'.
        tell: Called with a line before each of the two trainings.
    """
    tell("without noise (simulated), for comparison")
    no_privacy = _without_noise(source, tables)
    tell("combine: all features in one place")
    combine = train_on_all_features(parse_federation(source, file="demo"), tables)
    return {
        "no_privacy_test": no_privacy["test"],
        "no_privacy_test_metrics": no_privacy["test_metrics"],
        "combine_test": combine.test,
        "combine_test_metrics": combine.test_metrics,
    }


def _without_noise(source: dict[str, Any], tables: list[PartyTable]) -> dict[str, Any]:
    privacy = {"mechanism": "none", "encoder": source["privacy"]["encoder"]}
    for name in ("links_per_record", "clip_norm"):
        if name in source["privacy"]:
            privacy[name] = source["privacy"][name]
    config = parse_federation({**source, "privacy": privacy}, file="demo without noise")
    with tempfile.TemporaryDirectory(prefix="securevfl-") as folder:
        return simulate_federation(
            config,
            {table.name: table for table in tables},
            RunOptions(run_folder=Path(folder)),
            with_alone=False,
        ).metrics


def train_on_all_features(config: FederationConfig, tables: list[PartyTable]) -> MethodFigures:
    """Train one network on all features, joined by the true matches."""
    primary, secondaries = tables[0], tables[1:]
    split, _ = run_facts(config, primary)
    spec = link_spec(config)
    linked = Linker(spec, keys_of(spec.keys, primary)).primary
    data = primary_data(config, primary, split, linked, device=torch.device("cpu"))
    return train_combined(
        config,
        data,
        primary=primary,
        secondaries=secondaries,
        features=[
            torch.from_numpy(features_of(party, table))
            for party, table in zip(config.secondaries, secondaries, strict=True)
        ],
    ).figures
