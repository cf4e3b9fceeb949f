"""A plan's epsilon under five accountants, sound and published, for comparison."""

import math
from dataclasses import dataclass, replace
from typing import Final

from securevfl.core import checks
from securevfl.dp.accountant import SMALLEST_SAMPLED_DELTA
from securevfl.dp.budget import Budget
from securevfl.dp.events import EntitySampledRelease, GaussianRelease
from securevfl.dp.gaussian import gaussian_epsilon
from securevfl.dp.release_plan import epsilon_as_published
from securevfl.dp.sensitivity import honest_parties

# exp() overflows float64 from 710 on.
_LARGEST_EXPONENT: Final = 700.0


def amplified_epsilon(*, epsilon: float, sampling_rate: float) -> float:
    """Return epsilon of a release on a secret Poisson sample, at ``q`` times its delta.

    Args:
        epsilon: Epsilon of the release on the whole data, in nats, >= 0.
        sampling_rate: ``q``, in (0, 1].

    Returns:
        ``log(1 + q (exp(epsilon) - 1))``.

    References:
        [BBG18] Theorem 8 (arXiv:1807.01647v2). Differs from [FeT] section 6.1, whose
        ``q epsilon`` is its first-order term, too small by up to a factor of ``1/q``.

    Examples:
        >>> round(amplified_epsilon(epsilon=4.0, sampling_rate=0.1), 4)
        1.8496
    """
    checks.non_negative(epsilon=epsilon)
    checks.rate(sampling_rate=sampling_rate)
    if epsilon > _LARGEST_EXPONENT:
        # The same in a form that cannot overflow; below, it would cancel for small rates.
        return epsilon + math.log(sampling_rate + (1 - sampling_rate) * math.exp(-epsilon))
    return math.log1p(sampling_rate * math.expm1(epsilon))


def average_std(*, share_std: float, active: int) -> float:
    """Return the standard deviation of the released average: ``tau / sqrt(k_a)``."""
    checks.positive(share_std=share_std)
    checks.whole_from(1, active=active)
    return share_std / math.sqrt(active)


def sampled_gaussian_epsilon(
    *, delta: float, noise_multiplier: float, sampling_rate: float
) -> float:
    """Return epsilon at ``delta`` of one Gaussian release on a secret Poisson sample.

    Exact for removing a record, an upper bound for adding one: the curve of the whole release is
    taken at ``delta / q``.
    """
    checks.open_unit(delta=delta)
    checks.rate(sampling_rate=sampling_rate)
    if delta >= sampling_rate:
        return 0.0
    whole = gaussian_epsilon(delta=delta / sampling_rate, noise_multiplier=noise_multiplier)
    return amplified_epsilon(epsilon=whole, sampling_rate=sampling_rate)


def basic_composition(
    *, delta: float, noise_multiplier: float, sampling_rate: float, steps: int
) -> float:
    """Return epsilon of ``steps`` sampled releases by adding epsilons and deltas.

    Basic composition ([DR14] Theorem 3.16), for comparison: sound, and loose for many steps.

    Raises:
        ConfigError: If an argument is out of range, or the sum is not finite.
    """
    checks.whole_from(0, steps=steps)
    if steps == 0:
        return 0.0
    epsilon = steps * sampled_gaussian_epsilon(
        delta=delta / steps, noise_multiplier=noise_multiplier, sampling_rate=sampling_rate
    )
    checks.non_negative(epsilon=epsilon)
    return epsilon


@dataclass(frozen=True, kw_only=True, slots=True)
class AccountantFigure:
    """Epsilon of a plan by one accountant."""

    name: str
    """Short name, as in JSON."""

    label: str
    """Description for tables, one line."""

    sound: bool
    """True if the figure is a guarantee."""

    epsilon: float | None
    """Epsilon in nats at the plan's delta; None if the accountant does not cover the plan."""


def compare(budget: Budget, *, noise_multiplier: float) -> list[AccountantFigure]:
    """Return the plan's epsilon under five accountants, with the same noise.

    ``without-mpc``: the same noise shares, but the primary sees each secondary's own term. A record
    of one secondary is then hidden by one share instead of ``k - c`` of them. An entity or a
    linked row loses nothing without collusion: k views, each with one k-th of the change.
    """
    own = replace(budget, accountant="auto")
    sampled_too_finely = budget.sampling_rate < 1 and budget.delta < SMALLEST_SAMPLED_DELTA
    exact = None if sampled_too_finely else own.epsilon(noise_multiplier=noise_multiplier)
    renyi = replace(budget, accountant="rdp")
    replaces = budget.neighbouring == "replace-one" and budget.sampling_rate < 1
    alone = noise_multiplier
    if budget.unit == "secondary-record":
        alone /= math.sqrt(honest_parties(active=budget.secondaries, colluding=budget.colluding))
    # Without the sum, an entity's k views are k correlated samples; the full change at rate q
    # bounds them.
    bound = replace(own, secondaries=1, colluding=0)
    if budget.regime.noises_updates:
        # An update's noise is its own secondary's, with or without the sum.
        updates = budget.gradient_noise_multiplier or noise_multiplier
        bound = replace(bound, gradient_noise_multiplier=updates)
    share = budget.noise_share_std(noise_multiplier=noise_multiplier)
    published = epsilon_as_published(
        average_multiplier=average_std(share_std=share, active=budget.secondaries)
        / budget.clip_norm,
        sampling_rate=budget.sampling_rate,
        rounds=budget.steps,
        delta=budget.delta,
    )
    return [
        AccountantFigure(
            name="sound-pld",
            label="sound, exact Gaussian curve"
            if budget.sampling_rate == 1
            else "sound, privacy-loss distributions",
            sound=True,
            epsilon=exact,
        ),
        AccountantFigure(
            name="sound-rdp",
            label="sound, Renyi accountant",
            sound=True,
            epsilon=None if replaces else renyi.epsilon(noise_multiplier=noise_multiplier),
        ),
        AccountantFigure(
            name="naive-composition",
            label="sound, epsilons and deltas added up",
            sound=True,
            epsilon=_added_up(budget, noise_multiplier),
        ),
        AccountantFigure(
            name="without-mpc",
            label="sound, same noise shares without secure averaging",
            sound=True,
            epsilon=None if sampled_too_finely else bound.epsilon(noise_multiplier=alone),
        ),
        AccountantFigure(
            name="as-published",
            label="papers' formula (not a guarantee)",
            sound=False,
            epsilon=published,
        ),
    ]


def _added_up(budget: Budget, noise_multiplier: float) -> float | None:
    if budget.neighbouring == "replace-one" and budget.sampling_rate < 1:
        return None
    releases, epsilon = budget.releases(noise_multiplier), 0.0
    for release in releases:
        rate = 1.0 if isinstance(release, GaussianRelease) else release.sampling_rate
        if isinstance(release, EntitySampledRelease) and release.parties > 1:
            # Drawn by at least one party: what amplification of one release can say of the entity.
            rate = -math.expm1(release.parties * math.log1p(-rate))
        epsilon += basic_composition(
            delta=budget.delta / len(releases),
            noise_multiplier=release.noise_multiplier,
            sampling_rate=rate,
            steps=release.count,
        )
    return epsilon
