"""What ``securevfl contribution`` does: what each partner of a finished run is worth."""

import json
import sys
from pathlib import Path
from typing import Any

from rich.console import Console

from securevfl.cli.figure_table import print_figures
from securevfl.core import files
from securevfl.core.errors import ConfigError
from securevfl.lab.contribution import contribution
from securevfl.report.page import readings, sampled_in_words, write_report
from securevfl.report.plots import contribution_plot
from securevfl.runtime.run_folder import FILE, read_figures
from securevfl.runtime.shown_progress import RunProgress


def run_contribution(
    run: Path,
    *,
    permutations: int,
    seed: int | None,
    plot: Path | None,
    federation: Path | None,
    data_root: Path | None,
    device: str,
    as_json: bool,
) -> None:
    """Measure what partners are worth, keep it in the run's folder, and write its report again."""
    if plot is not None:
        if plot.suffix != ".svg":
            raise ConfigError(f"--plot: the file's name must end in .svg, got {plot}")
        files.require_writable_folder(plot.parent, what="folder of --plot")
    metric = read_figures(run)["metric"]
    with RunProgress(metric=metric) as progress:
        measured = contribution(
            run,
            permutations=permutations,
            seed=seed,
            federation=federation,
            data_root=data_root,
            device=device,
            observe=progress,
        ).as_json()
    write_report(run)
    if plot is not None:
        files.write_text(plot, contribution_plot(measured), for_others=True)
    if as_json:
        print(json.dumps(measured))
        return
    _print(measured)
    print(run / FILE)


def _print(measured: dict[str, Any]) -> None:
    better = "higher" if measured["higher_is_better"] else "lower"
    for reading in readings(measured):
        print(f"securevfl: {reading.title}; {reading.summary}", file=sys.stderr)
        rows = ([name, *cells] for name, cells in reading.rows.items())
        print_figures(Console(), [["secondary", *reading.columns], *rows])
    print(
        f"securevfl: positive is better, also of {measured['metric']} ({better} is better); "
        f"{measured['level']:.0%} intervals over {measured['rows']} test rows",
        file=sys.stderr,
    )
    for text in (*measured["notes"], *sampled_in_words(measured)):
        print(f"securevfl: {text}", file=sys.stderr)
    print(f"securevfl: this cost {measured['cost']}", file=sys.stderr)
