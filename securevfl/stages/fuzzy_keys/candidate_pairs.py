"""Candidate pairs: fewer pairs are compared, and some links are lost.

Whether a pair is a candidate depends on the keys of that pair alone: never on other rows or records
of a table, on how common a value is, or on how many candidates there are already. So a record's
choice of rows does not depend on other records, and caps (:mod:`securevfl.linkage.sampling`) and
samples keep their promises, on which the accounting of records stands (docs/privacy.md, section 3).
Rules (:mod:`securevfl.stages.fuzzy_keys.blocking_rules`) keep to that.

What blocking loses is measured when it is set up and stays with the keys
(:class:`BlockingQuality`): there is no way to block without it.
"""

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Final, TypeVar

import numpy as np
from jaxtyping import Float64, Int64

from securevfl.core import checks
from securevfl.data.tables import KeyTable
from securevfl.linkage.links import Chosen, LinkTable, Sample, eligible_ids, nearest_pairs
from securevfl.linkage.metrics.metric import ComparedKeys, KeySpec
from securevfl.stages.fuzzy_keys.blocking_rules import BlockingRules, RuleCandidates

Own = TypeVar("Own", bound="PairwiseKeys")
_ROWS_MEASURED: Final = 200


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockingQuality:
    """What blocking found and spared, on rows that were linked both ways."""

    rows_measured: int
    """Rows that were also compared with every record."""

    links_per_row: int
    """K."""

    recall_at_1: float
    """Share of those rows whose nearest link is as near as the nearest record."""

    recall_at_k: float
    """Share of their K nearest that were found; others as near as the K-th count as well."""

    candidates_per_row: float
    """Records that a row was compared with, on average."""

    reduction_ratio: float
    """Share of all pairs that were not compared."""


@dataclass(frozen=True, kw_only=True, eq=False)
class PairwiseKeys(ComparedKeys):
    """Keys that can be compared pair by pair, and with candidates alone once they are blocked.

    A row of blocked keys may have fewer than K links.
    """

    candidates: RuleCandidates | None = None
    """Pairs to compare; None compares all."""

    quality: BlockingQuality | None = None
    """Quality of the blocking; also of the swapped keys, as candidates are symmetric."""

    @abstractmethod
    def distances(
        self, rows: Int64[np.ndarray, " pairs"], records: Int64[np.ndarray, " pairs"]
    ) -> Float64[np.ndarray, " pairs"]:
        """Return the distance of each row to the record at its place, as :meth:`nearest` has it."""

    def nearest(self, rows: Chosen | None, k: int, *, eligible: Sample | None = None) -> LinkTable:
        """Link as all metrics do; blocked keys, to their ``k`` nearest eligible candidates."""
        if self.candidates is None:
            return super().nearest(rows, k, eligible=eligible)
        return self._nearest_among(self.candidates, rows, k, eligible=eligible)[0]

    def swap_roles(self: Own) -> Own:
        """Exchange the parties' roles."""
        candidates = None if self.candidates is None else self.candidates.swap_roles()
        return replace(self, primary=self.records, records=self.primary, candidates=candidates)

    def figures(self) -> Mapping[str, Any]:
        """Return what blocking lost and spared."""
        if self.candidates is None or self.quality is None:
            return {}
        return {"blocking": {**asdict(self.quality), **self.candidates.figures()}}

    def blocked(self: Own, spec: KeySpec, primary: KeyTable, records: KeyTable, k: int) -> Own:
        """Return keys that are linked as ``linkage.blocking`` says; the same without rules.

        Args:
            spec: Settings of the keys.
            primary: The primary's key columns.
            records: The secondary's.
            k: As of :meth:`with_candidates`.

        Raises:
            DataError: As there, or if a value of a text column is no text, or too long.
        """
        if spec.blocking is None:
            return self
        rules = BlockingRules.parse(spec.blocking, spec.kinds)
        candidates = RuleCandidates.of(rules, primary.columns, records.columns)
        return self.with_candidates(candidates, k)

    def with_candidates(
        self: Own, candidates: RuleCandidates, k: int, *, rows_measured: int = _ROWS_MEASURED
    ) -> Own:
        """Return keys that are linked by candidates, and measure what that loses.

        Args:
            candidates: Which pairs are compared.
            k: Links a row for which recall is measured.
            rows_measured: Rows, evenly spread over the table, that are compared with every record.

        Raises:
            ConfigError: If ``rows_measured`` is below 1.
            DataError: If there are fewer than ``k`` records.
        """
        checks.at_least(1, rows_measured=rows_measured)
        chosen = np.unique(np.linspace(0, self.num_rows - 1, rows_measured).astype(np.int64))
        exact = self.nearest(chosen, k)
        nearest, pairs = self._nearest_among(candidates, chosen, k)
        per_row = pairs / len(chosen)
        quality = BlockingQuality(
            rows_measured=len(chosen),
            links_per_row=k,
            recall_at_1=float((nearest.distances[:, 0] == exact.distances[:, 0]).mean()),
            recall_at_k=float((nearest.distances <= exact.distances[:, -1:]).mean()),
            candidates_per_row=per_row,
            reduction_ratio=1 - per_row / self.num_records,
        )
        return replace(self, candidates=candidates, quality=quality)

    def _nearest_among(
        self,
        candidates: RuleCandidates,
        rows: Chosen | None,
        k: int,
        *,
        eligible: Sample | None = None,
    ) -> tuple[LinkTable, int]:
        """Return the ``k`` nearest candidates of each row, and how many pairs were compared."""
        eligible_ids(self.num_records, k, eligible)
        nearest = LinkTable.empty(self.num_rows if rows is None else len(rows), k)
        compared = 0
        for pairs in candidates.pairs(rows, eligible):
            place = pairs.start + pairs.row
            apart = self.distances(place if rows is None else rows[place], pairs.record)
            links = nearest_pairs(pairs.end - pairs.start, k, pairs.row, pairs.record, apart)
            nearest.put(slice(pairs.start, pairs.end), links)
            compared += len(apart)
        return nearest, compared
