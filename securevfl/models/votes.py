"""Votes: a frozen encoder whose numbers point at classes, fitted to class means behind noise.

A release is a sum. Where every secondary writes into the same numbers, one for each class, agreeing
signals add up, and the noise is paid once; a number of one secondary's own would carry all of it.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np
from jaxtyping import Float64

MOST_NUMBERS: Final = 60
"""Of a record before it is projected: a mean behind noise is worse, the more numbers it has."""
PROJECTED: Final = 24
"""Numbers of a record that was projected."""

_SMALLEST: Final = 1e-12


def public_projection(features: int, *, seed: int) -> Float64[np.ndarray, "features numbers"]:
    """Return orthonormal directions that a record's numbers are taken along; drawn without data.

    Args:
        features: Of a record. Up to :data:`MOST_NUMBERS` they are kept as they are.
        seed: Public.
    """
    if features <= MOST_NUMBERS:
        return np.eye(features)
    drawn = np.random.default_rng(seed).normal(size=(features, PROJECTED))
    return np.linalg.qr(drawn)[0]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Directions:
    """How a record's numbers become votes: ``(x - centre) weights``."""

    centre: Float64[np.ndarray, " features"]
    weights: Float64[np.ndarray, "features classes"]


def class_directions(
    counts: Float64[np.ndarray, " bins"],
    means: Float64[np.ndarray, "bins features"],
    *,
    covariance: Float64[np.ndarray, "features features"] | None = None,
    spread: float = 0.0,
) -> Directions:
    """Return the directions from the mean of all rows to the mean of each class.

    Args:
        counts: Rows of each class, and of those that are not for learning last; at least 1 each.
        means: The mean of each; where a class has no row, anything.
        covariance: Of the records, to whiten by: directions are then those of a linear
            discriminant analysis. None: directions between means as they are.
        spread: About the largest eigenvalue of the noise in ``covariance``, >= 0.

    References:
        [HTF09] Hastie, Tibshirani and Friedman, The Elements of Statistical Learning, section
        4.3: between classes of one covariance, the linear discriminant's direction is the
        difference of means times its inverse.
    """
    centre = counts @ means / counts.sum()
    weights = (means[:-1] - centre).T
    if covariance is not None:
        values, vectors = np.linalg.eigh(covariance)
        floor = max(spread, 1e-3 * float(values.max(initial=0.0)), _SMALLEST)
        weights = vectors @ ((vectors.T @ weights) / np.maximum(values, floor)[:, None])
    return Directions(centre=centre, weights=weights)
