"""How many rows are linked: one noised, charged answer of each secondary, by which a run may end.

A secondary refuses nothing for its links, neither before its answer nor after it: what it did would
say without noise, and as often as one likes, whether a record of the primary's choice is there.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from securevfl.config.federation import link_spec
from securevfl.core import progress
from securevfl.core.errors import DataError
from securevfl.dp.class_sums import noised_rows
from securevfl.federation.messages import LinkCount
from securevfl.federation.run_plan import RunPlan
from securevfl.ledger.ledger import Ledger
from securevfl.linkage.sampling import has_candidate
from securevfl.linkage.spec import LinkedSecondary, few_links_doubt


def link_count(plan: RunPlan, linked: LinkedSecondary, ledger: Ledger) -> LinkCount:
    """Return a secondary's answer: charged and written down before it is returned, and made once.

    A resumed run answers what its ledger says, whatever rows the primary has now: no number of
    sessions gives a second draw.

    Args:
        plan: The run.
        linked: This party's links.
        ledger: Its own.

    Raises:
        BudgetExceededError: If the budget forbids it; nothing was drawn then.

    Reveals:
        To the primary, once sent: how many of its rows have a record here, in the secret sample or
        not, behind noise where epsilon is promised.
    """
    linked_rows = ledger.linked_rows
    if linked_rows is None:
        rows = plan.facts.rows
        count = int(has_candidate(linked.source, np.arange(rows, dtype=np.int64)).sum())
        std = plan.releases.link_count_std(plan.noise_share_std)
        linked_rows = ledger.charge_link_count(lambda: noised_rows(count, rows=rows, std=std))
    return LinkCount(linked=linked_rows)


def require_link_counts(
    plan: RunPlan, counts: Mapping[str, LinkCount], observe: progress.Observer
) -> dict[str, Any]:
    """Report at the primary how many rows are linked where, and end a run of too few links.

    Args:
        plan: The run.
        counts: The answers, by secondary.
        observe: The primary's own, or a simulation's.

    Returns:
        By secondary: the fields of :class:`securevfl.core.progress.LinkedRowsCounted`.

    Raises:
        DataError: If some answer is below ``linkage.least_linked`` of all rows.

    Reveals:
        Nothing but what the answers said; others see that the run has ended.
    """
    rows, least = plan.facts.rows, plan.config.linkage.least_linked
    std = plan.releases.link_count_std(plan.noise_share_std)
    events = [
        progress.LinkedRowsCounted(
            name=name,
            rows=rows,
            linked=linked_count.linked,
            noise_std=std,
            doubt=few_links_doubt(link_spec(plan.config), linked_count.linked / rows),
        )
        for name, linked_count in counts.items()
    ]
    for event in events:
        observe(event)
    few = [
        progress.linked_rows_in_words(replace(event, doubt=""))
        for event in events
        if event.linked < least * rows
    ]
    if few:
        raise DataError(
            f"linkage.least_linked: {', '.join(few)}; less than {100 * least:.4g} %, so the run "
            f"ends here, with this number charged and nothing else; compare how both parties "
            f"write their keys (securevfl check shows it where both tables are), or set "
            f"least_linked = 0 to run anyway"
        )
    return {event.name: progress.event_fields(event) for event in events}


def book_link_counts(plan: RunPlan, ledger: Ledger, observe: progress.Observer) -> bool:
    """Charge the answers at the primary before it asks, and return whether there are any.

    Raises:
        BudgetExceededError: If the budget forbids it.
    """
    if plan.releases.linked_rows is None:
        why = f"behind the noise of this epsilon {plan.facts.rows:,} rows are too few to count"
        if not plan.config.privacy.bounds_linked_rows:
            why = "without privacy.links_per_record one record might link every row"
        observe(progress.Warned(text=f"no secondary says how many rows are linked: {why}"))
        return False
    if ledger.link_counts_due:
        ledger.charge_link_count(lambda: None)
    return True
