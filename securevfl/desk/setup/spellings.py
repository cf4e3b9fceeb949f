"""Spellings of text keys under which more rows have a record of an equal key."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any, Final, NamedTuple

import numpy as np

from securevfl.data.tables import KeyTable
from securevfl.linkage.metrics.metric import KeySpec
from securevfl.linkage.metrics.texts import Exact, exact_texts
from securevfl.linkage.text import Spelling

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
