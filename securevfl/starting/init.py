"""From tables, or from partners' column lists, to a proposed federation."""

import contextlib
import tomllib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from securevfl.config.federation import FederationConfig
from securevfl.config.link_spec import key_spec, link_spec
from securevfl.config.reading import parse_federation
from securevfl.core.errors import ConfigError, SecureVflError
from securevfl.data.sources.columns import Wanted
from securevfl.data.sources.read import read_frame
from securevfl.data.tables import KeyTable
from securevfl.linking.key_reading import read_keys
from securevfl.starting.columns import (
    Declared,
    Table,
    declared_types,
    describe_table,
    read_column_list,
    require_columns,
    with_declared,
)
from securevfl.starting.links import expected_links
from securevfl.starting.proposal import Proposal, Wishes, propose
from securevfl.starting.rows_served import rows_served
from securevfl.starting.spellings import better_spelling
from securevfl.starting.writing import federation_text

_LETTERS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_")
_LONGEST = 40


def look_at(path: Path, *, declared: Declared, root: Path) -> Table:
    """Read a table of this machine and say what its columns are.

    Args:
        path: The table.
        declared: What the user says of columns.
        root: Where the federation file's relative paths start.

    Raises:
        DataError: If it can't be read.
    """
    where = f"table {path}"
    frame = read_frame(path, where=where, wanted=Wanted(words=declared.words))
    name = _party_name(path)
    return describe_table(
        frame, name=name, data=_from(root, path), types=declared_types(path), declared=declared
    )


def proposed(
    primary: Path,
    secondaries: Sequence[Path],
    lists: Sequence[Path],
    *,
    wishes: Wishes,
    declared: Declared,
    root: Path,
) -> tuple[Proposal, str]:
    """Propose a federation, and return its file's text too.

    Args:
        primary: The primary's table, or its column list (``.json``).
        secondaries: Tables of secondaries.
        lists: Column lists of further secondaries.
        wishes: What the user asks for.
        declared: What the user says of columns.
        root: Where the file's relative paths start.

    Raises:
        ConfigError: If nothing can be proposed.
        DataError: If a table can't be read.

    Reveals:
        To whoever gets the text: columns' names, kinds and declared bounds; with bounds from data,
        rounded ranges and the frequent words of the secondaries' records, and how many rows a
        record serves, too.
    """
    if not secondaries and not lists:
        raise ConfigError("--secondary: at least one table, or one column list by --columns")
    tables = [
        with_declared(read_column_list(path), declared)
        if path.suffix == ".json"
        else look_at(path, declared=declared, root=root)
        for path in (primary, *secondaries, *lists)
    ]
    require_columns(tables, declared)
    proposal = propose(_with_names_that_differ(tables), wishes)
    proposal = _with_links(proposal, root)
    text = federation_text(proposal)
    _parsed(text)
    return proposal, text


def _with_links(proposal: Proposal, root: Path) -> Proposal:
    """Return a proposal with what linking the tables that are here tells: by the run's own keys."""
    keys = _keys(proposal, _parsed(federation_text(proposal)), root)
    first, *others = (keys.get(table.name) for table in proposal.tables)
    if first is None:
        return replace(proposal, doubts=proposal.keys.doubts)
    spec, there = link_spec(_parsed(federation_text(proposal))), [one for one in others if one]
    better = [found for own in there if (found := better_spelling(spec.keys, first, own))]
    if better:
        settings = {name: value for found in better for name, value in found.settings.items()}
        shares = tuple(f"keys are spelled differently: {found.in_words()}" for found in better)
        proposal = replace(proposal, spelling=settings, spelling_shares=shares)
        spec = link_spec(_parsed(federation_text(proposal)))
        first, *there = (
            replace(one, columns=spec.keys.normal(one.columns)) for one in (first, *there)
        )
    served = {own.name: rows_served(spec, first, own) for own in there}
    config, doubts = _parsed(federation_text(proposal)), list(proposal.keys.doubts)
    for own in there:
        with contextlib.suppress(SecureVflError):  # check names it
            doubts += expected_links(config, first, own).doubts
    return replace(
        proposal,
        served={name: found for name, found in served.items() if found is not None},
        doubts=tuple(doubts),
    )


def _keys(proposal: Proposal, config: FederationConfig, root: Path) -> dict[str, KeyTable]:
    """Return the keys of tables that are here, as a run reads them; of bad keys, check tells."""
    keys = {}
    for table in proposal.tables:
        if table.rows is None:
            continue
        with contextlib.suppress(SecureVflError):
            keys[table.name] = read_keys(
                key_spec(config),
                root / table.data,
                name=table.name,
                columns=proposal.keys.columns[table.name],
                truth=None,
            )
    return keys


def _parsed(text: str) -> FederationConfig:
    return parse_federation(tomllib.loads(text), file="the proposed file")


def _with_names_that_differ(tables: Sequence[Table]) -> list[Table]:
    named: dict[str, Table] = {}
    for table in tables:
        name, number = table.name, 2
        while name in named:
            name, number = f"{table.name}-{number}", number + 1
        named[name] = Table(name=name, data=table.data, columns=table.columns, rows=table.rows)
    return list(named.values())


def _party_name(path: Path) -> str:
    stem = path.name.split(".")[0]
    return "".join(letter if letter in _LETTERS else "-" for letter in stem)[:_LONGEST] or "party"


def _from(root: Path, path: Path) -> str:
    """Return a path as the file says it: relative where the table lies below the file's folder."""
    resolved, start = path.resolve(), root.resolve()
    return str(resolved.relative_to(start)) if resolved.is_relative_to(start) else str(resolved)
