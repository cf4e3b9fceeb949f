"""Score encoders: a record's number is the normal score of its rank."""

import numpy as np
import torch
from scipy.special import ndtri

from securevfl.dp.class_sums import noised_ranks
from securevfl.models import frozen

RECORDS, COLUMNS = 400, 3


def table(*, records: int = RECORDS) -> torch.Tensor:
    """Return records with columns from even to very skewed, scaled by their bounds."""
    even = np.random.default_rng(0).uniform(size=(records, COLUMNS))
    skewed = np.stack([even[:, 0], even[:, 1] ** 4, even[:, 2] ** 8], axis=1)
    return torch.from_numpy(2 * skewed - 1).float()


def fitted(features: torch.Tensor, *, length: float = 0.5) -> frozen.ScoreBottom:
    """Return an encoder that was fitted without noise, for the sum of all columns."""
    bottom = frozen.ScoreBottom(projection=np.eye(COLUMNS), length=length)
    edges = frozen.COLUMN_EDGES
    numbers = bottom.numbers(features).numpy()
    bottom.fit_columns(noised_ranks(numbers, edges, noise_multiplier=None))
    bottom.fit_weights(np.ones(COLUMNS), radius=3.0)
    scores = bottom.scores(features).numpy()
    bottom.fit_ranks(noised_ranks(scores, frozen.SCORE_EDGES, noise_multiplier=None))
    return bottom


def released(bottom: frozen.ScoreBottom, features: torch.Tensor) -> np.ndarray:
    present = torch.ones(len(features), 1, dtype=torch.bool)
    keys = torch.zeros(len(features), 1, 0)
    return bottom(features[:, None], keys, present)[:, 0].numpy()


def test_a_skewed_amount_counts_by_its_rank() -> None:
    """Up to the cells: a column and its eighth power come to nearly the same quantiles."""
    features = table()
    mapped = fitted(features).records(features).numpy()
    for column in range(COLUMNS):
        ranks = (features[:, column].argsort().argsort().numpy() + 0.5) / RECORDS
        inner = (ranks > 0.5) & (ranks < 0.95)
        np.testing.assert_allclose(mapped[inner, column], ndtri(ranks[inner]), atol=0.12)


def test_numbers_are_normal_scores_of_the_records_ranks() -> None:
    """Up to the cells of scores; the lowest and the highest hundredth are at the ends."""
    features = table()
    bottom = fitted(features)
    numbers = released(bottom, features)[:, 0]
    order = bottom.scores(features)[:, 0].argsort().numpy()
    assert (np.diff(numbers[order]) >= -1e-6).all()
    scores = ndtri((np.arange(RECORDS) + 0.5) / RECORDS)
    inner = slice(RECORDS // 20, -RECORDS // 20)
    found = numbers[order] / 0.5 * frozen.LARGEST_SCORE
    np.testing.assert_allclose(found[inner], scores[inner], atol=0.15)
    assert np.abs(numbers).max() <= 0.5 + 1e-6


def test_a_records_vector_is_its_own_and_an_absent_one_is_zero() -> None:
    """What another record holds changes nothing; not even one that is not finite."""
    features = table()
    bottom = fitted(features)
    other = features.clone()
    other[1:] = torch.nan
    np.testing.assert_array_equal(released(bottom, features)[0], released(bottom, other)[0])
    nobody = torch.zeros(1, 1, dtype=torch.bool)
    assert not bottom(features[:1, None], torch.zeros(1, 1, 0), nobody).any()
