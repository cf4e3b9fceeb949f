"""Data sets for experiments: tables by name, and splits of one table between parties."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pandas as pd
import sklearn.datasets
from jaxtyping import Float64
from sklearn.decomposition import PCA

from securevfl.core import checks
from securevfl.core.conventions import Task, stream
from securevfl.core.errors import ConfigError, DataError
from securevfl.data.keys_and_labels import encode_labels
from securevfl.data.tables import Labels, PartyTable


def split_table(
    X: npt.ArrayLike,
    y: npt.ArrayLike,
    *,
    parties: int,
    key_dim: int = 4,
    key_noise: float = 0.05,
    seed: int = 0,
    task: Task = "multiclass",
    names: Sequence[str] | None = None,
) -> list[PartyTable]:
    """Split a table by FeT's protocol for multi-party fuzzy data.

    Features are divided equally at random. The primary's features are reduced to
    ``key_dim`` dimensions by PCA, and each dimension is brought to mean 0 and standard deviation 1:
    these are the universal keys. Each party, also the primary, gets them with independent noise
    N(0, key_noise^2). Every secondary's rows have another random order.

    Args:
        X: Features, one row a record, finite.
        y: Labels, one a row.
        parties: The primary and at least one secondary.
        key_dim: Dimensions of the keys, at most the primary's number of features.
        key_noise: Standard deviation of the noise, in standard deviations of a key dimension.
        seed: Seed of all random choices here.
        task: Kind of label.
        names: One name a party; default ``primary``, ``secondary-1``, ...

    Returns:
        The primary's table with labels, then the secondaries'. ``entities`` holds the row number
        in ``X``: the true match, for quality figures only.

    Raises:
        ConfigError: If an argument is out of range.
        DataError: If the table has a value that is not finite, or too few features.

    References:
        [FeT] section 7.1 ("Datasets") gives the protocol; it does not give the unit of the noise.
        The authors' code (Xtra-Computing/FeT @ cd6e119, src/preprocess/FuzzySplitter.py)
        standardises the PCA dimensions first, and so do we. The splits of its
        appendix G are :func:`split_views` of the columns that research/fet/uneven.py draws.

    Differs from [FeT]: PCA and its scale are fitted to all rows, where the authors' code takes
    the first 70 %. Keys stand for attributes that exist before any training, and the split into
    training and test rows is not known here. The order of the features is drawn from ``seed``.
    """
    checks.at_least(2, parties=parties)
    values, targets = _check_arrays(X, y)
    if parties > values.shape[1]:
        raise DataError(
            f"X: has {values.shape[1]} features, too few for {parties} parties with one each"
        )
    columns = stream(seed, "split", "features").permutation(values.shape[1])
    parts = [np.sort(part) for part in np.array_split(columns, parties)]
    views = {
        name: part.tolist() for name, part in zip(_party_names(names, parties), parts, strict=True)
    }
    keys = _principal_keys(values[:, views[next(iter(views))]], key_dim)
    return _deal(values, targets, keys, views, key_noise=key_noise, seed=seed, task=task)


def split_views(
    X: npt.ArrayLike,
    y: npt.ArrayLike,
    *,
    views: Mapping[str, Sequence[int]],
    key_dim: int = 4,
    key_noise: float = 0.05,
    seed: int = 0,
    task: Task = "multiclass",
) -> list[PartyTable]:
    """Split a table by given columns of each party; the first party is the primary.

    Keys are made as in :func:`split_table`, which this generalises to data whose columns come from
    different sources already (the six measurements of ``mfeat``, the halves of an image).

    Raises:
        ConfigError: If there are fewer than two views, or a column is given twice or not there.
        DataError: As in :func:`split_table`.
    """
    values, targets = _check_arrays(X, y)
    checks.at_least(2, views=len(views))
    given = [column for columns in views.values() for column in columns]
    if len(set(given)) < len(given):
        raise ConfigError("views: a column is given to two parties, or twice to one")
    if not all(0 <= column < values.shape[1] for column in given):
        raise ConfigError(f"views: columns must lie in 0 to {values.shape[1] - 1}")
    keys = _principal_keys(values[:, list(next(iter(views.values())))], key_dim)
    return _deal(values, targets, keys, views, key_noise=key_noise, seed=seed, task=task)


def _check_arrays(X: npt.ArrayLike, y: npt.ArrayLike) -> tuple[np.ndarray, "pd.Series[Any]"]:
    values = np.asarray(X, dtype=np.float64)
    targets = np.asarray(y)
    if values.ndim != 2 or targets.ndim != 1 or len(values) != len(targets):
        raise DataError(
            f"X and y: must be a matrix and a vector of equal length, got the shapes "
            f"{values.shape} and {targets.shape}"
        )
    if not np.isfinite(values).all():
        row, column = np.argwhere(~np.isfinite(values))[0]
        raise DataError(f"X: row {row + 1}, column {column}: is not finite")
    if np.abs(values).max(initial=0) > np.finfo(np.float32).max:
        raise DataError("X: a value is too large for float32; change its unit")
    return values, pd.Series(targets)


def _party_names(names: Sequence[str] | None, parties: int) -> tuple[str, ...]:
    if names is None:
        return ("primary", *(f"secondary-{number}" for number in range(1, parties)))
    if len(names) != parties or len(set(names)) < parties:
        raise ConfigError(f"names: must be {parties} different names, got {list(names)}")
    return tuple(names)


def _principal_keys(
    features: Float64[np.ndarray, "rows features"], key_dim: int
) -> Float64[np.ndarray, "rows key_dim"]:
    checks.at_least(1, key_dim=key_dim)
    if key_dim > min(features.shape):
        raise DataError(
            f"the primary's part has {features.shape[0]} rows and {features.shape[1]} features, "
            f"too few for key_dim={key_dim}"
        )
    # The full solver has no randomness, so keys are the same in every run.
    components = PCA(n_components=key_dim, svd_solver="full").fit_transform(features)
    deviation = components.std(axis=0)
    if not (deviation > 1e-9 * max(deviation[0], 1e-300)).all():
        raise DataError(
            f"the primary's features vary in fewer than key_dim={key_dim} directions; lower it"
        )
    return components / deviation


def _deal(
    values: Float64[np.ndarray, "rows features"],
    targets: "pd.Series[Any]",
    keys: Float64[np.ndarray, "rows key_dim"],
    views: Mapping[str, Sequence[int]],
    *,
    key_noise: float,
    seed: int,
    task: Task,
) -> list[PartyTable]:
    checks.non_negative(key_noise=key_noise)
    labels: Labels
    labels, classes = encode_labels(targets, task=task, where="y")
    tables = []
    for number, (name, columns) in enumerate(views.items()):
        noise = stream(seed, "split", "key-noise", number).normal(size=keys.shape)
        order = np.arange(len(values), dtype=np.int64)
        if number > 0:
            # Equal row numbers at two parties would give the true match away.
            order = stream(seed, "split", "order", number).permutation(len(values))
        tables.append(
            PartyTable(
                name=name,
                key_names=tuple(f"key_{axis}" for axis in range(keys.shape[1])),
                keys=(keys + key_noise * noise)[order],
                feature_names=tuple(f"x{column}" for column in columns),
                features=values[:, list(columns)].astype(np.float32)[order],
                labels=labels if number == 0 else None,
                classes=classes if number == 0 else None,
                entities=order,
            )
        )
    return tables


_LOADERS: Final[Mapping[str, tuple[Callable[..., Any], Task]]] = {
    "digits": (sklearn.datasets.load_digits, "multiclass"),
    "breast_cancer": (sklearn.datasets.load_breast_cancer, "binary"),
    "wine": (sklearn.datasets.load_wine, "multiclass"),
    "diabetes": (sklearn.datasets.load_diabetes, "regression"),
}


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class FullTable:
    """A table that is not split between parties yet."""

    name: str
    """The table's name."""

    X: Float64[np.ndarray, "rows features"]
    """Features."""

    y: np.ndarray
    """Labels."""

    task: Task
    """Kind of label: regression, binary or multiclass."""

    views: Mapping[str, tuple[int, ...]]
    """Columns that come from one source each; empty if all come from the same."""


def load_builtin(name: str) -> FullTable:
    """Return a real table that comes with scikit-learn: nothing is downloaded.

    Raises:
        ConfigError: If there is none of that name.
    """
    if name not in _LOADERS:
        raise ConfigError(f"data: no built-in table {name!r}; there are {', '.join(_LOADERS)}")
    loader, task = _LOADERS[name]
    X, y = loader(return_X_y=True)
    return FullTable(name=name, X=np.asarray(X, dtype=np.float64), y=y, task=task, views={})


PARTIES = ("clinic", "lab-a", "lab-b", "lab-c", "lab-d")
"""Names of the primary and the secondaries."""


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


def demo_federation(*, seed: int) -> dict[str, Any]:
    """Return the demo's federation file as a mapping, for ``tables`` next to it.

    Encoders are class means: every secondary's ten numbers point at digits, and agreeing ones
    add up. What this gains at which epsilon is printed by ``research/results/digits_privacy.py``.
    """
    parties = [
        {
            "name": name,
            "role": "secondary" if number else "primary",
            "data": f"tables/{name}.csv",
            "key": [f"key_{axis}" for axis in range(4)],
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
        "model": {
            "family": "class-means",
            "neighbours": 4,
            "numbers": 10,
            "top": "tied",
            "keys_as_features": False,
        },
        # The digits are as many of each kind: a random split has all of them everywhere.
        "training": {"batch_size": 64, "split": "random"},
        "privacy": {
            "mechanism": "gaussian",
            "epsilon": 8.0,
            "delta": 1e-5,
            "unit": "secondary-record",
            "encoder": "frozen",
            "links_per_record": 1,
        },
        "linkage": {
            "metric": "euclidean",
            "protection": "none",
            "truth": "entity",
            "choose": "records",
        },
        "encoder": {"method": "class-means", "labels": "shares"},
        "party": [*parties, {"name": "dealer", "role": "dealer"}],
    }
