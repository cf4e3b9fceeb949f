"""Settings of a sweep, as ``model.neighbours=1,10,50`` or ``seed=0..4``."""

import itertools
import re
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from securevfl.core.errors import ConfigError

SEED: Final = "federation.seed"
"""Full name of the setting ``seed``."""

_MOST_VALUES: Final = 10_000
_RANGE: Final = re.compile(r"([+-]?\d+)\.\.([+-]?\d+)")
_WORD: Final = re.compile(r"[A-Za-z_][\w-]*")

_SAME_FOR_ALL: Final = ("federation.name", "federation.task", "training.metric")
_OF_ALONE: Final = (
    "training.validation_fraction",
    "training.test_fraction",
    "training.split",
    "training.split_column",
    "training.labelled_rows",
    "training.rows",
    "training.empty_labels",
    "training.threshold",
    "linkage.metric",
    "linkage.fields",
)
"""Settings that change the rows or the columns of the primary alone."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """A setting of the federation file, and the values to try."""

    name: str
    """``table.field``, ``party.NAME.field``."""

    values: tuple[Any, ...]
    """Values of TOML."""

    def __post_init__(self) -> None:
        first, _, rest = self.name.partition(".")
        if not rest:
            raise ConfigError(
                f"set: {self.name!r}: is no setting; write TABLE.FIELD, such as model.neighbours, "
                f"or seed"
            )
        if first == "methods":
            raise ConfigError(
                f"set: {self.name}: is for securevfl lab compare; a sweep trains no methods"
            )
        if self.name in _SAME_FOR_ALL:
            raise ConfigError(f"set: {self.name}: must be the same for all runs")
        if not self.values:
            raise ConfigError(f"set: {self.name}: name at least one value")
        texts = [text_of(value) for value in self.values]
        twice = [text for text in texts if texts.count(text) > 1] if len(texts) < 1000 else []
        if twice:
            raise ConfigError(f"set: {self.name}: {twice[0]} is named twice")

    @property
    def changes_alone(self) -> bool:
        """Whether the value may change the primary alone: its rows or its columns."""
        return self.name in _OF_ALONE or self.name.startswith(("federation.", "party."))


def parse_setting(text: str) -> Setting:
    """Read ``NAME=VALUES``.

    Commas separate values. Each is a value of TOML (numbers, ``true``, ``"text"``, lists), a word
    without quotes, or all whole numbers ``a..b`` from ``a`` to ``b``.

    Raises:
        ConfigError: If the text has another form.
    """
    name, equals, values = text.partition("=")
    if not equals or not name.strip() or not values.strip():
        raise ConfigError(
            f"set: must be NAME=VALUES, such as model.neighbours=1,10,50; got {text!r}"
        )
    return setting_of(name.strip(), values)


def setting_of(name: str, values: str | Sequence[Any]) -> Setting:
    """Return a setting with its values, as a text of :func:`parse_setting` or one by one.

    Raises:
        ConfigError: If the text cannot be read.
    """
    name = SEED if name == "seed" else name
    if isinstance(values, str):
        parts = [_read(part, name) for part in _parts(values)]
        return Setting(name=name, values=tuple(itertools.chain.from_iterable(parts)))
    return Setting(name=name, values=tuple(values))


def text_of(value: Any) -> str:
    """Return a value as people would write it."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return f"[{','.join(map(text_of, value))}]"
    return str(value)


def _parts(text: str) -> Iterator[str]:
    """Yield the parts between commas that are not within quotes or brackets."""
    depth, quote, start = 0, "", 0
    for place, letter in enumerate(text):
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "\"'":
            quote = letter
        elif letter in "[{":
            depth += 1
        elif letter in "]}":
            depth -= 1
        elif letter == "," and not depth:
            yield text[start:place].strip()
            start = place + 1
    yield text[start:].strip()


def _read(part: str, name: str) -> Sequence[Any]:
    """Return the value that a part of a setting's text names, or the numbers of its range."""
    ends = _RANGE.fullmatch(part)
    if ends is not None:
        return _range(name, int(ends[1]), int(ends[2]))
    try:
        return [tomllib.loads(f"value = {part}")["value"]]
    except (tomllib.TOMLDecodeError, KeyError):
        if _WORD.fullmatch(part):
            return [part]
    raise ConfigError(
        f"set: {name}: {part!r} is no value of TOML, no word and no range such as 0..4"
    )


def _range(name: str, low: int, high: int) -> range:
    if low >= high:
        raise ConfigError(f"set: {name}: {low}..{high}: the second must be larger than the first")
    if high - low >= _MOST_VALUES:
        raise ConfigError(f"set: {name}: {low}..{high} are more than {_MOST_VALUES} values")
    return range(low, high + 1)
