"""What one party's table becomes, and all that is wrong with it."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pandas as pd

from securevfl.config.federation import FederationConfig
from securevfl.config.link_spec import key_spec
from securevfl.config.parties import PartySettings
from securevfl.core import checks
from securevfl.core.errors import ConfigError, DataError, SecureVflError
from securevfl.data.party_tables import ColumnRoles, fit_party_table, table_problems
from securevfl.data.scaling import Bounds, feature_scaler
from securevfl.data.schema import TableSchema, fit_schema
from securevfl.data.sources.columns import Wanted
from securevfl.data.sources.read import read_frame
from securevfl.data.tables import KeyTable, PartyTable
from securevfl.federation.fitting import build_direction_bottom
from securevfl.linking.key_reading import keys_of_frame
from securevfl.linking.keys import keys_of
from securevfl.runtime.preflight import table_warnings
from securevfl.runtime.tables import column_settings


@dataclass(kw_only=True)
class PartyCheck:
    """One party, as far as its table is here."""

    party: PartySettings
    rows: int | None = None
    """None where the table can't be read."""

    features: dict[str, str] = field(default_factory=dict)
    """Columns that become features: what each holds, and how it is encoded."""

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
