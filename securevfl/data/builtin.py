"""Real tables by name: those that come with scikit-learn, and folders of ``SECUREVFL_DATA``."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import sklearn.datasets
from jaxtyping import Float64

from securevfl.core.archives import require_unpackable
from securevfl.core.errors import ConfigError, DataError
from securevfl.core.task import Task
from securevfl.data.reading import read_table
from securevfl.data.tables import PartyTable

_MOST_UNPACKED: Final = 8 * 2**30
"""Bytes of the arrays of a ``NAME.npz``."""

DATA_VARIABLE: Final = "SECUREVFL_DATA"
"""The environment variable that names a folder of tables."""

_LOADERS: Final[Mapping[str, tuple[Callable[..., Any], Task]]] = {
    "digits": (sklearn.datasets.load_digits, "multiclass"),
    "breast_cancer": (sklearn.datasets.load_breast_cancer, "binary"),
    "wine": (sklearn.datasets.load_wine, "multiclass"),
    "diabetes": (sklearn.datasets.load_diabetes, "regression"),
}

# What the folders' own descriptions say that their label is.
_FOLDER_TASKS: Final[Mapping[str, Task]] = {
    "hdb": "regression",
    "house_kc": "regression",
    "fate_breast": "binary",
    "fate_vehicle": "multiclass",
}

_FULL_TABLES: Final = ("letter", "mfeat", "mnist")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class FullTable:
    """A table that is not split between parties yet."""

    name: str
    """What the table is called."""

    X: Float64[np.ndarray, "rows features"]
    """Features."""

    y: np.ndarray
    """Labels."""

    task: Task
    """What the label is."""

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


def data_folder() -> Path | None:
    """Return the folder that ``SECUREVFL_DATA`` names, or None if it names none.

    Raises:
        ConfigError: If it names something that is not a folder.
    """
    value = os.environ.get(DATA_VARIABLE, "")
    if not value:
        return None
    folder = Path(value)
    if not folder.is_dir():
        raise ConfigError(f"{DATA_VARIABLE}: {value} is not a folder")
    return folder


def load_folder(name: str) -> list[PartyTable]:
    """Read the two-party table ``SECUREVFL_DATA/name``: the primary's, then the secondary's.

    ``primary.csv.gz`` and ``secondary.csv.gz`` have key columns called ``key_*``, the primary's a
    label column ``y``; all others are features.

    Raises:
        ConfigError: If ``SECUREVFL_DATA`` is not set, or there is no such table in it.
        DataError: If a file is not what it should be.
    """
    folder = _require_folder(name)
    if name not in _FOLDER_TASKS:
        raise ConfigError(
            f"data: no two-party table {name!r}; there are {', '.join(_FOLDER_TASKS)}"
        )
    keys = {"hdb": ("key_lon", "key_lat"), "house_kc": ("key_lon", "key_lat")}.get(
        name, ("key_id",)
    )
    return [
        read_table(
            folder / f"{role}.csv.gz",
            name=role,
            key=keys,
            label="y" if role == "primary" else None,
            task=_FOLDER_TASKS[name],
        )
        for role in ("primary", "secondary")
    ]


def load_full(name: str) -> FullTable:
    """Read a table of ``SECUREVFL_DATA`` that is not split yet: letter, mfeat or mnist.

    Raises:
        ConfigError: If ``SECUREVFL_DATA`` is not set, or there is no such table in it.
        DataError: If a file is not what it should be.
    """
    folder = _require_folder(name)
    if name not in _FULL_TABLES:
        raise ConfigError(f"data: no full table {name!r}; there are {', '.join(_FULL_TABLES)}")
    views: dict[str, tuple[int, ...]] = {}
    if name == "letter":
        columns = np.loadtxt(folder / "full.csv.gz", delimiter=",", skiprows=1)
        X, y = columns[:, :-1], columns[:, -1].astype(np.int64)
    else:
        arrays = load_archive(name)
        X, y, views = _multiview(arrays) if name == "mfeat" else _pixels(arrays)
    return FullTable(name=name, X=X, y=y, task="multiclass", views=views)


def load_archive(name: str) -> dict[str, np.ndarray]:
    """Return the arrays of ``SECUREVFL_DATA/name/name.npz`` as they are stored.

    Raises:
        ConfigError: If ``SECUREVFL_DATA`` is not set, or has no such folder.
        DataError: If the file can't be read.
    """
    path = _require_folder(name) / f"{name}.npz"
    try:
        with path.open("rb") as file:
            require_unpackable(file, most=_MOST_UNPACKED)
            with np.load(file, allow_pickle=False) as archive:
                return dict(archive)
    except (OSError, ValueError) as error:
        raise DataError(f"table {path}: can't be read: {error}") from None


def _require_folder(name: str) -> Path:
    root = data_folder()
    if root is None:
        raise ConfigError(f"data: set {DATA_VARIABLE} to the folder that holds {name!r}")
    if not (root / name).is_dir():
        raise ConfigError(f"data: {root} has no folder {name!r}")
    return root / name


def _pixels(
    arrays: Mapping[str, np.ndarray],
) -> tuple[np.ndarray, np.ndarray, dict[str, tuple[int, ...]]]:
    # The training part alone, as in [FeT]; its order is the original one.
    return arrays["x_train"].astype(np.float64), arrays["y_train"].astype(np.int64), {}


def _multiview(
    arrays: Mapping[str, np.ndarray],
) -> tuple[np.ndarray, np.ndarray, dict[str, tuple[int, ...]]]:
    names = sorted(set(arrays) - {"y"})
    views: dict[str, tuple[int, ...]] = {}
    start = 0
    for view in names:
        views[view] = tuple(range(start, start + arrays[view].shape[1]))
        start += arrays[view].shape[1]
    X = np.column_stack([arrays[view] for view in names]).astype(np.float64)
    return X, arrays["y"].astype(np.int64), views
