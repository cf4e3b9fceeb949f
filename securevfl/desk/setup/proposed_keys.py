"""Proposed key columns: those with matching names and kinds in all tables."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any, Final, NamedTuple

import numpy as np

from securevfl.config.encoder import NEIGHBOURS
from securevfl.core.column_names import canonical, keys_in_clear, meaning_of, spelled_in_digits
from securevfl.core.errors import ConfigError
from securevfl.data.cells import share_with_zone, texts_of
from securevfl.data.tables import KeyTable
from securevfl.desk.setup.proposed_columns import Column, Table, no_such_column
from securevfl.linkage.metrics.exact import Exact, exact_texts
from securevfl.linkage.metrics.metric import KeySpec
from securevfl.linkage.text import Spelling

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
    def key_warning(self) -> str | None:
        """Warning about keys that the proposed file shows, or None."""
        return keys_in_clear("none", next(iter(self.columns.values())))


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
        return _by_places(tables, shared)
    texts = {name: by for name, by in shared.items() if name in ids or _tells_a_person(name, by)}
    if any(name not in ids and not _are_dates(by) for name, by in texts.items()):
        return _by_texts(tables, texts, agreement)
    ids = {name: by for name, by in ids.items() if (agreement[name] or 0) >= _SOME_IDS}
    if ids:
        return _by_ids(tables, ids, max(ids, key=lambda name: agreement[name] or 0), agreement)
    days = [name for name, by in texts.items() if _are_dates(by)]
    if days:
        return _by_days(tables, shared, days)
    times = {name: by for name, by in shared.items() if _is_time(name, by)}
    if times:
        return _by_times(tables, times, next(iter(times)))
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
                by_name.setdefault(canonical(column.name), {}).setdefault(table.name, column)
    return {
        name: by
        for name, by in by_name.items()
        if len(by) == len(tables)
        and (len(kinds := {column.kind for column in by.values()}) == 1 or kinds <= _SPELLED)
    }


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
    return "number" not in kinds or spelled_in_digits(name)


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
    once = all(column.unique or column.inferred is None for column in ids[name].values())
    return KeyProposal(
        metric="exact",
        columns=columns,
        reasons=(f"{_names(columns)}: {reason}; equal ids are linked, and nothing else",),
        neighbours=1 if once else NEIGHBOURS,
    )


def _by_places(tables: Sequence[Table], shared: _Shared) -> KeyProposal:
    columns = _columns(tables, shared, ["longitude", "latitude"])
    return KeyProposal(
        metric="great-circle",
        columns=columns,
        reasons=(
            f"{_names(columns)}: a longitude and a latitude in every table; near means metres "
            f"along the surface of the earth",
        ),
    )


def _by_days(tables: Sequence[Table], shared: _Shared, names: Sequence[str]) -> KeyProposal:
    columns = _columns(tables, shared, names)
    return KeyProposal(
        metric="exact",
        columns=columns,
        reasons=(f"{_names(columns)}: dates of people in every table; {_EQUAL_DATES}",),
    )


def _by_times(tables: Sequence[Table], times: _Shared, name: str) -> KeyProposal:
    columns = _columns(tables, times, [name])
    return KeyProposal(
        metric="euclidean",
        columns=columns,
        reasons=(f"{_names(columns)}: a time in every table; {_NEAR_IN_TIME}",),
        doubts=_zones(times[name]),
    )


def _zones(columns: Mapping[str, Column]) -> tuple[str, ...]:
    """Return a warning if only some times have a zone.

    Args:
        columns: One of each party that has its table here, by party.
    """
    shares = {
        party: share_with_zone(column.values)
        for party, column in columns.items()
        if column.values is not None
    }
    if len(set(shares.values())) <= 1 and set(shares.values()) <= {0.0, 1.0}:
        return ()
    having = {0.0: "none", 1.0: "all"}
    zones = ", ".join(f"{having.get(share, 'some')} of {party}" for party, share in shares.items())
    return (
        f"times with a zone (Z, +01:00): {zones}; a time without one counts as UTC, so write the "
        f"zone, or UTC, at every party",
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
        column.unique or column.inferred is None for every in chosen.values() for column in every
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


# What links fewer rows more than this share is not worth a setting.
_MORE: Final = 0.05
# Where so many rows have a record, spelling is not looked into.
_ENOUGH: Final = 0.9
# Different keys of a table that stay different.
_KEPT: Final = 0.99
# In larger tables settings are tried one by one, not in pairs.
_LARGE: Final = 400_000
_SETTINGS: Final[tuple[dict[str, Any], ...]] = (
    {"fold": True},
    {"strip_zeros": True},
    {"dates": "day-first"},
    {"dates": "month-first"},
    {"digits_only": True},
)
"""Settings in order of how much of a key they change."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BetterSpelling:
    """Settings of ``[linkage]`` under which more rows have a record of an equal key."""

    settings: dict[str, Any]
    """Settings by name."""

    share: float
    """Share of the primary's rows that have a record of an equal key under these settings."""

    share_now: float
    """Share of the primary's rows that have a record of an equal key now."""

    def in_words(self) -> str:
        """Return the settings to write, and their effect, in words."""
        settings_text = " and ".join(
            f"linkage.{name} = {str(value).lower() if value is True else repr(value)}"
            for name, value in self.settings.items()
        ).replace("'", '"')
        return (
            f"with {settings_text}, {self.share:.0%} of the rows have a record with an equal key "
            f"(now {self.share_now:.0%})"
        )


def better_spelling(spec: KeySpec, primary: KeyTable, own: KeyTable) -> BetterSpelling | None:
    """Return the settings that give most rows a record of an equal key; None if none gives more.

    A setting that makes different keys of one table equal is left out: it would link different
    people.

    Args:
        spec: Which keys are compared.
        primary: The primary's keys.
        own: The secondary's.

    Reveals:
        Nothing leaves the process, which holds both tables.
    """
    if "text" not in spec.kinds.values():
        return None
    if not isinstance(spec.metric, Exact):
        # Other metrics compare texts without case anyway.
        spec = dataclasses.replace(spec, fold=True)
    both = [_as_texts(keys) for keys in (primary, own)]
    now = _shares(spec, both, least=(0, 0))
    if now.rows >= _ENOUGH:
        return None
    known = {"fold"} if spec.fold else set()
    single = [
        setting for setting in _SETTINGS if not (known | set(spec.spelling.settings)) & set(setting)
    ]
    pairs = [
        first | other for first, other in combinations(single, 2) if not set(first) & set(other)
    ]
    large = sum(keys.num_rows for keys in both) > _LARGE
    best = None
    for settings in single if large else (*single, *pairs):
        share = _shares(_with(spec, settings), both, least=now.different).rows
        if share > _MORE + (now.rows if best is None else best.share):
            best = BetterSpelling(settings=settings, share=share, share_now=now.rows)
    return best


def _with(spec: KeySpec, settings: dict[str, Any]) -> KeySpec:
    spelled = {name: value for name, value in settings.items() if name != "fold"}
    return dataclasses.replace(
        spec,
        fold=settings.get("fold", spec.fold),
        spelling=Spelling(**{**spec.spelling.settings, **spelled}),
    )


def _as_texts(keys: KeyTable) -> KeyTable:
    """Return keys with numbers as texts; a missing one stays missing."""
    return dataclasses.replace(
        keys,
        columns={
            name: column
            if column.dtype == object
            else np.array(
                [None if number != number else f"{number:.17g}" for number in column], object
            )
            for name, column in keys.columns.items()
        },
    )


class _Shares(NamedTuple):
    rows: float
    """Share of the primary's rows that have a record of an equal key."""

    different: tuple[int, int]
    """Different keys of the primary, and of the secondary."""


def _shares(spec: KeySpec, both: Sequence[KeyTable], *, least: tuple[int, int]) -> _Shares:
    """Compare keys; no row counts as linked if a table has too few different keys."""
    texts = [
        exact_texts(spec, dataclasses.replace(keys, columns=spec.spelling.of_columns(keys.columns)))
        for keys in both
    ]
    mine, theirs = set(texts[0]) - {None}, set(texts[1]) - {None}
    different = len(mine), len(theirs)
    merged = any(now < _KEPT * before for now, before in zip(different, least, strict=True))
    linked = 0 if merged else sum(text in theirs for text in texts[0])
    return _Shares(rows=linked / len(texts[0]), different=different)
