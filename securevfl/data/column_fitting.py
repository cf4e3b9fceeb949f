"""Fit the encoding of one column: by what its party declares, or else by its cells."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Float32

from securevfl.core.errors import DataError
from securevfl.core.formatting import toml_key
from securevfl.data.cells import amounts_of, dates_of, days_of, first_row, texts_of, word
from securevfl.data.column_kinds import infer
from securevfl.data.columns import (
    OTHER,
    BooleanColumn,
    Column,
    DateColumn,
    NumberColumn,
    WordsColumn,
    encode_column,
)
from securevfl.data.scaling import ColumnSettings, Dependence, declared_range


def fit_column(
    cells: "pd.Series[Any]", name: str, settings: ColumnSettings, *, where: str
) -> tuple[Column, Float32[np.ndarray, "rows features"], tuple[Dependence, ...]]:
    """Fit the encoding of a column, and encode it.

    Args:
        cells: The column.
        name: Its name.
        settings: Declared settings.
        where: Name of the column in messages.

    Returns:
        The fitted column, its features, and what was taken from the cells.

    Raises:
        DataError: If it can't be a feature, or a cell does not match what is declared.
    """
    gaps = bool(cells.isna().any()) and settings.missing == "fill"
    declared = name in settings.missing_columns
    fit = _Fit(cells=cells, name=name, settings=settings, where=where, flagged=gaps or declared)
    column = fit.column()
    if gaps and not declared:
        quoted = json.dumps(name, ensure_ascii=False)
        fit.takes("whether values are missing", f"party.missing_columns = [{quoted}]")
    encoded = encode_column(column, cells, refuse=settings.missing == "refuse", where=where)
    return column, encoded, tuple(fit.taken)


@dataclass(kw_only=True, slots=True)
class _Fit:
    """The fitting of one column."""

    cells: "pd.Series[Any]"
    name: str
    settings: ColumnSettings
    where: str
    flagged: bool
    taken: list[Dependence] = field(default_factory=list)
    """Statistics taken from the cells so far."""

    def takes(self, what: str, declare: str) -> None:
        """Note a statistic of the cells, and the setting that would replace it."""
        self.taken.append(Dependence(column=self.name, what=what, declare=declare))

    def column(self) -> Column:
        """Return the column's encoding."""
        settings, name, where = self.settings, self.name, self.where
        words, pair = settings.words(name), settings.pair(name)
        if words is not None:
            words = tuple(map(word, words))
            _require_declared(self.cells, words, where=where)
            return WordsColumn(name=name, flagged=self.flagged, words=words)
        if pair is not None and isinstance(pair[0], str):
            return self._declared_dates(pair)
        inferred = infer(self.cells, max_categories=settings.max_categories)
        stated = isinstance(settings.bounds, Mapping) and pair is not None  # to be numbers
        if inferred.problem is not None and (inferred.kind == "number" or not stated):
            raise DataError(f"{where}: {inferred.problem}")
        if inferred.kind == "boolean":
            return BooleanColumn(name=name, flagged=self.flagged)
        if inferred.kind == "number" or stated:
            fill = self._filling_number(inferred.sign)
            return NumberColumn(name=name, flagged=self.flagged, fill=fill, sign=inferred.sign)
        return self._dates(inferred.timed) if inferred.kind == "date" else self._collected_words()

    def _filling_number(self, sign: str) -> float | None:
        pair = self.settings.pair(self.name)
        if pair is not None:
            return sum(declared_range(pair)) / 2
        if not self.settings.own_statistics:
            return None
        if self.flagged:
            self.takes(
                "the median that stands for missing values",
                f'scaling = "bounds" and party.bounds = {{ {toml_key(self.name)} = [low, high] }}',
            )
        return _median(amounts_of(self.cells, sign))

    def _declared_dates(self, pair: Sequence[float | str]) -> DateColumn:
        try:
            low, high = declared_range(pair)
        except DataError as error:
            raise DataError(f"{self.where}: its bounds: {error}") from None
        timed = any(":" in str(date) for date in pair)
        return DateColumn(
            name=self.name, flagged=self.flagged, origin=low, timed=timed, fill=(high - low) / 2
        )

    def _dates(self, timed: bool) -> DateColumn:
        days = days_of(dates_of(self.cells))
        origin = float(np.floor(np.nanmin(days)))
        example = f'{toml_key(self.name)} = ["2015-01-01", "2025-12-31"]'
        self.takes(
            "the earliest date, from which days are counted,",
            f'scaling = "bounds" and party.bounds = {{ {example} }}',
        )
        fill = _median(days) - origin if self.settings.own_statistics else None
        return DateColumn(
            name=self.name, flagged=self.flagged, origin=origin, timed=timed, fill=fill
        )

    def _collected_words(self) -> WordsColumn:
        places, texts = texts_of(self.cells)
        self.takes(
            "which words there are",
            f'party.categories = {{ {toml_key(self.name)} = ["...", "..."] }}',
        )
        counts = np.bincount(places[places >= 0], minlength=len(texts))
        # Equally frequent words go by their letters, so that the order of rows decides nothing.
        by_number = sorted(range(len(texts)), key=lambda place: (-counts[place], texts[place]))
        kept = sorted(texts[place] for place in by_number[: self.settings.max_categories])
        rest = [OTHER] if len(texts) > len(kept) and OTHER not in kept else []
        return WordsColumn(name=self.name, flagged=self.flagged, words=(*kept, *rest))


def _median(numbers: np.ndarray) -> float:
    present = numbers[~np.isnan(numbers)]
    return float(np.median(present)) if len(present) else 0.0


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
