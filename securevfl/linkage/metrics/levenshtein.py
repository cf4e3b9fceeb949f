"""The edits from one text to another: all key columns of a row are read as one text."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import numpy as np
from jaxtyping import Bool, Float64, Int64

from securevfl.linkage.blocking import CandidatePairs, blocked_keys
from securevfl.linkage.levenshtein import nearest_normal_texts, pair_edits
from securevfl.linkage.links import LinkTable
from securevfl.linkage.metrics.metric import ComparedKeys, KeyKind, KeyMetric, Keys, KeySpec, Metric
from securevfl.linkage.qgrams import QGramCandidates
from securevfl.linkage.rules import BlockingRules, RuleCandidates
from securevfl.linkage.text import checked_texts, joined_texts


@dataclass(frozen=True, kw_only=True, eq=False)
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
        texts = self.normal_primary
        if rows is not None:
            texts = [texts[row] for row in rows]
        return nearest_normal_texts(
            texts, self.normal_records, k, eligible=eligible, workers=self.workers
        )

    def distances(
        self, rows: Int64[np.ndarray, " pairs"], records: Int64[np.ndarray, " pairs"]
    ) -> Float64[np.ndarray, " pairs"]:
        """Return the edits from each row to the record at its place."""
        mine, theirs = self.normal_primary, self.normal_records
        edits = pair_edits(
            [mine[row] for row in rows.tolist()],
            [theirs[record] for record in records.tolist()],
            workers=self.workers,
        )
        return edits.astype(np.float64)

    @cached_property
    def normal_primary(self) -> list[str]:
        """The primary's texts as they are compared."""
        return checked_texts(self.primary, whose="the primary")

    @cached_property
    def normal_records(self) -> list[str]:
        """The secondary's texts as they are compared."""
        return checked_texts(self.records, whose="the secondary")


class Levenshtein(Metric):
    """Insertions, deletions and substitutions of letters."""

    name: ClassVar[str] = "levenshtein"
    unit: ClassVar[str] = "edits"
    whole: ClassVar[bool] = True
    reads: ClassVar[frozenset[str]] = frozenset({"blocking", "rules", "spelling"})

    def kind(self, spec: KeySpec) -> KeyKind:  # noqa: ARG002
        """Return that keys are texts."""
        return "text"

    def check(self, spec: KeySpec) -> None:
        """Read the rules that block."""
        if isinstance(spec.blocking, tuple):
            BlockingRules.parse(spec.blocking, spec.kinds)

    def compare(self, spec: KeySpec, primary: Keys, records: Keys, *, neighbours: int) -> KeyMetric:
        """Join each row's columns; with ``blocking``, say what leaving pairs out loses."""
        mine, theirs = joined_texts(primary.columns), joined_texts(records.columns)
        keys = TextKeys(primary=mine, records=theirs)
        if spec.blocking is None:
            return keys
        candidates: CandidatePairs
        if isinstance(spec.blocking, tuple):
            rules = BlockingRules.parse(spec.blocking, spec.kinds)
            candidates = RuleCandidates.of(rules, primary.columns, records.columns)
        else:
            candidates = QGramCandidates.of(
                keys.normal_primary, keys.normal_records, least_overlap=spec.blocking
            )
        return blocked_keys(keys, candidates, neighbours)
