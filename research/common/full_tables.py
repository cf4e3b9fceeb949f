"""Tables of ``SECUREVFL_DATA`` that are not split between parties yet."""

from collections.abc import Mapping
from pathlib import Path
from typing import Final

import numpy as np
import sklearn.datasets

from research.common.folder_tables import require_folder
from securevfl.core.conventions import Task
from securevfl.core.errors import ConfigError, DataError
from securevfl.core.files import require_unpackable
from securevfl.lab.datasets import FullTable

_FULL_TABLES: Final = ("gisette", "letter", "mfeat", "mnist")
_MOST_UNPACKED: Final = 8 * 2**30
"""Bytes of the arrays of a ``NAME.npz``."""


def load_full(name: str) -> FullTable:
    """Read a table of ``SECUREVFL_DATA`` that is not split yet: gisette, letter, mfeat or mnist.

    ``gisette`` is the folder of LIBSVM's ``gisette_scale.bz2``, as [FeT] takes it.

    Raises:
        ConfigError: If ``SECUREVFL_DATA`` is not set, or there is no such table in it.
        DataError: If a file can't be read.
    """
    folder = require_folder(name)
    if name not in _FULL_TABLES:
        raise ConfigError(f"data: no full table {name!r}; there are {', '.join(_FULL_TABLES)}")
    views: dict[str, tuple[int, ...]] = {}
    if name == "gisette":
        X, y = _libsvm(folder / "gisette_scale.bz2")
    elif name == "letter":
        columns = np.loadtxt(folder / "full.csv.gz", delimiter=",", skiprows=1)
        X, y = columns[:, :-1], columns[:, -1].astype(np.int64)
    else:
        arrays = load_archive(name)
        X, y, views = _multiview(arrays) if name == "mfeat" else _pixels(arrays)
    task: Task = "binary" if name == "gisette" else "multiclass"
    return FullTable(name=name, X=X, y=y, task=task, views=views)


def load_archive(name: str) -> dict[str, np.ndarray]:
    """Return the arrays of ``SECUREVFL_DATA/name/name.npz`` as they are stored.

    Raises:
        ConfigError: If ``SECUREVFL_DATA`` is not set, or has no such folder.
        DataError: If the file can't be read.
    """
    path = require_folder(name) / f"{name}.npz"
    try:
        with path.open("rb") as file:
            require_unpackable(file, most=_MOST_UNPACKED)
            with np.load(file, allow_pickle=False) as archive:
                return dict(archive)
    except (OSError, ValueError) as error:
        raise DataError(f"table {path}: can't be read: {error}") from None


def _libsvm(path: Path) -> tuple[np.ndarray, np.ndarray]:
    try:
        X, y = sklearn.datasets.load_svmlight_file(str(path))
    except (OSError, ValueError) as error:
        raise DataError(f"table {path}: can't be read: {error}") from None
    return X.toarray(), y.astype(np.int64)


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
