"""Calibrated averaged performance: by hand, and from the paper's own accuracies."""

import pytest

from research.fedhssl.trade_off import Protected, calibrated_averaged_performance
from securevfl.core.errors import ConfigError

STRENGTHS = (1.0, 5.0, 25.0)


def curve(*points: tuple[float, float]) -> list[Protected]:
    return [
        Protected(strength=strength, recovered=recovered, utility=utility)
        for strength, (recovered, utility) in zip(STRENGTHS, points, strict=False)
    ]


def test_it_is_a_mean_of_products() -> None:
    """(0.8 * 0.5 + 0.6 * 0.75) / 2 = 0.425; the product of the means would be 0.4375."""
    points = curve((0.5, 0.8), (0.25, 0.6))
    assert calibrated_averaged_performance(points) == pytest.approx(0.425, abs=1e-12)


def test_an_attack_that_recovers_all_leaves_nothing() -> None:
    assert calibrated_averaged_performance(curve((1.0, 0.9))) == 0
    assert calibrated_averaged_performance(curve((0.0, 0.9))) == 0.9


# [FedHSSL] Table XI: recovered labels and main task at lambda_f = 1, 5, 25; then Table XII.
PUBLISHED = {
    "NUSWIDE local": ((0.471, 0.494), (0.465, 0.487), (0.449, 0.458), 0.258),
    "NUSWIDE 20 %": ((0.471, 0.538), (0.449, 0.519), (0.443, 0.503), 0.284),
    "NUSWIDE 40 %": ((0.474, 0.533), (0.471, 0.528), (0.458, 0.503), 0.277),
    "Avazu local": ((0.548, 0.582), (0.546, 0.577), (0.545, 0.576), 0.262),
    "Avazu 20 %": ((0.568, 0.614), (0.565, 0.602), (0.563, 0.594), 0.262),
    "Avazu 40 %": ((0.571, 0.616), (0.566, 0.610), (0.561, 0.603), 0.264),
    "BHI local": ((0.710, 0.756), (0.699, 0.732), (0.685, 0.710), 0.221),
    "BHI 20 %": ((0.692, 0.783), (0.672, 0.764), (0.674, 0.758), 0.246),
    "BHI 40 %": ((0.686, 0.788), (0.687, 0.773), (0.682, 0.764), 0.244),
    "Modelnet local": ((0.438, 0.597), (0.415, 0.573), (0.408, 0.564), 0.334),
    "Modelnet 20 %": ((0.451, 0.652), (0.447, 0.613), (0.415, 0.594), 0.348),
    "Modelnet 40 %": ((0.466, 0.658), (0.448, 0.631), (0.419, 0.598), 0.349),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_papers_accuracies_give_the_papers_figures(name: str) -> None:
    """To the rounding of both tables: half a thousandth, and as much of what is averaged."""
    *points, published = PUBLISHED[name]
    assert calibrated_averaged_performance(curve(*points)) == pytest.approx(published, abs=1e-3)


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        ({"utility": 1.2}, "utility: must be between 0 and 1, got 1.2"),
        ({"recovered": float("nan")}, "recovered: must be between 0 and 1, got nan"),
        ({"strength": -1.0}, "strength"),
    ],
)
def test_figures_that_cannot_be_are_refused(values: dict[str, float], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        Protected(**{"strength": 1.0, "utility": 0.5, "recovered": 0.5, **values})


def test_no_strength_and_one_strength_twice_are_refused() -> None:
    with pytest.raises(ConfigError, match="at least one"):
        calibrated_averaged_performance([])
    twice = [*curve((0.5, 0.5)), *curve((0.4, 0.4))]
    with pytest.raises(ConfigError, match=r"each counts once, got \[1.0, 1.0\]"):
        calibrated_averaged_performance(twice)
