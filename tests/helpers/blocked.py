"""Texts that are linked by candidates: by q-grams, or by written rules."""

from collections.abc import Sequence
from typing import Any

from securevfl.linkage.blocking_rules import (
    BlockedKeys,
    BlockingRules,
    RuleCandidates,
    blocked_keys,
)
from securevfl.linkage.metrics.texts import QGramCandidates, TextKeys
from securevfl.linkage.text import joined_texts


def by_grams(
    rows: list[str],
    records: list[str],
    k: int,
    *,
    q: int = 3,
    least_overlap: float = 0.2,
    **measuring: Any,
) -> BlockedKeys:
    keys = TextKeys(primary=rows, records=records)
    candidates = QGramCandidates.of(
        keys.normal_primary, keys.normal_records, q=q, least_overlap=least_overlap
    )
    return blocked_keys(keys, candidates, k, **measuring)


def by_rules(
    primary: dict[str, list[str | None]],
    records: dict[str, list[str | None]],
    rules: Sequence[str],
    k: int,
) -> BlockedKeys:
    keys = TextKeys(primary=joined_texts(primary), records=joined_texts(records))
    parsed = BlockingRules.parse(rules, dict.fromkeys(primary, "text"))
    return blocked_keys(keys, RuleCandidates.of(parsed, primary, records), k)
