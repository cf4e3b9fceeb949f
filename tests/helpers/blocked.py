"""Texts that are linked by candidates: by written rules."""

from collections.abc import Sequence
from typing import Any

from securevfl.linkage.text import joined_texts
from securevfl.stages.fuzzy_keys.blocking_rules import BlockingRules, RuleCandidates
from securevfl.stages.fuzzy_keys.edits import TextKeys


def by_rules(
    primary: dict[str, list[str | None]],
    records: dict[str, list[str | None]],
    rules: Sequence[str],
    k: int,
    **measuring: Any,
) -> TextKeys:
    keys = TextKeys.of(joined_texts(primary), joined_texts(records))
    parsed = BlockingRules.parse(rules, dict.fromkeys(primary, "text"))
    return keys.with_candidates(RuleCandidates.of(parsed, primary, records), k, **measuring)
