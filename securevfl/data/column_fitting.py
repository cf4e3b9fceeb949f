"""Decide how one column is encoded: by what its party declares, and else by what it holds."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Float32

from securevfl.core.errors import DataError
from securevfl.data.cells import amounts_of, dates_of, days_of, first_row, texts_of, word
from securevfl.data.column_kinds import infer
from securevfl.data.column_settings import ColumnSettings, Dependence, declared_range
from securevfl.data.columns import (
    OTHER,
    BooleanColumn,
    Column,
    DateColumn,
    NumberColumn,
    WordsColumn,
    encode_column,
    toml_key,
)


def fit_column(
    cells: "pd.Series[Any]", name: str, settings: ColumnSettings, *, where: str
) -> tuple[Column, Float32[np.ndarray, "rows features"], tuple[Dependence, ...]]:
    """Decide how a column is encoded, and encode it.

    Args:
        cells: The column.
        name: Its name.
        settings: What its party declares.
        where: What messages call the column.

    Returns:
        The fitted column, its features, and what of it was taken from the cells.

    Raises:
        DataError: If it can't be a feature, or a cell is none of what is declared.
    """
    gaps = bool(cells.isna().any()) and settings.missing == "fill"
    declared = name in settings.missing_columns
    taken: list[Dependence] = []
    column = _fitted(cells, name, settings, taken, flagged=gaps or declared, where=where)
    if gaps and not declared:
        taken.append(
            Dependence(
                column=name,
                what="whether values are missing",
                declare=f"party.missing_columns = [{json.dumps(name, ensure_ascii=False)}]",
            )
        )
    encoded = encode_column(column, cells, refuse=settings.missing == "refuse", where=where)
    return column, encoded, tuple(taken)


def _fitted(
    cells: "pd.Series[Any]",
    name: str,
    settings: ColumnSettings,
    taken: list[Dependence],
    *,
    flagged: bool,
    where: str,
) -> Column:
    words, pair = settings.words(name), settings.pair(name)
    if words is not None:
        words = tuple(map(word, words))
        _require_declared(cells, words, where=where)
        return WordsColumn(name=name, flagged=flagged, words=words)
    if pair is not None and isinstance(pair[0], str):
        return _declared_dates(name, pair, flagged=flagged, where=where)
    found = infer(cells, max_categories=settings.max_categories)
    stated = isinstance(settings.bounds, Mapping) and pair is not None  # to be numbers
    if found.problem is not None and (found.kind == "number" or not stated):
        raise DataError(f"{where}: {found.problem}")
    if found.kind == "boolean":
        return BooleanColumn(name=name, flagged=flagged)
    if found.kind == "number" or stated:
        return _numbers(cells, name, settings, taken, flagged=flagged, sign=found.sign)
    if found.kind == "date":
        return _dates(cells, name, settings, taken, flagged=flagged, timed=found.timed)
    return _collected_words(cells, name, settings, taken, flagged=flagged)


def _numbers(
    cells: "pd.Series[Any]",
    name: str,
    settings: ColumnSettings,
    taken: list[Dependence],
    *,
    flagged: bool,
    sign: str,
) -> NumberColumn:
    pair = settings.pair(name)
    if pair is not None:
        low, high = declared_range(pair)
        return NumberColumn(name=name, flagged=flagged, fill=(low + high) / 2, sign=sign)
    if not settings.own_statistics:
        return NumberColumn(name=name, flagged=flagged, fill=None, sign=sign)
    numbers = amounts_of(cells, sign)
    if flagged:
        taken.append(
            Dependence(
                column=name,
                what="the median that stands for missing values",
                declare='scaling = "bounds" and '
                f"party.bounds = {{ {toml_key(name)} = [low, high] }}",
            )
        )
    return NumberColumn(name=name, flagged=flagged, fill=_median(numbers), sign=sign)


def _median(numbers: np.ndarray) -> float:
    present = numbers[~np.isnan(numbers)]
    return float(np.median(present)) if len(present) else 0.0


def _declared_dates(
    name: str, pair: Sequence[float | str], *, flagged: bool, where: str
) -> DateColumn:
    try:
        low, high = declared_range(pair)
    except DataError as error:
        raise DataError(f"{where}: its bounds: {error}") from None
    return DateColumn(
        name=name,
        flagged=flagged,
        origin=low,
        timed=any(":" in str(date) for date in pair),
        fill=(high - low) / 2,
    )


def _dates(
    cells: "pd.Series[Any]",
    name: str,
    settings: ColumnSettings,
    taken: list[Dependence],
    *,
    flagged: bool,
    timed: bool,
) -> DateColumn:
    days = days_of(dates_of(cells))
    origin = float(np.floor(np.nanmin(days)))
    taken.append(
        Dependence(
            column=name,
            what="the earliest date, from which days are counted,",
            declare='scaling = "bounds" and '
            f'party.bounds = {{ {toml_key(name)} = ["2015-01-01", "2025-12-31"] }}',
        )
    )
    fill = _median(days) - origin if settings.own_statistics else None
    return DateColumn(name=name, flagged=flagged, origin=origin, timed=timed, fill=fill)


def _require_declared(cells: "pd.Series[Any]", words: Sequence[str], *, where: str) -> None:
    if not words or len(set(words)) < len(words):
        raise DataError(f"{where}: its declared words must be different, and at least one")
    places, texts = texts_of(cells)
    known = np.array([*(text in words for text in texts), True])
    unknown = ~known[places]
    if unknown.any() and OTHER not in words:
        row = first_row(unknown)
        raise DataError(
            f"{where}, row {row}: {texts[places[row - 1]][:40]!r} is not among its declared words; "
            f"correct it, or declare {OTHER!r} for words that are not listed"
        )


def _collected_words(
    cells: "pd.Series[Any]",
    name: str,
    settings: ColumnSettings,
    taken: list[Dependence],
    *,
    flagged: bool,
) -> WordsColumn:
    places, texts = texts_of(cells)
    taken.append(
        Dependence(
            column=name,
            what="which words there are",
            declare=f'party.categories = {{ {toml_key(name)} = ["...", "..."] }}',
        )
    )
    counts = np.bincount(places[places >= 0], minlength=len(texts))
    # Equally frequent words go by their letters, so that the order of rows decides nothing.
    by_number = sorted(range(len(texts)), key=lambda place: (-counts[place], texts[place]))
    kept = sorted(texts[place] for place in by_number[: settings.max_categories])
    rest = [OTHER] if len(texts) > len(kept) and OTHER not in kept else []
    return WordsColumn(name=name, flagged=flagged, words=(*kept, *rest))
