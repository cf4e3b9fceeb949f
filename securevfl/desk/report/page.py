"""A run's report: one HTML file, made from the run folder alone.

A secondary's own page is made from the federation file and that party's own facts and ledger.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from securevfl.config.disclosure import channels
from securevfl.config.federation import FederationConfig
from securevfl.config.reading import read_federation
from securevfl.core import files
from securevfl.core.column_names import keys_in_clear
from securevfl.desk.report import plots, wording
from securevfl.desk.report.overview import (
    ACCOUNTED,
    NOT_SIMULATED,
    PROMISED,
    channel_picture,
    epsilon_by_release,
    ledger_findings,
    odds_in_words,
    party_lines,
    promised_figures,
    readings,
    sampled_in_words,
    setting_lines,
    summarise_attacks,
)
from securevfl.desk.report.secondary_page import TEMPLATES, write_secondary_pages
from securevfl.federation.run_plan import predictions_in_words
from securevfl.models.task_metrics import metrics_of
from securevfl.runtime import run_folder

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def write_report(run: Path, config: FederationConfig | None = None) -> Path:
    """Write ``RUN/report.html`` and return its path.

    Args:
        run: A run folder with ``metrics.json``, ``history.csv`` and ``federation.toml``.
        config: The run's federation file; None reads it.

    Raises:
        ConfigError: If the folder is not that of a finished run.
    """
    metrics = run_folder.read_figures(run)
    history = run_folder.read_history(run)
    epsilon = epsilon_by_release(run / metrics["ledger"], metrics["run"])
    privacy, evaluation = metrics["privacy"], metrics["evaluation"]
    figures = [
        plots.svg(metric_figure(metrics, history)),
        plots.loss_plot(history),
    ]
    if epsilon and privacy["epsilon"] is not None:
        rounds = list(range(1, len(epsilon) + 1))
        figures.append(plots.epsilon_plot(rounds, epsilon, budget=privacy["epsilon_planned"]))
    if metrics["bytes"]:
        figures.append(plots.bytes_plot(metrics["bytes"]))
    path = run / "federation.toml"
    config = config or read_federation(path)
    attack_figures = summarise_attacks(run, channels(config), run_id=metrics["run"])
    shown = attack_figures["channels"]
    measured = run_folder.read_measured(run, run_folder.CONTRIBUTION, run=metrics["run"])
    page = TEMPLATES.get_template("page.html.j2").render(
        metrics=metrics,
        engine=wording.engine_in_words(metrics),
        models=wording.models_measured(metrics),
        intervals=_intervals(metrics),
        against=_against(metrics),
        threshold=wording.threshold_in_words(evaluation) if "threshold" in evaluation else "",
        mistakes=_mistakes(evaluation),
        meanings=metrics_of(metrics["task"], metrics["metric"]),
        contribution=None if measured is None else _contribution(measured),
        links=wording.links_of_run(metrics),
        digest=config.digest,
        parties=party_lines(run, config, metrics),
        odds=odds_in_words(privacy),
        uncovered=[channel["channel"] for channel in shown if channel["mark"] == "not covered"],
        unseen=NOT_SIMULATED if metrics["mode"] == "simulated" else (),
        privacy=privacy,
        promised=promised_figures(privacy, PROMISED),
        accounted=promised_figures(privacy, ACCOUNTED),
        most_epochs=config.training.epochs,
        channels=[channel for channel in shown if channel["to"] != "nobody"],
        unsent=[
            f"{channel['channel']} ({channel['reveals']})"
            for channel in shown
            if channel["to"] == "nobody"
        ],
        picture=channel_picture(config, shown),
        audit=attack_figures["audit"],
        ledgers=ledger_findings(run, metrics),
        settings=setting_lines(config),
        predictions=predictions_in_words(config),
        figures=figures,
        keys_in_clear=keys_in_clear(config.linkage.protection, config.primary.key),
        federation=files.read_text(path),
    )
    path = run / "report.html"
    files.write_text(path, page, for_others=True)
    write_secondary_pages(run, config)
    return path


def metric_figure(metrics: Mapping[str, Any], history: Sequence[Mapping[str, float]]) -> "Figure":
    """Return a figure of a run's metric over epochs, next to the local baseline.

    Args:
        metrics: Content of ``metrics.json``.
        history: One mapping an epoch.
    """
    return plots.metric_figure(
        history,
        metric=metrics["metric"],
        alone=metrics["alone_test"],
        name=f"{wording.alone_in_words(metrics)}, test",
    )


def _intervals(metrics: dict[str, Any]) -> dict[str, Any] | None:
    """Return the row of intervals: its heading, and each metric's; None of an untested run."""
    evaluation = metrics["evaluation"]
    if not evaluation:
        return None
    intervals = (evaluation["intervals"][name] for name in metrics["test_metrics"])
    return {
        "heading": f"{metrics['family']} (joint), {wording.interval_heading(evaluation)}",
        "cells": [wording.interval_in_words(interval) for interval in intervals],
    }


def _contribution(measured: dict[str, Any]) -> dict[str, Any]:
    """Return the content of the section on partners."""
    return {
        **{name: measured[name] for name in ("metric", "rows", "cost")},
        "level": f"{measured['level']:.0%}",
        "plot": plots.contribution_plot(measured),
        "readings": list(readings(measured)),
        "notes": [*measured["notes"], *sampled_in_words(measured)],
    }


def _against(metrics: dict[str, Any]) -> dict[str, Any] | None:
    """Return the verdict on the gain over the local baseline, and its plot."""
    alone, gain, name = metrics["alone"], metrics["gain"], metrics["metric"]
    if alone is None:
        return None
    of_joint = metrics["test"], metrics["evaluation"]["intervals"][name]
    measured = {f"{metrics['family']} (joint)": of_joint}
    for model, candidate in alone["candidates"].items():
        chosen = ", chosen" if model == alone["chosen"] else ""
        measured[f"{model} (local{chosen})"] = candidate["test"], candidate["interval"]
    better = "higher" if metrics["higher_is_better"] else "lower"
    return {
        "verdict": gain["verdict"],
        "clear": gain["outcome"] == "better",
        "candidates": wording.candidates_in_words(metrics),
        "placebos": wording.placebos_in_words(metrics),
        "noise": wording.noise_in_words(metrics),
        "top": wording.top_in_words(metrics),
        "plot": plots.models_plot(measured, title=f"test {name} ({better} is better)"),
    }


def _mistakes(evaluation: dict[str, Any]) -> list[str]:
    """Return the confusion matrix and the calibration plot."""
    if "confusion" not in evaluation:
        return []
    confusion = evaluation["confusion"]
    return [
        plots.confusion_plot(confusion["counts"], confusion["classes"]),
        plots.calibration_plot(evaluation["calibration"]),
    ]
