"""A run's figures, as one JSON object or as a table for people."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from securevfl.cli.figure_table import print_figures
from securevfl.core.formatting import written
from securevfl.core.progress import alignment_in_words
from securevfl.federation.session.membership import absences_in_words
from securevfl.runtime.figures import (
    candidates_in_words,
    interval_heading,
    interval_in_words,
    links_of_run,
    models_measured,
    placebos_in_words,
    threshold_in_words,
)


def print_results(metrics: Mapping[str, Any], folder: Path, *, as_json: bool) -> None:
    """Print a run's metrics on stdout."""
    if as_json:
        print(json.dumps(metrics))
        return
    console = Console()
    _print_metrics(console, metrics)
    _print_privacy(console, metrics["privacy"])
    _print_alignment(console, metrics)
    for line in links_of_run(metrics):
        console.print(line, highlight=False, soft_wrap=True, markup=False)
    if "absences" in metrics:
        text = absences_in_words(metrics["absences"], epochs=metrics["epochs"])
        console.print(Text.assemble(("absent: ", "bold"), text), soft_wrap=True)
    if metrics["bytes"]:
        _print_parties(console, metrics)
    console.print(f"run folder: {folder}", soft_wrap=True)
    console.print(f"report:     {folder / 'report.html'}", soft_wrap=True)


def _print_metrics(console: Console, metrics: Mapping[str, Any]) -> None:
    """Print a row a metric: the joint model with its interval, then every other model."""
    evaluation, measured = metrics["evaluation"], models_measured(metrics)
    first, *others = measured
    tested = "no test rows" if "untested" in metrics else "test rows"
    title = f"{metrics['federation']}: {tested}; best epoch by validation {metrics['metric']}"
    heading = [interval_heading(evaluation)] if evaluation else []
    rows = [["metric", first, *heading, *others]]
    for name, value in measured[first].items():
        interval = [interval_in_words(evaluation["intervals"][name])] if evaluation else []
        rest = (_figure(measured[other][name]) for other in others)
        rows.append([name, _figure(value), *interval, *rest])
    print_figures(console, rows, title=title)
    if "untested" in metrics:
        console.print(Text.assemble(("not tested: ", "bold"), metrics["untested"]), soft_wrap=True)
    if "threshold" in evaluation:
        console.print(threshold_in_words(evaluation), highlight=False)
    if metrics["gain"] is not None:
        colour = {"better": "green", "unclear": "yellow", "worse": "red"}
        verdict, outcome = metrics["gain"]["verdict"], metrics["gain"]["outcome"]
        console.print(Text.assemble(("verdict: ", "bold"), (verdict, colour[outcome])))
        console.print(candidates_in_words(metrics), highlight=False)
        if metrics["placebos"]:
            console.print(placebos_in_words(metrics), highlight=False)


def print_pretraining(figures: Mapping[str, Any], folder: Path, *, as_json: bool) -> None:
    """Print the losses and spreads of a pretraining on stdout."""
    if as_json:
        print(json.dumps({key: value for key, value in figures.items() if key != "history"}))
        return
    console = Console()
    title = f"{figures['method']}: {figures['iterations']} iterations of {figures['algorithm']}"
    table = Table(title=title, title_justify="left")
    for column in ("encoder", "loss", "spread (1: even, 0: collapsed)"):
        table.add_column(column)
    for name in ("cross", "local"):
        if f"{name}_loss" in figures:
            loss, spread = figures[f"{name}_loss"], figures[f"{name}_spread"]
            table.add_row(name, written(loss), f"{spread:.3f}")
    console.print(table)
    _print_alignment(console, figures)
    if figures.get("bytes"):
        _print_parties(console, figures)
    console.print(f"encoders: {folder / 'parties' / 'NAME' / 'encoders.pt'}", soft_wrap=True)
    console.print(f'train with [pretraining] checkpoint = "{folder}"', soft_wrap=True, markup=False)


def _print_alignment(console: Console, figures: Mapping[str, Any]) -> None:
    if "alignment" in figures:
        text = alignment_in_words(figures["alignment"])
        console.print(text, highlight=False, soft_wrap=True, markup=False)


def _print_privacy(console: Console, privacy: Mapping[str, Any]) -> None:
    shown = (privacy["statement"], "yellow" if privacy["warning"] else "")
    console.print(Text.assemble("\n", ("privacy: ", "bold"), shown))
    labels = privacy.get("labels")
    if labels is not None:
        said = (labels["statement"], "yellow" if labels["warning"] else "")
        console.print(Text.assemble(("labels: ", "bold"), said))
    if privacy["epsilon"] is not None:
        console.print(
            f"spent epsilon = {privacy['epsilon']:.4g}, delta = {privacy['delta']:g}; the papers' "
            f"formula would claim epsilon = {privacy['epsilon_as_published']:.4g}. "
            f"{privacy['as_published_note']}",
            highlight=False,
        )
    console.print()


def _print_parties(console: Console, metrics: Mapping[str, Any]) -> None:
    table = Table(title="parties", title_justify="left")
    table.add_column("party")
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
    return "undefined" if value is None else written(value)


def _megabytes(count: int) -> str:
    return f"{count / 1e6:,.2f} MB"
