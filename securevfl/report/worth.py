"""What partners are worth, for people: titles, columns and cells of what was measured."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

TITLES = {
    "gone": "if it is gone tomorrow (the kept model, without it)",
    "again": "if it leaves, and the model is trained again without it",
}
"""Of the two readings, by their names in ``contribution.json``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """One of the two questions that a run's partners are measured by."""

    title: str
    summary: str
    """The metric with all partners and of the primary alone, in one line."""
    columns: list[str]
    """Headings beside the partner's name."""
    rows: dict[str, list[str]]
    """Cells of each partner."""


def readings(measured: Mapping[str, Any]) -> Iterator[Reading]:
    """Return what was measured as tables.

    Args:
        measured: What ``contribution.json`` holds.
    """
    for name, title in TITLES.items():
        worth = measured[name]
        if worth is None:
            continue
        metrics = list(worth["gain"])
        kinds = {"leave_one_out": "without it", "shapley": "Shapley"}
        yield Reading(
            title=title,
            summary=", ".join(
                f"{metric} {_number(worth['all'][metric])} with all, "
                f"{_number(worth['none'][metric])} alone (gain {_figure(worth['gain'][metric])})"
                for metric in metrics
            ),
            columns=[f"{metric}, {kind}" for metric in metrics for kind in kinds.values()],
            rows={
                partner: [_figure(one[kind][metric]) for metric in metrics for kind in kinds]
                for partner, one in worth["partners"].items()
            },
        )


def sampled_in_words(measured: Mapping[str, Any]) -> list[str]:
    """Return what there is to know of Shapley values that are not exact."""
    said = []
    for name, title in TITLES.items():
        worth = measured[name]
        if worth is None or worth["method"] == "exact":
            continue
        errors = [
            figure["standard_error"]
            for one in worth["partners"].values()
            for metric, figure in one["shapley"].items()
            if metric == measured["metric"]
        ]
        said.append(
            f"Shapley values {title} are means over {worth['permutations']} orders that were "
            f"drawn; their standard errors are up to {max(errors):.2g}: --permutations draws more"
        )
    return said


def _number(figure: Mapping[str, Any]) -> str:
    return f"{figure['value']:.4g}"


def _figure(figure: Mapping[str, Any]) -> str:
    interval = figure["interval"]
    value = f"{figure['value']:+.4f}"
    return value if interval is None else f"{value} ({interval[0]:+.4f} to {interval[1]:+.4f})"
