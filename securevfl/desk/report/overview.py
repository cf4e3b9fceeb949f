"""Overview of a run in its report: parties, promises in plain words, and checked ledgers."""

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, Final

from securevfl.config.disclosure import coverage, status
from securevfl.config.federation import FederationConfig
from securevfl.core import files
from securevfl.core.errors import ConfigError
from securevfl.core.formatting import epsilon_in_words, format_figure
from securevfl.desk.report.plots import attacks_plot
from securevfl.desk.report.verify import verify_run
from securevfl.dp.statement import suspicion_in_words
from securevfl.ledger.book import LABELS
from securevfl.ledger.chain import read_chain
from securevfl.ledger.ledger_file import lines_of_run
from securevfl.runtime import run_folder
from securevfl.runtime.run_folder import AUDIT, own_folders, read_measured

NOT_SIMULATED: Final = (
    "that parties which do not trust one another see no more than this: all tables lay with one "
    "process",
    "masks, TLS and signatures: sums were made in the open",
    "traffic, waiting and lost parties",
)


def party_lines(
    run: Path, config: FederationConfig, metrics: dict[str, Any]
) -> list[dict[str, Any]]:
    """Return a line for each party, with the figures of parties on this machine."""
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


def odds_in_words(privacy: dict[str, Any]) -> str:
    """Return the promise as odds, for this run and for all runs on the table."""
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
"""Most characters of a line between the boxes of the picture."""
_BOX: Final = 22
"""Most characters of a line in a box."""
_LINE: Final = 17
"""Units of the picture from line to line."""


def channel_picture(config: FederationConfig, shown: list[dict[str, str]]) -> dict[str, Any]:
    """Return the picture of channels: labelled arrows between two boxes."""
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


def ledger_findings(run: Path, metrics: dict[str, Any]) -> dict[str, Any]:
    """Return the findings of checking every available ledger."""
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


def setting_lines(config: FederationConfig) -> Iterator[dict[str, str]]:
    """Yield every setting, except the parties', with its value and origin."""
    for name in _SECTIONS:
        section, given = getattr(config, name), config.source.get(name, {})
        for field in fields(section) if is_dataclass(section) else ():
            where = f"{name}.{field.name}"
            origin = "the file" if field.name in given else "default"
            if where in config.chosen:
                origin = "auto"
            yield {"name": where, "value": str(getattr(section, field.name)), "origin": origin}


PROMISED: Final = {
    "epsilon spent by this run": "epsilon",
    "epsilon spent by all runs in the primary's ledger": "total_epsilon",
    "runs in that total": "table_runs",
    "delta": "delta",
    "what is hidden (unit)": "unit",
    "rows that one record is linked to, at most": "links_per_record",
    "secondaries that may collude with the primary": "colluding",
}
"""Figures of the promise by their names in a report."""

ACCOUNTED: Final = {
    "epsilon of the whole plan": "epsilon_planned",
    "epsilon by the papers' formula (no guarantee)": "epsilon_as_published",
    "encoder": "encoder",
    "noise multiplier: deviation of the noise over the sensitivity": "noise_multiplier",
    "cells of a released symbol": "cells",
    "noise share of each secondary (deviation; of symbols, odds; of Laplace, scale)": (
        "noise_share_std"
    ),
    "noise multiplier of fitting the encoders": "fitting_noise_multiplier",
    "sensitivity: most that one unit changes the released sums": "sensitivity",
    "clip norm: longest vector of a record": "clip_norm",
    "releases": "releases",
    "rows released": "row_releases",
    "accounting: sound (a proven bound) or as-published": "accounting",
}
"""Figures behind the promise, which the appendix of a report has."""


def promised_figures(privacy: dict[str, Any], words: Mapping[str, str]) -> dict[str, str]:
    """Return figures of :data:`PROMISED` or :data:`ACCOUNTED` that a run has, as text."""
    shown = {}
    for label, name in words.items():
        if name not in privacy:
            continue
        value = privacy[name]
        if value is None and name in ("noise_multiplier", "cells", "sensitivity"):
            continue
        if value is None:
            value = "not bounded" if "epsilon" in name else "none"
        shown[label] = f"{value:.5g}" if isinstance(value, float) else str(value)
    return shown


def epsilon_by_release(path: Path, run: str) -> list[float]:
    """Return epsilon after every release of records; empty without a bound."""
    if not path.exists():
        return []
    lines = lines_of_run(path, run)
    values = [line.get("epsilon") for line in lines if line["kind"] != LABELS]
    return [float(value) for value in values if value is not None]


TITLES = {
    "gone": "if it is gone tomorrow (the kept model, without it)",
    "again": "if it leaves, and the model is trained again without it",
}
"""Titles of the two readings, by their names in ``contribution.json``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorthFigure:
    """Table of one of the two questions about partners."""

    title: str
    summary: str
    """Metrics with all partners and of the primary alone, in one line."""
    columns: list[str]
    """Headings after the partner's name."""
    rows: dict[str, list[str]]
    """Cells of each partner."""


def readings(measured: Mapping[str, Any]) -> Iterator[WorthFigure]:
    """Return the measured worth as tables.

    Args:
        measured: Content of ``contribution.json``.
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
    """Return remarks on Shapley values that are not exact."""
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


_AIMS = {
    "labels": "labels",
    "columns": "columns",
    "keys": "where records lie",
    "links": "which rows have a link",
    "members": "which records are there",
}
"""Targets of attacks, in the order of the picture; others check the noise, and guess nothing."""


def summarise_attacks(
    run: Path, channels: Sequence[Mapping[str, str]], *, run_id: str
) -> dict[str, Any]:
    """Return the parts of a report on attacks.

    Args:
        run: The run folder; ``audit.json`` is missing where nothing was attacked.
        channels: Channels of the run, from :func:`securevfl.config.disclosure.channels`.
        run_id: The run's id.

    Returns:
        ``channels`` with ``mark``, ``status`` and ``measured``; and ``audit``, which is None, or
        the picture, a line a finding, and broken promises.

    Raises:
        ConfigError: If the file is damaged.
    """
    audit = read_measured(run, AUDIT, run=run_id)
    findings = [] if audit is None else sorted(audit["findings"], key=_gain, reverse=True)
    shown: list[dict[str, Any]] = []
    for channel in channels:
        of_channel = [finding for finding in findings if finding["channel"] == channel["channel"]]
        shown.append(
            {
                **channel,
                "mark": coverage(channel),
                "status": status(channel, measured=bool(of_channel)),
                "measured": [_in_words(finding) for finding in _best(of_channel, by="aim")],
            }
        )
    if audit is None:
        return {"channels": shown, "audit": None}
    marks = {channel["channel"]: channel["mark"] for channel in shown}
    best = sorted(_best(findings, by="attack"), key=lambda finding: [*_AIMS].index(finding["aim"]))
    clear = [finding["attack"] for finding in best if finding["beats_floor"]]
    audit_figures = {
        "picture": attacks_plot(
            {f"{finding['aim']}: {finding['attack']}": finding for finding in best},
            covered=[
                f"{finding['aim']}: {finding['attack']}"
                for finding in best
                if _covers(marks, finding)
            ],
        )
        if best
        else None,
        "tried": len(best),
        "beaten": clear,
        "lines": [_line(finding) for finding in audit["findings"]],
        "not_tried": audit["not_tried"],
        "violations": audit["violations"],
    }
    return {"channels": shown, "audit": audit_figures}


def _covers(marks: Mapping[str, str], finding: Mapping[str, Any]) -> bool:
    return marks.get(finding["channel"]) == "covered"


def _gain(finding: Mapping[str, Any]) -> float:
    """Return the success of a guess minus that of its trivial guess."""
    return float(finding["value"] - finding["floor"])


def _best(findings: Sequence[dict[str, Any]], *, by: str) -> list[dict[str, Any]]:
    """Return of each attack, or aim, the guess that gains most; ``findings`` are in that order."""
    best: dict[str, dict[str, Any]] = {}
    for finding in findings:
        if finding["aim"] in _AIMS:
            best.setdefault(finding[by], finding)
    return list(best.values())


def _in_words(finding: Mapping[str, Any]) -> str:
    low, high = finding["interval"]
    return (
        f"{_AIMS[finding['aim']]}, {finding['attack']}: {_measure(finding)} "
        f"{finding['value']:.2f} ({low:.2f} to {high:.2f}), trivial guess {finding['floor']:.2f}"
    )


def _line(finding: Mapping[str, Any]) -> dict[str, str]:
    ceiling = finding["ceiling"]
    return {
        "attack": finding["attack"],
        "who": f"{finding['attacker']}, on {finding['about']}",
        "measure": _measure(finding),
        "found": f"{finding['value']:.3f}",
        "interval": "{:.3f} to {:.3f}".format(*finding["interval"]),
        "floor": f"{finding['floor']:.3f}",
        "ceiling": "" if ceiling is None else f"{ceiling:.3f}",
        "known": finding["known"],
    }


def _measure(finding: Mapping[str, Any]) -> str:
    return str(finding["measure"].partition(";")[0])
