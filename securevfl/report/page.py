"""A run's report: one HTML file, made from the run folder alone."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from securevfl.config.federation import FederationConfig
from securevfl.config.reading import read_federation
from securevfl.core import files
from securevfl.core.column_names import keys_in_clear
from securevfl.core.formatting import written
from securevfl.federation.run_plan import predictions_in_words
from securevfl.federation.session.membership import absences_in_words
from securevfl.ledger.book import LABELS
from securevfl.ledger.ledger import lines_of_run
from securevfl.models.task_metrics import metrics_of
from securevfl.report import plots
from securevfl.report.learned import Section, section_of
from securevfl.report.secondary_page import TEMPLATES, write_secondary_pages
from securevfl.runtime import run_folder

# What partners are worth, for people: titles, columns and cells of what was measured.

TITLES = {
    "gone": "if it is gone tomorrow (the kept model, without it)",
    "again": "if it leaves, and the model is trained again without it",
}
"""Of the two readings, by their names in ``contribution.json``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorthFigure:
    """One of the two questions that a run's partners are measured by."""

    title: str
    summary: str
    """The metric with all partners and of the primary alone, in one line."""
    columns: list[str]
    """Headings after the partner's name."""
    rows: dict[str, list[str]]
    """Cells of each partner."""


def readings(measured: Mapping[str, Any]) -> Iterator[WorthFigure]:
    """Return what was measured as tables.

    Args:
        measured: What ``contribution.json`` holds.
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
                partner: [_figure(one[kind][metric]) for metric in metrics for kind in kinds]
                for partner, one in worth["partners"].items()
            },
        )


def sampled_in_words(measured: Mapping[str, Any]) -> list[str]:
    """Return what there is to know of Shapley values that are not exact."""
    said = []
    for name, title in TITLES.items():
        worth = measured[name]
        if worth is None or worth["method"] == "exact":
            continue
        errors = [
            figure["standard_error"]
            for one in worth["partners"].values()
            for metric, figure in one["shapley"].items()
            if metric == measured["metric"]
        ]
        said.append(
            f"Shapley values {title} are means over {worth['permutations']} orders that were "
            f"drawn; their standard errors are up to {max(errors):.2g}: --permutations draws more"
        )
    return said


def _number(figure: Mapping[str, Any]) -> str:
    return f"{figure['value']:.4g}"


def _figure(figure: Mapping[str, Any]) -> str:
    interval = figure["interval"]
    value = written(figure["value"], sign="+", beside=interval or ())
    if interval is None:
        return value
    ends = (written(one, sign="+", beside=(figure["value"], *interval)) for one in interval)
    return f"{value} ({' to '.join(ends)})"


# A run's report: one HTML file with everything in it, made from the run folder alone.

# Each takes most of a second to draw.
_MOST_SECONDARIES = 3


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
    epsilon = _spending(run / metrics["ledger"], metrics["run"])
    privacy, evaluation = metrics["privacy"], metrics["evaluation"]
    figures = [
        plots.metric_plot(
            history,
            metric=metrics["metric"],
            alone=metrics["alone_test"],
            name=f"{run_folder.alone_in_words(metrics)}, test",
        ),
        plots.loss_plot(history),
    ]
    if epsilon and privacy["epsilon"] is not None:
        rounds = list(range(1, len(epsilon) + 1))
        figures.append(plots.epsilon_plot(rounds, epsilon, budget=privacy["epsilon_planned"]))
    if metrics["bytes"]:
        figures.append(plots.bytes_plot(metrics["bytes"]))
    path = run / "federation.toml"
    config = config or read_federation(path)
    measured = run_folder.read_contribution(run, run=metrics["run"])
    page = TEMPLATES.get_template("page.html.j2").render(
        metrics=metrics,
        models=run_folder.models_measured(metrics),
        intervals=_intervals(metrics),
        against=_against(metrics),
        threshold=run_folder.threshold_in_words(evaluation) if "threshold" in evaluation else "",
        mistakes=_mistakes(evaluation),
        meanings=metrics_of(metrics["task"], metrics["metric"]),
        contribution=None if measured is None else _contribution(measured),
        absences=absences_in_words(metrics.get("absences", ()), epochs=metrics["epochs"]),
        links=run_folder.links_of_run(metrics),
        privacy=privacy,
        promised=_promised(privacy),
        predictions=predictions_in_words(config),
        figures=figures,
        learned=_learned(run, metrics),
        keys_in_clear=keys_in_clear(config.linkage.protection, config.primary.key),
        federation=path.read_text(encoding="utf-8"),
    )
    path = run / "report.html"
    files.write_text(path, page, for_others=True)
    if not _shows_all(metrics):
        for party in _explained_parties(run):
            write_pictures(party)
    write_secondary_pages(run, config)
    return path


def write_pictures(party: Path) -> Path:
    """Write a secondary's own pictures, ``pictures.html`` in its folder, for its user alone.

    Args:
        party: The party's folder within a run folder, with ``explanation.json``.

    Returns:
        The path.

    Raises:
        ConfigError: If that file is damaged.
    """
    page = TEMPLATES.get_template("pictures.html.j2").render(
        party=party.name, learned=[section_of(party, title="What the model learned")]
    )
    path = party / "pictures.html"
    files.write_text(path, page)
    return path


def _explained_parties(run: Path) -> list[Path]:
    return sorted(path.parent for path in run.glob(f"parties/*/{run_folder.EXPLANATION}"))


def _shows_all(metrics: Mapping[str, Any]) -> bool:
    """Return whether a report shows secondaries' models: of a simulation that promises nothing.

    Behind a promise it shows what a run between processes would.
    """
    return bool(metrics["mode"] == "simulated" and metrics["privacy"]["mechanism"] == "none")


def _learned(run: Path, metrics: Mapping[str, Any]) -> list[Section]:
    """Return pictures of the primary's model, and of secondaries' where they may be shown."""
    if not (run / run_folder.EXPLANATION).exists():
        return []
    sections = [section_of(run, title="What the primary's model learned")]
    secondaries = _explained_parties(run)
    if not _shows_all(metrics):
        sections[0].notes.append(
            "what a secondary's model learned is for that secondary alone, in "
            "parties/NAME/pictures.html of its own folder"
        )
        return sections
    for party in secondaries[:_MOST_SECONDARIES]:
        # How encodings lie to one another is drawn for the primary, with all of theirs.
        title = f"What {party.name}'s model learned"
        sections.append(section_of(party, title=title, without=["alignment"]))
    if len(secondaries) > _MOST_SECONDARIES:
        sections[-1].notes.append(
            f"of {len(secondaries)} secondaries these are the first {_MOST_SECONDARIES}; the "
            f"others' numbers are in parties/NAME/{run_folder.EXPLANATION}"
        )
    return sections


def _intervals(metrics: dict[str, Any]) -> dict[str, Any] | None:
    """Return the row of intervals: its heading, and each metric's; None of an untested run."""
    evaluation = metrics["evaluation"]
    if not evaluation:
        return None
    intervals = (evaluation["intervals"][name] for name in metrics["test_metrics"])
    return {
        "heading": f"{metrics['family']} (joint), {run_folder.interval_heading(evaluation)}",
        "cells": [run_folder.interval_in_words(one) for one in intervals],
    }


def _contribution(measured: dict[str, Any]) -> dict[str, Any]:
    """Return what the section on partners shows."""
    return {
        **{name: measured[name] for name in ("metric", "rows", "cost")},
        "level": f"{measured['level']:.0%}",
        "plot": plots.contribution_plot(measured),
        "readings": list(readings(measured)),
        "notes": [*measured["notes"], *sampled_in_words(measured)],
    }


def _against(metrics: dict[str, Any]) -> dict[str, Any] | None:
    """Return what stands above the figures: the verdict on the gain, and its plot."""
    alone, gain, name = metrics["alone"], metrics["gain"], metrics["metric"]
    if alone is None:
        return None
    of_joint = metrics["test"], metrics["evaluation"]["intervals"][name]
    measured = {f"{metrics['family']} (joint)": of_joint}
    for model, one in alone["candidates"].items():
        chosen = ", chosen" if model == alone["chosen"] else ""
        measured[f"{model} (local{chosen})"] = one["test"], one["interval"]
    better = "higher" if metrics["higher_is_better"] else "lower"
    return {
        "verdict": gain["verdict"],
        "clear": gain["outcome"] == "better",
        "candidates": run_folder.candidates_in_words(metrics),
        "placebos": run_folder.placebos_in_words(metrics),
        "plot": plots.models_plot(measured, title=f"test {name} ({better} is better)"),
    }


def _mistakes(evaluation: dict[str, Any]) -> list[str]:
    """Return the plots of where classes are taken for others, and of calibration."""
    if "confusion" not in evaluation:
        return []
    confusion = evaluation["confusion"]
    return [
        plots.confusion_plot(confusion["counts"], confusion["classes"]),
        plots.calibration_plot(evaluation["calibration"]),
    ]


def _promised(privacy: dict[str, Any]) -> dict[str, str]:
    """Return the figures behind the statement, in words of the federation file."""
    words = {
        "epsilon spent by this run": "epsilon",
        "epsilon spent by all runs in the primary's ledger": "total_epsilon",
        "runs in that total": "table_runs",
        "epsilon of the whole plan": "epsilon_planned",
        "epsilon by the papers' formula (no guarantee)": "epsilon_as_published",
        "delta": "delta",
        "unit": "unit",
        "encoder": "encoder",
        "links per record (m)": "links_per_record",
        "secondaries that may collude with the primary": "colluding",
        "fewest secondaries that may go on": "least_secondaries",
        "noise multiplier": "noise_multiplier",
        "noise share of each secondary (standard deviation)": "noise_share_std",
        "noise multiplier of fitting the encoders": "fitting_noise_multiplier",
        "sensitivity of the sum": "sensitivity",
        "clip norm": "clip_norm",
        "releases": "releases",
        "rows released": "row_releases",
        "accounting": "accounting",
    }
    shown = {}
    for label, name in words.items():
        if name not in privacy:
            continue
        value = privacy[name]
        if value is None:
            value = "not bounded" if "epsilon" in name else "none"
        shown[label] = f"{value:.5g}" if isinstance(value, float) else str(value)
    return shown


def _spending(path: Path, run: str) -> list[float]:
    """Return epsilon after every release of records; nothing where it was not bounded."""
    if not path.exists():
        return []
    lines = lines_of_run(path, run)
    values = [line.get("epsilon") for line in lines if line["kind"] != LABELS]
    return [float(value) for value in values if value is not None]
