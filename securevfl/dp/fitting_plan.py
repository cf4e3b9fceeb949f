"""What fitting a frozen encoder to every secondary's table costs, and the noise that it gets.

Each secondary fits its encoder to noised statistics of its own records, once, before anything is
released; nothing of that leaves it but through the releases. One record is in the statistics of one
secondary, an entity in every secondary's, and a row of the primary in none.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, assert_never

from securevfl.core import checks
from securevfl.dp.events import GaussianRelease, Release
from securevfl.dp.gaussian import gaussian_noise_multiplier
from securevfl.dp.privacy import Privacy


@dataclass(frozen=True, kw_only=True, slots=True)
class FittingPlan:
    """What every secondary's fitting may take, and in how many noised answers."""

    share: float
    """Part of the run's privacy, in squared ``mu`` (``mu = 1/z``, in whose squares Gaussian
    releases add up), that all fittings that a unit is in may take together; in (0, 1)."""

    steps: int = 1
    """Noised answers that one fitting takes from its table, >= 1."""

    def __post_init__(self) -> None:
        checks.open_unit(share=self.share)
        checks.whole(steps=self.steps)
        checks.at_least(1, steps=self.steps)


def fitting_from(settings: Mapping[str, Any] | None) -> FittingPlan | None:
    """Return a plan from its fields as a mapping; None stays None."""
    return None if settings is None else FittingPlan(**settings)


def fittings_of_unit(privacy: Privacy, *, parties: int) -> int:
    """Return in how many secondaries' statistics one unit is."""
    match privacy.unit:
        case "secondary-record":
            return 1
        case "entity":
            return parties
        case "linked-row":
            return 0
        case _:
            assert_never(privacy.unit)


@lru_cache(maxsize=64)
def fitting_multiplier(
    privacy: Privacy, fitting: FittingPlan | None, *, parties: int, delta: float
) -> float | None:
    """Return the noise multiplier of each step of a secondary's fitting; None if none is added.

    With ``privacy.epsilon``, fittings have their share of the squared ``mu`` that one Gaussian
    release may have at that epsilon; with ``noise_multiplier``, of what they and the releases have
    together. Sampled steps, which have no ``mu``, get the noise at which they cost the epsilon of
    such a Gaussian.

    Args:
        privacy: The promise.
        fitting: None fits nothing.
        parties: Secondaries of the federation.
        delta: What the accounting has of delta.

    References:
        [DRS19] Corollary 3.3: ``mu`` of Gaussian releases composes as the root of summed squares.
    """
    if privacy.mechanism == "none" or fitting is None:
        return None
    # A linked row is in no statistics; the records that are get the noise of one fitting.
    count = fitting.steps * max(1, fittings_of_unit(privacy, parties=parties))
    if privacy.noise_multiplier is not None:
        together = privacy.noise_multiplier * math.sqrt((1 - fitting.share) / fitting.share)
    else:
        assert privacy.epsilon is not None  # Privacy demands exactly one of the two
        z = gaussian_noise_multiplier(epsilon=privacy.epsilon, delta=delta)
        together = z / math.sqrt(fitting.share)
    return together * math.sqrt(count)


def fitting_releases(
    privacy: Privacy, fitting: FittingPlan | None, *, parties: int, delta: float
) -> list[Release]:
    """Return what the fittings cost one unit, for an accountant; maybe nothing."""
    multiplier = fitting_multiplier(privacy, fitting, parties=parties, delta=delta)
    fittings = fittings_of_unit(privacy, parties=parties)
    if fitting is None or multiplier is None or not fittings:
        return []
    return [GaussianRelease(noise_multiplier=multiplier, count=fitting.steps * fittings)]
