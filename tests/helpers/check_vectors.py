"""Run a file of accounting reference cases through the public functions.

``PYTHONPATH=tests python -m helpers.check_vectors FILE`` prints each miss and, last,
``N passed, N failed``. A case that expects a refusal passes only if it is refused.
"""

import json
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from helpers.vector_groups import GROUPS

from securevfl import SecureVflError
from securevfl.core.errors import ConfigError

_TOLERANCES: Final = frozenset(
    ("abs_tol", "rel_tol", "abs_tol_low", "abs_tol_high", "rel_tol_low", "rel_tol_high")
)
# Keys of "expect" that are no results.
_REMARKS: Final = _TOLERANCES | {
    "one_sided",
    "inf_allowed",
    "refuse",
    "reason",
    "tau_floor",
    "note",
}
# A one-sided value may fall short of the truth by rounding alone.
_ONE_SIDED: Final = 1e-9
_NUMBER_WORDS: Final = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def miss_of(case: Mapping[str, Any]) -> str | None:
    """Return why a case fails, or None if it passes."""
    group = case["group"]
    if group not in GROUPS:
        return f"no such group: {group!r}"
    expect = _numbers(case["expect"])
    try:
        results = GROUPS[group](_numbers(case["inputs"]))
    except SecureVflError as error:
        return None if expect.get("refuse") else f"refused: {error}"
    except KeyError as error:
        return f"an input is missing: {error}"
    except (TypeError, ValueError, ArithmeticError) as error:
        return f"neither answered nor refused: {type(error).__name__}: {error}"
    if expect.get("refuse"):
        return f"not refused, but answered {results} ({expect.get('reason', 'no reason given')})"
    wanted = {name: value for name, value in expect.items() if name not in _REMARKS}
    unknown = sorted(set(wanted) - set(results))
    if unknown:
        return f"this program computes no {unknown[0]!r} for the group"
    for name, value in wanted.items():
        text = _difference(results[name], value, expect)
        if text is not None:
            return f"{name}: {text}"
    return None


def _difference(result: float, value: float | None, expect: Mapping[str, Any]) -> str | None:
    if value is None or math.isinf(value):
        return None if math.isinf(result) else f"got {result!r}, expected no finite value"
    if expect.get("inf_allowed") and result == math.inf:
        return None
    both_absolute, both_relative = expect.get("abs_tol", 0.0), expect.get("rel_tol", 0.0)
    low = value - max(
        expect.get("abs_tol_low", both_absolute),
        expect.get("rel_tol_low", both_relative) * abs(value),
    )
    high = value + max(
        expect.get("abs_tol_high", both_absolute),
        expect.get("rel_tol_high", both_relative) * abs(value),
    )
    if "one_sided" in expect:
        low = value - _ONE_SIDED * abs(value)
    if low <= result <= high:
        return None
    return f"got {result!r}, expected {value!r} (between {low!r} and {high!r})"


def _numbers(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Turn the words that JSON has for NaN and infinity back into numbers."""
    return {
        name: _NUMBER_WORDS.get(value.lower(), value) if isinstance(value, str) else value
        for name, value in inputs.items()
    }


def check_file(path: Path) -> tuple[int, list[str]]:
    """Return how many cases of a file pass, and a line for each that does not.

    Raises:
        ConfigError: If the file is not a file of cases.
    """
    try:
        cases = json.loads(path.read_text(encoding="utf-8"))["cases"]
    except OSError as error:
        raise ConfigError(f"vectors {path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError):
        raise ConfigError(f'vectors {path}: is not JSON with a list of "cases"') from None
    misses = []
    for case in cases:
        miss = miss_of(case)
        if miss is not None:
            misses.append(f"{case.get('id', case['group'])}: {miss}")
    return len(cases) - len(misses), misses


def main() -> int:
    """Check the file named on the command line."""
    if len(sys.argv) != 2:
        sys.stderr.write("usage: make check-vectors FILE=path\n")
        return ConfigError.exit_code
    try:
        passed, misses = check_file(Path(sys.argv[1]))
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    for miss in misses:
        sys.stdout.write(f"MISS {miss}\n")
    sys.stdout.write(f"{passed} passed, {len(misses)} failed\n")
    return 1 if misses else 0


if __name__ == "__main__":
    sys.exit(main())
