"""Table of a comparison: mean and deviation over seeds, and differences seed by seed."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from securevfl.core import files
from securevfl.core.conventions import Task as LabelTask
from securevfl.lab.one_run import LeftOut
from securevfl.lab.run_figures import (
    by_name,
    cell,
    csv_of_runs,
    markdown,
    on_test_rows,
    over_seeds,
    summarise_seeds,
)
from securevfl.models.task_metrics import TaskMetric, metrics_of
from securevfl.version import __version__

REFERENCES: Final = ("alone", "fedsim", "fet")
"""Methods with which all others are compared seed by seed, if they take part."""

PLACEBO: Final = "placebo"
"""Name of the difference to a method's placebos, which lack the partners' information."""

_OTHERS_ON_A_SCREEN: Final = 3

_CSV_FIELDS: Final = (
    "method",
    "family",
    "seed",
    "metric",
    "test",
    "validation",
    "train",
    "epochs",
    "best_epoch",
    "seconds",
    "cpu_seconds",
    "chosen",
)


def summary(
    results: Sequence[Mapping[str, Any]],
    *,
    federation: str,
    task: LabelTask,
    metric: str | None = None,
    left_out: Sequence[LeftOut] = (),
    adapted: Mapping[str, Sequence[str]] = MappingProxyType({}),
) -> dict[str, Any]:
    """Return a comparison as one JSON object.

    Args:
        results: Results of :func:`securevfl.lab.comparison.compare_methods`.
        federation: Name of the federation.
        task: Kind of label.
        metric: Metric to compare by; None: that of the training.
        left_out: Methods without figures, with reasons.
        adapted: Each method's differences from the file, in words.

    Returns:
        ``metric``; ``chosen_by``, the metric that chose every run's best epoch; ``methods`` with
        each method's ``mean``, ``std`` (of a sample: n - 1; None for one seed) and ``seeds`` (the
        test metric of each), and the same of every metric of the task in ``metrics``; of the
        primary alone, and of ``auto``, also what was ``chosen`` with each seed; of the primary
        alone every model's figures in ``candidates``; and ``differences``: for each reference that
        takes part, each other method minus it, seed by seed, and each method minus its own
        ``placebo`` (partners' rows permuted, or no partners: the better one); ``left_out`` with the
        ``status`` and ``reason`` of each method without figures; and ``adapted``. A metric that is
        not defined for some seed's rows has no mean and no deviation.

    Raises:
        ConfigError: If the task has no such metric.
    """
    methods = by_name(results)
    first = results[0]
    ordered = metrics_of(task, metric or first["metric"])
    shown = ordered[0]
    tests = {name: on_test_rows(runs, shown.name) for name, runs in methods.items()}
    return {
        "federation": federation,
        "task": task,
        "metric": shown.name,
        "higher_is_better": shown.higher_is_better,
        "chosen_by": first["metric"],
        "seed_numbers": [run["seed"] for run in methods[first["name"]]],
        "methods": {
            name: {
                **over_seeds(runs, ordered),
                "family": runs[0]["family"],
                **_chosen(runs),
                **_candidates(runs, shown.name),
            }
            for name, runs in methods.items()
        },
        "differences": _from_partners(methods, shown)
        | {
            reference: {
                name: summarise_seeds(
                    [
                        None if mine is None or theirs is None else mine - theirs
                        for mine, theirs in zip(tests[name], tests[reference], strict=True)
                    ]
                )
                for name in methods
                if name != reference
            }
            for reference in REFERENCES
            if reference in methods
        },
        "left_out": {
            method.name: {"status": method.status, "reason": method.reason} for method in left_out
        },
        "adapted": {name: list(notes) for name, notes in adapted.items() if name in methods},
        "version": __version__,
    }


def _from_partners(
    methods: Mapping[str, Sequence[Mapping[str, Any]]], metric: TaskMetric
) -> dict[str, Any]:
    """Return each method's test figure minus that of the best of its placebos, seed by seed.

    It is 0 where the local baseline answers: then no partner is asked.
    """
    better = max if metric.higher_is_better else min

    def less(run: Mapping[str, Any]) -> float | None:
        if run["used"] == "alone":
            return 0.0
        mine = run["test_metrics"][metric.name]
        theirs = [placebo[metric.name] for placebo in run["placebos"].values()]
        return None if mine is None or None in theirs else mine - better(theirs)

    differences = {
        name: summarise_seeds([less(run) for run in runs])
        for name, runs in methods.items()
        if all(run["placebos"] for run in runs)
    }
    return {PLACEBO: differences} if differences else {}


def _chosen(runs: Sequence[Mapping[str, Any]]) -> dict[str, list[str]]:
    """Return the choices of a method that chooses with each seed; empty for others."""
    chosen = [run["chosen"] for run in runs if run.get("chosen")]
    return {"chosen": chosen} if chosen else {}


def _candidates(runs: Sequence[Mapping[str, Any]], metric: str) -> dict[str, Any]:
    """Return the test figures of each model of the primary alone; empty for other methods."""
    each = [run.get("candidates") or {} for run in runs]
    common = [name for name in each[0] if all(name in candidates for candidates in each)]
    if not common:
        return {}
    return {
        "candidates": {
            name: summarise_seeds([candidates[name][metric] for candidates in each])
            for name in common
        }
    }


def table_rows(figures: Mapping[str, Any], *, narrow: bool = False) -> list[list[str]]:
    """Return the table for people, its heading first.

    Args:
        figures: Result of :func:`summary`.
        narrow: Whether it is for a screen, which has room for a few metrics beside the first,
            without deviations, and for no reason why a method is left out.
    """
    references = list(figures["differences"])
    first = next(iter(figures["methods"].values()))
    others = [name for name in first["metrics"] if name != figures["metric"]]
    if narrow:
        others = others[:_OTHERS_ON_A_SCREEN]
    differences = (f"minus {name}" for name in references)
    rows = [["method", figures["metric"], *differences, *others, "CPU s a run"]]
    seeds = len(figures["seed_numbers"])
    for name, method in figures["methods"].items():
        cells = [name, cell(method)]
        for reference in references:
            other = figures["differences"][reference].get(name)
            cells.append("" if other is None else cell(other, sign="+"))
        spreads = [method["metrics"][other] for other in others]
        cells += [cell({**spread, "std": None} if narrow else spread) for spread in spreads]
        cpu = method["cpu_seconds"]
        rows.append([*cells, "" if cpu is None else f"{cpu / seeds:.1f}"])
    empty = [""] * (len(rows[0]) - 2)
    for name, entry in figures["left_out"].items():
        rows.append(
            [name, entry["status"] if narrow else f"{entry['status']}: {entry['reason']}", *empty]
        )
    return rows


def write_comparison(
    folder: Path, figures: Mapping[str, Any], results: Sequence[Mapping[str, Any]]
) -> None:
    """Write ``comparison.json``, ``comparison.csv`` (a row a run) and ``comparison.md``."""
    rows = [{**result, "method": result["name"]} for result in results]
    text = csv_of_runs(rows, first=_CSV_FIELDS, splits=("test", "validation"))
    files.write_text(folder / "comparison.csv", text, for_others=True)
    files.write_text(folder / "comparison.md", markdown(table_rows(figures)), for_others=True)
    files.write_json(folder / "comparison.json", figures, for_others=True)
