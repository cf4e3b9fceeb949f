"""Named argument checks: each message states the argument, the rule and the value.

Comparisons are written so that NaN fails.
"""

import math
from collections.abc import Iterable
from numbers import Real

from securevfl.core.errors import ConfigError


def _number(**values: object) -> None:
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, Real):
            raise ConfigError(f"{name} must be a number, got {value!r}")
        try:
            float(value)
        except OverflowError:
            raise ConfigError(f"{name} must be below 1e308") from None


def positive(**values: float) -> None:
    """Check that every named value is finite and > 0."""
    _number(**values)
    for name, value in values.items():
        if not (math.isfinite(value) and value > 0):
            raise ConfigError(f"{name} must be finite and > 0, got {value!r}")


def non_negative(**values: float) -> None:
    """Check that every named value is finite and >= 0."""
    _number(**values)
    for name, value in values.items():
        if not (math.isfinite(value) and value >= 0):
            raise ConfigError(f"{name} must be finite and >= 0, got {value!r}")


def at_least(minimum: float, **values: float) -> None:
    """Check that every named value is finite and >= ``minimum``."""
    _number(**values)
    for name, value in values.items():
        if not (math.isfinite(value) and value >= minimum):
            raise ConfigError(f"{name} must be at least {minimum}, got {value!r}")


def whole(**values: object) -> None:
    """Check that every named value is an int (a bool is not one)."""
    for name, value in values.items():
        if not isinstance(value, int) or isinstance(value, bool):
            raise ConfigError(f"{name} must be a whole number, got {value!r}")


def open_unit(**values: float) -> None:
    """Check that every named value lies in (0, 1)."""
    _number(**values)
    for name, value in values.items():
        if not 0 < value < 1:
            raise ConfigError(f"{name} must lie in (0, 1), got {value!r}")


def rate(**values: float) -> None:
    """Check that every named value lies in (0, 1]."""
    _number(**values)
    for name, value in values.items():
        if not 0 < value <= 1:
            raise ConfigError(f"{name} must lie in (0, 1], got {value!r}")


def fraction(**values: float) -> None:
    """Check that every named value lies in [0, 1)."""
    _number(**values)
    for name, value in values.items():
        if not 0 <= value < 1:
            raise ConfigError(f"{name} must lie in [0, 1), got {value!r}")


def one_of(allowed: Iterable[str], **values: object) -> None:
    """Check that every named value is one of the ``allowed`` words."""
    words = tuple(allowed)
    for name, value in values.items():
        if value not in words:
            raise ConfigError(f"{name} must be one of {', '.join(words)}; got {value!r}")
