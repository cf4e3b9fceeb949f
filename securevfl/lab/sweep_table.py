"""Table of a sweep: mean and deviation over seeds of every point, and of the primary alone."""

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from securevfl.core import files
from securevfl.lab.one_run import LeftOut
from securevfl.lab.run_figures import by_name, cell, csv_of_runs, markdown, over_seeds
from securevfl.lab.sweep import ALONE, Sweep
from securevfl.lab.sweep_settings import text_of
from securevfl.version import __version__

_COLUMNS_ON_A_SCREEN: Final = 3
"""Most columns of settings and further metrics together."""

_CSV_FIELDS: Final = (
    "seed",
    "metric",
    "test",
    "validation",
    "train",
    "epsilon",
    "epochs",
    "best_epoch",
    "seconds",
    "cpu_seconds",
)


def summary(
    sweep: Sweep, results: Sequence[Mapping[str, Any]], *, left_out: Mapping[str, LeftOut]
) -> dict[str, Any]:
    """Return a grid as one JSON object.

    Args:
        sweep: The sweep.
        results: Results of :func:`securevfl.lab.sweep.train_grid`.
        left_out: Points without figures, by name.

    Returns:
        ``metric``, by which points are compared on test rows; ``chosen_by``, the metric that chose
        every run's best epoch; ``settings`` with all values of each; ``points``, each with its
        ``settings`` and the figures of :func:`securevfl.lab.run_figures.over_seeds`; ``alone``
        with the same figures, None where settings change what the primary alone would be; ``best``,
        the point whose mean on validation rows is best, None where that is not defined; and
        ``left_out`` with the reason.
    """
    shown = sweep.metrics[0]
    runs = by_name(results)
    points = {
        point.name: {
            "settings": dict(point.settings),
            **over_seeds(runs[point.name], sweep.metrics),
        }
        for point in sweep.grid()
        if point.name in runs
    }
    measured = {
        name: point["validation"]
        for name, point in points.items()
        if point["validation"] is not None
    }
    sign = 1 if shown.higher_is_better else -1
    return {
        "federation": sweep.config.federation.name,
        "task": sweep.config.federation.task,
        "metric": shown.name,
        "higher_is_better": shown.higher_is_better,
        "chosen_by": results[0]["metric"],
        "seed_numbers": list(sweep.seeds),
        "settings": {setting.name: list(setting.values) for setting in sweep.settings},
        "points": points,
        "alone": over_seeds(runs[ALONE], sweep.metrics) if ALONE in runs else None,
        "best": max(measured, key=lambda name: sign * measured[name], default=None),
        "left_out": {
            point.name: {"status": point.status, "reason": point.reason}
            for point in left_out.values()
        },
        "version": __version__,
    }


def table_rows(figures: Mapping[str, Any], *, narrow: bool = False) -> list[list[str]]:
    """Return the table for people, its heading first.

    Args:
        figures: Result of :func:`summary`.
        narrow: Whether it is for a screen, which has room for a few metrics beside the first,
            without deviations.
    """
    points, metric = figures["points"], figures["metric"]
    names = _headings(figures["settings"]) or ["settings"]
    others = [name for name in next(iter(points.values()))["metrics"] if name != metric]
    if narrow:
        others = others[: max(0, _COLUMNS_ON_A_SCREEN - len(names))]
    noised = any(point["epsilon"] is not None for point in points.values())
    rows = [
        [
            *names,
            f"test {metric}",
            "validation",
            *(["epsilon"] if noised else []),
            *others,
            "CPU s a run",
        ]
    ]
    alone = figures["alone"]
    lines = [
        ([text_of(value) for value in point["settings"].values()] or ["as written"], point)
        for point in points.values()
    ]
    if alone is not None:
        lines.append(([ALONE, *[""] * (len(names) - 1)], alone))
    for first, line in lines:
        spreads = [line["metrics"][other] for other in others]
        cpu = line["cpu_seconds"]
        epsilon = "" if line["epsilon"] is None else f"{line['epsilon']:.4g}"
        rows.append(
            [
                *first,
                cell(line),
                cell({"mean": line["validation"], "std": None}),
                *([epsilon] if noised else []),
                *(cell({**other, "std": None} if narrow else other) for other in spreads),
                "" if cpu is None else f"{cpu / len(figures['seed_numbers']):.1f}",
            ]
        )
    return rows


def _headings(settings: Collection[str]) -> list[str]:
    """Return short names of settings: the last part if it is unique."""
    last = [name.rpartition(".")[2] for name in settings]
    return [
        short if last.count(short) == 1 else name
        for name, short in zip(settings, last, strict=True)
    ]


def write_sweep(
    folder: Path, figures: Mapping[str, Any], results: Sequence[Mapping[str, Any]]
) -> None:
    """Write ``sweep.json``, ``sweep.csv`` (a row a run, a column a setting) and ``sweep.md``."""
    names = list(figures["settings"])
    rows = [
        {**result, "run": result["name"], **_settings_of(figures["points"], result["name"])}
        for result in results
    ]
    text = csv_of_runs(rows, first=("run", *names, *_CSV_FIELDS), splits=("test", "validation"))
    files.write_text(folder / "sweep.csv", text, for_others=True)
    files.write_text(folder / "sweep.md", markdown(table_rows(figures)), for_others=True)
    files.write_json(folder / "sweep.json", figures, for_others=True)


def _settings_of(points: Mapping[str, Any], name: str) -> dict[str, str]:
    """Return a run's settings as columns of CSV; empty for the primary alone."""
    settings = points[name]["settings"] if name in points else {}
    return {setting: text_of(value) for setting, value in settings.items()}
