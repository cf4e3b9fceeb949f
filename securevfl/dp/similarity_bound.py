"""FedSim's bound on one greedy attacker who sees a noisy similarity. It is not DP.

``tau`` bounds the probability that this attacker recovers a secondary's key exactly, when the
similarity is normalised with the scale ``sigma_0`` and carries Gaussian noise of deviation
``sigma``. Reported on its own line, never added to an epsilon.
"""

import math

from scipy.special import erfinv

from securevfl.core import checks
from securevfl.core.errors import ConfigError


def recovery_bound(*, noise_std: float, key_scale: float) -> float:
    """Return ``tau``, the bound on the attacker's success for one record.

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
    """Return what ``tau`` tends to under unlimited noise: ``erf(1 / (2 sqrt(2) sigma_0))``."""
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
    stretched = 2 * math.sqrt(2) * key_scale * float(erfinv(bound))
    if not (bound > floor and stretched > 1):
        raise ConfigError(
            f"bound must be above {floor:.6g}, which is what unlimited noise reaches at "
            f"key_scale = {key_scale!r}; got {bound!r}"
        )
    return 1 / math.sqrt((stretched - 1) * (stretched + 1))


def expected_recoveries(*, noise_std: float, key_scale: float, records: int) -> float:
    """Return how many of ``records`` the attacker is expected to recover: ``n tau``."""
    checks.whole(records=records)
    checks.at_least(0, records=records)
    return records * recovery_bound(noise_std=noise_std, key_scale=key_scale)
