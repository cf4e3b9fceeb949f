"""JSON of others, read so that whoever computes with it or prints it meets no surprise.

Python's own reader takes numbers that are infinite, whole numbers of thousands of digits, and lists
within lists down to the end of the stack: what is read without an error then fails far from there.
"""

import json
import math
from typing import Any, Final, NoReturn

_MOST_WHOLE: Final = 1 << 63
_MOST_DIGITS: Final = 20


def strict_json(text: str | bytes, *, depth: int) -> Any:
    """Read JSON whose numbers are finite and whole ones within 64 bits.

    Args:
        text: The JSON.
        depth: Levels of lists and objects within one another, at most.

    Raises:
        ValueError: If it is something else.
    """
    try:
        found = json.loads(text, parse_constant=_refused, parse_float=_finite, parse_int=_whole)
    except RecursionError:
        raise ValueError("too many levels") from None
    level = [found]
    for _ in range(depth):
        level = [
            inner
            for outer in level
            if isinstance(outer, dict | list)
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]
    if any(isinstance(inner, dict | list) for inner in level):
        raise ValueError(f"more than {depth} levels")
    return found


def _finite(text: str) -> float:
    value = float(text)
    return value if math.isfinite(value) else _refused(text)


def _whole(text: str) -> int:
    value = int(text) if len(text) <= _MOST_DIGITS else _MOST_WHOLE
    return value if -_MOST_WHOLE <= value < _MOST_WHOLE else _refused(text[:_MOST_DIGITS])


def _refused(text: str) -> NoReturn:
    raise ValueError(f"{text} is not a number that is taken")
