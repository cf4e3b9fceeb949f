"""Score encoders: a record's angle is its rank, its length is C; and what a noised one was."""

import numpy as np
import pytest
import torch
from scipy.special import ndtri

from securevfl.dp.class_sums import noised_ranks
from securevfl.models import frozen
from securevfl.models.fitted_top import CodeReader, TiedTop, fit_tied
from securevfl.models.tasks import TaskHead

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
    bottom.fit_angles(noised_ranks(scores, frozen.SCORE_EDGES, noise_multiplier=None))
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


def test_angles_follow_the_scores_and_all_have_the_full_length() -> None:
    """The sixth of the records with the least scores, and that with the most, are at the ends."""
    features = table()
    bottom = fitted(features)
    vectors = released(bottom, features)
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 0.5, rtol=1e-6)
    order = bottom.scores(features)[:, 0].argsort().numpy()
    angles = np.arctan2(vectors[:, 0], vectors[:, 1])[order]
    assert (np.diff(angles) >= -1e-6).all()
    sixth = RECORDS // 6 - RECORDS // 40
    np.testing.assert_allclose(np.abs(angles[[*range(sixth), *range(-sixth, 0)]]), np.pi / 2)
    assert abs(angles[RECORDS // 2]) < 0.2


def test_a_records_vector_is_its_own_and_an_absent_one_is_zero() -> None:
    """What another record holds changes nothing; not even one that is not finite."""
    features = table()
    bottom = fitted(features)
    other = features.clone()
    other[1:] = torch.nan
    np.testing.assert_array_equal(released(bottom, features)[0], released(bottom, other)[0])
    nobody = torch.zeros(1, 1, dtype=torch.bool)
    assert not bottom(features[:1, None], torch.zeros(1, 1, 0), nobody).any()


def test_two_codes_are_read_by_their_posterior_mean() -> None:
    """Of -1 and 1, as likely as each other, it is tanh(r / z^2), by hand."""
    reader = CodeReader(np.array([[-1.0], [1.0]]))
    reader.noise_std.fill_(0.7)
    noised = torch.linspace(-3, 3, 31, dtype=torch.float64)[:, None]
    torch.testing.assert_close(reader(noised), (noised / 0.49).tanh())


def test_shares_of_codes_are_found_behind_noise() -> None:
    """1,500 of 2,000 are at 1: readings are nearer to the truth than releases, and unbiased."""
    random = np.random.default_rng(1)
    codes = np.where(np.arange(2000) < 1500, 1.0, -1.0)[:, None]
    noised = torch.from_numpy(codes + random.normal(size=codes.shape))
    reader = CodeReader(np.linspace(-1, 1, 21)[:, None])
    reader.fit(noised, noise_std=1.0)
    read = reader(noised).numpy()
    assert read.mean() == pytest.approx(0.5, abs=0.1)
    assert np.square(read - codes).mean() < 0.6 * np.square(noised.numpy() - codes).mean()


def test_releases_without_noise_are_read_as_they_are() -> None:
    reader = CodeReader(frozen.sums_of_codes(2))
    noised = torch.randn(5, 2, generator=torch.Generator().manual_seed(0))
    reader.fit(noised, noise_std=0.0)
    torch.testing.assert_close(reader(noised), noised.double())


@pytest.mark.parametrize("secondaries", [1, 3])
def test_a_reader_lowers_the_loss_of_rows_that_were_not_seen(secondaries: int) -> None:
    """Below a linear correction of the releases themselves, of a label between two ends."""
    random = np.random.default_rng(2)
    latent = random.uniform(size=(3000, 1))
    angles = np.pi / 2 * np.clip(1.5 * (2 * latent - 1), -1, 1).repeat(secondaries, axis=1)
    codes = np.stack([np.sin(angles), np.cos(angles)], axis=-1).sum(axis=1)
    noised = torch.from_numpy(codes + random.normal(scale=0.6 * secondaries, size=codes.shape))
    targets = torch.from_numpy(np.square(latent[:, 0] - 0.5) * 12 - 1).float()
    head, base = TaskHead(task="regression", num_classes=1), torch.zeros(3000, 1)
    losses = {}
    for name, reader in (("plain", None), ("read", CodeReader(frozen.sums_of_codes(secondaries)))):
        if reader is not None:
            reader.fit(noised[:2000], noise_std=0.6 * secondaries)
        top = TiedTop(width=2, outputs=1, reader=reader)
        read = top.read(noised)
        model, _ = fit_tied(
            lambda reader=reader: TiedTop(width=2, outputs=1, reader=reader),
            read[:2000],
            base[:2000],
            targets[:2000],
            head,
            folds=torch.arange(2000) % 5,
        )
        with torch.no_grad():
            added = model.correct(read[2000:])
        losses[name] = float(head.row_losses(base[2000:] + added, targets[2000:]).mean())
    assert losses["read"] < 0.97 * losses["plain"], losses
