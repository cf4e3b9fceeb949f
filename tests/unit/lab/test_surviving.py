"""What survives a release's noise: the figures, and that they follow the plan's own noise."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from research.frontier.surviving import noise_a_number, partners_for_half, surviving_share
from securevfl.dp import Privacy
from securevfl.dp.events import Unit
from securevfl.dp.gaussian import gaussian_noise_multiplier
from securevfl.dp.release_plan import ReleasePlan

UNITS = [unit.value for unit in Unit]


def plan(*, epsilon: float = 8.0, secondaries: int = 4, **changed: Any) -> ReleasePlan:
    """Return one release a row, by records that choose one row each."""
    privacy = {"epsilon": epsilon, "delta": 1e-6, "encoder": "frozen", "links_per_record": 1}
    ours = {name: changed.pop(name) for name in ("unit", "colluding") if name in changed}
    fields = {"links": 1, "pooled": True, "contested": False, "disjoint": False, **changed}
    return ReleasePlan(
        privacy=Privacy(**{**privacy, **ours}),
        parties=secondaries,
        min_active=secondaries,
        rounds=4,
        rows_per_round=100,
        row_releases=400,
        releases_per_row=1,
        **fields,
    )


def noise(of: ReleasePlan) -> float:
    return noise_a_number(of, of.noise_share_std())


@pytest.mark.parametrize(
    ("epsilon", "whole", "half"),
    [(8, 0.70, 0.37), (4, 0.41, 0.15), (2, 0.17, 0.05), (1, 0.05, 0.01)],
)
def test_the_figures_that_frontier_tells(epsilon: float, whole: float, half: float) -> None:
    """All of the length in one number, and a half of it: spread over four."""
    z = noise(plan(epsilon=epsilon))

    assert surviving_share(noise=z) == pytest.approx(whole, abs=0.005)
    assert surviving_share(noise=z, numbers=4) == pytest.approx(half, abs=0.005)


@pytest.mark.parametrize("numbers", [1, 5])
@pytest.mark.parametrize("agreement", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("rate", [1.0, 0.3])
def test_the_share_is_what_a_linear_reader_explains(
    numbers: int, agreement: float, rate: float
) -> None:
    """Of the sum of three secondaries' signals, drawn and noised; the seed is fixed."""
    random, rows = np.random.default_rng(4), 200_000
    common, own = random.normal(size=(rows, 1)), random.normal(size=(rows, 3))
    signals = (np.sqrt(agreement) * common + np.sqrt(1 - agreement) * own) / np.sqrt(numbers)
    drawn = random.random((rows, 3)) < rate
    released = (drawn * signals).sum(axis=1) + 1.5 * random.normal(size=rows)

    told = surviving_share(
        noise=1.5, numbers=numbers, secondaries=3, agreement=agreement, sampling_rate=rate
    )

    explained = np.corrcoef(released, signals.sum(axis=1))[0, 1] ** 2
    assert told == pytest.approx(explained, abs=0.01)


@pytest.mark.parametrize("links", [1, 4])
@pytest.mark.parametrize("secondaries", [1, 5])
def test_one_record_meets_the_noise_multiplier(links: int, secondaries: int) -> None:
    """Of records that choose one row, z is the multiplier, whatever K, C and k are."""
    of = plan(links=links, secondaries=secondaries)
    of = replace(of, privacy=replace(of.privacy, clip_norm=3.0))

    assert noise(of) == pytest.approx(gaussian_noise_multiplier(epsilon=8.0, delta=1e-6), rel=1e-6)


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("disjoint", [False, True])
@pytest.mark.parametrize("colluding", [0, 2])
def test_noise_of_another_number_is_that_of_its_own_plan(
    unit: str, disjoint: bool, colluding: int
) -> None:
    four = plan(unit=unit, disjoint=disjoint, colluding=colluding)
    nine = plan(unit=unit, disjoint=disjoint, colluding=colluding, secondaries=9)

    told = noise_a_number(four, four.noise_share_std(), secondaries=9)

    assert told == pytest.approx(noise(nine), rel=1e-6)


def test_sharing_gains_where_noise_is_paid_once_and_only_there() -> None:
    """An entity's records at all secondaries cost as much as they add."""
    one = surviving_share(noise=noise(plan()))
    shared = surviving_share(noise=noise(plan()), secondaries=4)
    blocks = surviving_share(noise=noise(plan(unit="entity", disjoint=True)))
    entity = surviving_share(noise=noise(plan(unit="entity")), secondaries=4)

    assert shared > one + 0.1
    assert entity == pytest.approx(blocks, rel=1e-6)


@pytest.mark.parametrize(("epsilon", "fewest"), [(8, 1), (4, 2), (2, 5), (1, 18)])
def test_partners_for_half_are_the_fewest(epsilon: float, fewest: int) -> None:
    of = plan(epsilon=epsilon)

    assert partners_for_half(of, of.noise_share_std()) == fewest


def test_no_number_of_partners_is_enough_where_each_brings_its_noise() -> None:
    of = plan(unit="entity", epsilon=1.0)

    assert partners_for_half(of, of.noise_share_std()) is None
