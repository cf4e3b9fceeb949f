"""scikit-learn's own checks of estimators, over a federation and over the primary alone.

The secondary's table is made of ``X`` itself: its first column is the key, and the secondary holds
that column as a feature, which the primary then does not have.
"""

from typing import Any

import numpy as np
import pandas as pd
import pytest
from sklearn.utils.estimator_checks import parametrize_with_checks

import securevfl as sv

KEY_IS_MISSING = (
    "the check empties cells of every column, the key's among them, and rows of training need keys"
)
EXPECTED = dict.fromkeys(["check_estimators_pickle"], KEY_IS_MISSING)
SUMS_ARE_ROUNDED = (
    "sums of float32 are rounded by which rows share a round: 5e-6, and 1e-7 is asked"
)
TRAINS: dict[str, Any] = {
    "batch_size": 64,
    "learning_rate": 0.05,
    "random_state": 0,
    "base": "none",
}
STEADY: dict[str, Any] = {**TRAINS, "batch_size": 32, "learning_rate": 0.02}
SLOW = ("classes", "train", "not_an_array", "dtypes", "subset", "regressors_int", "y_2d")


def partner(X: Any) -> pd.DataFrame:
    """Return a secondary's table; an empty one of rows that ``fit`` refuses anyway."""
    try:
        column = np.asarray(X, dtype=np.float64)[:, 0]
    except (TypeError, ValueError, IndexError):
        return pd.DataFrame()
    name = X.columns[0] if hasattr(X, "columns") else "x0"
    return pd.DataFrame({name: column, "other": column}).dropna()


class Classifier(sv.FederatedClassifier):
    """With a secondary."""

    def fit(self, X: Any, y: Any) -> "Classifier":  # type: ignore[override]
        return super().fit(X, y, secondaries=[partner(X)])


class Regressor(sv.FederatedRegressor):
    """With a secondary."""

    def fit(self, X: Any, y: Any) -> "Regressor":  # type: ignore[override]
        return super().fit(X, y, secondaries=[partner(X)])


def together(kind: type, *, epochs: int, trains: dict[str, Any] = TRAINS) -> Any:
    return kind(sv.models.Top1Sim(hidden=8), key=[0], epochs=epochs, **trains)


def exceptions(estimator: Any) -> dict[str, str]:
    if estimator.secondaries == ():
        return {}
    rounded = {"check_methods_subset_invariance": SUMS_ARE_ROUNDED}
    return EXPECTED | (rounded if isinstance(estimator, Regressor) else {})


def is_quick(check: Any) -> bool:
    return not any(word in check.func.__name__ for word in SLOW)


@pytest.mark.filterwarnings("ignore")
@parametrize_with_checks(
    [together(Classifier, epochs=1)], expected_failed_checks=lambda _estimator: EXPECTED
)
def test_a_federation(estimator: Any, check: Any) -> None:
    if not is_quick(check):
        pytest.skip("in test_all_checks")
    check(estimator)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@parametrize_with_checks(
    [
        together(Classifier, epochs=8),
        together(Regressor, epochs=20, trains=STEADY),
        sv.FederatedClassifier(secondaries=(), epochs=8, **TRAINS),
        sv.FederatedRegressor(secondaries=(), epochs=8, **TRAINS),
    ],
    expected_failed_checks=exceptions,
)
def test_all_checks(estimator: Any, check: Any) -> None:
    check(estimator)
