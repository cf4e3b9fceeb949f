"""How much noise each party adds, so that what the primary learns carries enough of it."""

import math

from securevfl.core import checks
from securevfl.core.errors import PrivacyError


def honest_parties(*, active: int, colluding: int) -> int:
    """Return how many active secondaries add noise that nobody can subtract.

    Raises:
        ConfigError: If a number is out of range.
        PrivacyError: If none would be left.
    """
    checks.whole(active=active, colluding=colluding)
    checks.at_least(1, active=active)
    checks.at_least(0, colluding=colluding)
    if colluding >= active:
        raise PrivacyError(
            f"colluding = {colluding} of {active} active secondaries leaves nobody whose noise "
            f"protects; it must be at most {active - 1}, or more secondaries must take part"
        )
    return active - colluding


def noise_share_std(*, sum_std: float, active: int, colluding: int = 0) -> float:
    """Return ``tau``, the standard deviation of the noise that each party adds to its own term.

    Colluding parties can subtract what they added, so the others carry the whole of ``sum_std``.

    Args:
        sum_std: Standard deviation that the sum must keep, in the units of the sum, > 0.
        active: Secondaries that add a share, >= 1.
        colluding: Largest number of them that may help the primary, >= 0 and < ``active``.

    Returns:
        ``sum_std / sqrt(active - colluding)``.

    References:
        docs/privacy.md, section 3. Differs from [FeT] section 6.1, which gives each of k parties
        the variance ``sigma^2/k^2``: under averaging that leaves ``sigma/k^1.5`` on the average,
        not sigma.

    Examples:
        >>> noise_share_std(sum_std=2.0, active=5, colluding=1)
        1.0
    """
    checks.positive(sum_std=sum_std)
    return sum_std / math.sqrt(honest_parties(active=active, colluding=colluding))


def noise_multiplier_of_shares(
    *, share_std: float, sensitivity: float, active: int, colluding: int = 0
) -> float:
    """Return ``z = tau sqrt(k_a - c) / Delta_sum`` (docs/privacy.md, section 3).

    Args:
        share_std: ``tau``, what each party adds to its term of the sum, > 0.
        sensitivity: ``Delta_sum``, L2 sensitivity of the sum, in the same units, > 0.
        active: ``k_a``, >= 1.
        colluding: ``c``, >= 0 and < ``active``.
    """
    checks.positive(share_std=share_std, sensitivity=sensitivity)
    return share_std * math.sqrt(honest_parties(active=active, colluding=colluding)) / sensitivity


def average_std(*, share_std: float, active: int) -> float:
    """Return the standard deviation of the released average: ``tau / sqrt(k_a)``."""
    checks.positive(share_std=share_std)
    checks.whole(active=active)
    checks.at_least(1, active=active)
    return share_std / math.sqrt(active)


def share_std_for_average(
    *, average_noise_std: float, parties: int, colluding: int = 0, divided_terms: bool = False
) -> float:
    """Return what each of ``parties`` adds so that the average keeps ``average_noise_std``.

    Args:
        average_noise_std: Standard deviation that must stay on the average when the colluding
            parties have subtracted their own noise, > 0.
        parties: ``k``, >= 1.
        colluding: ``c``, >= 0 and < ``parties``.
        divided_terms: The noise goes on terms that were divided by k already.

    Returns:
        ``k s / sqrt(k - c)`` before the division, ``s / sqrt(k - c)`` on divided terms.

    Examples:
        >>> share_std_for_average(average_noise_std=1.0, parties=4)
        2.0
        >>> share_std_for_average(average_noise_std=1.0, parties=4, divided_terms=True)
        0.5
    """
    divided = noise_share_std(sum_std=average_noise_std, active=parties, colluding=colluding)
    return divided if divided_terms else parties * divided
