"""Tables of the partners' measured worth, for people."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from securevfl.core.formatting import format_figure

TITLES = {
    "gone": "if it is gone tomorrow (the kept model, without it)",
    "again": "if it leaves, and the model is trained again without it",
}
"""Titles of the two readings, by their names in ``contribution.json``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorthFigure:
    """Table of one of the two questions about partners."""

    title: str
    summary: str
    """Metrics with all partners and of the primary alone, in one line."""
    columns: list[str]
    """Headings after the partner's name."""
    rows: dict[str, list[str]]
    """Cells of each partner."""


def readings(measured: Mapping[str, Any]) -> Iterator[WorthFigure]:
    """Return the measured worth as tables.

    Args:
        measured: Content of ``contribution.json``.
    """
    for name, title in TITLES.items():
        worth = measured[name]
        if worth is None:
            continue
        metrics = list(worth["gain"])
        kinds = {"leave_one_out": "without it", "shapley": "Shapley"}
        yield WorthFigure(
            title=title,
            summary=", ".join(
                f"{metric} {_number(worth['all'][metric])} with all, "
                f"{_number(worth['none'][metric])} alone (gain {_figure(worth['gain'][metric])})"
                for metric in metrics
            ),
            columns=[f"{metric}, {kind}" for metric in metrics for kind in kinds.values()],
            rows={
                partner: [
                    _figure(partner_figures[kind][metric]) for metric in metrics for kind in kinds
                ]
                for partner, partner_figures in worth["partners"].items()
            },
        )


def sampled_in_words(measured: Mapping[str, Any]) -> list[str]:
    """Return remarks on Shapley values that are not exact."""
    sentences = []
    for name, title in TITLES.items():
        worth = measured[name]
        if worth is None or worth["method"] == "exact":
            continue
        errors = [
            figure["standard_error"]
            for partner_figures in worth["partners"].values()
            for metric, figure in partner_figures["shapley"].items()
            if metric == measured["metric"]
        ]
        sentences.append(
            f"Shapley values {title} are means over {worth['permutations']} orders that were "
            f"drawn; their standard errors are up to {max(errors):.2g}: --permutations draws more"
        )
    return sentences


def _number(figure: Mapping[str, Any]) -> str:
    return f"{figure['value']:.4g}"


def _figure(figure: Mapping[str, Any]) -> str:
    interval = figure["interval"]
    value = format_figure(figure["value"], sign="+", beside=interval or ())
    if interval is None:
        return value
    ends = (format_figure(end, sign="+", beside=(figure["value"], *interval)) for end in interval)
    return f"{value} ({' to '.join(ends)})"
