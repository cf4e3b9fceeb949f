"""Grid of a federation file's settings: each combination of values is compared as a method."""

import hashlib
import itertools
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from securevfl.config.disclosure import require_covered_channels
from securevfl.config.encoder import AUTO
from securevfl.config.federation import FederationConfig
from securevfl.config.reading import parse_federation
from securevfl.core.errors import ConfigError, PrivacyError
from securevfl.federation.base import require_estimator
from securevfl.lab.one_run import Recipe

_WORD: Final = re.compile(r"[A-Za-z_][\w-]*")
_COMMA: Final = re.compile(r""",(?![^\[]*\])(?=(?:[^"]*"[^"]*")*[^"]*$)""")
"""Comma that is not within brackets or quotes."""

_SAME_FOR_ALL: Final = ("federation.name", "federation.task", "training.metric")
_OF_ROWS: Final = (
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

_OF_TABLES: Final = ("federation.", "party.")


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """A setting of the federation file, and the values to try."""

    name: str
    """``table.field``, ``party.NAME.field``."""

    values: tuple[Any, ...]
    """Values of TOML."""

    def __post_init__(self) -> None:
        if "." not in self.name:
            raise ConfigError(
                f"set: {self.name!r}: is no setting; write TABLE.FIELD, such as model.neighbours"
            )
        if self.name == "federation.seed":
            raise ConfigError("set: federation.seed: --seeds says how many seeds there are")
        if self.name in _SAME_FOR_ALL or self.name.startswith("methods."):
            raise ConfigError(f"set: {self.name}: must be the same for all runs")
        if not self.values:
            raise ConfigError(f"set: {self.name}: name at least one value")
        texts = [text_of(value) for value in self.values]
        twice = [text for text in texts if texts.count(text) > 1]
        if twice:
            raise ConfigError(f"set: {self.name}: {twice[0]} is named twice")

    @property
    def changes_tables(self) -> bool:
        """Whether the value may change a party's table."""
        return self.name.startswith(_OF_TABLES)

    @property
    def changes_rows(self) -> bool:
        """Whether the value may change the primary's rows or columns."""
        return self.name in _OF_ROWS or self.changes_tables


def parse_setting(text: str) -> Setting:
    """Read ``NAME=VALUES``.

    Commas separate values. Each is a value of TOML (numbers, ``true``, ``"text"``, lists) or a word
    without quotes.

    Raises:
        ConfigError: If the text has another form.
    """
    name, equals, values = (part.strip() for part in text.partition("="))
    if not (name and equals and values):
        raise ConfigError(
            f"set: must be NAME=VALUES, such as model.neighbours=1,10,50; got {text!r}"
        )
    read = [_read(part.strip(), name) for part in _COMMA.split(values)]
    return Setting(name=name, values=tuple(read))


def _read(part: str, name: str) -> Any:
    try:
        return tomllib.loads(f"value = {part}")["value"]
    except (tomllib.TOMLDecodeError, KeyError):
        if _WORD.fullmatch(part):
            return part
    raise ConfigError(f"set: {name}: {part!r} is no value of TOML and no word")


def text_of(value: Any) -> str:
    """Return a value as people would write it."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return f"[{','.join(map(text_of, value))}]"
    return str(value)


_LONGEST_NAME: Final = 120
_ODD: Final = re.compile(r"[^A-Za-z0-9._=,+\[\]-]+")


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """One value of each setting."""

    settings: Mapping[str, Any]
    """Value by ``table.field``."""

    @property
    def name(self) -> str:
        """Unique name of the settings, in the table and of a folder."""
        text = ",".join(f"{name}={text_of(value)}" for name, value in self.settings.items())
        plain = _ODD.sub("-", text)
        if plain == text and len(text) <= _LONGEST_NAME:
            return text
        return f"{plain[:_LONGEST_NAME]}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"

    def recipe(self, config: FederationConfig) -> tuple[Recipe, FederationConfig]:
        """Return the recipe and the checked federation of this point.

        Values that ``auto`` chose for the file are chosen anew under the point's settings.

        Args:
            config: The federation file.

        Raises:
            ConfigError: If a setting is impossible or contradicts another; the text names the
                point.
            PrivacyError: If the privacy settings contradict one another.
        """
        changed = _as_asked(config.source, config.chosen)
        for name, value in self.settings.items():
            changed = _with(changed, name.split("."), name, value)
        where = f"with {self.name}"
        try:
            own = parse_federation(changed, file=where)
            require_covered_channels(own)
            require_estimator(own, None)
        except (ConfigError, PrivacyError) as error:
            text = str(error)
            raise type(error)(text if text.startswith(where) else f"{where}: {text}") from None
        return Recipe(source=changed, method=None), own


def points_of(settings: Sequence[Setting]) -> tuple[Point, ...]:
    """Return every combination of values; none without settings.

    Raises:
        ConfigError: If a setting is there twice.
    """
    names = [setting.name for setting in settings]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"set: {name} is set twice; write all its values behind one =")
    if not settings:
        return ()
    return tuple(
        Point(settings=dict(zip(names, values, strict=True)))
        for values in itertools.product(*(setting.values for setting in settings))
    )


def _as_asked(source: Mapping[str, Any], chosen: Mapping[str, Any]) -> dict[str, Any]:
    """Return a file as it was before ``auto`` chose, without ``[methods]``."""
    asked = {name: value for name, value in source.items() if name != "methods"}
    if not chosen:
        return asked
    for table, fields in asked.items():
        if isinstance(fields, Mapping):
            asked[table] = {
                name: value for name, value in fields.items() if f"{table}.{name}" not in chosen
            }
    return {**asked, "encoder": {**asked["encoder"], "method": AUTO}}


def _with(table: Any, path: Sequence[str], name: str, value: Any) -> dict[str, Any]:
    """Return a table of a parsed file with one setting changed; nothing is changed in place."""
    if not isinstance(table, Mapping):
        raise ConfigError(
            f"set: {name}: {table!r} is a value and no table with a field {path[0]!r}"
        )
    first, *rest = path
    if not rest:
        return {**table, first: value}
    if first != "party" or not isinstance(table.get(first), list):
        return {**table, first: _with(table.get(first, {}), rest, name, value)}
    parties = {party["name"]: party for party in table["party"]}
    if rest[0] not in parties or len(rest) == 1:
        raise ConfigError(f"set: {name}: write party.NAME.FIELD; parties are {', '.join(parties)}")
    return {**table, "party": list(_with(parties, rest, name, value).values())}
