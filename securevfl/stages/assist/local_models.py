"""A secondary's model of one round of boosting: fitted to residuals, scored out of fold, saved.

n = rows, K = links of a row, F = inputs of a record, O = outputs.
"""

import warnings
import zipfile
from typing import Any, Final

import numpy as np
from jaxtyping import Bool, Float, Float32, Float64

from securevfl.core.files import require_unpackable
from securevfl.stages.assist.settings import AssistConfig

FOLDS: Final = 3
"""Folds of the training rows; each is scored by a model fitted to the others."""

_FEWEST: Final = 2 * FOLDS
"""Fewest linked training rows to which a model is fitted."""

_MOST_UNPACKED: Final = 2**30
"""Most bytes of the unpacked models of all rounds."""

_TRUSTED: Final = (
    "numpy.dtype",
    "sklearn.ensemble._hist_gradient_boosting.predictor.TreePredictor",
    "sklearn.tree._tree.Tree",
)
"""Types that a saved model may contain in addition to those that skops trusts."""


def inputs_of(
    records: Float32[np.ndarray, "rows links inputs"], present: Bool[np.ndarray, "rows links"]
) -> Float64[np.ndarray, "rows columns"]:
    """Return the inputs of a local model: the records of each row, one after another by rank.

    Several records are followed by their mean. Missing values are NaN. Distances of links are not
    used: under most protections of linkage a secondary does not know them.
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
    """Fit a model to linked rows, and score each of them out of fold.

    Args:
        settings: The family's settings.
        inputs: Result of :func:`inputs_of` for the rows.
        residuals: Residuals of the rows.
        seed: Of folds and trees.

    Returns:
        The model of all rows, None if they are too few, and the scores out of fold. A forest scores
        a row by the trees that did not draw it.
    """
    scores = np.zeros(residuals.shape, dtype=np.float32)
    if len(inputs) < _FEWEST:
        return None, scores
    model = _fit_model(settings, inputs, residuals, seed=seed)
    if settings.estimator == "forest":
        drawn = model.oob_prediction_.reshape(residuals.shape)
        # A row that every tree drew, as happens with few trees, has no score.
        return model, np.nan_to_num(drawn).astype(np.float32)
    from sklearn.model_selection import KFold

    folds = KFold(FOLDS, shuffle=True, random_state=seed)
    for rest, held_out in folds.split(inputs):
        part = _fit_model(settings, inputs[rest], residuals[rest], seed=seed)
        scores[held_out] = predict_scores(part, inputs[held_out], outputs=residuals.shape[1])
    return model, scores


def predict_scores(
    model: Any, inputs: Float64[np.ndarray, "rows columns"], *, outputs: int
) -> Float32[np.ndarray, "rows outputs"]:
    """Return a model's scores of rows; zeros if no model was fitted."""
    if model is None or not len(inputs):
        return np.zeros((len(inputs), outputs), dtype=np.float32)
    scores = np.asarray(model.predict(inputs), dtype=np.float32)
    return scores.reshape(len(inputs), outputs)


def within_ball(
    scores: Float[np.ndarray, "rows outputs"],
) -> Float32[np.ndarray, "rows outputs"]:
    """Return scores scaled down to norm 1, the largest norm of residuals."""
    norm = np.linalg.norm(scores, axis=1, keepdims=True)
    return (scores / np.maximum(norm, 1.0)).astype(np.float32)


def pack_models(models: list[Any]) -> bytes:
    """Return models as bytes that hold no code; see :func:`unpack_models`."""
    import skops.io  # It brings scikit-learn, which other families never use.

    return bytes(skops.io.dumps(models, compression=zipfile.ZIP_DEFLATED))


def unpack_models(data: bytes) -> list[Any]:
    """Return the models that :func:`pack_models` was given.

    Raises:
        ValueError: If the bytes are not such models.
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


def _fit_model(
    settings: AssistConfig,
    inputs: Float64[np.ndarray, "rows columns"],
    residuals: Float32[np.ndarray, "rows outputs"],
    *,
    seed: int,
) -> Any:
    model = _build_model(settings, rows=len(inputs), seed=seed)
    with warnings.catch_warnings():
        # A forest warns of rows that all its trees drew.
        warnings.simplefilter("ignore", UserWarning)
        return model.fit(inputs, residuals)


def _build_model(settings: AssistConfig, *, rows: int, seed: int) -> Any:
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
