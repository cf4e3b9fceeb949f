"""Output of commands about runs: figures on stdout, and pages."""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from securevfl.config.federation import FederationConfig
from securevfl.core.errors import SecureVflError, missing_extra
from securevfl.core.formatting import format_figure
from securevfl.core.memory import keep_freed_memory, loading
from securevfl.core.progress import alignment_in_words
from securevfl.core.shown_progress import RunProgress
from securevfl.desk.printing import print_figures, wrap_text
from securevfl.desk.report import wording
from securevfl.federation.run_plan import PredictionBudget
from securevfl.runtime.predictions import Predictions


def print_results(metrics: Mapping[str, Any], folder: Path, *, as_json: bool) -> None:
    """Print a run's metrics on stdout."""
    if as_json:
        print(json.dumps(metrics))
        return
    console = Console()
    _print_metrics(console, metrics)
    _print_privacy(console, metrics["privacy"])
    _print_alignment(console, metrics)
    for line in wording.links_of_run(metrics):
        console.print(line.partition("; ")[0], highlight=False, soft_wrap=True, markup=False)
    console.print(wording.engine_in_words(metrics), highlight=False, soft_wrap=True)
    if metrics["bytes"]:
        _print_parties(console, metrics)
    console.print(f"run folder: {folder}", soft_wrap=True)
    if (report := folder / "report.html").exists():
        console.print(f"report:     {report}", soft_wrap=True)


def _print_metrics(console: Console, metrics: Mapping[str, Any]) -> None:
    """Print a row for each metric: the joint model with its interval, then all other models."""
    evaluation, measured = metrics["evaluation"], wording.models_measured(metrics)
    first, *others = measured
    tested = "no test rows" if "untested" in metrics else "test rows"
    title = f"{metrics['federation']}: {tested}; best epoch by validation {metrics['metric']}"
    heading = [wording.interval_heading(evaluation)] if evaluation else []
    rows = [["metric", first, *heading, *others]]
    for name, value in measured[first].items():
        interval = [wording.interval_in_words(evaluation["intervals"][name])] if evaluation else []
        rest = (_figure(measured[other][name]) for other in others)
        rows.append([name, _figure(value), *interval, *rest])
    print_figures(console, rows, title=title)
    if "untested" in metrics:
        console.print(Text.assemble(("not tested: ", "bold"), metrics["untested"]), soft_wrap=True)
    if "threshold" in evaluation:
        console.print(wording.threshold_in_words(evaluation), highlight=False)
    if metrics["gain"] is not None:
        colour = {"better": "green", "unclear": "yellow", "worse": "red"}
        verdict, outcome = metrics["gain"]["verdict"], metrics["gain"]["outcome"]
        console.print(Text.assemble(("verdict: ", "bold"), (verdict, colour[outcome])))
        console.print(wording.candidates_in_words(metrics), highlight=False)
        if metrics["placebos"]:
            console.print(wording.placebos_in_words(metrics), highlight=False)
        if metrics["without_noise"]:
            console.print(wording.noise_in_words(metrics), highlight=False)


def _print_alignment(console: Console, figures: Mapping[str, Any]) -> None:
    if "alignment" in figures:
        alignment = figures["alignment"]
        text = alignment_in_words(alignment)
        console.print(text, highlight=False, soft_wrap=True, markup=False)
        if alignment["warning"]:
            console.print(Text(alignment["warning"], "yellow"), soft_wrap=True)


def _print_privacy(console: Console, privacy: Mapping[str, Any]) -> None:
    console.print()
    labels = privacy.get("labels")
    for head, promise in (("privacy: ", privacy), ("labels: ", labels)):
        if promise is not None and promise["warning"]:
            console.print(Text.assemble((head, "bold"), (promise["warning"], "yellow")))
    if privacy["epsilon"] is not None:
        of_labels = ""
        if labels is not None and labels["epsilon"] is not None:
            of_labels = f"; of labels: epsilon {labels['epsilon']:.4g}"
        console.print(
            f"cost: epsilon {privacy['epsilon']:.4g}, delta {privacy['delta']:g}{of_labels}; the "
            f"sentences to sign are in the report and metrics.json",
            highlight=False,
        )


def _print_parties(console: Console, metrics: Mapping[str, Any]) -> None:
    table = Table("party", title="parties", title_justify="left")
    table.add_column("sent", justify="right")
    table.add_column("received", justify="right")
    memory = metrics.get("peak_memory_bytes", {})
    if memory:
        table.add_column("peak memory", justify="right")
    for name, row in metrics["bytes"].items():
        cells = [name, _megabytes(row["sent"]), _megabytes(row["received"])]
        if memory:
            cells.append(_megabytes(memory[name]))
        table.add_row(*cells)
    console.print(table)


def _figure(value: float | None) -> str:
    return "undefined" if value is None else format_figure(value)


def _megabytes(count: int) -> str:
    return f"{count / 1e6:,.2f} MB"


def report_finished(config: FederationConfig, folder: Path) -> dict[str, Any] | None:
    """Return the figures of a finished run, with a line on stderr; None if it is not finished."""
    from securevfl.runtime.entry import finished_metrics

    metrics = finished_metrics(config, folder)
    if metrics is not None:
        print(f"securevfl: {folder} is finished already; these are its figures", file=sys.stderr)
    return metrics


def train_and_report(
    config: FederationConfig,
    folder: Path,
    simulated: bool,
    *,
    data_root: Path,
    resume: bool = False,
    device: str = "cpu",
    record_mib: float | None = None,
) -> dict[str, Any]:
    """Run a federation with progress on stderr, and write its report.

    Args:
        config: The federation.
        folder: Run folder.
        simulated: Whether all parties are in this process; otherwise each has its own.
        data_root: Where relative data paths start.
        resume: Whether to continue the run in the folder.
        device: ``"cpu"`` or ``"cuda"``.
        record_mib: MiB of what each party receives and holds, which it records; None: nothing.
    """
    with loading():
        from securevfl.runtime.entry import simulate, train

    if simulated:
        keep_freed_memory()
    run = simulate if simulated else train
    with RunProgress(metric=config.metric) as progress:
        result = run(
            config,
            out=folder,
            data_root=data_root,
            resume=resume,
            device=device,
            observe=progress,
            record_mib=record_mib,
            progress=False,
        )
    write_page(folder, config)
    return result.metrics


def write_page(folder: Path, config: FederationConfig | None = None) -> None:
    """Write a finished run's report; if the packages for it are missing, print one line instead."""
    # Loaded here: plots take most of a second to load, in every party's process.
    try:
        from securevfl.desk.report.page import write_report
    except ImportError as error:
        lacks = missing_extra(error)
        if lacks is None:
            raise
        print(wrap_text(f"securevfl: warning: no report: {lacks}"), file=sys.stderr)
    else:
        write_report(folder, config)


def write_own_page(party: Path) -> None:
    """Write a secondary's own page if it was linked; a failure is only a warning."""
    from securevfl.runtime.run_folder import own_folders

    if not own_folders(party):
        return
    from securevfl.desk.report.secondary_page import write_secondary_page

    try:
        path = write_secondary_page(party)
    except SecureVflError as error:
        print(f"securevfl: warning: no page for {party.name}: {error}", file=sys.stderr)
    else:
        print(f"securevfl: what left {party.name} and what it cost: {path}", file=sys.stderr)


def summary_of(predictions: Predictions, out: Path) -> dict[str, Any]:
    """Return the content of ``--json``."""
    return {
        "predictions": str(out),
        "rows": len(predictions),
        "metrics": predictions.metrics,
        "epsilon": predictions.epsilon,
        "used": predictions.used,
        "without": list(predictions.without),
        "measured_without": predictions.measured_without,
        "unknown_words": dict(predictions.unknown_words),
    }


def print_predictions(
    predictions: Predictions,
    out: Path,
    *,
    before: PredictionBudget | None,
    left: PredictionBudget | None,
    as_json: bool,
) -> None:
    """Print the predictions' file, cost, remaining budget and, if known, quality.

    Args:
        predictions: The predictions.
        out: Their file.
        before: Budget before the request.
        left: Budget after it.
        as_json: Print JSON instead.
    """
    if as_json:
        print(json.dumps(summary_of(predictions, out)))
        return
    spent = predictions.epsilon
    cost = "" if spent is None else f"; cost: epsilon {spent:.4g} on top of training"
    if spent and before is not None and left is not None and before.spent == left.spent:
        cost = f"; cost: nothing on top of the epsilon {spent:.4g} of earlier predictions"
    if predictions.used == "alone":
        cost = " by the primary alone: nothing was sent, and no ledger was charged"
    print(f"securevfl: {len(predictions)} rows predicted{cost}", file=sys.stderr)
    if left is not None and predictions.used != "alone":
        rest = (
            f"left of the limit for predictions: epsilon {left.epsilon_left:.4g} of {left.budget:g}"
        )
        if left.releases_per_record is not None:
            most = left.releases_per_record
            rest = f"no later prediction costs more; releases of a record in all of them: {most}"
        print(f"securevfl: {rest}", file=sys.stderr)
    if predictions.without:
        print(f"securevfl: {_absence(predictions)}", file=sys.stderr)
    if predictions.metrics:
        table = Table("metric", "of these rows")
        for name, value in predictions.metrics.items():
            table.add_row(name, "not defined" if value is None else format_figure(value))
        Console().print(table)
    print(out)


def _absence(predictions: Predictions) -> str:
    """Return the absent parties, and the measured quality of predictions without them."""
    who = f"without {', '.join(predictions.without)}"
    measured = predictions.measured_without
    if measured is None:
        return f"{who}: not measured what such predictions are worth"
    texts = []
    for name, figure in measured["metrics"].items():
        value = f"{name} {figure['value']:.4g}"
        ends = figure["interval"]
        texts.append(value if ends is None else f"{value} ({ends[0]:.4g} to {ends[1]:.4g})")
    by = "the primary alone, who does better then" if measured["used"] == "alone" else "the others"
    return f"{who}, answered by {by}: on the run's test rows {', '.join(texts)}"
