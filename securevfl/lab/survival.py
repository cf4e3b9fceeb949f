"""Share of a secondary's signal that survives the noise of a release."""

import math
from dataclasses import replace
from typing import Final

from securevfl.core import checks
from securevfl.dp.release_plan import ReleasePlan

HALF: Final = 0.5
"""The share at which signal and noise are equally strong."""

CLEAR: Final = 2.0
"""Standard errors, or deviations, from zero at which a gain is called clear."""

EXPLAINED: Final = 0.01
"""Share of the primary's residual variance that :func:`rows_to_see` assumes by default."""

_MOST_PARTNERS: Final = 10_000


def noise_a_number(
    plan: ReleasePlan, noise_share_std: float, *, secondaries: int | None = None
) -> float:
    """Return z: the deviation of one released number's noise, over a record's length in the sum.

    A record writes a vector of length C, or C/K if a row is the mean over K slots; the sum carries
    the noise of all secondaries' shares, helpers of the primary included, since the top model knows
    none of them. With another number of secondaries the noise multiplier stays, and the noise
    follows the sensitivity: for ``secondary-record`` it does not grow with them, for the other
    units it does (:func:`securevfl.dp.sensitivity.row_change`). Of symbols it is the noise that
    would leave as much.

    Args:
        plan: Plan of the releases.
        noise_share_std: ``tau`` of that plan; 0 without noise.
        secondaries: Number of secondaries instead of the plan's; more than ``colluding``.

    Returns:
        Dimensionless, >= 0.
    """
    checks.non_negative(noise_share_std=noise_share_std)
    if plan.symbols is not None:
        # Noise that would leave as much of one number; every secondary has its own.
        share = plan.surviving_share(noise_share_std)
        return math.sqrt((1 - share) / share * (secondaries or plan.parties))
    record = plan.privacy.clip_norm / (plan.links if plan.pooled else 1)
    noise = noise_share_std * math.sqrt(plan.parties)
    if secondaries is not None:
        if plan.privacy.accounting == "as-published":
            # The papers' noise is one on the average.
            return noise / record * secondaries / plan.parties
        colluding = plan.privacy.colluding
        other = replace(plan, parties=secondaries, min_active=secondaries)
        noise *= other.sensitivity() / plan.sensitivity()
        # Of k shares k - c must do; the sum carries all k.
        noise *= math.sqrt(
            (secondaries / (secondaries - colluding)) * (plan.parties - colluding) / plan.parties
        )
    return noise / record


def surviving_share(
    *,
    noise: float,
    numbers: int = 1,
    secondaries: int = 1,
    agreement: float = 0.0,
    sampling_rate: float = 1.0,
) -> float:
    """Return the share of signal in a released number's variance: s^2 / (s^2 + z^2).

    The numbers of a record share its length, so each has a deviation of at most 1/sqrt(w) of it.
    Where k secondaries write into one number, their signals add up against noise that is paid
    once: to k times the variance of one where they are uncorrelated, and to k^2 times where all
    write the same. Of records that are drawn at a rate of q, so much of the signal is not there.

    Args:
        noise: ``z``, from :func:`noise_a_number`; of the sum that all of them write into.
        numbers: ``w``, over which the length is spread evenly, >= 1; 1 has all of it in one.
        secondaries: ``k`` that share the number, >= 1; 1 for coordinates of a secondary's own.
        agreement: Correlation between two secondaries' signals, in [0, 1].
        sampling_rate: ``q``, of the secret sample of records; 1 has all of them.

    Returns:
        In [0, 1]. No linear reader, and of a normal quantity no reader at all, explains more of
        the signal's variance.

    References:
        [CT06] sections 9.1 (capacity) and 10.3.2 (rate distortion); research/frontier/README.md,
        "What can survive".

    Examples:
        >>> surviving_share(noise=1.0)
        0.5
        >>> surviving_share(noise=2.0, secondaries=4)
        0.5
        >>> surviving_share(noise=2.0, secondaries=4, agreement=1.0)
        0.8
    """
    checks.non_negative(noise=noise)
    checks.whole(numbers=numbers, secondaries=secondaries)
    checks.at_least(1, numbers=numbers, secondaries=secondaries)
    checks.rate(sampling_rate=sampling_rate)
    others = (secondaries - 1) * agreement
    signal = secondaries * (1 + others) / numbers
    written = sampling_rate * secondaries * (1 + sampling_rate * others) / numbers
    return sampling_rate**2 * signal / (written + noise**2)


def partners_for_half(plan: ReleasePlan, noise_share_std: float, *, numbers: int = 1) -> int | None:
    """Return the fewest secondaries whose signals, in shared coordinates, half survive.

    Their signals are taken as uncorrelated; the noise grows with their number.

    Args:
        plan: Plan of the releases of secondaries that share coordinates (``disjoint`` is False).
        noise_share_std: ``tau`` of that plan.
        numbers: As for :func:`surviving_share`.

    Returns:
        None if no number is enough, as for units whose noise grows with every secondary.
    """

    def share(secondaries: int) -> float:
        noise = noise_a_number(plan, noise_share_std, secondaries=secondaries)
        return surviving_share(
            noise=noise,
            numbers=numbers,
            secondaries=secondaries,
            sampling_rate=plan.privacy.sampling_rate,
        )

    fewest = plan.privacy.colluding + 1
    # Where the noise grows with their number, the first is the best of all.
    if plan.privacy.unit != "secondary-record" or plan.privacy.accounting == "as-published":
        return fewest if share(fewest) >= HALF else None
    if share(_MOST_PARTNERS) < HALF:
        return None
    low, high = fewest - 1, _MOST_PARTNERS
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if share(middle) >= HALF else (middle, high)
    return high


def rows_to_see(share: float, *, explained: float = EXPLAINED) -> int | None:
    """Return the approximate number of training rows that show a signal by two standard errors.

    A released number that correlates by r with what is left open has, over n rows, a t value of
    ``r sqrt(n / (1 - r^2))`` in expectation; r^2 is what the signal would explain without noise,
    times the share of it that survives.

    Args:
        share: From :func:`surviving_share`.
        explained: Share of the primary's residual variance that the signal explains without noise,
            in (0, 1).

    Returns:
        At least 1; None if nothing survives.
    """
    squared = share * explained
    if squared == 0:
        return None
    return max(1, math.ceil(CLEAR**2 * (1 - squared) / squared))
