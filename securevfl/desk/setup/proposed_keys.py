"""Proposed key columns: those with matching names and kinds in all tables."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Final

from securevfl.config.encoder import NEIGHBOURS
from securevfl.core.column_names import BIRTH, keys_in_clear, meaning_of, words_of
from securevfl.core.errors import ConfigError
from securevfl.data.cells import texts_of
from securevfl.desk.setup.proposed_columns import Column, Table, no_such_column

# Ids that differ in more of the records than this are misspelled, or are not the same ids.
_EQUAL_IDS: Final = 0.95
# Ids of which fewer agree number different things.
_SOME_IDS: Final = 0.1
_NEAR_IN_TIME: Final = "near means a small difference in time, in days"
_EQUAL_DATES: Final = "equal dates are linked, and nothing else: edits of a date mean nothing"


@dataclass(frozen=True, kw_only=True, slots=True)
class KeyProposal:
    """Proposed metric and key columns."""

    metric: str
    """``linkage.metric``."""

    columns: Mapping[str, tuple[str, ...]]
    """Key columns by party, in one order."""

    reasons: tuple[str, ...]
    """Reasons, one sentence each."""

    neighbours: int = NEIGHBOURS
    """K."""

    doubts: tuple[str, ...] = ()
    """Doubts about these keys, one sentence each."""

    @property
    def numeric(self) -> bool:
        """Whether keys are positions, which a model may read too."""
        return self.metric in ("great-circle", "euclidean")

    @property
    def protection(self) -> str:
        """``linkage.protection``: PSI for ids if it is installed, else none."""
        return "psi" if self.metric == "exact" and find_spec("rbcl") else "none"

    @property
    def protection_reason(self) -> str:
        """Who sees which keys under this protection, as one sentence."""
        if self.protection == "psi":
            return (
                "a secondary sees which rows have one of its ids, and no other key; the primary "
                "sees how many ids a secondary has (pad_to hides it)"
            )
        return "every secondary sees the keys of the primary's rows"

    @property
    def key_warning(self) -> str | None:
        """Warning about keys that the proposed file shows, or None."""
        return keys_in_clear(self.protection, next(iter(self.columns.values())))


_DIGITS: Final = BIRTH | {"postcode", "postal", "zip", "zipcode", "plz"}
_FILLERS: Final = frozenset({"key", "full"})
_SPELLED: Final = {"words", "text", "date"}
"""Kinds of columns that can mean the same."""

_Shared = Mapping[str, Mapping[str, Column]]


def propose_keys(
    tables: Sequence[Table], *, asked: Sequence[str] = (), without: Sequence[str] = ()
) -> KeyProposal:
    """Propose key columns.

    Args:
        tables: The primary's table, then the secondaries'.
        asked: Key columns that the user names; ``lon=longitude`` where tables differ. No others are
            proposed then.
        without: Columns that are no keys: the label, the truth.

    Raises:
        ConfigError: If there is nothing to link by, or a table lacks a column that was asked for.
    """
    shared = _shared_columns(tables, without)
    if asked:
        return _as_asked(tables, asked)
    ids = {name: by for name, by in shared.items() if _is_identity(name, by)}
    agreement = {name: _agreement(tables, by) for name, by in ids.items()}
    good = [name for name in ids if (agreed := agreement[name]) is None or agreed >= _EQUAL_IDS]
    if good:
        return _by_ids(tables, ids, max(good, key=lambda name: agreement[name] or 0), agreement)
    if {"longitude", "latitude"} <= set(shared):
        near = "near means metres along the surface of the earth"
        reason = f"a longitude and a latitude in every table; {near}"
        axes = ["longitude", "latitude"]
        return _by_shared(tables, shared, axes, "great-circle", reason)
    texts = {name: by for name, by in shared.items() if name in ids or _tells_a_person(name, by)}
    if any(name not in ids and not _are_dates(by) for name, by in texts.items()):
        return _by_texts(tables, texts, agreement)
    ids = {name: by for name, by in ids.items() if (agreement[name] or 0) >= _SOME_IDS}
    if ids:
        return _by_ids(tables, ids, max(ids, key=lambda name: agreement[name] or 0), agreement)
    days = [name for name, by in texts.items() if _are_dates(by)]
    if days:
        reason = f"dates of people in every table; {_EQUAL_DATES}"
        return _by_shared(tables, shared, days, "exact", reason)
    times = {name: by for name, by in shared.items() if _is_time(name, by)}
    if times:
        name, reason = next(iter(times)), f"a time in every table; {_NEAR_IN_TIME}"
        proposal = _by_shared(tables, times, [name], "euclidean", reason)
        return replace(proposal, doubts=_zones(times[name]))
    common = [dict.fromkeys(by[table.name].name for table in tables) for by in shared.values()]
    common_columns = ", ".join("=".join(names) for names in common) or "none"
    raise ConfigError(
        f"--key: no column of all tables looks like a key (a longitude and a latitude, an id, "
        f"names, addresses, a time); columns in common: {common_columns}. Name the key columns by "
        f"--key, as --key mine=theirs where names differ"
    )


def _shared_columns(tables: Sequence[Table], without: Sequence[str]) -> _Shared:
    by_name: dict[str, dict[str, Column]] = {}
    for table in tables:
        for column in table.columns:
            if column.name not in without and not column.excluded:
                by_name.setdefault(_canonical(column.name), {}).setdefault(table.name, column)
    return {
        name: by
        for name, by in by_name.items()
        if len(by) == len(tables)
        and (len(kinds := {column.kind for column in by.values()}) == 1 or kinds <= _SPELLED)
    }


def _canonical(name: str) -> str:
    """Return a canonical name, equal for the names that two parties may give to one column."""
    words = [word for word in words_of(name) if word not in _FILLERS] or words_of(name)
    meaning = meaning_of(name)
    return meaning if meaning in ("longitude", "latitude") else "_".join(words)


def _spelled_in_digits(name: str) -> bool:
    """Return whether an identifying column may hold digits only: a postcode, a date of birth."""
    return bool(set(words_of(name)) & _DIGITS)


def _is_identity(name: str, by: Mapping[str, Column]) -> bool:
    columns = by.values()
    if not all(column.kind in ("number", "words", "text") for column in columns):
        return False
    named = meaning_of(name) == "identity"
    if any(column.inferred is None for column in columns):
        return named
    if not all(_is_whole(column) for column in columns):
        return False
    # What is unique nowhere tells no one apart, whatever it is called.
    some = any(column.unique for column in columns)
    every = all(column.unique for column in columns)
    return (named and some) or (every and meaning_of(name) == "none")


def _is_whole(column: Column) -> bool:
    if column.kind != "number" or column.values is None:
        return True
    if column.inferred is not None and column.inferred.sign:
        return False
    present = column.values.dropna()
    return bool((present.astype(float) % 1 == 0).all())


def _tells_a_person(name: str, by: Mapping[str, Column]) -> bool:
    kinds = {column.kind for column in by.values()}
    if meaning_of(name) != "person" or "boolean" in kinds:
        return False
    return "number" not in kinds or _spelled_in_digits(name)


def _are_dates(by: Mapping[str, Column]) -> bool:
    return all(column.kind == "date" for column in by.values())


def _is_time(name: str, by: Mapping[str, Column]) -> bool:
    if meaning_of(name) != "time" or not _are_dates(by):
        return False
    return all(column.inferred is None or column.inferred.timed for column in by.values())


def _agreement(tables: Sequence[Table], by: Mapping[str, Column]) -> float | None:
    """Return the least share of the smaller table's ids that the other table has."""
    values = [by[table.name].values for table in tables]
    different = [frozenset(texts_of(own)[1]) for own in values if own is not None]
    if len(different) < len(tables):
        return None
    primary, *others = different
    shares = [len(primary & other) / max(1, min(len(primary), len(other))) for other in others]
    return min(shares)


def _columns(
    tables: Sequence[Table], shared: _Shared, names: Sequence[str]
) -> dict[str, tuple[str, ...]]:
    return {table.name: tuple(shared[name][table.name].name for name in names) for table in tables}


def _by_ids(
    tables: Sequence[Table], ids: _Shared, name: str, agreement: Mapping[str, float | None]
) -> KeyProposal:
    columns, agreed = _columns(tables, ids, [name]), agreement[name]
    reason = "has the same name and kind everywhere; whether values agree is not known here"
    if agreed is not None:
        most = "nearly all" if agreed >= _EQUAL_IDS else "some"
        reason = f"is in every table, and {most} of the smaller table's values are in the other"
    once = all(column.one_each for column in ids[name].values())
    return KeyProposal(
        metric="exact",
        columns=columns,
        reasons=(f"{_names(columns)}: {reason}; equal ids are linked, and nothing else",),
        neighbours=1 if once else NEIGHBOURS,
    )


def _by_shared(
    tables: Sequence[Table], shared: _Shared, names: Sequence[str], metric: str, reason: str
) -> KeyProposal:
    """Return a proposal of columns that all tables have, with one reason."""
    columns = _columns(tables, shared, names)
    return KeyProposal(metric=metric, columns=columns, reasons=(f"{_names(columns)}: {reason}",))


def _zones(columns: Mapping[str, Column]) -> tuple[str, ...]:
    """Return a warning if only some times have a zone, as a table elsewhere can't be asked.

    Args:
        columns: One of each party, by party.
    """
    if all(column.values is not None for column in columns.values()):
        return ()
    zones = {party: having for party, column in columns.items() if (having := column.zone)}
    if len(set(zones.values())) <= 1 and "some" not in zones.values():
        return ()
    of_parties = ", ".join(f"{having} of {party}" for party, having in zones.items())
    return (
        f"times with a zone (Z, +01:00): {of_parties}; a time without one counts as UTC, so "
        f"write the zone, or UTC, at every party",
    )


def _by_texts(
    tables: Sequence[Table], texts: _Shared, agreement: Mapping[str, float | None]
) -> KeyProposal:
    columns = _columns(tables, texts, list(texts))
    reasons = [
        f"{_names(columns)}: names, addresses and dates of people in every table; read as one "
        f"text, near means few edits (levenshtein)"
    ]
    for name, agreed in agreement.items():
        if agreed is not None:
            reasons.append(
                f"{', '.join({column.name for column in texts[name].values()})}: an id, but many "
                f"of the smaller table's values are not in the other, so it is part of the text"
            )
    return KeyProposal(metric="levenshtein", columns=columns, reasons=tuple(reasons))


def _as_asked(tables: Sequence[Table], asked: Sequence[str]) -> KeyProposal:
    chosen: dict[str, list[Column]] = {table.name: [] for table in tables}
    for key in asked:
        for table, column in _named_columns(tables, key).items():
            if any(column is other for other in chosen[table]):
                raise ConfigError(f"--key {key}: {column.name!r} is named twice")
            chosen[table].append(column)
    columns = {name: tuple(column.name for column in own) for name, own in chosen.items()}
    own = chosen[tables[0].name]
    held = [column.kind for every in chosen.values() for column in every]
    numbers = set(held) == {"number"}
    meanings = [meaning_of(column.name) for column in own]
    whole = all(_is_whole(column) for every in chosen.values() for column in every)
    places = [{name: every[place] for name, every in chosen.items()} for place in range(len(own))]
    dates = [place for place in places if _are_dates(place)]
    # A date of birth is spelled with the name.
    spelled = all(meaning_of(place[tables[0].name].name) == "person" for place in dates)
    if meanings == ["latitude", "longitude"] and numbers:
        columns = {name: pair[::-1] for name, pair in columns.items()}
        meanings.reverse()
    if meanings == ["longitude", "latitude"] and numbers:
        metric, why = "great-circle", "near means metres along the surface of the earth"
    elif len(own) == 1 and ((numbers and whole) or meanings == ["identity"]):
        metric, why = "exact", "equal ids are linked, and nothing else"
    elif numbers:
        metric, why = "euclidean", "near means a small Euclidean distance, in the columns' unit"
    elif len(dates) == len(places):
        metric, why = "euclidean", _NEAR_IN_TIME
    elif dates and not (spelled and {"words", "text"} & set(held)):
        metric, why = "exact", _EQUAL_DATES
    else:
        metric, why = "levenshtein", "read as one text, near means few edits"
    once = metric == "exact" and all(
        column.one_each for every in chosen.values() for column in every
    )
    return KeyProposal(
        metric=metric,
        columns=columns,
        reasons=(f"{_names(columns)}: as you asked; {why} ({metric})",),
        neighbours=1 if once else NEIGHBOURS,
        doubts=tuple(doubt for place in dates for doubt in _zones(place)),
    )


def _named_columns(tables: Sequence[Table], key: str) -> dict[str, Column]:
    """Return the column of each table that a key of the command line names.

    Raises:
        ConfigError: If a table has none of the key's columns, or no table has one of them.
    """
    mine, *theirs = key.split("=")
    named = {}
    for number, table in enumerate(tables):
        names = [*theirs, mine] if number else [mine, *theirs]
        column = next((candidate for name in names if (candidate := table.column(name))), None)
        if column is None:
            known = [column.name for column in table.columns]
            raise ConfigError(f"--key {key}: of {table.name!r}, {no_such_column(mine, known)}")
        named[table.name] = column
    for name in (mine, *theirs):
        if name not in {column.name for column in named.values()}:
            known = [column.name for table in tables for column in table.columns]
            others = ", ".join(
                f"{named_column.name!r} of {party!r}" for party, named_column in named.items()
            )
            why = f"is no party's key, as {others} come first"
            if name not in known:
                why = no_such_column(name, list(dict.fromkeys(known)))
            raise ConfigError(f"--key {key}: {name!r}: {why}")
    return named


def _names(columns: Mapping[str, tuple[str, ...]]) -> str:
    """Return the columns' names, with each party's names if they differ."""
    if len(set(columns.values())) == 1:
        return ", ".join(next(iter(columns.values())))
    return "; ".join(f"{', '.join(names)} ({party})" for party, names in columns.items())
