"""Counts of what is released: none may be negative, and none of what is shared may be missing."""

from collections.abc import Callable

import pytest

from securevfl.core.errors import ConfigError
from securevfl.dp.accountant import epsilon_of
from securevfl.dp.budget import Budget
from securevfl.dp.events import EntitySampledRelease, GaussianRelease, SampledRelease
from securevfl.dp.release_plan import epsilon_as_published

KINDS: list[Callable] = [
    lambda count: GaussianRelease(noise_multiplier=1.0, count=count),
    lambda count: SampledRelease(sampling_rate=0.5, noise_multiplier=1.0, count=count),
    lambda count: EntitySampledRelease(
        parties=2, sampling_rate=0.5, noise_multiplier=1.0, count=count
    ),
]
NAMES = ["gaussian", "sampled", "entity"]


@pytest.mark.parametrize("release", KINDS, ids=NAMES)
def test_a_negative_count_is_refused(release: Callable) -> None:
    """It would give back what other releases cost."""
    with pytest.raises(ConfigError, match="count"):
        release(-1)


@pytest.mark.parametrize("release", KINDS, ids=NAMES)
def test_releases_that_were_not_made_cost_nothing(release: Callable) -> None:
    """Beside others, and alone."""
    other = GaussianRelease(noise_multiplier=1.0)
    alone = epsilon_of([other], delta=1e-5)
    assert epsilon_of([release(0)], delta=1e-5) == 0
    assert epsilon_of([other, release(0)], delta=1e-5) == alone
    assert epsilon_of([other, release(1)], delta=1e-5) > alone


def test_a_negative_number_of_rounds_is_refused_by_the_published_formula_too() -> None:
    """No rounds are none."""
    settings = {"average_multiplier": 1.0, "sampling_rate": 0.5, "delta": 1e-5}
    with pytest.raises(ConfigError, match="rounds"):
        epsilon_as_published(rounds=-1, **settings)
    assert epsilon_as_published(rounds=0, **settings) == 0


@pytest.mark.parametrize("name", ["secondaries", "batch_rows", "batches_per_epoch"])
def test_a_plan_has_at_least_one_of_each(name: str) -> None:
    """By the name of the setting."""
    Budget(steps=1, delta=1e-5, links_per_record=1, **{name: 1})
    with pytest.raises(ConfigError, match=name):
        Budget(steps=1, delta=1e-5, links_per_record=1, **{name: 0})
