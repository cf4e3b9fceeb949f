"""Figures for people, in whatever unit a label has."""

import math
from collections.abc import Iterable
from typing import Final

_SMALLEST: Final = 1e-3
_LARGEST: Final = 1e7


def epsilon_in_words(epsilon: float | None) -> str:
    """Return a privacy loss for people; None and infinity are one without bound."""
    return "without bound" if epsilon is None or math.isinf(epsilon) else f"{epsilon:.4g}"


def written(value: float, *, sign: str = "", beside: Iterable[float] = (), digits: int = 4) -> str:
    """Return a figure with decimals, or with significant digits where decimals say nothing.

    Args:
        value: The figure.
        sign: ``"+"`` shows it before what is positive.
        beside: Figures of the same unit that stand next to it, which are written alike.
        digits: Decimals of a figure of usual size: from 0.001 to below 10 million, or 0.
    """
    largest = max((abs(one) for one in (value, *beside) if math.isfinite(one)), default=0.0)
    if largest != 0 and not _SMALLEST <= largest < _LARGEST:
        return f"{value:{sign}.4g}"
    # Not "-0.0000".
    return f"{round(value, digits) + 0.0:{sign}.{digits}f}"
