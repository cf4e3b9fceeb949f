"""The primary's report of how many rows are aligned where."""

from collections.abc import Callable
from typing import Any

from securevfl.config.federation import FederationConfig, link_spec
from securevfl.core.formatting import finite_or_none
from securevfl.core.progress import Observer, RowsAligned, Warned
from securevfl.linkage.links import Alignment
from securevfl.linkage.stage.linkage_parts import protection_of


def report_alignment(
    config: FederationConfig,
    alignment: Alignment | None,
    *,
    training_rows: int,
    log: Callable[..., None],
    observe: Observer,
) -> dict[str, Any] | None:
    """Report how many rows are aligned, and warn where no setting bounds a link's distance.

    Args:
        config: The federation file.
        alignment: What linking has counted; None where it does not count.
        training_rows: Labelled rows that the joint model learns from.
        log: The primary's log.
        observe: Called with the counts and the warning.

    Returns:
        Counts and the warning, for ``metrics.json``; None where linking does not count.
    """
    if alignment is None:
        return None
    spec = link_spec(config)
    figures = {
        **alignment.figures(
            max_distance=finite_or_none(spec.choice.max_distance),
            unit=protection_of(spec).unit(spec),
        ),
        "training_rows": training_rows,
    }
    log("aligned", **figures)
    observe(
        RowsAligned(
            aligned=figures["aligned"], rows=figures["rows"], by_secondary=figures["by_secondary"]
        )
    )
    if figures["warning"] is not None:
        observe(Warned(text=figures["warning"]))
    return figures
