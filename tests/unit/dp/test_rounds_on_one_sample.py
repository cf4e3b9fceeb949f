"""A round's release and update on one secret sample: by integration, against what is charged."""

import numpy as np
import pytest
from scipy.stats import norm

from securevfl.desk.accountants import sampled_gaussian_epsilon
from securevfl.dp.gaussian import composed_multiplier

STEP = 0.02
POINTS = np.arange(-9, 9 + 6, STEP)


def delta_of_pair(
    epsilon: float, *, rate: float, forward: float, update: float, adaptive: bool, again: bool
) -> float:
    """Integrate max(0, p - e^epsilon q) over both outputs of a round, in units of their noise.

    Args:
        epsilon: Nats.
        rate: Of the sample.
        forward: ``1/z_f``, by how much the release shifts if the record is in the sample.
        update: ``1/z_g``, likewise.
        adaptive: Whether the update's direction depends on the sign of the release.
        again: Whether the update takes a sample of its own.
    """
    x, y = POINTS[:, None], POINTS[None, :]
    sign = np.where(x > 0, -1.0, 1.0) if adaptive else 1.0
    without = norm.pdf(x) * norm.pdf(y)
    released, taught = norm.pdf(x - forward), norm.pdf(y - sign * update)
    if again:
        drawn = (1 - rate) * norm.pdf(x) + rate * released
        present = drawn * ((1 - rate) * norm.pdf(y) + rate * taught)
    else:
        present = (1 - rate) * without + rate * released * taught
    return float(np.maximum(present - np.exp(epsilon) * without, 0).sum() * STEP**2)


@pytest.mark.parametrize("adaptive", [False, True])
@pytest.mark.parametrize(
    ("rate", "forward", "update"), [(0.1, 0.5, 1.5), (0.3, 1.0, 1.0), (0.6, 2.0, 0.7)]
)
def test_the_pair_is_one_sampled_gaussian(
    rate: float, forward: float, update: float, *, adaptive: bool
) -> None:
    """At the epsilon of Poisson(q, z_eff) the pair's delta is that delta, whatever it adapts to."""
    together = composed_multiplier(1 / forward, 1 / update)
    for delta in (1e-2, 1e-3, 1e-4):
        epsilon = sampled_gaussian_epsilon(
            delta=delta, noise_multiplier=together, sampling_rate=rate
        )
        found = delta_of_pair(
            epsilon, rate=rate, forward=forward, update=update, adaptive=adaptive, again=False
        )

        assert found == pytest.approx(delta, rel=0.02)


def test_a_second_sample_is_another_mechanism() -> None:
    """Negative control: where both outputs tell all, two samples catch the record more often.

    So one sample a round is not a detail of the code: the accountant's event needs it.
    """
    settings = {"rate": 0.3, "forward": 4.0, "update": 4.0, "adaptive": False}
    one, two = (delta_of_pair(1.0, again=again, **settings) for again in (False, True))

    assert one == pytest.approx(0.3, abs=0.02)
    assert two > 0.45
