"""Tables of two parties that link by fuzzy keys: data sets that FedSim's paper compares on."""

import dataclasses
from pathlib import Path
from typing import Literal

import numpy as np
import pandas as pd
from sklearn.datasets import make_classification

from research.common.folder_tables import load_folder
from research.common.full_tables import load_full
from securevfl.data.tables import PartyTable
from securevfl.lab.datasets import split_pair, write_tables

Task = Literal["regression", "binary", "multiclass"]
SPLIT_SEED = 0
# Agreed ranges of one width, round numbers about Seattle and Singapore.
RANGES = {
    "house_kc": [[-122.6, -121.2], [46.8, 48.2]],
    "hdb": [[103.6, 104.1], [1.1, 1.6]],
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tables:
    """Two parties' tables and what is to be learned from them."""

    parties: list[PartyTable]
    task: Task
    neighbours: int
    truth: bool
    """Whether true matches are known."""

    scaling: str = "standard"
    """How the parties scale their features; ``clamped`` where some words are rare."""


def places(name: str, *, rows: int | None, key_noise: float) -> Tables:
    """A pair linked by longitude and latitude, with a sample of the primary's rows."""
    if key_noise:
        raise SystemExit(f"{name}: its keys are real; --key-noise is for tables that are split")
    primary, secondary = load_folder(name)
    if rows is not None and rows < primary.num_rows:
        chosen = np.sort(np.random.RandomState(0).permutation(primary.num_rows)[:rows])
        assert primary.labels is not None
        primary = dataclasses.replace(
            primary,
            keys=primary.keys[chosen],
            features=primary.features[chosen],
            labels=primary.labels[chosen],
        )
    return Tables(
        parties=[primary, secondary],
        task="regression",
        neighbours=50,
        truth=False,
        scaling="clamped",
    )


def letter(*, rows: int | None, key_noise: float) -> Tables:
    """Letters: four of sixteen features are the keys."""
    table = load_full("letter")
    chosen = np.random.RandomState(0).permutation(len(table.y))[:rows]
    parties = split_pair(
        table.X[chosen], table.y[chosen], key_dim=4, key_noise=key_noise, seed=SPLIT_SEED
    )
    return Tables(parties=parties, task="multiclass", neighbours=20, truth=True)


def fate(name: str, task: Task, *, rows: int | None, key_noise: float) -> Tables:
    """One of FATE's tables, joined by its exact number and split again with fuzzy keys."""
    primary, secondary = load_folder(name)
    place = {int(key): row for row, key in enumerate(secondary.keys[:, 0])}
    order = [place[int(key)] for key in primary.keys[:, 0]]
    X = np.hstack([primary.features, secondary.features[order]]).astype(np.float64)[:rows]
    assert primary.labels is not None
    parties = split_pair(
        X, primary.labels[:rows], key_dim=4, key_noise=key_noise, seed=SPLIT_SEED, task=task
    )
    return Tables(parties=parties, task=task, neighbours=20, truth=True)


def synthetic(*, random_keys: bool, rows: int | None, key_noise: float) -> Tables:
    """The paper's ``sklearn``: 60,000 rows, 50 features, 5 of them keys; or random keys.

    What the paper does not say of the classification problem is as in its authors' generator.
    """
    X, y = make_classification(
        n_samples=60_000,
        n_features=50,
        n_informative=20,
        n_redundant=10,
        n_clusters_per_class=3,
        class_sep=0.7,
        shift=None,
        random_state=0,
    )
    parties = split_pair(
        X[:rows], y[:rows], key_dim=5, key_noise=key_noise, seed=SPLIT_SEED, task="binary"
    )
    if random_keys:
        random = np.random.default_rng(SPLIT_SEED)
        keys = random.uniform(size=parties[0].keys.shape)
        parties = [
            dataclasses.replace(
                party,
                keys=(keys + key_noise * random.normal(size=keys.shape))[party.entities],
            )
            for party in parties
        ]
    return Tables(parties=parties, task="binary", neighbours=20, truth=True)


def write_table(folder: Path, role: str, table: PartyTable) -> None:
    """Write a party's table as ROLE.csv in a folder, with its entities where it has them."""
    if table.entities is not None:
        write_tables([dataclasses.replace(table, name=role)], folder)
        return
    columns = dict(zip(table.key_names, table.keys.T, strict=True))
    columns |= dict(zip(table.feature_names, table.features.T, strict=True))
    if table.labels is not None:
        columns["y"] = table.labels
    pd.DataFrame(columns).to_csv(folder / f"{role}.csv", index=False)
