"""What predictions cost where secondaries count how often each record is released."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest

from securevfl.core.errors import ConfigError
from securevfl.dp import Privacy
from securevfl.dp.events import GaussianRelease
from securevfl.dp.gaussian import gaussian_epsilon
from securevfl.dp.release_plan import ReleasePlan


def plan_of(
    *, releases: int | None = 3, parties: int = 4, active: int = 4, rows: int = 7, **privacy
) -> ReleasePlan:
    """Return the plan of one request."""
    disjoint = privacy.pop("disjoint", False)
    settings = {"epsilon": 8.0, "encoder": "frozen", "links_per_record": 2, **privacy}
    return ReleasePlan(
        privacy=Privacy(**settings),
        parties=parties,
        min_active=active,
        rounds=1,
        rows_per_round=rows,
        row_releases=rows,
        releases_per_row=1,
        links=5,
        pooled=True,
        contested=False,
        disjoint=disjoint,
        releases_per_record=releases,
    )


def test_all_requests_together_are_one_release_of_n_rows() -> None:
    """Mu = sqrt(N) (C / K) / (tau sqrt(k_a - c)), of whatever number of rows."""
    for rows in (1, 7, 100_000):
        plan = plan_of(rows=rows, colluding=1)
        mu = math.sqrt(3) / 5 / (0.4 * math.sqrt(3))
        release = plan.release(0.4, rounds=1, row_releases=1)
        assert isinstance(release, GaussianRelease)
        assert release.noise_multiplier == pytest.approx(1 / mu, rel=1e-12)
        assert plan.epsilon(0.4) == pytest.approx(
            gaussian_epsilon(delta=1e-5, noise_multiplier=1 / mu), rel=1e-9
        )


@pytest.mark.parametrize("unit", ["secondary-record", "entity"])
@pytest.mark.parametrize("disjoint", [False, True])
@pytest.mark.parametrize("colluding", [0, 1])
def test_as_many_as_in_training_cost_what_training_cost(
    unit: str, disjoint: bool, colluding: int
) -> None:
    """To the last bit, so that the same epsilon covers them."""
    counted = plan_of(releases=2, unit=unit, disjoint=disjoint, colluding=colluding, rows=40)
    training = replace(counted, releases_per_record=None)
    share = training.noise_share_std()
    assert counted.epsilon(share) == training.epsilon(share) <= 8.0


@pytest.mark.parametrize("disjoint", [False, True])
@pytest.mark.parametrize(("parties", "colluding"), [(2, 0), (3, 0), (3, 1), (4, 1), (4, 2)])
def test_an_entity_is_covered_whoever_is_asked_for_what(
    parties: int, colluding: int, disjoint: bool
) -> None:
    """Requests to different secondaries, in any mixture: a search finds none that costs more.

    Each secondary has N releases of the entity's record; a row goes to some set of secondaries, and
    those among them that still have one move it by the most that they can, all the same way.
    """
    most, rounds = 2, 3000
    random = np.random.default_rng([parties, colluding, disjoint])
    sets = [
        active
        for size in range(colluding + 1, parties + 1)
        for active in itertools.combinations(range(parties), size)
    ]
    worst = 0.0
    for _ in range(rounds):
        some = [sets[number] for number in random.integers(0, len(sets), 1 + 2 * parties)]
        smallest = min(len(active) for active in some)
        left = np.full(parties, most)
        squares = 0.0
        for active in some:
            there = [one for one in active if left[one]]
            left[there] -= 1
            change = len(there) if disjoint else len(there) ** 2
            squares += change / (len(active) - colluding)
        plan = plan_of(
            releases=most,
            unit="entity",
            parties=parties,
            active=smallest,
            colluding=colluding,
            disjoint=disjoint,
        )
        release = plan.release(1 / 5, rounds=1, row_releases=1)
        assert isinstance(release, GaussianRelease)
        booked = release.noise_multiplier**-2
        assert squares <= booked * (1 + 1e-9)
        worst = max(worst, squares / booked)
    assert worst > 0.7, "the bound is not far from what can happen"


@pytest.mark.parametrize(
    "privacy",
    [
        {"encoder": "dp-trained"},
        {"unit": "linked-row"},
        {"sampling_rate": 0.5},
    ],
)
def test_records_are_counted_only_where_that_bounds_them(privacy: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="releases_per_record"):
        plan_of(**privacy)


def test_nor_where_another_record_takes_the_place() -> None:
    """The other one would be released once more, since this one was: counts would depend on it."""
    with pytest.raises(ConfigError, match="releases_per_record"):
        replace(plan_of(), contested=True)
