"""What telling labels costs, alone and together, once and over runs."""

import math

import pytest

from securevfl.core.errors import ConfigError
from securevfl.dp.gaussian import gaussian_delta, gaussian_noise_multiplier
from securevfl.dp.labels import LabelRelease, labels_together, labels_total

DELTA = 1e-6


def shares(epsilon: float, *, parties: int = 4, delta: float = DELTA) -> LabelRelease:
    return LabelRelease(mechanism="shares", epsilon=epsilon, delta=delta, parties=parties)


def randomised(epsilon: float) -> LabelRelease:
    return LabelRelease(mechanism="randomised", epsilon=epsilon, delta=0.0, parties=4)


SHOWN = LabelRelease(mechanism="plaintext", epsilon=None, delta=0.0, parties=4)


def test_k_secondaries_together_are_one_release_of_root_k_mu() -> None:
    """By the curve of that Gaussian; one secondary has what was asked for."""
    multiplier = gaussian_noise_multiplier(epsilon=2.0, delta=DELTA)
    together = labels_together(2.0, DELTA, 4)
    assert gaussian_delta(epsilon=together, noise_multiplier=multiplier / 2) <= DELTA
    assert gaussian_delta(epsilon=together * 0.999, noise_multiplier=multiplier / 2) > DELTA
    assert labels_together(2.0, DELTA, 1) == pytest.approx(2.0, rel=1e-9)


def test_drawn_once_is_the_same_against_all() -> None:
    """Together they see what each sees; sums of each one's own add up."""
    assert randomised(2.0).together == 2.0
    assert shares(2.0).together == labels_together(2.0, DELTA, 4)
    assert SHOWN.together is None


def test_runs_add_up() -> None:
    """Gaussians by the squares of mu, at the smallest delta; randomised ones on top of that."""
    assert labels_total([]) is None
    only = labels_total([randomised(1.0), randomised(0.5)])
    assert only is not None
    assert (only.epsilon, only.together, only.delta) == (1.5, 1.5, 0.0)

    both = labels_total([shares(2.0), randomised(1.0), shares(2.0)])
    assert both is not None
    assert both.epsilon == pytest.approx(1.0 + labels_together(2.0, DELTA, 2))
    assert both.together == pytest.approx(1.0 + labels_together(2.0, DELTA, 8))
    lower = labels_total([shares(2.0), shares(2.0, delta=1e-8)])
    assert lower is not None
    assert lower.delta == 1e-8
    assert lower.epsilon is not None
    assert lower.epsilon > labels_together(2.0, 1e-8, 2)  # the first had less noise than that

    with_shown = labels_total([shares(2.0), SHOWN])
    assert with_shown is not None
    assert with_shown.epsilon is with_shown.together is None


@pytest.mark.parametrize(
    "wrong",
    [
        {"mechanism": "plaintext", "epsilon": 1.0, "delta": 0.0},
        {"mechanism": "randomised", "epsilon": None, "delta": 0.0},
        {"mechanism": "randomised", "epsilon": 1.0, "delta": 1e-5},
        {"mechanism": "shares", "epsilon": 1.0, "delta": 0.0},
        {"mechanism": "shares", "epsilon": math.inf, "delta": 1e-5},
    ],
)
def test_a_promise_that_does_not_fit_its_mechanism_is_refused(wrong: dict) -> None:
    """As a line of a ledger might ask for it."""
    with pytest.raises(ConfigError):
        LabelRelease(parties=2, **wrong)
