"""What the command ``compare`` does: methods side by side, their table, their plot."""

import json
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from securevfl.cli.figure_table import print_figures
from securevfl.cli.study_progress import StudyProgress
from securevfl.config.reading import read_federation
from securevfl.core import files
from securevfl.core.errors import ConfigError
from securevfl.core.memory import keep_freed_memory
from securevfl.lab.comparison import Comparison, table_rows
from securevfl.lab.entry_points import compare_and_write
from securevfl.lab.run_figures import cell
from securevfl.lab.study import Engines
from securevfl.runtime.preflight import warnings_about


def run_compare(
    path: Path,
    *,
    methods: str,
    seeds: int,
    engines: Engines,
    out: Path | None,
    metric: str | None,
    device: str,
    data_root: Path | None,
    as_json: bool,
) -> dict[str, Any]:
    """Compare methods on one federation file; print their table."""
    if seeds < 1:
        raise ConfigError(f"--seeds: must be at least 1, got {seeds}")
    config = read_federation(path)
    comparison = Comparison(
        config=config,
        methods=tuple(name.strip() for name in methods.split(",") if name.strip()),
        seeds=seeds,
        data_root=data_root or path.parent,
        folder=out or Path("runs") / f"{config.federation.name}-compare",
        device=device,
        metric=metric,
    )
    for warning in warnings_about(config):
        print(f"securevfl: warning: {warning}", file=sys.stderr)
    keep_freed_memory()
    with StudyProgress(
        names=len(comparison.trained), seeds=seeds, folder=comparison.folder
    ) as shown:
        figures = compare_and_write(
            comparison, engines=engines, tell=shown, done=shown.done, leave_out=shown.left_out
        )
    _write_plot(comparison.folder, figures)
    if as_json:
        print(json.dumps(figures))
    else:
        _print_table(figures, comparison.folder)
    return figures


def _write_plot(folder: Path, figures: Mapping[str, Any]) -> None:
    # Loaded here: plots take most of a second to load.
    from securevfl.report.plots import comparison_plot

    methods = figures["methods"].items()
    values = {name: one["seeds"] for name, one in methods if one["mean"] is not None}
    title = f"{figures['federation']}: test {figures['metric']}"
    files.write_text(
        folder / "comparison.svg", comparison_plot(values, title=title), for_others=True
    )


def _print_table(figures: Mapping[str, Any], folder: Path) -> None:
    better = "higher" if figures["higher_is_better"] else "lower"
    seeds = figures["seed_numbers"]
    title = (
        f"{figures['federation']}: test {figures['metric']} ({better} is better), "
        f"mean ± deviation over {len(seeds)} seed{'s' if len(seeds) > 1 else ''}; "
        f"best epochs by validation {figures['chosen_by']}"
    )
    console = Console()
    print_figures(console, table_rows(figures, narrow=True), title=title)
    for name, one in figures["left_out"].items():
        console.print(
            f"{name} {one['status']}: {one['reason']}",
            soft_wrap=True,
            highlight=False,
            markup=False,
        )
    for name, method in figures["methods"].items():
        if "chosen" in method:
            counted = Counter(method["chosen"]).most_common()
            text = ", ".join(f"{model} with {number} of {len(seeds)}" for model, number in counted)
            console.print(f"{name} is {text} seeds", highlight=False, markup=False)
        if "candidates" in method:
            text = ", ".join(f"{model} {cell(one)}" for model, one in method["candidates"].items())
            console.print(f"{name}, model by model: {text}", highlight=False, markup=False)
    for name, notes in figures["adapted"].items():
        text = f"{name} adapted: {'; '.join(notes)}; more of its own: [methods.{name}]"
        console.print(text, soft_wrap=True, highlight=False, markup=False)
    for name in ("comparison.json", "comparison.csv", "comparison.md", "comparison.svg"):
        console.print(str(folder / name), soft_wrap=True)
