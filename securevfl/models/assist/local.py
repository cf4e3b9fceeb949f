"""A secondary's own model of one round: from its linked records to the primary's residuals.

n = rows, K = links of a row, F = inputs of a record, O = outputs.
"""

import warnings
import zipfile
from typing import Any, Final

import numpy as np
from jaxtyping import Bool, Float, Float32, Float64

from securevfl.core.archives import require_unpackable
from securevfl.models.assist.assist_config import AssistConfig

FOLDS: Final = 3
"""Parts of the training rows, each of which is scored by a model that never saw it."""

_FEWEST: Final = 2 * FOLDS
"""Linked training rows without which nothing is fitted."""

_MOST_UNPACKED: Final = 2**30
"""Bytes of the models of all rounds, which are kept packed."""

_TRUSTED: Final = (
    "numpy.dtype",
    "sklearn.ensemble._hist_gradient_boosting.predictor.TreePredictor",
    "sklearn.tree._tree.Tree",
)
"""What a kept model may hold beside what skops knows to be safe."""


def inputs_of(
    records: Float32[np.ndarray, "rows links inputs"], present: Bool[np.ndarray, "rows links"]
) -> Float64[np.ndarray, "rows columns"]:
    """Return what a local model reads of rows: their records, one after another by rank.

    Behind the records comes their mean, where there are several. What is missing is NaN. How near
    a link is does not come in: under most protections of linkage a secondary does not know it.
    """
    table = records.astype(np.float64)
    table[~present] = np.nan
    rows, links, width = table.shape
    columns = table.reshape(rows, links * width)
    if links == 1:
        return columns
    known = np.maximum(present.sum(axis=1), 1)[:, None]
    mean = np.where(present[:, :, None], table, 0.0).sum(axis=1) / known
    mean[~present.any(axis=1)] = np.nan
    return np.hstack([columns, mean])


def cross_fit(
    settings: AssistConfig,
    inputs: Float64[np.ndarray, "rows columns"],
    residuals: Float32[np.ndarray, "rows outputs"],
    *,
    seed: int,
) -> tuple[Any, Float32[np.ndarray, "rows outputs"]]:
    """Fit a model to rows that are linked, and score each of them by one that never saw it.

    Args:
        settings: The family's settings.
        inputs: What :func:`inputs_of` returned for the rows.
        residuals: What is to be explained.
        seed: Of folds and trees.

    Returns:
        The model of all rows, None where they are too few, and the scores out of fold. A forest's
        are those of the trees that did not draw the row.
    """
    scores = np.zeros(residuals.shape, dtype=np.float32)
    if len(inputs) < _FEWEST:
        return None, scores
    model = _fitted(settings, inputs, residuals, seed=seed)
    if settings.estimator == "forest":
        drawn = model.oob_prediction_.reshape(residuals.shape)
        # A row that every tree drew, as happens with few trees, has no score.
        return model, np.nan_to_num(drawn).astype(np.float32)
    from sklearn.model_selection import KFold

    folds = KFold(FOLDS, shuffle=True, random_state=seed)
    for rest, held_out in folds.split(inputs):
        part = _fitted(settings, inputs[rest], residuals[rest], seed=seed)
        scores[held_out] = predicted(part, inputs[held_out], outputs=residuals.shape[1])
    return model, scores


def predicted(
    model: Any, inputs: Float64[np.ndarray, "rows columns"], *, outputs: int
) -> Float32[np.ndarray, "rows outputs"]:
    """Return a model's scores of rows; zeros of a round in which nothing was fitted."""
    if model is None or not len(inputs):
        return np.zeros((len(inputs), outputs), dtype=np.float32)
    scores = np.asarray(model.predict(inputs), dtype=np.float32)
    return scores.reshape(len(inputs), outputs)


def within_ball(
    scores: Float[np.ndarray, "rows outputs"],
) -> Float32[np.ndarray, "rows outputs"]:
    """Return scores of norm at most 1, as the residuals have."""
    norm = np.linalg.norm(scores, axis=1, keepdims=True)
    return (scores / np.maximum(norm, 1.0)).astype(np.float32)


def packed(models: list[Any]) -> bytes:
    """Return models as bytes that hold no code; see :func:`unpacked`."""
    import skops.io  # It brings scikit-learn, which other families never use.

    return bytes(skops.io.dumps(models, compression=zipfile.ZIP_DEFLATED))


def unpacked(data: bytes) -> list[Any]:
    """Return the models that :func:`packed` was given.

    Raises:
        ValueError: If they are something else.
    """
    import skops.io

    try:
        require_unpackable(data, most=_MOST_UNPACKED)
        models = skops.io.loads(data, trusted=list(_TRUSTED))
    except Exception as error:
        raise ValueError("these are no local models of assisted boosting") from error
    if not isinstance(models, list):
        raise ValueError("these are no local models of assisted boosting")
    return models


def _fitted(
    settings: AssistConfig,
    inputs: Float64[np.ndarray, "rows columns"],
    residuals: Float32[np.ndarray, "rows outputs"],
    *,
    seed: int,
) -> Any:
    model = _unfitted(settings, rows=len(inputs), seed=seed)
    with warnings.catch_warnings():
        # A forest warns of rows that all its trees drew.
        warnings.simplefilter("ignore", UserWarning)
        return model.fit(inputs, residuals)


def _unfitted(settings: AssistConfig, *, rows: int, seed: int) -> Any:
    from sklearn.ensemble import HistGradientBoostingRegressor, RandomForestRegressor
    from sklearn.impute import SimpleImputer
    from sklearn.linear_model import RidgeCV
    from sklearn.multioutput import MultiOutputRegressor
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    if settings.estimator == "linear":
        # RidgeCV's folds are rows left out one by one, which is free for a ridge.
        return make_pipeline(
            SimpleImputer(keep_empty_features=True),
            StandardScaler(),
            RidgeCV(np.logspace(-3, 4, 15)),
        )
    if settings.estimator == "forest":
        return RandomForestRegressor(
            settings.trees,
            max_leaf_nodes=settings.leaves,
            min_samples_leaf=2,
            max_features=1 / 3,
            oob_score=True,
            random_state=seed,
        )
    return MultiOutputRegressor(
        HistGradientBoostingRegressor(
            max_iter=settings.trees,
            max_leaf_nodes=settings.leaves,
            # scikit-learn's own 20 can't split forty rows.
            min_samples_leaf=min(20, max(3, rows // 50)),
            early_stopping=False,
            random_state=seed,
        )
    )
