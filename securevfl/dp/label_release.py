"""What telling secondaries of the primary's labels costs: a promise with its own epsilon.

Neighbouring tables differ in the label of one row, which is exchanged for another. Two kinds of
mechanism keep it. Labels that are drawn once are told to every secondary alike: one epsilon holds
against all of them together. Noise on what each secondary gets by itself holds against that one at
a delta; against k that put theirs together it is as if there were k releases.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Literal, get_args

from securevfl.core import checks
from securevfl.core.errors import ConfigError
from securevfl.dp.gaussian import composed_multiplier, gaussian_epsilon, gaussian_noise_multiplier

SMALLEST_EPSILON: Final = 1e-6
"""Of labels; below it nothing is left of them."""

LabelMechanism = Literal["randomised", "noised", "shares", "shown"]
"""How labels reach secondaries: classes by ``randomised`` response or numbers ``noised`` by a
Gaussian, both drawn once and the same for all; ``shares``, sums over rows with a Gaussian for each
secondary; ``shown``, as they are."""


def label_noise_multiplier(epsilon: float, delta: float) -> float:
    """Return the noise, over what one label moves, that keeps epsilon against one secondary.

    Args:
        epsilon: > 0.
        delta: In (0, 1).

    Raises:
        ConfigError: If an argument is out of range.

    References:
        [BW18] Theorem 8; see :func:`securevfl.dp.gaussian.gaussian_noise_multiplier`.
    """
    return gaussian_noise_multiplier(epsilon=epsilon, delta=delta)


def labels_together(epsilon: float, delta: float, parties: int) -> float:
    """Return epsilon against so many secondaries that put together what each got by itself.

    Args:
        epsilon: Against one of them, > 0.
        delta: At which both hold, in (0, 1).
        parties: ``k``, at least 1.

    Raises:
        ConfigError: If an argument is out of range.

    References:
        [DRS19] Corollary 3.3: k releases of ``mu`` are one of ``sqrt(k) mu``.

    Examples:
        >>> round(labels_together(2.0, 1e-5, 4), 2)
        4.49
    """
    checks.whole(parties=parties)
    checks.at_least(1, parties=parties)
    multiplier = label_noise_multiplier(epsilon, delta) / math.sqrt(parties)
    return max(gaussian_epsilon(delta=delta, noise_multiplier=multiplier), epsilon)


@dataclass(frozen=True, kw_only=True, slots=True)
class LabelRelease:
    """What a run tells secondaries of labels, as ledgers book it."""

    mechanism: LabelMechanism
    epsilon: float | None
    """Against one secondary alone; None for labels that are shown."""
    delta: float
    """At which it holds; 0 for randomised and shown labels."""
    parties: int
    """Secondaries that are told."""
    digest: str = ""
    """Of labels that are drawn once and told again when a run is resumed; empty for others."""

    def __post_init__(self) -> None:
        checks.one_of(get_args(LabelMechanism), mechanism=self.mechanism)
        checks.whole(parties=self.parties)
        checks.at_least(1, parties=self.parties)
        if (self.epsilon is None) != (self.mechanism == "shown"):
            raise ConfigError("an epsilon of labels belongs to all mechanisms but 'shown'")
        if self.epsilon is not None:
            checks.positive(epsilon=self.epsilon)
        if self.gaussian:
            checks.open_unit(delta=self.delta)
        elif self.delta != 0:
            raise ConfigError(f"labels that are {self.mechanism} have no delta")

    @property
    def gaussian(self) -> bool:
        """Whether noise keeps the promise, at a delta."""
        return self.mechanism in ("noised", "shares")

    @property
    def together(self) -> float | None:
        """Epsilon against all secondaries together; None for labels that are shown."""
        if self.mechanism != "shares" or self.epsilon is None:
            return self.epsilon
        return labels_together(self.epsilon, self.delta, self.parties)


@dataclass(frozen=True, kw_only=True, slots=True)
class LabelTotal:
    """What several releases of labels come to."""

    epsilon: float | None
    """Against one secondary, the same in all of them; None where labels were shown."""
    together: float | None
    """Against all secondaries together; None where labels were shown."""
    delta: float
    """At which both hold: the smallest of the releases with noise; 0 without any."""


def labels_total(releases: Iterable[LabelRelease]) -> LabelTotal | None:
    """Return what releases of labels come to together; None where there are none.

    Gaussians compose exactly, by adding the squares of ``mu``; the epsilons of randomised labels
    are added to what they come to.

    References:
        [DRS19] Corollary 3.3; basic composition, [DR14] Theorem 3.16.
    """
    all_of_them = list(releases)
    if not all_of_them:
        return None
    noised = [one for one in all_of_them if one.gaussian]
    delta = min((one.delta for one in noised), default=0.0)
    if any(one.mechanism == "shown" for one in all_of_them):
        return LabelTotal(epsilon=None, together=None, delta=delta)
    if len(all_of_them) == 1:
        # As it was asked for, which its noise gives back but for the last digits.
        (only,) = all_of_them
        return LabelTotal(epsilon=only.epsilon, together=only.together, delta=delta)
    pure = math.fsum(one.epsilon or 0.0 for one in all_of_them if not one.gaussian)
    alone = [label_noise_multiplier(one.epsilon or 0.0, one.delta) for one in noised]
    joint = [
        z / math.sqrt(one.parties if one.mechanism == "shares" else 1)
        for z, one in zip(alone, noised, strict=True)
    ]
    if not noised:
        return LabelTotal(epsilon=pure, together=pure, delta=delta)
    return LabelTotal(
        epsilon=pure + gaussian_epsilon(delta=delta, noise_multiplier=composed_multiplier(*alone)),
        together=pure + gaussian_epsilon(delta=delta, noise_multiplier=composed_multiplier(*joint)),
        delta=delta,
    )
