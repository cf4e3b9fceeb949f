"""Sets at hand: digits, MNIST and mfeat in two or three views, and two-party tables of FATE."""

import numpy as np

from research.common.aligned.views import AlignedViews
from research.common.folder_tables import load_folder
from research.common.full_tables import load_archive, load_full
from securevfl.core.conventions import stream
from securevfl.core.errors import ConfigError
from securevfl.lab.datasets import load_builtin

_MFEAT = {
    2: (("fac", "kar"), ("fou", "pix", "zer", "mor")),
    3: (("fac", "mor"), ("pix", "zer"), ("fou", "kar")),
}


def digits_halves(parties: int = 2) -> AlignedViews:
    """Return scikit-learn's digits cut into upright strips, one a party; a fifth is for testing.

    Raises:
        ConfigError: If there is no strip for each party.
    """
    table = load_builtin("digits")
    views, images = _strips(table.X.reshape(-1, 8, 8) / 16, parties)
    train, test = _fifth_apart(len(table.y), "digits")
    return AlignedViews(
        name="digits",
        views=views,
        labels=table.y.astype(np.int64),
        train=train,
        test=test,
        metric="accuracy",
        images=images,
    )


def mnist_halves(parties: int = 2, *, rows: int | None = None) -> AlignedViews:
    """Return MNIST cut into upright strips, one a party, with its own test rows.

    Args:
        parties: How many strips.
        rows: Training rows drawn from the 60,000; None takes all.

    Raises:
        ConfigError: If ``SECUREVFL_DATA`` has no ``mnist``, or a number is out of range.
    """
    arrays = load_archive("mnist")
    pixels = np.concatenate([arrays["x_train"], arrays["x_test"]]).reshape(-1, 28, 28) / 255
    views, images = _strips(pixels, parties)
    available = len(arrays["x_train"])
    if rows is not None and not 1 <= rows <= available:
        raise ConfigError(f"rows must lie in 1 to {available}, got {rows}")
    train = stream(0, "mnist", "rows").permutation(available)[:rows]
    return AlignedViews(
        name="mnist",
        views=views,
        labels=np.concatenate([arrays["y_train"], arrays["y_test"]]).astype(np.int64),
        train=train,
        test=np.arange(available, len(pixels)),
        metric="accuracy",
        images=images,
    )


def mfeat_views(parties: int = 2) -> AlignedViews:
    """Return the six measurements of mfeat at two or three parties; a fifth is for testing.

    Raises:
        ConfigError: If ``SECUREVFL_DATA`` has no ``mfeat``, or for another number of parties.
    """
    if parties not in _MFEAT:
        raise ConfigError(f"parties: mfeat is dealt to 2 or 3, got {parties}")
    table = load_full("mfeat")
    train, test = _fifth_apart(len(table.y), "mfeat")
    return AlignedViews(
        name="mfeat",
        views=tuple(
            table.X[:, [c for name in names for c in table.views[name]]].astype(np.float32)
            for names in _MFEAT[parties]
        ),
        labels=table.y,
        train=train,
        test=test,
        metric="accuracy",
    )


def folder_views(name: str) -> AlignedViews:
    """Return a two-party table of ``SECUREVFL_DATA`` with exact keys, its rows brought together.

    Raises:
        ConfigError: If there is no such table, or its label is a number to predict.
        DataError: If a row of the primary has no match.
    """
    primary, secondary = load_folder(name)
    if primary.classes is None or primary.labels is None or primary.key_dim != 1:
        raise ConfigError(f"data: {name!r} is no classification with exact keys")
    _, own, theirs = np.intersect1d(primary.keys[:, 0], secondary.keys[:, 0], return_indices=True)
    train, test = _fifth_apart(len(own), name)
    return AlignedViews(
        name=name,
        views=(primary.features[own], secondary.features[theirs]),
        labels=primary.labels[own].astype(np.int64),
        train=train,
        test=test,
        metric="auc" if len(primary.classes) == 2 else "accuracy",
    )


def _strips(
    pixels: np.ndarray, parties: int
) -> tuple[tuple[np.ndarray, ...], tuple[tuple[int, int, int], ...]]:
    if not 2 <= parties <= pixels.shape[2]:
        raise ConfigError(f"parties: must lie in 2 to {pixels.shape[2]}, got {parties}")
    strips = np.array_split(pixels.astype(np.float32), parties, axis=2)
    return (
        tuple(strip.reshape(len(strip), -1) for strip in strips),
        tuple((1, strip.shape[1], strip.shape[2]) for strip in strips),
    )


def _fifth_apart(rows: int, name: str) -> tuple[np.ndarray, np.ndarray]:
    # One split for every run: seeds vary which rows are aligned and labelled, never what tests.
    order = stream(0, "aligned-views", name).permutation(rows)
    return order[rows // 5 :], order[: rows // 5]
