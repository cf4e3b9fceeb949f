"""Texts that are linked by candidates: by q-grams, or by written rules."""

from collections.abc import Sequence
from typing import Any

from securevfl.linkage.text import joined_texts
from securevfl.stages.fuzzy_keys.blocking_rules import BlockingRules, RuleCandidates
from securevfl.stages.fuzzy_keys.edits import QGramCandidates, TextKeys, gram_matrix


def by_grams(
    rows: list[str],
    records: list[str],
    k: int,
    *,
    q: int = 3,
    least_overlap: float = 0.2,
    **measuring: Any,
) -> TextKeys:
    keys = TextKeys.of(rows, records)
    candidates = QGramCandidates(
        primary=gram_matrix(keys.primary, q),
        records=gram_matrix(keys.records, q),
        least_overlap=least_overlap,
    )
    return keys.with_candidates(candidates, k, **measuring)


def by_rules(
    primary: dict[str, list[str | None]],
    records: dict[str, list[str | None]],
    rules: Sequence[str],
    k: int,
) -> TextKeys:
    keys = TextKeys.of(joined_texts(primary), joined_texts(records))
    parsed = BlockingRules.parse(rules, dict.fromkeys(primary, "text"))
    return keys.with_candidates(RuleCandidates.of(parsed, primary, records), k)
