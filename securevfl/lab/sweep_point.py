"""Point of a sweep: the federation file under certain settings."""

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from securevfl.config.disclosure import require_covered_channels
from securevfl.config.encoder import AUTO
from securevfl.config.federation import FederationConfig
from securevfl.config.reading import parse_federation
from securevfl.core.errors import ConfigError, PrivacyError
from securevfl.federation.base import require_estimator
from securevfl.lab.one_run import Recipe
from securevfl.lab.sweep_settings import text_of

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
        """Settings as a folder's name, which no other point has."""
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
    """Return a file as it was before ``auto`` chose, so that a changed one is resolved anew.

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
