"""Settings of a sweep, as ``model.neighbours=1,10,50``, and combinations of their values."""

import hashlib
import itertools
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from securevfl.config.disclosure import require_covered_channels
from securevfl.config.encoder import AUTO
from securevfl.config.federation import FederationConfig
from securevfl.config.reading import parse_federation
from securevfl.core.errors import ConfigError, PrivacyError
from securevfl.federation.base import require_estimator
from securevfl.lab.one_run import Recipe

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
    """Return a setting with its values, from a text as for :func:`parse_setting` or a list.

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


_AS_WRITTEN: Final = "as-written"
_LONGEST_NAME: Final = 120
_ODD: Final = re.compile(r"[^A-Za-z0-9._=,+\[\]-]+")


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """Values of the swept settings, except the seed."""

    settings: Mapping[str, Any]
    """Value by ``table.field``."""

    @property
    def text(self) -> str:
        """Settings as readable text."""
        return ", ".join(f"{name}={text_of(value)}" for name, value in self.settings.items())

    @property
    def name(self) -> str:
        """Unique folder name of the settings."""
        text = self.text.replace(", ", ",") or _AS_WRITTEN
        plain = _ODD.sub("-", text)
        if plain == text and len(text) <= _LONGEST_NAME:
            return text
        return f"{plain[:_LONGEST_NAME]}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"

    def recipe(self, source: Mapping[str, Any]) -> tuple[Recipe, FederationConfig]:
        """Return the recipe and the checked federation of this point.

        Args:
            source: Federation file, from :func:`source_of`.

        Raises:
            ConfigError: If a setting is impossible or contradicts another; the text names the
                point.
            PrivacyError: If the privacy settings contradict one another.
        """
        changed = dict(source)
        for name, value in self.settings.items():
            changed = _with(changed, name, value)
        where = f"with {self.text}" if self.settings else "federation file"
        try:
            config = parse_federation(changed, file=where)
            require_covered_channels(config)
            require_estimator(config, None)
        except (ConfigError, PrivacyError) as error:
            text = str(error)
            raise type(error)(text if text.startswith(where) else f"{where}: {text}") from None
        return Recipe(source=changed, method=None), config


def as_asked(source: Mapping[str, Any], chosen: Mapping[str, Any]) -> dict[str, Any]:
    """Return a file as it was before ``auto`` chose, so that it can be resolved again.

    Args:
        source: The file with the chosen values.
        chosen: The chosen values, by ``table.field``.
    """
    if not chosen:
        return dict(source)
    as_written = {
        table: {name: value for name, value in fields.items() if f"{table}.{name}" not in chosen}
        if isinstance(fields, Mapping)
        else fields
        for table, fields in source.items()
    }
    return {**as_written, "encoder": {**as_written["encoder"], "method": AUTO}}


def source_of(config: FederationConfig) -> dict[str, Any]:
    """Return a federation file as it was written, without ``[methods]``.

    Values that ``auto`` chose become ``auto`` again, so that each point's settings decide them.
    """
    source = as_asked(config.source, config.chosen)
    return {name: value for name, value in source.items() if name != "methods"}


def _with(source: Mapping[str, Any], name: str, value: Any) -> dict[str, Any]:
    """Return a parsed file with one setting changed; nothing is changed in place."""
    first, *rest = name.split(".")
    if first == "party":
        return {**source, "party": _with_party(source, rest, name, value)}
    return _deeper(source, [first, *rest], name, value)


def _deeper(table: Any, path: list[str], name: str, value: Any) -> dict[str, Any]:
    if not isinstance(table, Mapping):
        raise ConfigError(
            f"set: {name}: {table!r} is a value and no table with a field {path[0]!r}"
        )
    first, *rest = path
    return {**table, first: _deeper(table.get(first, {}), rest, name, value) if rest else value}


def _with_party(source: Mapping[str, Any], path: list[str], name: str, value: Any) -> list[Any]:
    parties = list(source.get("party", []))
    names = [party.get("name") for party in parties if isinstance(party, Mapping)]
    if len(path) < 2 or path[0] not in names:
        known = ", ".join(map(str, names))
        raise ConfigError(f"set: {name}: write party.NAME.FIELD; parties are {known}")
    place = names.index(path[0])
    parties[place] = _deeper(parties[place], path[1:], name, value)
    return parties
