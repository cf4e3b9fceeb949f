"""SplitAvg between real processes: the sum is exact, and carries the noise that was promised."""

import json

import numpy as np
import pytest
from helpers import ring_reference as reference
from helpers.ring_keys import bounded_values, random_pair_keys
from helpers.warm import Program
from scipy import stats

from securevfl.dp.ring_noise import ExactDiscreteGaussian
from securevfl.launch.spawn import reserved_port
from securevfl.mpc.codec import RingFormat
from securevfl.transport.identity import provision

PARTIES = 3
NOISE_SHARE_STD = 0.2
ELEMENTS = 100_001
FALSE_ALARM = 1e-9

pytestmark = pytest.mark.multiprocess


ROUNDS = [0.0, 0.0, NOISE_SHARE_STD, NOISE_SHARE_STD]
"""Noise share of each round of the one run that all tests look at."""


@pytest.fixture(scope="module")
def sums(tmp_path_factory: pytest.TempPathFactory) -> np.ndarray:
    """Run one primary and three secondaries to their end; return the sums of all rounds."""
    folder = tmp_path_factory.mktemp("splitavg")
    names = ["primary", "one", "two", "three"]
    with reserved_port() as port:
        keys = random_pair_keys((1, 2, 3))
        job = {
            "names": names,
            "pinned": provision(names, folder, valid_days=1),
            "port": port,
            "keys": {r: {p: key.hex() for p, key in peers.items()} for r, peers in keys.items()},
            "elements": ELEMENTS,
            "noise_share_std": ROUNDS,
        }
        (folder / "job.json").write_text(json.dumps(job))
        parties = [Program("helpers.splitavg_party", folder, rank) for rank in range(len(names))]
        try:
            for party in parties:
                code, errors = party.ended()
                assert code == 0, errors[-2000:]
        finally:
            for party in parties:
                party.kill()
    return np.load(folder / "sums.npy")


def ring(noise_share_std: float) -> RingFormat:
    return RingFormat.choose(clip_norm=1.0, noise_share_std=noise_share_std, parties=PARTIES)


def exact_sum(fmt: RingFormat) -> np.ndarray:
    """The sum of the quantised values, by the readable twin."""
    parts = [reference.quantise(bounded_values(r, ELEMENTS).tolist(), fmt) for r in (1, 2, 3)]
    return np.sum(parts, axis=0)


def variance_is_plausible(noise: np.ndarray, variance: float) -> bool:
    """Two-sided chi-square test at FALSE_ALARM."""
    statistic = float((noise.astype(np.float64) ** 2).sum()) / variance
    low, high = (
        stats.chi2.ppf(FALSE_ALARM / 2, noise.size),
        stats.chi2.isf(FALSE_ALARM / 2, noise.size),
    )
    return bool(low <= statistic <= high)


def rounds_are_unrelated(noise: np.ndarray) -> bool:
    """The correlation of two rounds, at FALSE_ALARM."""
    first, second = noise[0].astype(np.float64), noise[1].astype(np.float64)
    z = (first @ second) / np.sqrt((first @ first) * (second @ second) / len(first))
    return bool(abs(z) < stats.norm.isf(FALSE_ALARM / 2))


def test_without_noise_processes_and_twin_agree_exactly(sums: np.ndarray) -> None:
    """Through TLS, masks and CrypTen comes the very sum of the quantised values, every round."""
    expected = exact_sum(ring(0.0))

    assert np.array_equal(sums[0], expected)
    assert np.array_equal(sums[1], expected)


@pytest.mark.statistical
def test_the_released_noise_has_the_promised_variance(sums: np.ndarray) -> None:
    """Three tau^2 over 2 x 100,001 coordinates and no relation between rounds: once in 1e9 each.

    A standard deviation wrong by 2 % passes with probability below 1e-9.
    """
    fmt = ring(NOISE_SHARE_STD)

    noise = sums[2:] - exact_sum(fmt)
    promised = PARTIES * (NOISE_SHARE_STD / fmt.granularity) ** 2
    assert variance_is_plausible(noise, promised)
    assert rounds_are_unrelated(noise)
    largest_mean = stats.norm.isf(FALSE_ALARM / 2) * (promised / noise.size) ** 0.5
    assert abs(float(noise.mean())) < largest_mean


def contributions(stds: list[float], *, seeds: list[int | None]) -> np.ndarray:
    """The summed noise of two rounds by three parties, under a convention to be rejected."""
    parties = [
        ExactDiscreteGaussian(std, insecure_seed=seed)
        for std, seed in zip(stds, seeds, strict=True)
    ]
    return np.stack(
        [
            np.sum([p.sample((ELEMENTS,)).numpy().astype(np.int64) for p in parties], axis=0)
            for _ in range(2)
        ]
    )


@pytest.mark.statistical
def test_every_wrong_convention_fails_these_tests() -> None:
    """Negative controls of the test above, at its own size."""
    std = NOISE_SHARE_STD / ring(NOISE_SHARE_STD).granularity
    promised = PARTIES * std**2
    fresh = [None] * PARTIES

    right = contributions([std] * PARTIES, seeds=fresh)
    assert variance_is_plausible(right, promised)
    assert rounds_are_unrelated(right)
    wrong = {
        "share divided by k": contributions([std / PARTIES] * PARTIES, seeds=fresh),
        "share divided by sqrt(k)": contributions([std / PARTIES**0.5] * PARTIES, seeds=fresh),
        "whole noise by each": contributions([std * PARTIES**0.5] * PARTIES, seeds=fresh),
        "one party's noise only": contributions([std], seeds=[None]),
        "one party left out": contributions([std] * (PARTIES - 1), seeds=[None] * (PARTIES - 1)),
        "one seed for all": contributions([std] * PARTIES, seeds=[5] * PARTIES),
        "2 % too little": contributions([std * 0.98] * PARTIES, seeds=fresh),
    }
    for convention, noise in wrong.items():
        assert not variance_is_plausible(noise, promised), convention
    reused = np.stack([right[0], right[0]])
    assert not rounds_are_unrelated(reused)
    # As far as the variance goes, reused noise is right: only the second test sees it.
    assert variance_is_plausible(reused, promised)
