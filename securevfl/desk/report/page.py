"""A run's report: one HTML file, made from the run folder alone."""

import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, Final

from securevfl.config.disclosure import channels
from securevfl.config.federation import FederationConfig
from securevfl.config.reading import read_federation
from securevfl.core import files
from securevfl.core.column_names import keys_in_clear
from securevfl.core.errors import ConfigError
from securevfl.core.formatting import epsilon_in_words, format_figure
from securevfl.desk.report import plots
from securevfl.desk.report.attacks import summarise_attacks
from securevfl.desk.report.learned import Section, section_of
from securevfl.desk.report.secondary_page import TEMPLATES, write_secondary_pages
from securevfl.desk.report.verify import verify_run
from securevfl.dp.statement import suspicion_in_words
from securevfl.federation.run_plan import predictions_in_words
from securevfl.federation.session.membership import absences_in_words
from securevfl.ledger.book import LABELS
from securevfl.ledger.chain import read_chain
from securevfl.ledger.ledger import lines_of_run
from securevfl.models.task_metrics import metrics_of
from securevfl.runtime import metrics_file, run_folder
from securevfl.runtime.run_folder import own_folders

# What partners are worth, for people: titles, columns and cells of what was measured.

TITLES = {
    "gone": "if it is gone tomorrow (the kept model, without it)",
    "again": "if it leaves, and the model is trained again without it",
}
"""Titles of the two readings, by their names in ``contribution.json``."""


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
                partner: [
                    _figure(partner_figures[kind][metric]) for metric in metrics for kind in kinds
                ]
                for partner, partner_figures in worth["partners"].items()
            },
        )


def sampled_in_words(measured: Mapping[str, Any]) -> list[str]:
    """Return what there is to know of Shapley values that are not exact."""
    sentences = []
    for name, title in TITLES.items():
        worth = measured[name]
        if worth is None or worth["method"] == "exact":
            continue
        errors = [
            figure["standard_error"]
            for partner_figures in worth["partners"].values()
            for metric, figure in partner_figures["shapley"].items()
            if metric == measured["metric"]
        ]
        sentences.append(
            f"Shapley values {title} are means over {worth['permutations']} orders that were "
            f"drawn; their standard errors are up to {max(errors):.2g}: --permutations draws more"
        )
    return sentences


def _number(figure: Mapping[str, Any]) -> str:
    return f"{figure['value']:.4g}"


def _figure(figure: Mapping[str, Any]) -> str:
    interval = figure["interval"]
    value = format_figure(figure["value"], sign="+", beside=interval or ())
    if interval is None:
        return value
    ends = (format_figure(end, sign="+", beside=(figure["value"], *interval)) for end in interval)
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
            name=f"{metrics_file.alone_in_words(metrics)}, test",
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
    attack_figures = summarise_attacks(run, channels(config), run_id=metrics["run"])
    shown = attack_figures["channels"]
    measured = run_folder.read_measured(run, run_folder.CONTRIBUTION, run=metrics["run"])
    page = TEMPLATES.get_template("page.html.j2").render(
        metrics=metrics,
        models=metrics_file.models_measured(metrics),
        intervals=_intervals(metrics),
        against=_against(metrics),
        threshold=metrics_file.threshold_in_words(evaluation) if "threshold" in evaluation else "",
        mistakes=_mistakes(evaluation),
        meanings=metrics_of(metrics["task"], metrics["metric"]),
        contribution=None if measured is None else _contribution(measured),
        absences=absences_in_words(metrics.get("absences", ()), epochs=metrics["epochs"]),
        links=metrics_file.links_of_run(metrics),
        digest=config.digest,
        parties=_parties(run, config, metrics),
        odds=_odds(privacy),
        uncovered=[channel["channel"] for channel in shown if channel["mark"] == "not covered"],
        unseen=_UNSEEN if metrics["mode"] == "simulated" else (),
        privacy=privacy,
        promised=_promised_figures(privacy),
        channels=[channel for channel in shown if channel["to"] != "nobody"],
        unsent=[
            f"{channel['channel']} ({channel['reveals']})"
            for channel in shown
            if channel["to"] == "nobody"
        ],
        picture=_picture(config, shown),
        audit=attack_figures["audit"],
        ledgers=_ledgers(run, metrics),
        settings=_settings(config),
        predictions=predictions_in_words(config),
        figures=figures,
        learned=_model_sections(run, metrics),
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


def _model_sections(run: Path, metrics: Mapping[str, Any]) -> list[Section]:
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
        "heading": f"{metrics['family']} (joint), {metrics_file.interval_heading(evaluation)}",
        "cells": [metrics_file.interval_in_words(interval) for interval in intervals],
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
    for model, candidate in alone["candidates"].items():
        chosen = ", chosen" if model == alone["chosen"] else ""
        measured[f"{model} (local{chosen})"] = candidate["test"], candidate["interval"]
    better = "higher" if metrics["higher_is_better"] else "lower"
    return {
        "verdict": gain["verdict"],
        "clear": gain["outcome"] == "better",
        "candidates": metrics_file.candidates_in_words(metrics),
        "placebos": metrics_file.placebos_in_words(metrics),
        "top": metrics_file.top_in_words(metrics),
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


# The first page, and the last: who, what is promised in plain words, and what was checked.

_UNSEEN: Final = (
    "that parties which do not trust one another see no more than this: all tables lay with one "
    "process",
    "masks, TLS and signatures: sums were made in the open",
    "traffic, waiting and lost parties",
)


def _parties(run: Path, config: FederationConfig, metrics: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a line for each party: the primary's own figures, and others' where they lie here."""
    facts = {path.name: files.read_json(path / run_folder.OWN_FACTS) for path in own_folders(run)}
    lines = []
    for party in config.parties:
        known = facts.get(party.name)
        rows, columns = ("its own page", "its own page") if party.role == "secondary" else ("", "")
        if known is not None:
            rows, columns = f"{known['records']:,}", str(len(known["features"]))
        elif party.role == "primary":
            rows = f"{sum(metrics['rows'].values()):,}"
        lines.append(
            {
                "name": party.name,
                "role": party.role,
                "rows": rows,
                "columns": columns,
                "identity": (party.identity or "none: simulated").removeprefix("ed25519:")[:16],
                "signs": not party.is_helper,
            }
        )
    return lines


def _odds(privacy: dict[str, Any]) -> str:
    """Return the promise in odds that people can picture, of this run and of the table."""
    if privacy["hides"] is None:
        return "nothing bounds what may be found out of secondaries' records; no noise was added."
    spent = max(privacy["epsilon"], privacy["epsilon_planned"])
    sentence = (
        f"whoever is 1 % sure that {privacy['hides']} may become {suspicion_in_words(spent)} sure, "
        f"by all that this run released (epsilon = {epsilon_in_words(spent)})"
    )
    total = privacy["total_epsilon"]
    if privacy["table_runs"] > 1 and total is not None:
        sentence += (
            f", and {suspicion_in_words(total)} by all {privacy['table_runs']} runs on the tables "
            f"(epsilon = {epsilon_in_words(total)})"
        )
    return f"{sentence}."


_WRAPPED: Final = 38
"""Characters of a line between the boxes of the picture."""
_BOX: Final = 22
"""Characters of a line in a box."""
_LINE: Final = 17
"""Units of the picture from line to line."""


def _picture(config: FederationConfig, shown: list[dict[str, str]]) -> dict[str, Any]:
    """Return the picture of channels: arrows between two boxes, with what goes along each."""
    lanes, y = [], 22
    for whose, to, left, right in (
        ("secondaries", "primary", False, True),
        ("primary", "secondaries", True, False),
        ("", "all", True, True),
    ):
        names = [
            {"name": line, "mark": channel["mark"], "first": not number}
            for channel in shown
            if channel["to"] == to and (to == "all" or channel["whose"] == whose)
            for number, line in enumerate(textwrap.wrap(channel["channel"], _WRAPPED))
        ]
        if names:
            lanes.append({"y": y, "names": names, "left": left, "right": right})
            y += _LINE * len(names) + 26
    below = [
        f"{party.name} ({party.role}) helps to link or deals masks, and must collude with no party"
        for party in config.parties
        if party.is_helper
    ]
    below += [
        f"{channel['channel']}: to everybody who gets the model"
        for channel in shown
        if channel["to"] == "recipients"
    ]
    partners = [secondary.name for secondary in config.secondaries]
    named = partners if len(partners) < 6 else [*partners[:4], f"and {len(partners) - 4} more"]
    heading = "1 secondary" if len(partners) == 1 else f"{len(partners)} secondaries"
    return {
        "lanes": lanes,
        "below": below,
        "secondaries": [heading, *map(_in_box, named)],
        "primary": ["primary", _in_box(config.primary.name)],
        "tall": y - 12,
        "height": y + 18 * len(below) + 8,
        "alt": "Arrows between the secondaries and the primary; the table below says the same",
    }


def _in_box(name: str) -> str:
    return name if len(name) <= _BOX else f"{name[: _BOX - 1]}\u2026"


def _ledgers(run: Path, metrics: dict[str, Any]) -> dict[str, Any]:
    """Return what checking every ledger at hand came to."""
    ledger = run / metrics["ledger"]
    party = ledger.parent.name
    try:
        findings = verify_run(run)
    except ConfigError as error:
        return {"findings": [], "good": False, "note": str(error), "head": "", "party": party}
    bad = [finding for finding in findings if finding.good is False]
    shown = [
        replace(finding, text=finding.text.replace(f"{run.absolute()}/", ""))
        for finding in dict.fromkeys(findings)
    ]
    known = sum(finding.good is not None for finding in shown)
    result = f"{len(bad)} FAILED" if bad else "none failed"
    return {
        "findings": shown,
        "good": not bad,
        "note": f"The ledgers at hand were checked again for this page, in {known} ways: {result}.",
        "head": read_chain(ledger)[0].head.hex() if ledger.exists() else "",
        "party": party,
    }


_SECTIONS: Final = (
    *("federation", "model", "training", "base", "privacy", "mpc", "linkage", "encoder"),
    *("pretraining", "prediction", "runtime"),
)


def _settings(config: FederationConfig) -> Iterator[dict[str, str]]:
    """Yield every setting but the parties', with its value and where that is from."""
    for name in _SECTIONS:
        section, given = getattr(config, name), config.source.get(name, {})
        for field in fields(section) if is_dataclass(section) else ():
            where = f"{name}.{field.name}"
            origin = "the file" if field.name in given else "default"
            if where in config.chosen:
                origin = "auto"
            yield {"name": where, "value": str(getattr(section, field.name)), "origin": origin}


def _promised_figures(privacy: dict[str, Any]) -> dict[str, str]:
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
