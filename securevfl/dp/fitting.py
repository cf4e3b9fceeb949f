"""What fitting a frozen encoder to every secondary's table costs, and the noise that it gets.

Each secondary fits its encoder to noised statistics of its own records, once, before anything is
released; nothing of that leaves it but through the releases. One record is in the statistics of one
secondary, an entity in every secondary's, and a row of the primary in none.
"""

import math
from typing import assert_never

from securevfl.dp.events import GaussianRelease, Release
from securevfl.dp.gaussian import gaussian_noise_multiplier
from securevfl.dp.privacy import Privacy


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


def fitting_multiplier(
    privacy: Privacy, *, share: float, parties: int, delta: float
) -> float | None:
    """Return the noise multiplier of each secondary's fitting; None if no noise is added.

    With ``privacy.epsilon``, all fittings that a unit is in have ``share`` of the squared ``mu``
    (``mu = 1/z``, in whose squares Gaussian releases add up) that one Gaussian release may have at
    that epsilon; with ``noise_multiplier``, of what they and the releases have together.

    Args:
        privacy: The promise.
        share: In [0, 1); 0 fits nothing.
        parties: Secondaries of the federation.
        delta: What the accounting has of delta.

    References:
        [DRS19] Corollary 3.3: ``mu`` of Gaussian releases composes as the root of summed squares.
    """
    if privacy.mechanism == "none" or not share:
        return None
    # A linked row is in no statistics; the records that are get the noise of one fitting.
    count = max(1, fittings_of_unit(privacy, parties=parties))
    if privacy.noise_multiplier is not None:
        return privacy.noise_multiplier * math.sqrt(count * (1 - share) / share)
    assert privacy.epsilon is not None  # Privacy demands exactly one of the two
    z = gaussian_noise_multiplier(epsilon=privacy.epsilon, delta=delta)
    return z * math.sqrt(count / share)


def fitting_releases(
    privacy: Privacy, *, share: float, parties: int, delta: float
) -> list[Release]:
    """Return what the fittings cost one unit, for an accountant; maybe nothing."""
    multiplier = fitting_multiplier(privacy, share=share, parties=parties, delta=delta)
    count = fittings_of_unit(privacy, parties=parties)
    if multiplier is None or not count:
        return []
    return [GaussianRelease(noise_multiplier=multiplier, count=count)]
