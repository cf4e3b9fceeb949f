"""What is asked of a setting: ``model.neighbours=1,10,50``, ``seed=0..4``, ``log:1e-4..1e-1``."""

import re
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from securevfl.core.errors import ConfigError

SEED: Final = "federation.seed"
"""Full name of the setting ``seed``."""

_MOST_VALUES: Final = 10_000
_NUMBER: Final = r"[+-]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?"
_RANGE: Final = re.compile(rf"(log:)?({_NUMBER})\.\.({_NUMBER})")
_WHOLE: Final = re.compile(r"[+-]?\d+")
_WORD: Final = re.compile(r"[A-Za-z_][\w-]*")

_SAME_FOR_ALL: Final = ("federation.name", "federation.task", "training.metric")
_ROWS: Final = (
    "training.validation_fraction",
    "training.test_fraction",
    "training.split",
    "training.split_column",
    "training.labelled_rows",
    "training.rows",
    "training.empty_labels",
)
"""Settings that decide which rows train, validate and test."""

_OF_ALONE: Final = (*_ROWS, "training.threshold", "linkage.metric", "linkage.fields")


@dataclass(frozen=True, kw_only=True, slots=True)
class Range:
    """All numbers from one to another, both among them."""

    low: float
    high: float
    log: bool = False
    """True if a search samples uniformly on a logarithmic scale."""

    @property
    def whole(self) -> bool:
        """Whether these are whole numbers."""
        return isinstance(self.low, int) and isinstance(self.high, int)

    def __str__(self) -> str:
        return f"{'log:' if self.log else ''}{self.low}..{self.high}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """A setting of the federation file, and the values to try."""

    name: str
    """``table.field``, ``party.NAME.field``."""

    items: tuple[Any, ...]
    """Values of TOML, and ranges."""

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
        if not self.items:
            raise ConfigError(f"set: {self.name}: name at least one value")

    @property
    def text(self) -> str:
        """What it is tried with, as people write it."""
        return ",".join(text_of(item) for item in self.items)

    @property
    def range(self) -> Range | None:
        """The range, if that is all there is."""
        only = self.items[0]
        return only if len(self.items) == 1 and isinstance(only, Range) else None

    @property
    def changes_alone(self) -> bool:
        """Whether the primary alone may be another with another value: its rows or its columns."""
        return self.name in _OF_ALONE or self.name.startswith(("federation.", "party."))

    def values(self) -> tuple[Any, ...]:
        """Return every value, with ranges of whole numbers written out.

        Raises:
            ConfigError: For another range, for too many values, or for one that is there twice.
        """
        values: list[Any] = []
        for item in self.items:
            values += self._written_out(item) if isinstance(item, Range) else [item]
        texts = [text_of(value) for value in values]
        twice = [text for text in texts if texts.count(text) > 1] if len(texts) < 1000 else []
        if twice:
            raise ConfigError(f"set: {self.name}: {twice[0]} is named twice")
        return tuple(values)

    def ends(self) -> tuple[Any, ...]:
        """Return what a search checks before it starts: every value, and a range's two ends."""
        return self.values() if self.range is None else (self.range.low, self.range.high)

    def require_searchable(self) -> None:
        """Refuse what would let trials validate on other rows.

        Raises:
            ConfigError: Naming the setting.
        """
        if self.name in _ROWS:
            raise ConfigError(
                f"set: {self.name}: changes the validation rows by which a search chooses; sweep "
                f"it without --search"
            )

    def _written_out(self, item: Range) -> Sequence[int]:
        if not item.whole or item.log:
            raise ConfigError(
                f"set: {self.name}: a grid takes values, or whole numbers as 0..4; log: and ranges "
                f"of other numbers are for --search"
            )
        low, high = int(item.low), int(item.high)
        if high - low >= _MOST_VALUES:
            raise ConfigError(
                f"set: {self.name}: {low}..{high} are more than {_MOST_VALUES} values"
            )
        return range(low, high + 1)


def parse_setting(text: str) -> Setting:
    """Read ``NAME=VALUES``.

    Values are parted by commas. Each is a value of TOML (numbers, ``true``, ``"text"``, lists), a
    word without quotes, or a range ``a..b``, whose ends both belong to it, with ``log:`` before it
    where a search is to go by logarithms.

    Raises:
        ConfigError: If it is none of these.
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
        return Setting(name=name, items=tuple(_read(part, name) for part in _parts(values)))
    return Setting(name=name, items=tuple(values))


def text_of(value: Any) -> str:
    """Return a value as people would write it."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return f"[{','.join(map(text_of, value))}]"
    return str(value)


def _parts(text: str) -> Iterator[str]:
    """Yield what commas part, but for those within quotes and brackets."""
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


def _read(part: str, name: str) -> Any:
    ends = _RANGE.fullmatch(part)
    if ends is not None:
        return _range(name, ends[2], ends[3], log=ends[1] is not None)
    try:
        return tomllib.loads(f"value = {part}")["value"]
    except (tomllib.TOMLDecodeError, KeyError):
        if _WORD.fullmatch(part):
            return part
    raise ConfigError(
        f"set: {name}: {part!r} is no value of TOML, no word and no range such as 0..4"
    )


def _range(name: str, low: str, high: str, *, log: bool) -> Range:
    whole = bool(_WHOLE.fullmatch(low) and _WHOLE.fullmatch(high))
    kind = int if whole else float
    value_range = Range(low=kind(low), high=kind(high), log=log)
    if value_range.low >= value_range.high:
        raise ConfigError(f"set: {name}: {low}..{high}: the second must be larger than the first")
    if log and value_range.low <= 0:
        raise ConfigError(f"set: {name}: log:{low}..{high}: logarithms need numbers above 0")
    return value_range
