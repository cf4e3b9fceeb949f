"""Uneven splits, as VertiBench defines them; held against its package where that is installed."""

import numpy as np
import pytest
import sklearn.datasets

from research.fet.uneven import by_correlation, by_importance, icor, split_unevenly
from securevfl.core.errors import ConfigError, DataError

X, Y = sklearn.datasets.load_digits(return_X_y=True)


def correlations(values: np.ndarray) -> np.ndarray:
    ranks = np.argsort(np.argsort(values, axis=0), axis=0)
    return np.corrcoef(ranks, rowvar=False)


@pytest.mark.parametrize("weights", [0.001, 0.1, 1.0, 100.0, [5.0, 0.2, 0.2]])
def test_every_feature_has_one_owner_and_nobody_goes_without(weights: float) -> None:
    for seed in range(50):
        parts = by_importance(20, parties=3, weights=weights, first=4, seed=seed)
        assert sorted(np.concatenate(parts)) == list(range(20))
        assert len(parts[0]) >= 4
        assert all(len(part) >= 1 for part in parts)


def test_shares_are_those_of_a_dirichlet_distribution() -> None:
    """Mean alpha_i / sum, variance by its formula; of 1,000 features draws hardly add to it."""
    weights = [2.0, 1.0, 0.5]
    drawn = [
        [
            len(part) / 1000
            for part in by_importance(1000, parties=3, weights=weights, first=1, seed=s)
        ]
        for s in range(2_000)
    ]
    alpha = np.array(weights)
    mean = alpha / alpha.sum()
    assert np.mean(drawn, axis=0) == pytest.approx(mean, abs=0.02)
    deviation = np.sqrt(mean * (1 - mean) / (alpha.sum() + 1))
    assert np.std(drawn, axis=0) == pytest.approx(deviation, abs=0.015)


def test_correlated_features_go_together_or_apart() -> None:
    """Two copies of three columns over three parties: together at 0, apart at 1."""
    one = np.random.default_rng(0).normal(size=(300, 3))
    doubled = np.hstack([one, one + 1e-3])
    together = by_correlation(doubled, parties=3, beta=0.0, seed=0)
    assert sorted(part.tolist() for part in together) == [[0, 3], [1, 4], [2, 5]]
    of = correlations(doubled)
    values = [icor(of, by_correlation(doubled, parties=3, beta=b, seed=0)) for b in (0, 0.5, 1)]
    assert values == sorted(values)
    assert values[2] - values[0] > 0.3


@pytest.mark.parametrize(
    ("by", "weights"), [("importance", 0.5), ("importance", [9, 1, 1]), ("correlation", 0.2)]
)
def test_tables_are_dealt_out_so(by: str, weights: object) -> None:
    tables = split_unevenly(X, Y, parties=3, by=by, weights=weights)
    same = split_unevenly(X, Y, parties=3, by=by, weights=weights)
    assert sum(table.num_features for table in tables) == 64
    assert [one.feature_names for one in tables] == [one.feature_names for one in same]
    assert tables[0].num_features >= tables[0].key_dim == 4


@pytest.mark.parametrize(
    ("how", "error", "message"),
    [
        ({"by": "importance", "weights": 0.0}, ConfigError, "weights: must be above 0"),
        ({"by": "correlation", "weights": 1.5}, ConfigError, r"beta must lie in \[0, 1\]"),
        ({"by": "correlation", "weights": [1.0, 2.0]}, ConfigError, "weights: must be one number"),
        ({"by": "size"}, ConfigError, "by must be one of importance, correlation"),
        ({"by": "importance", "key_dim": 63}, DataError, "too few for 63 at the primary"),
    ],
)
def test_impossible_splits_are_refused(
    how: dict[str, object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        split_unevenly(X, Y, parties=3, **how)


def test_icor_is_the_packages() -> None:
    evaluator = pytest.importorskip("vertibench.Evaluator").CorrelationEvaluator()
    evaluator.pool.terminate()
    for seed in range(5):
        parts = np.array_split(np.random.default_rng(seed).permutation(64), 5)
        order, sizes = np.concatenate(parts), [len(part) for part in parts]
        evaluator.fit([X[:, part] for part in parts])
        whole = np.empty((64, 64))
        whole[np.ix_(order, order)] = evaluator.corr
        assert icor(whole, parts) == pytest.approx(
            evaluator.overall_corr_score(evaluator.corr, sizes), abs=1e-9
        )


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_the_search_goes_as_far_as_the_packages(beta: float) -> None:
    """Its genetic search, shortened, is no nearer to either end; the middle is met by both."""
    package = pytest.importorskip("vertibench.Splitter")
    few = X[:, 20:44]
    splitter = package.CorrelationSplitter(3, seed=0)
    small = {"n_elites": 20, "n_offsprings": 70, "n_mutants": 10, "n_gen": 30}
    splitter.fit(few, **small)
    splitter.pool.terminate()
    splitter.evaluator.pool.terminate()
    of = splitter.evaluator.corr
    ours = icor(of, by_correlation(few, parties=3, beta=beta, seed=0))
    theirs = (1 - beta) * splitter.min_icor + beta * splitter.max_icor
    if beta == 0.5:
        assert ours == pytest.approx(theirs, abs=0.03)
    else:
        assert (ours - theirs) * (1 if beta else -1) > -0.01


def test_shares_of_importance_are_the_packages() -> None:
    """Mean and deviation of the number of features, over as many seeds."""
    package = pytest.importorskip("vertibench.Splitter")
    weights = [2.0, 1.0, 0.5]
    theirs = [
        [len(p) for p in package.ImportanceSplitter(3, weights, seed=s).split_indices(X)]
        for s in range(1_000)
    ]
    ours = [
        [len(p) for p in by_importance(64, parties=3, weights=weights, first=1, seed=s)]
        for s in range(1_000)
    ]
    assert np.mean(ours, axis=0) == pytest.approx(np.mean(theirs, axis=0), abs=2.0)
    assert np.std(ours, axis=0) == pytest.approx(np.std(theirs, axis=0), abs=1.5)
