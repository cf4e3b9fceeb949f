"""Spelling of keys: what must not count so that both tables write equal keys alike.

Where both tables are on this machine, their keys are compared. Where one is not, its owner's card
has the form of its keys, and forms are compared.
"""

import dataclasses
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

import numpy as np

from securevfl.config.federation import FederationConfig, key_spec
from securevfl.data.cells import texts_of
from securevfl.data.sources.read import read_frame
from securevfl.data.sources.settings import Wanted
from securevfl.data.tables import KeyTable
from securevfl.linkage.metrics.exact import Exact, exact_texts
from securevfl.linkage.metrics.metric import KeySpec
from securevfl.linkage.text import Spelling, normalise_text, trimmed_text

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
    """Share of the primary's rows that have a record of an equal key under these settings; of
    forms, the share of pairs that are alike."""

    share_now: float
    """The same share now."""

    of_forms: bool = False
    """True if forms were compared, as a table is elsewhere."""

    def in_words(self) -> str:
        """Return the settings to write, and their effect, in words."""
        settings_text = " and ".join(
            f"linkage.{name} = {str(value).lower() if value is True else repr(value)}"
            for name, value in self.settings.items()
        ).replace("'", '"')
        if self.of_forms:
            return (
                f"with {settings_text}, their forms are alike; how many rows have a record with an "
                f"equal key is known in a run"
            )
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
    spec = _as_compared(spec)
    both = [_as_texts(keys) for keys in (primary, own)]
    now = _shares(spec, both, least=(0, 0))
    if now.rows >= _ENOUGH:
        return None
    return _best(
        _candidates(spec, pairs=sum(keys.num_rows for keys in both) <= _LARGE),
        lambda settings: _shares(_with(spec, settings), both, least=now.different).rows,
        now=now.rows,
    )


def _best(
    candidates: Sequence[dict[str, Any]], share_of: Callable[[dict[str, Any]], float], *, now: float
) -> BetterSpelling | None:
    """Return the settings with the largest share; None if none is worth a setting."""
    best = None
    for settings in candidates:
        share = share_of(settings)
        if share > _MORE + (now if best is None else best.share):
            best = BetterSpelling(settings=settings, share=share, share_now=now)
    return best


def _as_compared(spec: KeySpec) -> KeySpec:
    """Return a spec with ``fold`` where its metric compares texts without case anyway."""
    return spec if isinstance(spec.metric, Exact) else dataclasses.replace(spec, fold=True)


def _candidates(spec: KeySpec, *, pairs: bool = True) -> list[dict[str, Any]]:
    """Return the settings that a spec lacks, one by one and, if asked for, in pairs."""
    known = {*spec.spelling.settings, *(["fold"] if spec.fold else [])}
    single = [setting for setting in _SETTINGS if not known & set(setting)]
    both = combinations(single if pairs else [], 2)
    return single + [first | other for first, other in both if not set(first) & set(other)]


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


Zone = Literal["all", "some", "none"]
"""Which points in time of a column say their zone."""

_FEWEST: Final = 20
_LEAST_SHARE: Final = 0.05
_LONGEST_FORM: Final = 40
_DATE: Final = re.compile(r"([0-9]{1,2})[./-]([0-9]{1,2})[./-][0-9]{4}")
_ISO_DATE: Final = re.compile(r"[0-9]{4}[./-][0-9]{1,2}[./-][0-9]{1,2}")
_RUN: Final = re.compile(r"\d+|[^\W\d_]+|\s+|(?:[^\w\s]|_)+")
# Settings under which keys of one table are counted, for each table on its own.
_MERGING: Final[tuple[dict[str, Any], ...]] = (
    {"fold": True},
    {"strip_zeros": True},
    {"digits_only": True},
    {"strip_zeros": True, "digits_only": True},
)
# What the last day of the century looks like in each order.
_LAST_DAY: Final = {"iso": "1999-12-31", "day-first": "31.12.1999", "month-first": "12.31.1999"}


@dataclass(frozen=True, kw_only=True, slots=True)
class KeyForm:
    """Form of the values of a column, as keys."""

    texts: tuple[str, ...] = ()
    """A made-up text for each common form: 9 for a digit, 0 for a zero in front, A and a for
    letters, - for other characters, and for dates the last day of 1999."""

    merges: tuple[str, ...] = ()
    """Settings of ``[linkage]`` that make different keys equal, those of a pair joined by +."""

    repeats: bool = False
    """True if records share keys."""

    zone: Zone | None = None
    """Which points in time say their zone; None if the column has none."""


def form_of(texts: Sequence[str], *, rows: int, zone: Zone | None) -> KeyForm | None:
    """Return the form of a column's different values; None if they are fewer than 20.

    Args:
        texts: The different values.
        rows: Number of records that have one.
        zone: Which points in time say their zone.

    Reveals:
        To whoever sees it: forms that 20 different values and one in twenty have, with the number
        of digits and no character of a value; whether 20 values and one in a hundred equal others
        under a setting; whether 20 records and one in twenty share a value with others.
    """
    if len(texts) < _FEWEST:
        return None
    order = _order_of_dates(texts)
    counted = Counter(made_up_text(text, order) for text in texts)
    return KeyForm(
        texts=tuple(
            sorted(
                form
                for form, count in counted.items()
                if _is_common(count, len(texts)) and 0 < len(form) <= _LONGEST_FORM
            )
        ),
        merges=tuple("+".join(settings) for settings in _MERGING if _merges(texts, settings)),
        repeats=_is_common(rows - len(texts), rows),
        zone=zone,
    )


def forms_of_party(config: FederationConfig, name: str, data_root: Path) -> list[KeyForm | None]:
    """Return the form of each key column of a party's table, in the federation file's order.

    Args:
        config: The federation file.
        name: The party.
        data_root: Where relative paths start.

    Raises:
        DataError: If the table can't be read.

    Reveals:
        To whoever sees them: as :func:`form_of`.
    """
    party, spec = config.party(name), key_spec(config)
    if party.is_helper or "text" not in spec.kinds.values():
        return []
    frame = read_frame(
        data_root / party.data,
        where=f"table {data_root / party.data}",
        reading=party.reading,
        wanted=Wanted(as_text=party.key, expected=party.key),
    )
    return [
        form_of(texts_of(frame[column])[1], rows=int(frame[column].count()), zone=None)
        if column in frame
        else None
        for column in party.key
    ]


def compare_forms(
    spec: KeySpec, forms: Mapping[str, Sequence[KeyForm | None]]
) -> tuple[str | None, bool]:
    """Return what two tables' key forms say of links, and whether few are likely.

    Args:
        spec: Which keys are compared.
        forms: The forms of the primary's key columns and of a secondary's, by party.

    Returns:
        A sentence, or None if a table has no form; and True if it names a cause of few links.
    """
    mine, theirs = forms.values()
    if len(mine) != len(theirs) or not any(
        first and other and first.texts and other.texts
        for first, other in zip(mine, theirs, strict=True)
    ):
        return None, False
    better = better_by_forms(spec, mine, theirs)
    if better is not None:
        return f"keys are written differently: {better.in_words()}", True
    doubts = doubts_about_forms(spec, None, forms)
    if doubts:
        return "; ".join(doubts), True
    return "keys have a form in common", False


def zone_of(share: float, rows: int) -> Zone:
    """Return which points in time say their zone, rare ones left out.

    Args:
        share: Share of the points that do.
        rows: Number of points.
    """
    having, lacking = (_is_common(round(part * rows), rows) for part in (share, 1 - share))
    return "some" if having and lacking else "all" if share > 1 / 2 else "none"


def _is_common(count: int, of: int) -> bool:
    return count >= max(_FEWEST, _LEAST_SHARE * of)


def _merges(texts: Sequence[str], settings: dict[str, Any]) -> bool:
    as_compared = normalise_text if settings.get("fold") else trimmed_text
    spelling = Spelling(**{name: value for name, value in settings.items() if name != "fold"})
    merged = len(texts) - len({as_compared(spelling.of(text)) for text in texts})
    return merged >= max(_FEWEST, (1 - _KEPT) * len(texts))


def _order_of_dates(texts: Sequence[str]) -> str | None:
    """Return the order of day and month in dates, if many of them tell it and few another."""
    days = [tuple(map(int, day.groups())) for text in texts if (day := _DATE.fullmatch(text))]
    orders = {
        "day-first": sum(first > 12 >= second for first, second in days),
        "month-first": sum(second > 12 >= first for first, second in days),
    }
    sure = [order for order, count in orders.items() if _is_common(count, len(texts))]
    return sure[0] if len(sure) == 1 else None


def made_up_text(text: str, order: str | None = None) -> str:
    """Return a text of the same form as a key's, with no character of it.

    Args:
        text: The key.
        order: The order of its column's dates, if known.

    Examples:
        >>> made_up_text("c-00123 Müller"), made_up_text("3.4.1956", "day-first")
        ('a-00999 Aa', '31.12.1999')
    """
    text = trimmed_text(text)
    if _ISO_DATE.fullmatch(text):
        return _LAST_DAY["iso"]
    if order is not None and _DATE.fullmatch(text):
        return _LAST_DAY[order]
    return _RUN.sub(_made_up_run, text)


def _made_up_run(run: re.Match[str]) -> str:
    text = run[0]
    if text[0].isdecimal():
        front = len(text) - max(1, len(text.lstrip("0")))
        return "0" * front + "9" * (len(text) - front)
    if text.isspace():
        return " "
    if not text.isalpha():
        return "-"
    return "A" if text.isupper() else "a" if text.islower() else "Aa"


def better_by_forms(
    spec: KeySpec, primary: Sequence[KeyForm | None], own: Sequence[KeyForm | None]
) -> BetterSpelling | None:
    """Return the settings under which the forms of two tables' keys are most alike.

    None if none makes them more alike. A setting that merges keys of either table is left out.

    Args:
        spec: Which keys are compared.
        primary: The forms of the primary's key columns.
        own: Those of the secondary's.
    """
    if "text" not in spec.kinds.values():
        return None
    spec = _as_compared(spec)
    known = [
        (mine, theirs)
        for mine, theirs in zip(primary, own, strict=True)
        if mine is not None and theirs is not None and mine.texts and theirs.texts
    ]
    if not known:
        return None
    merging = [set(names.split("+")) for pair in known for form in pair for names in form.merges]
    candidates = [
        settings
        for settings in _candidates(spec)
        if not any(names <= {*settings, *spec.spelling.settings} for names in merging)
    ]
    best = _best(
        candidates,
        lambda settings: _likeness(_with(spec, settings), known),
        now=_likeness(spec, known),
    )
    return best and dataclasses.replace(best, of_forms=True)


def doubts_about_forms(
    spec: KeySpec,
    better: BetterSpelling | None,
    forms: Mapping[str, Sequence[KeyForm | None]],
) -> list[str]:
    """Return a doubt for each key column of which two tables have no common form.

    Args:
        spec: Which keys are compared.
        better: The settings that are proposed.
        forms: The forms of both tables' key columns, by party.
    """
    spec = _as_compared(spec if better is None else _with(spec, better.settings))
    (first, mine), (other, theirs) = forms.items()
    return [
        f"{name}: keys of {first} look like {' or '.join(own.texts)}, those of {other} like "
        f"{' or '.join(partners.texts)}, and no setting makes them alike: equal ones are unlikely; "
        f"compare what both parties write"
        for name, own, partners in zip(spec.columns, mine, theirs, strict=True)
        if isinstance(spec.metric, Exact)
        and own is not None
        and partners is not None
        and own.texts
        and partners.texts
        and not _likeness(spec, [(own, partners)])
    ]


def _likeness(spec: KeySpec, known: Sequence[tuple[KeyForm, KeyForm]]) -> float:
    """Return the share of pairs of forms that are alike, over all columns."""
    as_compared = normalise_text if spec.fold else trimmed_text

    def forms(form: KeyForm) -> list[str]:
        return [made_up_text(as_compared(spec.spelling.of(text))) for text in form.texts]

    pairs = [
        (mine, theirs) for first, other in known for mine in forms(first) for theirs in forms(other)
    ]
    return sum(bool(mine) and mine == theirs for mine, theirs in pairs) / len(pairs)
