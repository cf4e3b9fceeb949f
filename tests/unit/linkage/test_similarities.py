"""FedSim's similarities: one scale for all parts, one noise for all runs."""

import numpy as np
import pytest

from securevfl.core.errors import ConfigError, DataError
from securevfl.linkage.links import LinkTable, SimilarityScale, noised_similarities

LINKS = LinkTable(
    indices=np.array([[3, 1], [0, -1]]), distances=np.array([[1.0, 2.0], [6.0, np.inf]])
)


def test_training_links_have_mean_0_and_deviation_1() -> None:
    """The nearest link is the most similar; empty slots count in nothing."""
    scale = SimilarityScale.fit(LINKS)
    table = noised_similarities(LINKS, scale, noise_std=0.0)
    similarities = table[LINKS.present]

    assert scale.mean == -3
    assert scale.whole_distances
    assert similarities.mean() == pytest.approx(0, abs=1e-6)
    assert similarities.std() == pytest.approx(1, abs=1e-6)
    assert table[0, 0] > table[0, 1] > table[1, 0]
    assert table[1, 1] == 0


def test_other_parts_use_the_training_scale() -> None:
    """A test link has the value that a training link of its distance has."""
    scale = SimilarityScale.fit(LINKS)
    other = LinkTable(indices=np.array([[9]]), distances=np.array([[2.0]]))

    assert (
        noised_similarities(other, scale, noise_std=0.0)[0, 0]
        == noised_similarities(LINKS, scale, noise_std=0.0)[0, 1]
    )


def test_equal_distances_have_similarity_zero() -> None:
    """The nearest of exact ids are all equally far; another distance differs by its own."""
    same = LinkTable(indices=np.array([[0, 1]]), distances=np.array([[2.0, 2.0]]))

    scale = SimilarityScale.fit(same)

    assert (scale.mean, scale.deviation) == (-2.0, 1.0)


def test_a_scale_without_a_link_is_refused() -> None:
    """There is nothing to scale by."""
    none = LinkTable(indices=np.array([[-1]]), distances=np.array([[np.inf]]))

    with pytest.raises(DataError, match="no training row has a link"):
        SimilarityScale.fit(none)


def test_distances_that_are_no_whole_numbers_are_told() -> None:
    """Tau is not claimed for them."""
    links = LinkTable(indices=np.array([[0, 1]]), distances=np.array([[2.0, 2.5]]))

    assert not SimilarityScale.fit(links).whole_distances


def test_noise_is_drawn_anew_by_every_call() -> None:
    """Whoever keeps values keeps their noise; nobody can ask for the same noise again."""
    scale = SimilarityScale.fit(LINKS)
    table, again = (noised_similarities(LINKS, scale, noise_std=0.5) for _ in range(2))
    assert not np.array_equal(again[LINKS.present], table[LINKS.present])


def test_noise_has_its_standard_deviation() -> None:
    """Over 100,000 links with a fixed seed, to 2 % (more than six standard errors)."""
    rng = np.random.default_rng(0)
    distances = np.sort(rng.random((10_000, 10)), axis=1)
    links = LinkTable(indices=np.zeros((10_000, 10), dtype=np.int64), distances=distances)
    scale = SimilarityScale.fit(links)
    noised = noised_similarities(links, scale, noise_std=0.4, insecure_seed=1)
    exact = noised_similarities(links, scale, noise_std=0.0)

    assert (noised - exact).std() == pytest.approx(0.4, rel=0.02)


@pytest.mark.parametrize("noise_std", [-1.0, float("nan"), float("inf")])
def test_impossible_noise_is_refused(noise_std: float) -> None:
    """Noise has a finite standard deviation."""
    with pytest.raises(ConfigError, match="noise_std must be finite and >= 0"):
        noised_similarities(LINKS, SimilarityScale.fit(LINKS), noise_std=noise_std)
