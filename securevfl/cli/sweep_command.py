"""What the command ``sweep`` does: one file under many settings, their table, their plot."""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from securevfl.cli.figure_table import print_figures
from securevfl.cli.study_progress import StudyProgress
from securevfl.config.reading import read_federation
from securevfl.core import files
from securevfl.core.formatting import written
from securevfl.core.memory import keep_freed_memory
from securevfl.lab.entry_points import sweep_and_write
from securevfl.lab.run_figures import cell
from securevfl.lab.study import Engines
from securevfl.lab.sweep import Sweep
from securevfl.lab.sweep_settings import parse_setting, text_of
from securevfl.lab.sweep_table import table_rows, trial_rows
from securevfl.runtime.preflight import warnings_about

_TRIALS_ON_A_SCREEN = 10


def run_sweep(
    path: Path,
    *,
    settings: Sequence[str],
    trials: int | None,
    engines: Engines,
    out: Path | None,
    metric: str | None,
    device: str,
    data_root: Path | None,
    as_json: bool,
) -> dict[str, Any]:
    """Train one federation file under many settings; print their table."""
    config = read_federation(path)
    kind = "sweep" if trials is None else "search"
    asked = Sweep(
        config=config,
        tried=tuple(parse_setting(text) for text in settings),
        data_root=data_root or path.parent,
        folder=out or Path("runs") / f"{config.federation.name}-{kind}",
        device=device,
        metric=metric,
    )
    for warning in warnings_about(config):
        print(f"securevfl: warning: {warning}", file=sys.stderr)
    keep_freed_memory()
    points = len(asked.grid()) if trials is None else trials
    with StudyProgress(
        names=points + asked.has_alone, seeds=len(asked.seeds), folder=asked.folder
    ) as shown:
        figures = sweep_and_write(
            asked,
            trials=trials,
            engines=engines,
            tell=shown,
            done=shown.done,
            leave_out=shown.left_out,
        )
    _write_plot(asked.folder, kind, figures)
    if as_json:
        print(json.dumps(figures))
        return figures
    console = Console()
    if trials is None:
        _print_grid(console, figures)
    else:
        _print_search(console, figures)
    for name, one in figures["left_out"].items():
        _say(console, f"{name} {one['status']}: {one['reason']}")
    if _promises(figures):
        _say(
            console,
            "These runs were simulated: they released nothing to anyone, and no ledger is charged. "
            "But settings that were chosen by real tables are a function of them, and no epsilon "
            "counts that.",
        )
    for ending in ("json", "csv", "md", "svg"):
        console.print(str(asked.folder / f"{kind}.{ending}"), soft_wrap=True)
    return figures


def _write_plot(folder: Path, kind: str, figures: Mapping[str, Any]) -> None:
    # Loaded here: plots take most of a second to load.
    from securevfl.report.plots import search_plot, sweep_plot

    draw = sweep_plot if kind == "sweep" else search_plot
    files.write_text(folder / f"{kind}.svg", draw(figures), for_others=True)


def _print_grid(console: Console, figures: Mapping[str, Any]) -> None:
    seeds = len(figures["seed_numbers"])
    better = "higher" if figures["higher_is_better"] else "lower"
    title = (
        f"{figures['federation']}: test {figures['metric']} ({better} is better), mean ± deviation "
        f"over {seeds} seed{'s' if seeds > 1 else ''}; best epochs by validation "
        f"{figures['chosen_by']}"
    )
    names = max(1, len(figures["settings"]))
    print_figures(console, table_rows(figures, narrow=True), title=title, names=names)
    if figures["best"] is not None and len(figures["points"]) > 1:
        best = figures["points"][figures["best"]]
        _say(
            console,
            f"best on validation rows: {_in_words(best['settings'])}, with "
            f"{written(best['validation'])} there and {cell(best)} on test rows; the best of "
            f"{len(figures['points'])} looks better on validation rows than it is",
        )


def _print_search(console: Console, figures: Mapping[str, Any]) -> None:
    best, seeds = figures["best"], len(figures["seed_numbers"])
    rows = trial_rows(figures)
    title = (
        f"{figures['federation']}: validation {figures['metric']} of trials, mean over {seeds} "
        f"seed{'s' if seeds > 1 else ''}"
    )
    print_figures(console, rows[: _TRIALS_ON_A_SCREEN + 1], title=title)
    trials = len(figures["trials"])
    if trials > _TRIALS_ON_A_SCREEN:
        _say(console, f"and {trials - _TRIALS_ON_A_SCREEN} more in search.md")
    _say(
        console,
        f"best of {trials} trials: {_in_words(best['settings'])}, with validation "
        f"{figures['metric']} {written(best['validation'])}",
    )
    _say(
        console,
        f"that figure is optimistic: it is the best of {trials}, chosen on the rows that it is "
        f"measured on",
    )
    alone = figures["alone"]
    beside = "" if alone is None else f"; the primary alone: {cell(alone)}"
    _say(console, f"its run's test {figures['metric']}: {cell(best['test'])}{beside}")


def _in_words(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} = {text_of(value)}" for name, value in settings.items())


def _promises(figures: Mapping[str, Any]) -> bool:
    """Whether any run would have had a promise to keep."""
    measured = [*figures.get("points", {}).values()]
    measured += [figures["best"]["test"]] if "trials" in figures else []
    return any(one["epsilon"] is not None for one in measured)


def _say(console: Console, text: str) -> None:
    console.print(text, soft_wrap=True, highlight=False, markup=False)
