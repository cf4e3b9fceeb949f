"""FedSim's bound: the probability tau that its attacker recovers a secondary's key exactly.

The similarity is normalised with the scale sigma_0 and has Gaussian noise of deviation sigma. As
differential privacy the same noise has an epsilon in the millions. Neither is added to an epsilon;
both are reported on their own lines.
"""

import math

import scipy  # special functions load when they are first named

from securevfl.core import checks
from securevfl.core.errors import ConfigError


def recovery_bound(*, noise_std: float, key_scale: float) -> float:
    """Return ``tau``, the bound on the attacker's success for one record, a probability.

    Args:
        noise_std: ``sigma``, noise on the normalised similarity, > 0.
        key_scale: ``sigma_0``, the scale that similarities were divided by, > 0.

    References:
        [FedSim] Theorem 2: ``erf(sqrt(sigma^2 + 1) / (2 sqrt(2) sigma sigma_0))``. Differs from
        the later version's example, which prints 1.94e-5 for sigma = 0.4 and sigma_0 = 21178.86:
        that value belongs to sigma = 4.0.

    Examples:
        >>> f"{recovery_bound(noise_std=0.4, key_scale=21178.86):.4e}"
        '5.0720e-05'
    """
    checks.positive(noise_std=noise_std, key_scale=key_scale)
    return math.erf(math.hypot(noise_std, 1) / (2 * math.sqrt(2) * noise_std * key_scale))


def reachable_floor(*, key_scale: float) -> float:
    """Return the limit of ``tau`` under unlimited noise: ``erf(1 / (2 sqrt(2) sigma_0))``."""
    checks.positive(key_scale=key_scale)
    return math.erf(1 / (2 * math.sqrt(2) * key_scale))


def similarity_noise_std(*, bound: float, key_scale: float) -> float:
    """Return the noise ``sigma`` at which the attacker's bound is ``tau = bound``.

    ``y = 2 sqrt(2) sigma_0 erfinv(tau)``, ``sigma = 1 / sqrt((y - 1)(y + 1))``.

    Raises:
        ConfigError: If ``bound`` is not below 1, or at or below the floor that no noise reaches.
    """
    checks.open_unit(bound=bound)
    floor = reachable_floor(key_scale=key_scale)
    stretched = 2 * math.sqrt(2) * key_scale * float(scipy.special.erfinv(bound))
    if not (bound > floor and stretched > 1):
        raise ConfigError(
            f"bound must be above {floor:.6g}, which is what unlimited noise reaches at "
            f"key_scale = {key_scale!r}; got {bound!r}"
        )
    return 1 / math.sqrt((stretched - 1) * (stretched + 1))


def similarity_epsilon(*, noise_std: float, key_scale: float, key_mean: float, rows: int) -> float:
    """Return a lower bound on epsilon of the noise on similarities, as differential privacy.

    ``epsilon >= Delta^2 / (2 sigma^2)`` with ``Delta = n max(|1 + mu_0|, |1 - mu_0|) / sigma_0``.
    At noise that keeps FedSim's accuracy it is far above any useful guarantee.

    Args:
        noise_std: ``sigma``, noise on the normalised similarity, > 0.
        key_scale: ``sigma_0``, the scale that similarities were divided by, > 0.
        key_mean: ``mu_0``, the mean negative distance of training links.
        rows: ``n``, rows of the primary whose similarities are shown, >= 1.

    References:
        [FedSim] Theorem 1.

    Examples:
        >>> f"{similarity_epsilon(
        ...     noise_std=0.4, key_scale=21178.86, key_mean=-46237.78, rows=14_105
        ... ):.3g}"
        '2.96e+09'
    """
    checks.positive(noise_std=noise_std, key_scale=key_scale)
    checks.non_negative(mean_distance=-key_mean)
    checks.whole_from(1, rows=rows)
    sensitivity = rows * (1 + abs(key_mean)) / key_scale
    return (sensitivity / noise_std) ** 2 / 2


def expected_recoveries(*, noise_std: float, key_scale: float, records: int) -> float:
    """Return the expected number of ``records`` that the attacker recovers: ``n tau``."""
    checks.whole_from(0, records=records)
    return records * recovery_bound(noise_std=noise_std, key_scale=key_scale)
