"""The edits from one text to another: all key columns of a row are read as one text."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from jaxtyping import Bool, Int64

from securevfl.linkage.blocking import QGramBlocking, block_texts
from securevfl.linkage.levenshtein import nearest_texts
from securevfl.linkage.links import LinkTable
from securevfl.linkage.metrics.metric import ComparedKeys, KeyKind, KeyMetric, Keys, KeySpec, Metric
from securevfl.linkage.text import joined_texts


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TextKeys(ComparedKeys):
    """One text a row; see :mod:`securevfl.linkage.levenshtein`."""

    primary: Sequence[str]
    """The primary's texts."""

    records: Sequence[str]
    """The secondary's texts."""

    workers: int = 1
    """Threads; -1 takes every core."""

    def nearest(
        self,
        rows: Int64[np.ndarray, " chosen"] | None,
        k: int,
        *,
        eligible: Bool[np.ndarray, " records"] | None = None,
    ) -> LinkTable:
        """Link as :func:`~securevfl.linkage.levenshtein.nearest_texts` does."""
        texts = self.primary if rows is None else [self.primary[row] for row in rows]
        return nearest_texts(texts, self.records, k, eligible=eligible, workers=self.workers)


class Levenshtein(Metric):
    """Insertions, deletions and substitutions of letters."""

    name: ClassVar[str] = "levenshtein"
    unit: ClassVar[str] = "edits"
    whole: ClassVar[bool] = True
    reads: ClassVar[frozenset[str]] = frozenset({"blocking"})

    def kind(self, spec: KeySpec) -> KeyKind:  # noqa: ARG002
        """Return that keys are texts."""
        return "text"

    def compare(self, spec: KeySpec, primary: Keys, records: Keys, *, neighbours: int) -> KeyMetric:
        """Join each row's columns; with ``blocking``, say what leaving pairs out loses."""
        mine, theirs = joined_texts(primary.columns), joined_texts(records.columns)
        if spec.blocking is None:
            return TextKeys(primary=mine, records=theirs)
        blocking = QGramBlocking(least_overlap=spec.blocking)
        return block_texts(mine, theirs, neighbours, blocking=blocking)
