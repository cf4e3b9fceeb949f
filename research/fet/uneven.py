"""Uneven divisions of a table's features by importance and by correlation, after VertiBench."""

from collections.abc import Sequence
from typing import Final

import numpy as np
import pandas as pd
from jaxtyping import Float64

from securevfl.core import checks
from securevfl.core.conventions import Task, stream
from securevfl.core.errors import ConfigError, DataError
from securevfl.data.tables import PartyTable
from securevfl.lab.datasets import split_views

Parts = list[np.ndarray]
"""Feature numbers of each party."""

# Exchanges of two features that a search tries; on tables of 64 columns it has settled by then.
_TRIES: Final = 2_000
# A worse Icor is kept at first by about so much, to leave a poor optimum again.
_HEAT: Final = 0.003
_NEAR: Final = 1e-4


def by_importance(
    features: int, *, parties: int, weights: float | Sequence[float], first: int, seed: int
) -> Parts:
    """Assign each feature to a party that is drawn with random shares of importance.

    Args:
        features: Number of features.
        parties: Number of parties.
        weights: alpha of every party, or one a party, > 0; small ones make very uneven shares.
        first: Features that the first party has at least; every other one has one at least.
        seed: Of all draws.

    Raises:
        ConfigError: If a weight is not above 0, or there is not one a party.

    References:
        [VertiBench], as in its package (0.1.2), ``ImportanceSplitter``.
    """
    alpha = np.broadcast_to(np.asarray(weights, dtype=np.float64), (parties,)).copy()
    if not (np.isfinite(alpha).all() and (alpha > 0).all()):
        raise ConfigError(f"weights: must be above 0, got {weights}")
    random = stream(seed, "split", "importance")
    # Logarithms of gamma variates, which do not vanish where alpha is small.
    grown = np.log(random.gamma(alpha + 1)) + np.log(random.uniform(size=parties)) / alpha
    shares = np.exp(grown - grown.max())
    order = random.permutation(features)
    owners = random.choice(parties, size=features, p=shares / shares.sum())
    # The first places are everyone's own, so that no party is empty.
    owners[: first + parties - 1] = [0] * first + list(range(1, parties))
    return [np.sort(order[owners == party]) for party in range(parties)]


def icor(correlations: Float64[np.ndarray, "features features"], parts: Parts) -> float:
    """Return Icor: correlation between parties' features minus correlation within parties.

    The mean over parties i of the mean over others j of ``Pcor(i, j) - Pcor(i, i)``, Pcor being
    the standard deviation of a block's singular values over the root of its smaller side.

    References:
        [VertiBench], as in its package (0.1.2), ``CorrelationEvaluator.overall_corr_score``.
    """
    count = len(parts)
    blocks = np.empty((count, count))
    for first in range(count):
        for other in range(first + 1):
            singular_values = np.linalg.svd(
                correlations[np.ix_(parts[first], parts[other])], compute_uv=False
            )
            spread = (
                singular_values.std(ddof=1) / len(singular_values) ** 0.5
                if len(singular_values) > 1
                else 0.0
            )
            blocks[first, other] = blocks[other, first] = spread
    return float((blocks.sum() - count * np.trace(blocks)) / (count * (count - 1)))


def by_correlation(
    X: Float64[np.ndarray, "rows features"], *, parties: int, beta: float, seed: int
) -> Parts:
    """Divide features equally, so that Icor is beta of the way from its least to its largest.

    Args:
        X: The table.
        parties: Number of parties.
        beta: 0 keeps correlated features together, 1 spreads them over the parties.
        seed: Seed of the search.

    References:
        [VertiBench], as in its package (0.1.2), ``CorrelationSplitter``.

    Differs from [VertiBench]: exchanges of two features, annealed, take the place of its genetic
    search for the least, the largest and the wanted Icor. Both are heuristics.
    """
    checks.closed_unit(beta=beta)
    correlations = np.nan_to_num(pd.DataFrame(X).corr(method="spearman").to_numpy())
    random = stream(seed, "split", "correlation")
    start = np.array_split(random.permutation(X.shape[1]), parties)

    def search(target: float) -> tuple[Parts, float]:
        """Return parts whose Icor is near a target, and that Icor."""
        parts = [part.copy() for part in start]
        reached = icor(correlations, parts)
        for tried_before in range(_TRIES):
            if abs(reached - target) < _NEAR:
                break
            first, other = random.choice(parties, size=2, replace=False)
            here, there = random.integers(len(parts[first])), random.integers(len(parts[other]))
            own, theirs = parts[first][here], parts[other][there]
            parts[first][here], parts[other][there] = theirs, own
            tried = icor(correlations, parts)
            worse = abs(tried - target) - abs(reached - target)
            if worse < _HEAT * (1 - tried_before / _TRIES) ** 2 * random.exponential():
                reached = tried
            else:
                parts[first][here], parts[other][there] = own, theirs
        return parts, reached

    # Icor lies between -1 and 1.
    (_, least), (_, largest) = search(-1.0), search(1.0)
    parts, _ = search(beta * largest + (1 - beta) * least)
    return [np.sort(part) for part in parts]


def split_unevenly(
    X: np.ndarray,
    y: np.ndarray,
    *,
    parties: int,
    by: str,
    weights: float | Sequence[float] | None = None,
    key_dim: int = 4,
    key_noise: float = 0.05,
    seed: int = 0,
    task: Task = "multiclass",
) -> list[PartyTable]:
    """Split a table as :func:`securevfl.lab.datasets.split_views` does, by drawn columns.

    Args:
        X: Features, one row a record.
        y: Labels.
        parties: The primary and at least one secondary.
        by: ``importance`` gives each party a random share of the features, and the primary at least
            ``key_dim``; ``correlation`` gives all as many, more or less correlated within a party.
        weights: With ``importance``: alpha of every party's share, or one a party, by default 1.
            With ``correlation``: beta, by default 0.5.
        key_dim: Dimensions of the keys.
        key_noise: Deviation of the noise on keys.
        seed: Seed of all random choices.
        task: Kind of label.

    Raises:
        ConfigError: If an argument is out of range.
        DataError: If the table has too few features.

    References:
        [FeT] appendix G.
    """
    checks.one_of(("importance", "correlation"), by=by)
    if by == "importance":
        if key_dim + parties - 1 > X.shape[1]:
            raise DataError(
                f"X: has {X.shape[1]} features, too few for {key_dim} at the primary and one at "
                f"each of {parties - 1} others"
            )
        alpha = 1.0 if weights is None else weights
        parts = by_importance(X.shape[1], parties=parties, weights=alpha, first=key_dim, seed=seed)
    else:
        beta = 0.5 if weights is None else weights
        if not isinstance(beta, int | float):
            raise ConfigError(f"weights: must be one number with by = {by!r}, got {weights}")
        parts = by_correlation(X, parties=parties, beta=beta, seed=seed)
    names = ["primary", *(f"secondary-{number}" for number in range(1, parties))]
    views = {name: part.tolist() for name, part in zip(names, parts, strict=True)}
    return split_views(
        X, y, views=views, key_dim=key_dim, key_noise=key_noise, seed=seed, task=task
    )
