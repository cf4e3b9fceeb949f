"""Check of one party's table: the features that it becomes, and all its problems."""

from collections.abc import Callable, Collection, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

import numpy as np
import pandas as pd

from securevfl.config import rules
from securevfl.config.disclosure import require_covered_channels
from securevfl.config.encoder import resolve
from securevfl.config.federation import FederationConfig, key_spec
from securevfl.config.reading import Findings, load_federation, read_sections, section_checks
from securevfl.config.sections import PartySettings
from securevfl.core import checks
from securevfl.core.errors import ConfigError, DataError, PrivacyError, SecureVflError
from securevfl.core.settings import Problem, problems_of, read_settings
from securevfl.data.party_tables import ColumnRoles, fit_table
from securevfl.data.scaling import Bounds, feature_scaler
from securevfl.data.schema import TableSchema
from securevfl.data.sources.read import ignore_note, read_frame
from securevfl.data.sources.settings import Wanted, query_behind
from securevfl.data.tables import KeyTable, PartyTable
from securevfl.federation.encoder_fitting import build_encoder
from securevfl.linkage.stage.party_keys import keys_of, keys_of_frame
from securevfl.models.registry import family_names
from securevfl.runtime.run_tables import column_roles, column_settings, table_warnings, with_split


@dataclass(kw_only=True)
class PartyCheck:
    """Check of one party's table."""

    party: PartySettings
    rows: int | None = None
    """Number of rows; None if the table can't be read."""

    features: dict[str, str] = field(default_factory=dict)
    """Kind and encoding of each column that becomes features."""

    unusable: list[str] = field(default_factory=list)
    """Feature columns with problems."""

    num_features: int | None = None
    """Number of features after encoding; None if a column can't be encoded."""

    dropped: dict[str, str] = field(default_factory=dict)
    """Reason for each column that is no feature."""

    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    table: PartyTable | None = None
    """The table; None if there is a problem."""

    keys: KeyTable | None = None
    """Keys for linkage; None if there is a problem."""


LARGE_FILE: Final = 50_000_000
"""Bytes of a table from which its reading is announced."""


def announce_reading(path: Path, name: str, show: Callable[[str], None]) -> None:
    """Show that a large table is read, which takes a while."""
    size = path.stat().st_size if path.is_file() else 0
    if size >= LARGE_FILE:
        show(f"{name}: reading {path}, {size / 1e6:,.0f} MB")


def check_party(
    party: PartySettings,
    config: FederationConfig | None,
    data_root: Path,
    show: Callable[[str], None] = ignore_note,
) -> PartyCheck:
    """Check one party's table.

    Args:
        party: The party.
        config: The federation; None if it can't be read as a whole, so that only the named columns
            are checked.
        data_root: Folder at which relative paths start.
        show: Receives a database's query before it is run, and what takes long.

    Reveals:
        Nothing leaves the process; problems may quote a cell of the table, for its owner.
    """
    party_check = PartyCheck(party=party)
    path = data_root / party.data
    where = f"table {path} of {party.name!r}"
    kinds = {} if config is None else key_spec(config).kinds
    texts = [own for own, kind in zip(party.key, kinds.values(), strict=False) if kind == "text"]
    if (query := query_behind(path)) is not None:
        show(f"{party.name}: {path} runs the query {' '.join(query.split())}")
    announce_reading(path, party.name, show)
    try:
        frame = read_frame(
            path,
            where=where,
            reading=party.reading,
            wanted=Wanted(
                as_text=texts,
                words=party.categories or {},
                expected=[*party.key, *([] if party.label is None else [party.label])],
            ),
            notice=party_check.warnings.append,
        )
    except DataError as error:
        party_check.problems.append(
            f"{error}; correct party.data, or check one party alone by --name"
        )
        return party_check
    party_check.rows = len(frame)
    _require_names(party_check, [str(column) for column in frame.columns], where=where)
    if config is not None:
        _look(party_check, frame, config, where=where)
    return party_check


def _require_names(party_check: PartyCheck, names: Sequence[str], *, where: str) -> None:
    """Note every column that the federation file names and the table lacks."""
    party = party_check.party
    bounds = list(party.bounds) if isinstance(party.bounds, dict) else []
    named = {
        "key": party.key,
        "label": (party.label,) if party.label is not None else (),
        "exclude": party.exclude,
        "categories": tuple(party.categories or ()),
        "missing_columns": party.missing_columns,
        # A bound may be that of one feature of several that a column becomes.
        "bounds": tuple(name for name in bounds if not _feature_of(name, names)),
    }
    for setting, columns in named.items():
        for column in columns:
            if column not in names:
                party_check.problems.append(
                    f"{where}: party.{setting}: names {column!r}, and there is no such column; "
                    f"{_nearest(column, names)}"
                )


def _feature_of(name: str, columns: Collection[str]) -> bool:
    return any(
        name == column or name.startswith((f"{column}=", f"{column} ")) for column in columns
    )


def _nearest(name: str, names: Sequence[str]) -> str:
    return checks.did_you_mean(name, names).removeprefix("; ") or "correct it, or leave it out"


def _look(
    party_check: PartyCheck, frame: pd.DataFrame, config: FederationConfig, *, where: str
) -> None:
    party, names = party_check.party, set(map(str, frame.columns))
    numeric = key_spec(config).are_numbers
    keys = [key for key in party.key if key in names]
    try:
        roles = _roles(party_check, config, names, where=where)
    except ConfigError:
        return  # the rules of the file say so
    settings = column_settings(config, party)
    fitted = fit_table(frame, roles, settings, name=party.name, where=where)
    # What is not there was noted before, all of it.
    party_check.problems += [text for text in fitted.problems if "has no column" not in text]
    link_columns = None
    if len(keys) == len(party.key) and not numeric:
        try:
            link_columns = keys_of_frame(
                key_spec(config),
                frame,
                name=party.name,
                columns=party.key,
                truth=roles.truth,
                where=where,
            )
        except SecureVflError as error:
            party_check.problems.append(str(error))
    if fitted.schema is None or fitted.features is None:
        return
    for column in roles.row_numbers_of(frame):
        party_check.dropped[column] = "a row number without a name"
    _take(party_check, config, fitted.schema, fitted.features, where=where)
    party_check.unusable = [
        column for column in fitted.chosen if column not in party_check.features
    ]
    if not fitted.unfit:
        party_check.num_features = fitted.features.shape[1]
    table = fitted.table
    if table is not None:
        try:
            table = with_split(config, party, frame, table, where=where)
        except DataError as error:
            party_check.problems.append(str(error))
    if not party_check.problems and table is not None:
        party_check.table = replace(table, link_columns=link_columns)
        party_check.warnings += table_warnings(config, party, table)
        party_check.keys = keys_of(key_spec(config), party_check.table)
    else:
        party_check.warnings += [f"{party.name}: {text}" for text in fitted.notes]


def _roles(
    party_check: PartyCheck, config: FederationConfig, names: Set[str], *, where: str
) -> ColumnRoles:
    """Return what the columns that are there are for, and note why others are no features.

    Raises:
        ConfigError: If a column has two roles.
    """
    party, truth = party_check.party, config.linkage.truth
    if truth is not None and truth not in names:
        party_check.problems.append(
            f"{where}: linkage.truth: names {truth!r}, and there is no such column; correct it, or "
            f"leave it out"
        )
        truth = None
    named = [*party.key, *([party.label] if party.label else [])]
    for column in named:
        party_check.dropped[column] = "the label" if column == party.label else "a key"
    if truth is not None:
        party_check.dropped[truth] = "the truth of linkage"
    party_check.dropped |= dict.fromkeys(party.exclude, "excluded")
    roles = column_roles(config, party)
    return replace(
        roles,
        key=[key for key in roles.key if key in names],
        label=party.label if party.label in names else None,
        exclude=names & {*roles.exclude, *party.exclude},
        truth=truth,
        text_key=[key for key in roles.text_key if key in names],
    )


def _take(
    party_check: PartyCheck,
    config: FederationConfig,
    schema: TableSchema,
    features: np.ndarray,
    *,
    where: str,
) -> None:
    """Note the features of the readable columns, and conflicts with the rest of the file."""
    party = party_check.party
    columns = [column.name for column in schema.columns]
    party_check.features = {
        name: line.removeprefix(f"{name}: ")
        for name, line in zip(columns, schema.describe(), strict=True)
    }
    if party.role == "secondary":
        if config.features_are_declared:
            party_check.problems += [
                f"{where}: column {dependence.column!r}: {dependence.what} depends on the records, "
                f"so epsilon would not hold; declare {dependence.declare}, or exclude the column"
                for dependence in schema.data_dependent
            ]
        if len(features) < config.model.neighbours:
            party_check.problems.append(
                f"{where}: has {len(features)} records, fewer than model.neighbours = "
                f"{config.model.neighbours}; lower model.neighbours"
            )
        if config.encoder is not None:
            try:
                build_encoder(config, config.encoder, party, num_features=features.shape[1])
            except DataError as error:
                party_check.problems.append(str(error))
    party_check.problems += _scaling_problems(party, schema, features, where=where)


def _scaling_problems(
    party: PartySettings, schema: TableSchema, features: np.ndarray, *, where: str
) -> list[str]:
    bounds: Bounds | None = party.bounds
    problems = []
    if bounds is not None:
        try:
            bounds = schema.feature_bounds(bounds)
        except ConfigError as error:
            return [f"{where}: {error}"]
    for place, name in enumerate(schema.feature_names):
        try:
            feature_scaler(
                features[:, place : place + 1], [name], scaling=party.scaling, bounds=bounds
            )
        except (ConfigError, DataError) as error:
            problems.append(f"{where}: party.{error}")
    return problems


_STAND_INS: Final[Mapping[str, Any]] = {
    "federation.name": "federation",
    "federation.task": "regression",
    "model.family": "fet",
    "privacy.epsilon": 2.0,
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
