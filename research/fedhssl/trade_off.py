"""Calibrated averaged performance: utility and attack success of a protection in one figure."""

from collections.abc import Sequence
from dataclasses import dataclass

from securevfl.core import checks
from securevfl.core.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class Protected:
    """Measurements at one strength of a protection."""

    strength: float
    """lambda, >= 0."""

    utility: float
    """U: the main task's metric on test rows, in [0, 1]."""

    recovered: float
    """Share of private labels that the attack gets right, in [0, 1]."""

    def __post_init__(self) -> None:
        checks.non_negative(strength=self.strength)
        for name, value in (("utility", self.utility), ("recovered", self.recovered)):
            if not 0 <= value <= 1:
                raise ConfigError(f"{name}: must be between 0 and 1, got {value!r}")


def calibrated_averaged_performance(points: Sequence[Protected]) -> float:
    """Return the mean over strengths of utility times the attack's share of wrong guesses.

    Of label inference, E of the definition is the share of labels that the attack misses: with it
    the accuracies of the paper's Table XI give the figures of its Table XII. The figure is between
    0 and 1 and higher is better. It compares only curves over the same strengths and the same
    attack, and says nothing of a better attack.

    Raises:
        ConfigError: If there are no points, or two of one strength.

    References:
        [FedHSSL] Definition 1, Equation 8.
    """
    if not points:
        raise ConfigError("strength: at least one is needed for an average")
    strengths = [point.strength for point in points]
    if len(set(strengths)) < len(strengths):
        raise ConfigError(f"strength: each counts once, got {strengths}")
    return sum(point.utility * (1 - point.recovered) for point in points) / len(points)
