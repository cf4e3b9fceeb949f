"""Checks of a federation file and of one party's table, before a run.

A setting that cannot be read is noted, replaced by what was probably meant or left out, and the
reading continues. Problems that follow from such a setting are not noted.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

import numpy as np
import pandas as pd

from securevfl.config import rules
from securevfl.config.disclosure import channels, require_covered_channels
from securevfl.config.encoder import resolve
from securevfl.config.federation import FederationConfig, key_spec, link_spec
from securevfl.config.reading import Findings, load_federation, read_sections, section_checks
from securevfl.config.rules import require_helpers
from securevfl.config.sections import PartySettings
from securevfl.core import checks
from securevfl.core.errors import ConfigError, DataError, PrivacyError, SecureVflError
from securevfl.core.formatting import finite_or_none
from securevfl.core.settings import Problem, problems_of, read_settings
from securevfl.data.party_tables import ColumnRoles, fit_table
from securevfl.data.scaling import Bounds, feature_scaler
from securevfl.data.schema import TableSchema
from securevfl.data.sources.read import ignore_note, read_frame
from securevfl.data.sources.settings import Wanted
from securevfl.data.sources.source_files import query_behind
from securevfl.data.tables import KeyTable, PartyTable
from securevfl.desk.setup.estimates import Costs, ExpectedLinks, estimate_costs, expected_links
from securevfl.dp.labels import labels_total
from securevfl.dp.statement import of_labels
from securevfl.federation.encoder_fitting import build_encoder
from securevfl.federation.run_plan import (
    RunFacts,
    RunPlan,
    plan_run,
    predictions_in_words,
    run_facts,
)
from securevfl.linkage.stage.candidates import repeated_key_warnings
from securevfl.linkage.stage.party_keys import keys_of, keys_of_frame
from securevfl.models.registry import family_names
from securevfl.runtime.run_options import warnings_about
from securevfl.runtime.run_tables import column_settings, table_warnings
from securevfl.stages.class_means.class_labels import label_release

# A federation file with all that is wrong with it, not only what is met first.

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
"""Sections that stand for those that cannot be mended, until all others are read."""

_CHOSEN_STAND_INS: Final[Mapping[str, Any]] = {
    "encoder": {"method": "random"},
    "privacy": {"mechanism": "none", "encoder": "frozen"},
    "model": {"family": "fet", "release": "pooled"},
}
"""Sections for ``encoder.method = "auto"`` where it cannot be resolved."""

T = TypeVar("T")


class Collected(Findings):
    """All mistakes of a federation file, and as much of the file as can be read."""

    def __init__(self, path: Path) -> None:
        self.problems: list[str] = []
        """One line each: where, what, and what to do."""
        self.config: FederationConfig | None = None
        """The whole file; None where no mending makes one of it."""
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
        """Note an error, unless it follows from what was mended."""
        text = str(error)
        known = text in self.problems or self.follows(text)
        # Of parties together nothing is known where one of them is a stand-in.
        if not known and (self._whole or about != "parties"):
            self.problems.append(text)
        self.mended.add(about)
        self._whole &= about not in ("party", "parties", "rules")

    def attempt(self, work: Callable[[], T], *, otherwise: T, about: str) -> T:
        """Return what ``work`` returns, or ``otherwise`` where it fails."""
        try:
            return work()
        except (ConfigError, PrivacyError) as error:
            self.wrong(error, about)
            return otherwise

    def settings(self, kind: type[T], tables: Mapping[str, Any], name: str) -> T:
        """Read one section, mended until it can be read."""
        return self.table(partial(read_settings, kind, where=name), tables.get(name, {}), name)

    def table(self, read: Callable[[dict[str, Any]], T], table: Mapping[str, Any], name: str) -> T:
        """Read one table, mended until it can be read."""
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
        """Whether a problem begins with a section that was mended, or speaks of such a setting."""
        return any(
            name in text if "." in name else text.startswith(name) for name in self.mended if name
        )


# What one party's table becomes, and all that is wrong with it.


@dataclass(kw_only=True)
class PartyCheck:
    """One party, as far as its table is here."""

    party: PartySettings
    rows: int | None = None
    """None where the table can't be read."""

    features: dict[str, str] = field(default_factory=dict)
    """Columns that become features: what each holds, and how it is encoded."""

    unusable: list[str] = field(default_factory=list)
    """Columns that would be features, were it not for what is wrong with them."""

    num_features: int | None = None
    """Features after encoding; None where a column can't be encoded."""

    dropped: dict[str, str] = field(default_factory=dict)
    """Columns that are no features, and why."""

    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    table: PartyTable | None = None
    """None where something is wrong."""

    keys: KeyTable | None = None
    """Its keys, as linking takes them; None where something is wrong."""


def check_party(
    party: PartySettings,
    config: FederationConfig | None,
    data_root: Path,
    show: Callable[[str], None] = ignore_note,
) -> PartyCheck:
    """Look at one party's table.

    Args:
        party: Who.
        config: The federation file; None where it can't be read as a whole: then only the columns
            that the party names are looked for.
        data_root: Where relative paths start.
        show: Receives a database's query before it is run.

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
    truth = config.linkage.truth
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
    keys = [key for key in party.key if key in names]
    exclude = [column for column in party.exclude if column in names]
    roles = ColumnRoles(
        key=keys if numeric else (),
        task=config.federation.task,
        label=party.label if party.label in names else None,
        positive=party.positive,
        exclude=exclude if numeric else [*exclude, *keys],
        truth=truth,
        keys_are_inputs=config.source["model"].get("keys_as_features") is True,
    )
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
                truth=truth,
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
    if not party_check.problems and fitted.table is not None:
        party_check.table = replace(fitted.table, link_columns=link_columns)
        party_check.warnings += table_warnings(config, party, fitted.table)
        party_check.keys = keys_of(key_spec(config), party_check.table)


def _take(
    party_check: PartyCheck,
    config: FederationConfig,
    schema: TableSchema,
    features: np.ndarray,
    *,
    where: str,
) -> None:
    """Note what those columns become that can be read, and what the rest of the file asks of it."""
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
                build_encoder(config, party, num_features=features.shape[1])
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


# What a federation file will do, before anything is done: and all that is wrong with it.

# Of a frozen run the noise is the same for any number of rows: each is released once.
_SOME_ROWS: Final = 1000


@dataclass(kw_only=True)
class Check:
    """What will happen, and what is wrong."""

    file: Path
    problems: list[str] = field(default_factory=list)
    """One line each: where, what, and what to do."""

    warnings: list[str] = field(default_factory=list)
    """Remarks that do not prevent the run."""

    config: FederationConfig | None = None
    """None where a setting is wrong: noise, links and costs are then not known."""

    parties: list[PartyCheck] = field(default_factory=list)
    links: dict[str, ExpectedLinks] = field(default_factory=dict)
    """By secondary, where both tables are here."""

    plan: RunPlan | None = None
    """None where no noise can be worked out."""

    costs: Costs | None = None
    """None where the primary's table is not here."""

    @property
    def fine(self) -> bool:
        """Whether nothing is wrong."""
        return not self.problems

    def learns(self) -> list[dict[str, str]]:
        """Return every channel by which a party learns something."""
        return [] if self.config is None else channels(self.config)

    def privacy(self) -> dict[str, Any] | None:
        """Return what is promised, and the noise that it takes."""
        if self.plan is None:
            return None
        releases, tau = self.plan.releases, self.plan.noise_share_std
        return {
            "mechanism": self.plan.config.privacy.mechanism,
            "epsilon": finite_or_none(releases.epsilon(tau)),
            "delta": self.plan.config.privacy.delta,
            "unit": self.plan.config.privacy.unit,
            "noise_share_std": tau,
            "sensitivity": releases.sensitivity(),
            "of": "all releases together" if self.plan.frozen else "one round",
            "clip_norm": self.plan.config.privacy.clip_norm,
            "statement": releases.statement(tau).text,
            "labels": self._labels(),
            "predictions": predictions_in_words(self.plan.config),
        }

    def _labels(self) -> str | None:
        """Return what is promised of the primary's labels; None where none is released."""
        release = None if self.config is None else label_release(self.config)
        total = labels_total([] if release is None else [release])
        if release is None or total is None:
            return None
        return of_labels(release.mechanism, total, parties=release.parties).text

    def as_json(self) -> dict[str, Any]:
        """Return all of it for ``--json``."""
        return {
            "file": str(self.file),
            "fine": self.fine,
            "problems": self.problems,
            "warnings": self.warnings,
            "parties": {
                party_check.party.name: _party_json(party_check) for party_check in self.parties
            },
            "links": {name: links.as_json() for name, links in self.links.items()},
            "privacy": self.privacy(),
            "chosen": {} if self.config is None else dict(self.config.chosen),
            "base": None if self.config is None else self.config.base.estimator,
            "costs": None if self.costs is None else asdict(self.costs),
            "learns": self.learns(),
        }


def check_federation(
    path: Path,
    *,
    name: str | None = None,
    data_root: Path | None = None,
    show: Callable[[str], None] = ignore_note,
) -> Check:
    """Say what a federation file will do, and collect all that is wrong with it.

    Args:
        path: The federation file.
        name: The one party whose table is here; None: all are.
        data_root: Where relative paths start; default: next to the file.
        show: Receives each database's query before it is run.

    Raises:
        ConfigError: If ``name`` is no party of the file.

    Reveals:
        Nothing leaves the process. What is said of a table is for its owner: problems may quote a
        cell.
    """
    collected = Collected(path)
    readable = not collected.problems
    check = Check(
        file=path,
        problems=collected.problems,
        # Nothing is said of settings that were made up: a promise least of all.
        config=collected.config if readable else None,
    )
    parties = list(collected.config.parties if collected.config else collected.parties)
    if name is not None:
        known = ", ".join(party.name for party in parties)
        parties = [party for party in parties if party.name == name]
        if not parties and (collected.config is not None or known):
            raise ConfigError(f"--name {name}: is no party of {path}, which has {known}")
    unsure = _what_is_unsure(collected.mended)
    for party in parties:
        if party.is_helper or not party.data:
            continue
        config = None if unsure else collected.config
        party_check = check_party(party, config, data_root or path.parent, show)
        check.parties.append(party_check)
        check.problems += [text for text in party_check.problems if not collected.follows(text)]
        check.warnings += party_check.warnings
    if check.config is not None:
        _see_the_run(check, check.config)
    return check


def _what_is_unsure(mended: set[str]) -> bool:
    """Whether the task or the keys were made up: what a table should hold is not known then."""
    return not mended.isdisjoint(
        {"federation", "federation.task", "model.family", "linkage", "linkage.metric"}
    )


def _see_the_run(check: Check, config: FederationConfig) -> None:
    check.warnings = [*warnings_about(config), *check.warnings]
    try:
        require_helpers(config)
    except ConfigError as error:
        check.warnings.append(f"{error} (between processes; simulate does without)")
    by_name = {party_check.party.name: party_check for party_check in check.parties}
    primary = by_name.get(config.primary.name)
    _link(check, config, primary, by_name)
    _plan(check, config, primary)


def _link(
    check: Check,
    config: FederationConfig,
    primary: PartyCheck | None,
    by_name: Mapping[str, PartyCheck],
) -> None:
    if primary is None or primary.keys is None:
        for party in config.secondaries:
            own = by_name.get(party.name)
            if own is not None and own.keys is not None:
                check.warnings += repeated_key_warnings(link_spec(config), own.keys)
        return
    for party in config.secondaries:
        own = by_name.get(party.name)
        if own is None or own.keys is None or own.keys.num_rows < config.model.neighbours:
            continue
        try:
            links = expected_links(config, primary.keys, own.keys)
        except SecureVflError as error:
            check.problems.append(str(error))
            continue
        check.links[party.name] = links
        if (problem := links.problem(config)) is not None:
            check.problems.append(problem)
        else:
            check.warnings += links.warnings(config)


def _plan(check: Check, config: FederationConfig, primary: PartyCheck | None) -> None:
    table = None if primary is None else primary.table
    try:
        if table is not None:
            facts = run_facts(config, table)[1]
        elif config.privacy.encoder == "frozen":
            facts = RunFacts(
                rows=_SOME_ROWS,
                train_rows=_SOME_ROWS - 2,
                validation_rows=1,
                test_rows=1,
            )
        else:
            return
        check.plan = plan_run(config, facts)
        if table is not None and primary is not None:
            shown = primary.keys if config.linkage.protection == "none" else None
            check.costs = estimate_costs(check.plan, table, shown)
    except SecureVflError as error:
        if str(error) not in check.problems:
            check.problems.append(str(error))


def _party_json(party_check: PartyCheck) -> dict[str, Any]:
    party: PartySettings = party_check.party
    return {
        "role": party.role,
        "rows": party_check.rows,
        "key": list(party.key),
        "columns": party_check.features,
        "unusable": party_check.unusable,
        "features": party_check.num_features,
        "dropped": party_check.dropped,
        "problems": party_check.problems,
    }
