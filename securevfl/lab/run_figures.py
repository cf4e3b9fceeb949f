"""Figures of runs over seeds, and their tables in Markdown and CSV."""

import csv
import io
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from securevfl.core.formatting import format_figure
from securevfl.models.task_metrics import TaskMetric


def by_name(results: Sequence[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    """Return results by name, in the order of the seeds."""
    named: dict[str, list[Mapping[str, Any]]] = {}
    for result in results:
        named.setdefault(result["name"], []).append(result)
    return named


def over_seeds(runs: Sequence[Mapping[str, Any]], metrics: Sequence[TaskMetric]) -> dict[str, Any]:
    """Return the figures of one name over seeds.

    Args:
        runs: A result for each seed.
        metrics: Metrics of the task; the first is the one to compare by.

    Returns:
        ``mean``, ``std`` (of a sample: n - 1; None for one seed) and ``seeds`` (the test metric of
        each), and the same of every metric in ``metrics``; ``validation``, the mean of the first
        metric on validation rows; ``epochs``; ``samples_per_cpu_second``; ``cpu_seconds``;
        ``epsilon``.
    """
    shown = metrics[0].name
    return {
        **summarise_seeds(on_test_rows(runs, shown)),
        "metrics": {
            metric.name: summarise_seeds(on_test_rows(runs, metric.name)) for metric in metrics
        },
        "validation": mean([run["validation_metrics"][shown] for run in runs]),
        "epochs": [run["epochs"] for run in runs],
        "samples_per_cpu_second": _speed(runs),
        "cpu_seconds": _total(runs, "cpu_seconds"),
        "epsilon": runs[0]["epsilon"],
    }


def on_test_rows(runs: Sequence[Mapping[str, Any]], metric: str) -> list[float | None]:
    """Return a metric on test rows for each seed; None if it is not defined."""
    return [run["test_metrics"][metric] for run in runs]


def summarise_seeds(values: Sequence[float | None]) -> dict[str, Any]:
    """Return mean and deviation over seeds; None if a value is not known."""
    known = [value for value in values if value is not None]
    several = len(known) == len(values) > 1
    return {
        "mean": mean(values),
        "std": statistics.stdev(known) if several else None,
        "seeds": list(values),
    }


def mean(values: Sequence[float | None]) -> float | None:
    """Return the mean; None if a value is unknown, since other seeds have other splits."""
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if len(known) == len(values) else None


def _total(runs: Sequence[Mapping[str, Any]], field: str) -> float | None:
    values = [run[field] for run in runs]
    return None if None in values else round(sum(values), 3)


def _speed(runs: Sequence[Mapping[str, Any]]) -> float | None:
    """Return training rows passed over a CPU-second; linking and evaluation count as time."""
    timed = [run for run in runs if run["cpu_seconds"]]
    if not timed:
        return None
    passed = sum(run["epochs"] * run["train_rows"] for run in timed)
    return round(passed / sum(run["cpu_seconds"] for run in timed), 1)


def cell(figures: Mapping[str, Any], *, sign: str = "") -> str:
    """Return mean and deviation as text.

    Args:
        figures: Result of :func:`summarise_seeds`.
        sign: ``"+"`` shows a plus before positive numbers.
    """
    if figures["mean"] is None:
        return "undefined"
    digits = 4 if abs(figures["mean"]) < 2 else 2
    mean, deviation = figures["mean"], figures["std"]
    if deviation is None:
        return format_figure(mean, sign=sign, digits=digits)
    text = format_figure(mean, sign=sign, beside=(deviation,), digits=digits)
    return f"{text} ± {format_figure(deviation, beside=(mean,), digits=digits)}"


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """Return rows, their heading first, as a table of Markdown."""
    head, *rest = [[text.replace("|", r"\|") for text in cells] for cells in rows]
    lines = [head, ["---"] * len(head), *rest]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def csv_of_runs(
    rows: Sequence[Mapping[str, Any]], *, first: Sequence[str], splits: Sequence[str]
) -> str:
    """Return a CSV with a row for each run.

    Args:
        rows: Results, with further columns.
        first: First columns.
        splits: ``"test"`` and ``"validation"``, or one of them: their metrics are further columns,
            ``test_NAME`` and so on.
    """
    wide = [
        {
            **row,
            **{
                f"{split}_{name}": value
                for split in splits
                for name, value in row[f"{split}_metrics"].items()
            },
        }
        for row in rows
    ]
    more = [name for name in wide[0] if name not in rows[0]]
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, (*first, *more), lineterminator="\n", extrasaction="ignore")
    writer.writeheader()
    writer.writerows(wide)
    return buffer.getvalue()
