"""Checks of a federation file and of one party's table, before a run.

A setting that cannot be read is noted, mended by the name that was meant or left out, and the
reading goes on. What is said of settings that were mended so is not noted again.
"""

import copy
import dataclasses
import re
import tomllib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final, TypeVar

import numpy as np
import pandas as pd

from securevfl.config import rules
from securevfl.config.disclosure import channels
from securevfl.config.encoder import EncoderSettings, resolved
from securevfl.config.federation import FederationConfig
from securevfl.config.link_spec import key_spec, link_spec
from securevfl.config.linkage import parse_linkage
from securevfl.config.parties import PartySettings
from securevfl.config.presets import without_top
from securevfl.config.reading import parse_federation
from securevfl.config.rules import require_helpers
from securevfl.config.sections import FederationSettings, RuntimeSettings, TrainingSettings
from securevfl.core import checks
from securevfl.core.errors import ConfigError, DataError, PrivacyError, SecureVflError
from securevfl.core.files import MOST_OF_SETTINGS, read_text
from securevfl.core.settings import read_settings
from securevfl.data.party_tables import ColumnRoles, fit_party_table, table_problems
from securevfl.data.scaling import Bounds, feature_scaler
from securevfl.data.schema import TableSchema, fit_schema
from securevfl.data.sources.read import read_frame
from securevfl.data.sources.settings import Wanted
from securevfl.data.tables import KeyTable, PartyTable
from securevfl.dp.labels import labels_total
from securevfl.dp.privacy import Privacy
from securevfl.dp.statement import of_labels
from securevfl.federation.class_means.ballot import label_release
from securevfl.federation.rounds.fitting import build_direction_bottom
from securevfl.federation.run_plan import RunFacts, RunPlan, plan_run, run_facts
from securevfl.linkage.stage.candidates import doubts_about_records
from securevfl.linkage.stage.party_keys import keys_of, keys_of_frame
from securevfl.models.fedhssl.settings import PretrainingSettings
from securevfl.models.registry import family_named
from securevfl.runtime.figures import finite_or_none
from securevfl.runtime.preflight import table_warnings, warnings_about
from securevfl.runtime.run_tables import column_settings
from securevfl.setup.estimates import Costs, ExpectedLinks, estimate_costs, expected_links

# A federation file with all that is wrong with it, not only what is met first.

_MEANT: Final = re.compile(r"did you mean '([\w-]+)'\?")

# What stands for a required setting that is missing or impossible, so that reading can go on.
_STAND_INS: Final[Mapping[str, Any]] = {
    "federation.name": "federation",
    "federation.task": "regression",
    "privacy.epsilon": 8.0,
    "privacy.links_per_record": 1,
    "linkage.protection": "none",
    "party.name": "a-party",
    "party.role": "secondary",
    "party.address": "127.0.0.1:0",
    "party.bounds": [0.0, 1.0],
}
_REQUIRED: Final = ("federation", "model", "privacy", "linkage")

T = TypeVar("T")


@dataclass(kw_only=True)
class Collected:
    """What a federation file says, as far as it can be read, and what is wrong with it."""

    problems: list[str] = field(default_factory=list)
    """One line each: where, what, and what to do."""

    config: FederationConfig | None = None
    """The whole; None where no mending makes one of it."""

    parties: list[PartySettings] = field(default_factory=list)
    """Those that can be read by themselves."""

    mended: set[str] = field(default_factory=set)
    """``section.field`` of what was left out or stood in for."""


def collect(path: Path) -> Collected:
    """Read a federation file and note all that is wrong with it."""
    found = Collected()
    try:
        source = tomllib.loads(read_text(path, most=MOST_OF_SETTINGS))
    except OSError as error:
        found.problems.append(f"federation file {path}: {error.strerror}; check the path")
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        found.problems.append(f"federation file {path}: is not TOML: {error}")
    except RecursionError:
        found.problems.append(f"federation file {path}: is nested too deeply to be settings")
    else:
        _collect(source, found)
    return found


def _collect(source: dict[str, Any], found: Collected) -> None:
    mended, chosen = copy.deepcopy(source), dict[str, Any]()
    try:
        filled, chosen = resolved(mended)
        mended = copy.deepcopy(dict(filled))
    except ConfigError as error:
        found.problems.append(str(error))
        found.mended |= {"encoder", "model.family"}
        # Whatever would follow from what is missing: nothing of it is told.
        mended["encoder"] = {"method": "random"}
        mended["privacy"] = {"mechanism": "none", "encoder": "frozen"}
        mended["model"] = {"family": "fet", "release": "pooled"}
    _sections(mended, found)
    tables = mended.get("party", [])
    if isinstance(tables, list):
        for number, table in enumerate(tables):
            if isinstance(table, dict):
                where = f"party[{number}]"
                party = _section(PartySettings, table, where, found)
                if party is not None:
                    found.parties.append(party)
    _whole(mended, found)
    if found.config is not None:
        found.config = dataclasses.replace(found.config, chosen=chosen)


def _sections(source: dict[str, Any], found: Collected) -> None:
    """Read every table by itself, and leave in ``source`` what could be read."""
    classes: dict[str, Callable[[dict[str, Any]], object]] = {
        "federation": _reader(FederationSettings, "federation"),
        "training": _reader(TrainingSettings, "training"),
        "privacy": _reader(Privacy, "privacy"),
        "linkage": parse_linkage,
        "runtime": _reader(RuntimeSettings, "runtime"),
        "pretraining": _reader(PretrainingSettings, "pretraining"),
        "encoder": _reader(EncoderSettings, "encoder"),
        "model": _model,
    }
    for name in [*_REQUIRED, *(name for name in source if name not in _REQUIRED)]:
        if name in ("party", "methods"):
            continue
        if name in source and not isinstance(source[name], dict):
            found.problems.append(f"[{name}]: must be a table of settings, got {source[name]!r}")
            found.mended.add(name)
            source[name] = {}
        if name in classes and name in source and "preset" not in source[name]:
            _read(classes[name], source[name], name, found)


def _reader(cls: type[T], where: str) -> Callable[[dict[str, Any]], T]:
    return lambda table: read_settings(cls, table, where=where)


def _model(table: dict[str, Any]) -> object:
    model, _ = without_top(table)
    return family_named(model.pop("family", None)).settings_from(model)


def _section(cls: type[T], table: dict[str, Any], where: str, found: Collected) -> T | None:
    return _read(_reader(cls, where), table, where, found)


def _read(
    read: Callable[[dict[str, Any]], T], table: dict[str, Any], where: str, found: Collected
) -> T | None:
    """Read one table, mending it in place until it can be read; None if it can't be mended."""
    mended = set[str]()
    for _ in range(len(table) + len(_STAND_INS)):
        try:
            return read(table)
        except (ConfigError, PrivacyError) as error:
            text = str(error)
            named = re.match(rf"{re.escape(where)}\.(\w+)", text)
            name = "" if named is None else named[1]
            if text not in found.problems and name not in mended:
                found.problems.append(text)
            if not name or not _mend(table, name, text, where.partition("[")[0], found):
                return None
            mended.add(name)
    return None


def _mend(table: dict[str, Any], name: str, text: str, section: str, found: Collected) -> bool:
    """Change the setting that an error speaks of; False if nothing can be changed."""
    found.mended.add(f"{section}.{name}")
    meant, stand_in = _MEANT.search(text), _STAND_INS.get(f"{section}.{name}")
    there, value = name in table, table.pop(name, None)
    if there and "no such field" in text:
        if meant is not None and meant[1] not in table:
            table[meant[1]] = value
        return True
    if meant is not None and value != meant[1]:
        table[name] = meant[1]
    elif isinstance(value, str) and "must be a list, got" in text:
        table[name] = [value]
    elif stand_in is not None and value != stand_in:
        table[name] = stand_in
    return there or name in table


def _whole(source: dict[str, Any], found: Collected) -> None:
    """Read what was mended as one file, and note what does not go together in it."""
    for _ in range(len(source) + len(_REQUIRED)):
        try:
            found.config = parse_federation(source, file="", only_linkage=True)
            break
        except (ConfigError, PrivacyError) as error:
            text = str(error).removeprefix(": ")
            _note(text, found)
            if not _mend_sections(source, text, found):
                return
    if found.config is None:
        return
    for require in (rules.require_trainable, rules.require_covered_channels):
        try:
            require(found.config)
        except (ConfigError, PrivacyError) as error:
            _note(str(error), found)


def _mend_sections(source: dict[str, Any], text: str, found: Collected) -> bool:
    if (method := re.match(r"method '([^']*)'", text)) is not None:
        return source.get("methods", {}).pop(method[1], None) is not None
    section = re.match(r"\[(\w+)\]: ", text)
    if section is None:
        return False
    name = section[1]
    found.mended.add(name)
    if "is missing" in text:
        stand_ins = {
            "federation": {"name": "federation", "task": "regression"},
            "model": {"family": "fet"},
            "privacy": {"mechanism": "none"},
            "linkage": {"protection": "none"},
        }
        if name not in stand_ins:
            return False
        source[name] = stand_ins[name]
        return True
    return source.pop(name, None) is not None


def _note(text: str, found: Collected) -> None:
    """Note a problem, unless it speaks of something that was mended, or of one noted before."""
    if text not in found.problems and not _follows(text, found.mended):
        found.problems.append(text)


def _follows(text: str, mended: Collection[str]) -> bool:
    """Whether a problem speaks of a setting that was mended, or begins with a section that was."""
    plain = re.sub(r"\[\d+\]", "", text)
    return any(
        re.search(rf"\b{re.escape(name)}\b", plain) if "." in name else text.startswith(name)
        for name in mended
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
    party: PartySettings, config: FederationConfig | None, data_root: Path
) -> PartyCheck:
    """Look at one party's table.

    Args:
        party: Who.
        config: The federation file; None where it can't be read as a whole: then only the columns
            that the party names are looked for.
        data_root: Where relative paths start.

    Reveals:
        Nothing leaves the process; problems may quote a cell of the table, for its owner.
    """
    found = PartyCheck(party=party)
    path = data_root / party.data
    where = f"table {path} of {party.name!r}"
    kinds = {} if config is None else key_spec(config).kinds
    texts = [own for own, kind in zip(party.key, kinds.values(), strict=False) if kind == "text"]
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
            notice=found.warnings.append,
        )
    except DataError as error:
        found.problems.append(f"{error}; correct party.data, or check one party alone by --name")
        return found
    found.rows = len(frame)
    _require_names(found, [str(column) for column in frame.columns], where=where)
    if config is not None:
        _look(found, frame, config, where=where)
    return found


def _require_names(found: PartyCheck, names: Sequence[str], *, where: str) -> None:
    """Note every column that the federation file names and the table lacks."""
    party = found.party
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
                found.problems.append(
                    f"{where}: party.{setting}: names {column!r}, and there is no such column; "
                    f"{_nearest(column, names)}"
                )


def _feature_of(name: str, columns: Collection[str]) -> bool:
    return any(
        name == column or name.startswith((f"{column}=", f"{column} ")) for column in columns
    )


def _nearest(name: str, names: Sequence[str]) -> str:
    return checks.did_you_mean(name, names).removeprefix("; ") or "correct it, or leave it out"


def _look(found: PartyCheck, frame: pd.DataFrame, config: FederationConfig, *, where: str) -> None:
    party, names = found.party, set(map(str, frame.columns))
    numeric = key_spec(config).are_numbers
    truth = config.linkage.truth
    if truth is not None and truth not in names:
        found.problems.append(
            f"{where}: linkage.truth: names {truth!r}, and there is no such column; correct it, or "
            f"leave it out"
        )
        truth = None
    named = [*party.key, *([party.label] if party.label else [])]
    _note_dropped(found, named, truth)
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
        empty_labels=config.training.empty_labels == "unlabelled",
    )
    settings = column_settings(config, party)
    found.problems += [
        problem
        for problem in table_problems(frame, roles, settings, name=party.name, where=where)
        if "has no column" not in problem  # noted before, all of them
    ]
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
            found.problems.append(str(error))
    try:
        chosen = roles.features_of(frame, where=where)
    except DataError:
        return  # noted before
    for column in roles.row_numbers_of(frame):
        found.dropped[column] = "a row number without a name"
    schema, features, wrong = fit_schema(frame, chosen, settings, where=where)
    _take(found, config, schema, features, where=where)
    found.unusable = [column for column in chosen if column not in found.features]
    if not wrong:
        found.num_features = features.shape[1]
    if not found.problems:
        table = fit_party_table(frame, roles, settings, name=party.name, where=where)
        found.table = replace(table, link_columns=link_columns)
        found.warnings += table_warnings(config, party, table)
        found.keys = keys_of(key_spec(config), found.table)


def _note_dropped(found: PartyCheck, named: Sequence[str], truth: str | None) -> None:
    party = found.party
    for column in named:
        found.dropped[column] = "the label" if column == party.label else "a key"
    if truth is not None:
        found.dropped[truth] = "the truth of linkage"
    for column in party.exclude:
        found.dropped[column] = "excluded"


def _take(
    found: PartyCheck,
    config: FederationConfig,
    schema: TableSchema,
    features: np.ndarray,
    *,
    where: str,
) -> None:
    """Note what those columns become that can be read, and what the rest of the file asks of it."""
    party = found.party
    columns = [column.name for column in schema.columns]
    found.features = {
        name: line.removeprefix(f"{name}: ")
        for name, line in zip(columns, schema.describe(), strict=True)
    }
    if party.role == "secondary":
        if config.features_are_declared:
            found.problems += [
                f"{where}: column {one.column!r}: {one.what} depends on the records, so epsilon "
                f"would not hold; declare {one.declare}, or exclude the column"
                for one in schema.data_dependent
            ]
        if len(features) < config.model.neighbours:
            found.problems.append(
                f"{where}: has {len(features)} records, fewer than model.neighbours = "
                f"{config.model.neighbours}; lower model.neighbours"
            )
        if config.encoder is not None:
            try:
                build_direction_bottom(config, party, num_features=features.shape[1])
            except DataError as error:
                found.problems.append(str(error))
    found.problems += _scaling_problems(party, schema, features, where=where)


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
    """What to know, though it runs."""

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
        }

    def _labels(self) -> str | None:
        """Return what is promised of the primary's labels; None where nobody is told of them."""
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
            "parties": {one.party.name: _party_json(one) for one in self.parties},
            "links": {name: links.as_json() for name, links in self.links.items()},
            "privacy": self.privacy(),
            "chosen": {} if self.config is None else dict(self.config.chosen),
            "base": None if self.config is None else self.config.base.estimator,
            "costs": None if self.costs is None else asdict(self.costs),
            "learns": self.learns(),
        }


def check_federation(
    path: Path, *, name: str | None = None, data_root: Path | None = None
) -> Check:
    """Say what a federation file will do, and collect all that is wrong with it.

    Args:
        path: The federation file.
        name: The one party whose table is here; None: all are.
        data_root: Where relative paths start; default: next to the file.

    Raises:
        ConfigError: If ``name`` is no party of the file.

    Reveals:
        Nothing leaves the process. What is told of a table is for its owner: problems may quote a
        cell.
    """
    collected = collect(path)
    readable = not collected.problems
    check = Check(
        file=path,
        problems=collected.problems,
        # Of settings that were made up nothing is told: a promise least of all.
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
        one = check_party(party, None if unsure else collected.config, data_root or path.parent)
        check.parties.append(one)
        check.problems += [text for text in one.problems if not _follows(text, collected.mended)]
        check.warnings += one.warnings
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
    by_name = {one.party.name: one for one in check.parties}
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
                check.warnings += doubts_about_records(link_spec(config), own.keys)
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


def _party_json(one: PartyCheck) -> dict[str, Any]:
    party: PartySettings = one.party
    return {
        "role": party.role,
        "rows": one.rows,
        "key": list(party.key),
        "columns": one.features,
        "unusable": one.unusable,
        "features": one.num_features,
        "dropped": one.dropped,
        "problems": one.problems,
    }
