"""All problems of a federation file.

A setting that cannot be read is noted and replaced or left out, and the reading continues. Problems
that follow from such a setting are not noted.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

from securevfl.config import rules
from securevfl.config.disclosure import require_covered_channels
from securevfl.config.encoder import resolve
from securevfl.config.federation import FederationConfig
from securevfl.config.reading import Findings, load_federation, read_sections, section_checks
from securevfl.config.sections import PartySettings
from securevfl.core import checks
from securevfl.core.errors import ConfigError, PrivacyError
from securevfl.core.settings import Problem, problems_of, read_settings
from securevfl.models.registry import family_names

_STAND_INS: Final[Mapping[str, Any]] = {
    "federation.name": "federation",
    "federation.task": "regression",
    "model.family": "fet",
    "privacy.epsilon": 8.0,
    "privacy.links_per_record": 1,
    "linkage.protection": "none",
    "party.name": "a-party",
    "party.role": "secondary",
    "party.address": "127.0.0.1:0",
    "party.bounds": [0.0, 1.0],
}
"""Values for required settings that are missing or impossible, so that reading can continue."""

_UNREADABLE: Final[Mapping[str, Mapping[str, Any]]] = {
    "federation": {"name": "federation", "task": "regression"},
    "model": {"family": "fet"},
    "privacy": {"mechanism": "none"},
    "linkage": {"protection": "none"},
    "encoder": {"method": "random"},
    "party": {"name": "a-party", "role": "dealer"},
}
"""Replacements for unreadable sections, until all others are read."""

_CHOSEN_STAND_INS: Final[Mapping[str, Any]] = {
    "encoder": {"method": "random"},
    "privacy": {"mechanism": "none", "encoder": "frozen"},
    "model": {"family": "fet", "release": "pooled"},
}
"""Sections for ``encoder.method = "auto"`` if it can't be resolved."""

T = TypeVar("T")


class Collected(Findings):
    """All problems of a federation file, and its readable parts."""

    def __init__(self, path: Path) -> None:
        self.problems: list[str] = []
        """Problems, one line each with the place and the remedy."""
        self.config: FederationConfig | None = None
        """The federation; None if no replacement makes the file readable."""
        self.parties: list[PartySettings] = []
        """The parties that can be read."""
        self.mended: set[str] = set()
        """Sections, and ``section.field`` of settings, that were left out or replaced."""
        self._whole = True
        self._tables: dict[str, Mapping[str, Any]] = {}
        try:
            self._collect(load_federation(path))
        except ConfigError as error:
            self.problems.append(str(error))

    def _collect(self, source: dict[str, Any]) -> None:
        try:
            resolve(source)
        except ConfigError as error:
            self.wrong(error, "encoder")
            self.mended.add("model.family")
            source = {**source, **_CHOSEN_STAND_INS}
        config = read_sections(source, self)
        config = replace(config, source={**config.source, **self._tables})
        if self._whole:
            self.attempt(partial(rules.require_linkable, config), otherwise=None, about="rules")
        if not self._whole:
            return
        self.config = config
        for require in (rules.require_trainable, require_covered_channels):
            self.attempt(partial(require, config), otherwise=None, about="rules")
        for check in section_checks(config):
            self.attempt(check, otherwise=None, about="rules")

    def wrong(self, error: Exception, about: str) -> None:
        """Note an error, unless it follows from a replaced setting."""
        text = str(error)
        known = text in self.problems or self.follows(text)
        # Of parties together nothing is known where one of them is a stand-in.
        if not known and (self._whole or about != "parties"):
            self.problems.append(text)
        self.mended.add(about)
        self._whole &= about not in ("party", "parties", "rules")

    def attempt(self, work: Callable[[], T], *, otherwise: T, about: str) -> T:
        """Return the result of ``work``, or ``otherwise`` if it fails."""
        try:
            return work()
        except (ConfigError, PrivacyError) as error:
            self.wrong(error, about)
            return otherwise

    def settings(self, kind: type[T], tables: Mapping[str, Any], name: str) -> T:
        """Read one section, with settings replaced until it is readable."""
        return self.table(partial(read_settings, kind, where=name), tables.get(name, {}), name)

    def table(self, read: Callable[[dict[str, Any]], T], table: Mapping[str, Any], name: str) -> T:
        """Read one table, with settings replaced until it is readable."""
        section, mended = name.partition("[")[0], dict(table)
        for _ in range(len(table) + len(_STAND_INS)):
            try:
                settings = read(dict(mended))
            except (ConfigError, PrivacyError) as error:
                problems = problems_of(error, where=name)
            else:
                if isinstance(settings, PartySettings):
                    self.parties.append(settings)
                elif mended != table:
                    self._tables[name] = mended
                return settings
            changed = [self._mend(mended, problem, name) for problem in problems]
            if not any(changed):
                break
        self._whole = False
        return read(dict(_UNREADABLE.get(section, {})))

    def _mend(self, table: dict[str, Any], problem: Problem, where: str) -> bool:
        """Note a problem and change the setting that it names; False if nothing can be changed."""
        section, name = where.partition("[")[0], problem.field
        noted = problem.text in self.problems or f"{where}.{name}" in self.mended
        if not noted and section not in self.mended:
            self.problems.append(problem.text)
        if name is None:
            return False
        self.mended |= {f"{section}.{name}", f"{where}.{name}"}
        there, value = name in table, table.pop(name, None)
        instead, stand_in = problem.instead, _STAND_INS.get(f"{section}.{name}")
        if where == "model" and name == "family":
            near = checks.nearest(value, family_names())
            instead = {} if near is None else {"family": near}
            if near is None:  # nothing is known of the model then, and rules would speak of it
                table.clear()
                self._whole = False
        if not instead and stand_in is not None and value != stand_in:
            instead = {name: stand_in}
        for meant, replacement in instead.items():
            table.setdefault(meant, replacement)
        return there or name in table

    def follows(self, text: str) -> bool:
        """Return whether a problem is about a replaced section or setting."""
        return any(
            name in text if "." in name else text.startswith(name) for name in self.mended if name
        )
