"""Which rows are aligned, as it is told to whoever runs the primary."""

from collections.abc import Callable
from typing import Any

from securevfl.core.progress import Observer, RowsAligned, Warned
from securevfl.linkage.alignment import Alignment
from securevfl.linkage.spec import LinkSpec
from securevfl.linking.protections.table import protection_of
from securevfl.runtime.figures import finite_or_none


def tell_alignment(
    spec: LinkSpec,
    alignment: Alignment | None,
    *,
    training_rows: int,
    log: Callable[..., None],
    observe: Observer,
) -> dict[str, Any] | None:
    """Tell how many rows are aligned, and warn where nothing says how far a link may be.

    Args:
        spec: What linking needed.
        alignment: What the primary was told; None where nobody asks.
        training_rows: Labelled rows that the joint model will learn from.
        log: The primary's log.
        observe: Hears of the counts and of the warning.

    Returns:
        Counts and the warning, for ``metrics.json``; None where nobody asks.
    """
    if alignment is None:
        return None
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
