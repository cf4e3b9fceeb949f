"""Score encoders: a record's number is the normal score of its rank."""

import numpy as np
import torch
from scipy.special import ndtri

from securevfl.dp.class_sums import noised_ranks
from securevfl.models import frozen

RECORDS, COLUMNS = 400, 3
COUNTS, MEANS = np.full(2, 1e9), np.array([[0.0], [1.0]]) * np.ones(COLUMNS)


def table(*, records: int = RECORDS) -> torch.Tensor:
    """Return records with columns from even to very skewed, scaled by their bounds."""
    even = np.random.default_rng(0).uniform(size=(records, COLUMNS))
    skewed = np.stack([even[:, 0], even[:, 1] ** 4, even[:, 2] ** 8], axis=1)
    return torch.from_numpy(2 * skewed - 1).float()


def fitted(features: torch.Tensor, *, length: float = 0.5) -> frozen.ScoreBottom:
    """Return an encoder that was fitted without noise, for the sum of all columns."""
    bottom = frozen.ScoreBottom(frozen.RecordShape(features=COLUMNS), length=length)
    edges = frozen.COLUMN_EDGES
    numbers = bottom.numbers(features).numpy()
    bottom.fit_columns(noised_ranks(numbers, edges, noise_multiplier=None))
    bottom.fit_weights(COUNTS, MEANS, radius=3.0, noise_std=0.0)
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


def words_and_numbers(
    records: int = 4000, *, words: int = 50
) -> tuple[torch.Tensor, np.ndarray, np.ndarray, frozen.RecordShape]:
    """Return features, labels and words of records: 3 numbers say nothing, a word much."""
    rng = np.random.default_rng(1)
    word = rng.integers(0, words, records)
    odds = rng.normal(size=words) * 1.5
    labels = (rng.logistic(size=records) < odds[word]).astype(int)
    hot = 2.0 * np.eye(words)[word] - 1
    features = np.concatenate([rng.uniform(-1, 1, size=(records, 3)), hot], axis=1)
    shape = frozen.RecordShape(features=3 + words, words=(range(3, 3 + words),))
    return torch.from_numpy(features).float(), labels, odds[word], shape


def score_encoder(
    features: torch.Tensor, labels: np.ndarray, shape: frozen.RecordShape, *, noise_std: float = 0
) -> frozen.ScoreBottom:
    bottom = frozen.ScoreBottom(shape, length=1.0)
    edges, numbers = frozen.COLUMN_EDGES, bottom.numbers(features).numpy()
    bottom.fit_columns(noised_ranks(numbers, edges, noise_multiplier=None))
    records = bottom.records(features).numpy()
    counts = np.bincount(labels, minlength=2).astype(float)
    means = np.stack([records[labels == label].mean(axis=0) for label in (0, 1)])
    means += np.random.default_rng(2).normal(size=means.shape) * noise_std / counts[:, None]
    bottom.fit_weights(counts, means, radius=0.8 * 3**0.5, noise_std=noise_std)
    return bottom


def test_a_word_adds_the_log_odds_of_its_records() -> None:
    features, labels, odds, shape = words_and_numbers()
    scores = score_encoder(features, labels, shape).scores(features)[:, 0].numpy()
    assert np.corrcoef(scores, odds)[0, 1] > 0.95
    assert np.abs(scores).max() <= 1


def test_words_are_read_in_each_scaling() -> None:
    """As bounds, deviations, and no scaling at all have them."""
    features, _, _, shape = words_and_numbers()
    there = (features[:, 3:] > 0).double()
    mean, std = there.mean(dim=0), there.std(dim=0)
    for scaled, above in ((features, 0.0), ((there - mean) / std, 0.0), (there, 0.5)):
        rows = torch.cat([features[:, :3], scaled[:, -50:].float()], dim=1)
        bottom = frozen.ScoreBottom(shape, length=1.0, above=above)
        assert torch.equal(bottom.records(rows)[:, 3:] > 0, there > 0)


def test_weights_that_are_noise_are_drawn_towards_zero() -> None:
    """Of 3 numbers that say nothing; and of words, where noise is larger than their counts."""
    features, labels, _, shape = words_and_numbers()
    quiet = score_encoder(features, labels, shape).weights.numpy()
    assert np.abs(quiet[:3]).max() < 0.1 < np.abs(quiet[3:]).mean()
    noisy = score_encoder(features, labels, shape, noise_std=4000.0).weights.numpy()
    assert np.abs(noisy).mean() < np.abs(quiet).mean() / 2
