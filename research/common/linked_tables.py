"""Tables of two parties that link by fuzzy keys: data sets that FedSim's paper compares on."""

import dataclasses
from pathlib import Path
from typing import Literal

import numpy as np
import pandas as pd
from sklearn.datasets import make_classification

from research.common.folder_tables import load_folder
from research.common.full_tables import load_full
from securevfl.core.conventions import stream
from securevfl.core.errors import DataError
from securevfl.data.tables import PartyTable
from securevfl.lab.datasets import split_views, write_tables

Task = Literal["regression", "binary", "multiclass"]
SPLIT_SEED = 0
# Agreed ranges of one width, round numbers about Seattle and Singapore.
RANGES = {
    "house_kc": [[-122.6, -121.2], [46.8, 48.2]],
    "hdb": [[103.6, 104.1], [1.1, 1.6]],
}


def split_pair(
    X: np.ndarray,
    y: np.ndarray,
    *,
    key_dim: int,
    key_noise: float = 0.0,
    seed: int = 0,
    task: Task = "multiclass",
) -> list[PartyTable]:
    """Split a table by FedSim's protocol for synthetic two-party data.

    ``key_dim`` features drawn at random become the common features: the keys. The others are
    dealt out equally. Keys are scaled to [0, 1] and each party adds its own noise to them.

    Args:
        X: Features, one row a record, finite.
        y: Labels, one a row.
        key_dim: Common features.
        key_noise: Standard deviation of the noise, in ranges of a key dimension.
        seed: Everything random here follows from it.
        task: What the label is.

    Returns:
        The primary's table and the secondary's; ``entities`` has the true matches.

    Raises:
        DataError: If the table has a value that is not finite, or too few features.

    References:
        [FedSim] section 6.1 ("Dataset", "Baselines"): common features are not trained on.

    Differs from [FedSim]: the paper perturbs identifiers without giving their unit; here the
    noise is relative to the range, so that one setting means the same for every feature.
    """
    if X.shape[1] < key_dim + 2:
        raise DataError(
            f"X: has {X.shape[1]} features; {key_dim} keys and one feature for each of two "
            f"parties need {key_dim + 2}"
        )
    columns = stream(seed, "split", "features").permutation(X.shape[1])
    common = np.asarray(X, dtype=np.float64)[:, columns[:key_dim]]
    spread = common.max(axis=0) - common.min(axis=0)
    if not (spread > 0).all():
        raise DataError("X: a feature that was drawn as a key is constant; drop it or change seed")
    own, other = (np.sort(part).tolist() for part in np.array_split(columns[key_dim:], 2))
    views = {"primary": own, "secondary-1": other}
    keys = (common - common.min(axis=0)) / spread
    parties = []
    # Its keys, of the primary's features, are replaced.
    for number, table in enumerate(split_views(X, y, views=views, key_dim=1, seed=seed, task=task)):
        noise = stream(seed, "split", "key-noise", number).normal(size=keys.shape)
        parties.append(
            dataclasses.replace(
                table,
                key_names=tuple(f"key_{axis}" for axis in range(key_dim)),
                keys=(keys + key_noise * noise)[table.entities],
            )
        )
    return parties


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
