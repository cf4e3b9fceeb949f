"""Checks of values: arguments, fields of settings, and JSON of other parties.

Comparisons are written so that NaN fails.

Python's JSON reader accepts infinite numbers, integers of thousands of digits and nesting as deep
as the stack; these then fail far from the place where they were read. :func:`strict_json` refuses
them.
"""

import difflib
import functools
import json
import math
import operator
import string
import typing
import unicodedata
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from numbers import Real
from pathlib import PureWindowsPath
from types import NoneType, UnionType
from typing import Annotated, Any, Final, Literal, NoReturn, Union

from securevfl.core.errors import ConfigError

MOST_WIDTH: Final = 16_384
"""Largest width of a layer or vector: a layer between two such widths has 1 GiB of weights."""

MOST_LINKS: Final = 10_000
"""Links of a row."""

MOST_LAYERS: Final = 64
"""Blocks of a model."""

MOST_TIMES: Final = 1_000_000
"""Epochs, steps, rows of a batch, trees."""

MOST_KEYS: Final = 2**26
"""Keys that a party may announce in private set intersection."""

_LONGEST_FILE_NAME: Final = 100
_NOT_IN_FILE_NAMES: Final = frozenset('/\\:*?<>|"')
_DEVICES: Final = frozenset(
    ["CON", "PRN", "AUX", "NUL", "CONIN$", "CONOUT$"]
    + [f"{port}{number}" for port in ("COM", "LPT") for number in "0123456789\u00b9\u00b2\u00b3"]
)


def _number(**values: object) -> None:
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, Real):
            raise ConfigError(f"{name} must be a number, got {value!r}")
        try:
            float(value)
        except OverflowError:
            raise ConfigError(f"{name} must be below 1e308") from None


_HOLDS: Final[Mapping[str, Callable[[float, float], bool]]] = {
    "minimum": operator.ge,
    "exclusiveMinimum": operator.gt,
    "maximum": operator.le,
    "exclusiveMaximum": operator.lt,
}


@dataclass(frozen=True, slots=True, eq=False)
class NumberCheck:
    """A check of named numbers: ``positive(epsilon=8.0)``."""

    rule: str
    """Requirement on a number, worded to follow "must"."""

    limits: Mapping[str, float]
    """The limits, by JSON Schema's keywords."""

    def __call__(self, **values: float) -> None:
        """Check that every named value is finite and within the limits."""
        _number(**values)
        for name, value in values.items():
            holds = (_HOLDS[end](value, limit) for end, limit in self.limits.items())
            if not (math.isfinite(value) and all(holds)):
                raise ConfigError(f"{name} must {self.rule}, got {value!r}")


positive: Final = NumberCheck("be finite and > 0", {"exclusiveMinimum": 0})
non_negative: Final = NumberCheck("be finite and >= 0", {"minimum": 0})
open_unit: Final = NumberCheck("lie in (0, 1)", {"exclusiveMinimum": 0, "exclusiveMaximum": 1})
rate: Final = NumberCheck("lie in (0, 1]", {"exclusiveMinimum": 0, "maximum": 1})
fraction: Final = NumberCheck("lie in [0, 1)", {"minimum": 0, "exclusiveMaximum": 1})
closed_unit: Final = NumberCheck("lie in [0, 1]", {"minimum": 0, "maximum": 1})


def at_least(minimum: float, **values: float) -> None:
    """Check that every named value is finite and >= ``minimum``."""
    NumberCheck(f"be at least {minimum}", {"minimum": minimum})(**values)


def at_most(maximum: float, **values: float) -> None:
    """Check that every named value is finite and <= ``maximum``."""
    NumberCheck(f"be at most {maximum:g}", {"maximum": maximum})(**values)


def whole(**values: object) -> None:
    """Check that every named value is an int (a bool is not one)."""
    for name, value in values.items():
        if not isinstance(value, int) or isinstance(value, bool):
            raise ConfigError(f"{name} must be a whole number, got {value!r}")


def whole_from(least: int, **values: object) -> None:
    """Check that every named value is a whole number of at least ``least``."""
    whole(**values)
    at_least(least, **values)  # type: ignore[arg-type]


def within(least: int, most: int, **values: object) -> None:
    """Check that every named value is a whole number from ``least`` to ``most``.

    Numbers that determine the size of memory are bounded before any is allocated: a mistyped number
    would otherwise use up the machine's memory without an explanation.
    """
    whole(**values)
    for name, value in values.items():
        assert isinstance(value, int), "a whole number"
        if not least <= value <= most:
            rule = f"at least {least}" if value < least else f"at most {most}"
            raise ConfigError(f"{name} must be {rule}, got {value!r}")


Positive = Annotated[float, positive]
NonNegative = Annotated[float, non_negative]
OpenUnit = Annotated[float, open_unit]
Rate = Annotated[float, rate]
ClosedUnit = Annotated[float, closed_unit]
FromZero = Annotated[int, partial(whole_from, 0)]
Count = Annotated[int, partial(whole_from, 1)]
Keys = Annotated[int, partial(within, 1, MOST_KEYS)]
Times = Annotated[int, partial(within, 1, MOST_TIMES)]
Links = Annotated[int, partial(within, 1, MOST_LINKS)]
Layers = Annotated[int, partial(within, 1, MOST_LAYERS)]
Fraction = Annotated[float, fraction]
Width = Annotated[int, partial(within, 1, MOST_WIDTH)]


def require_limits(settings: object) -> None:
    """Check the fields of a dataclass by their annotations; None only where it is allowed.

    The annotation of a tuple's numbers is checked for each of them.

    Raises:
        ConfigError: Naming the first invalid field, its rule and its value.
    """
    kind: Any = type(settings)
    for name, optional, limits in limits_of(kind):
        value = getattr(settings, name)
        if value is None and optional:
            continue
        values = {name: value}
        if isinstance(value, tuple):
            values = {f"{name}[{place}]": item for place, item in enumerate(value)}
        for check in limits:
            check(**values)


@functools.cache
def limits_of(kind: type[Any]) -> list[tuple[str, bool, list[Callable[..., None]]]]:
    """Return each field's name, whether it may be None, and the checks in its annotation."""
    limits_by_name = []
    for name, hint in typing.get_type_hints(kind, include_extras=True).items():
        options = options_of(hint)
        numbers = [
            typing.get_args(option)[0] if typing.get_origin(option) is tuple else option
            for option in options
        ]
        limits = [
            c for number in numbers for c in getattr(number, "__metadata__", ()) if callable(c)
        ]
        if len(options) == 1 and typing.get_origin(options[0]) is Literal:
            limits.append(partial(one_of, typing.get_args(options[0])))
        limits_by_name.append((name, NoneType in typing.get_args(hint), limits))
    return limits_by_name


def options_of(hint: Any) -> tuple[Any, ...]:
    """Return the alternatives of a type hint, without None."""
    if typing.get_origin(hint) in (Union, UnionType):
        return tuple(choice for choice in typing.get_args(hint) if choice is not NoneType)
    return (hint,)


def file_name(**values: str) -> None:
    """Check that every named value can be the name of a file or folder on any system.

    It has 1 to 100 printable characters, is not a path, does not start with a dot or hyphen
    (commands would take it for an option), does not end with a dot or space, and is not a device
    name of Windows.
    """
    for name, value in values.items():
        device = value.partition(".")[0].rstrip().upper()
        if (
            not 1 <= len(value) <= _LONGEST_FILE_NAME
            or not value.isprintable()
            or set(value) & _NOT_IN_FILE_NAMES
            or value[0] in ".- "
            or value[-1] in ". "
            or device in _DEVICES
        ):
            raise ConfigError(
                f"{name}: must be a plain file name of at most {_LONGEST_FILE_NAME} characters, "
                f"with none of / \\ : * ? < > | and quotes, and no dot or hyphen in front; "
                f"got {value!r}"
            )


NO_BACKSLASH: Final = (
    'a backslash between double quotes begins an escape: write paths with forward slashes, "a/b"'
)
"""What to do about a Windows path in a file of settings."""


def no_control_characters(**paths: str) -> None:
    """Check that no named path has a character that a backslash of a Windows path may have made."""
    for name, path in paths.items():
        if any(character < " " for character in path):
            raise ConfigError(
                f"{name}: has a control character, got {path!r}; in TOML, {NO_BACKSLASH}"
            )


def below_root(**values: str) -> None:
    """Check that every named value is a relative path that stays below its folder on any system."""
    for name, value in values.items():
        path = PureWindowsPath(value)  # it knows both separators, drives and shares
        if path.anchor or ".." in path.parts or value[:1] == "~" or "\0" in value:
            raise ConfigError(
                f"{name}: must be a relative path below --data-root (data_root; default: the "
                f"folder of the federation file), without ..; got {value!r}"
            )
        no_control_characters(**{name: value})
        if "\\" in value:
            raise ConfigError(
                f"{name}: has a backslash, which is a letter of the name on other systems: write "
                f"forward slashes, {value.replace(chr(92), '/')!r}"
            )


NAME_LETTERS: Final = frozenset(string.ascii_letters + string.digits + "-_")
"""Letters of parties' and methods' names."""

LONGEST_NAME: Final = 40


def plain_name(**values: str) -> None:
    """Check that every named value has 1 to 40 letters, digits, hyphens or underscores."""
    for name, value in values.items():
        if not 1 <= len(value) <= LONGEST_NAME or set(value) - NAME_LETTERS:
            raise ConfigError(
                f"{name}: must be 1 to {LONGEST_NAME} letters, digits, '-' or '_', got {value!r}"
            )


def one_of(allowed: Iterable[object], **values: object) -> None:
    """Check that every named value is one of the ``allowed`` words."""
    words = tuple(allowed)
    for name, value in values.items():
        if value not in words:
            known = [*map(str, words)]
            near = did_you_mean(value, known)
            raise ConfigError(f"{name} must be one of {', '.join(known)}; got {value!r}{near}")


def nearest(word: object, known: Iterable[str]) -> str | None:
    """Return the known word that is most similar to a misspelt one; None if none is similar."""
    if not isinstance(word, str):
        return None
    words = {name.casefold(): name for name in known}
    close = difflib.get_close_matches(word.casefold(), words, n=1)
    return words[close[0]] if close else None


def _compose_accents(word: str) -> str:
    return unicodedata.normalize("NFC", word)


def did_you_mean(word: object, known: Iterable[str]) -> str:
    """Return the end of a message about an unknown word: a suggestion, or nothing."""
    near = nearest(word, known)
    if near is not None and _compose_accents(near) == _compose_accents(str(word)):
        return f"; {near!r} is there, which looks alike: its letters have another Unicode form"
    return "" if near is None else f"; did you mean {near!r}?"


_MOST_WHOLE: Final = 1 << 63
_MOST_DIGITS: Final = 20


def strict_json(text: str | bytes, *, depth: int) -> Any:
    """Read JSON with finite numbers and 64-bit integers only.

    Args:
        text: The JSON.
        depth: Most levels of nested lists and objects.

    Raises:
        ValueError: If it is anything else.
    """
    try:
        parsed = json.loads(
            text, parse_constant=_refuse_number, parse_float=_finite, parse_int=_whole
        )
    except RecursionError:
        raise ValueError("too many levels") from None
    level = [parsed]
    for _ in range(depth):
        level = [
            inner
            for outer in level
            if isinstance(outer, dict | list)
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]
    if any(isinstance(inner, dict | list) for inner in level):
        raise ValueError(f"more than {depth} levels")
    return parsed


def _finite(text: str) -> float:
    value = float(text)
    return value if math.isfinite(value) else _refuse_number(text)


def _whole(text: str) -> int:
    value = int(text) if len(text) <= _MOST_DIGITS else _MOST_WHOLE
    return value if -_MOST_WHOLE <= value < _MOST_WHOLE else _refuse_number(text[:_MOST_DIGITS])


def _refuse_number(text: str) -> NoReturn:
    raise ValueError(f"{text} is not a number that is taken")
