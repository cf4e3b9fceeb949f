"""Findings of attacks on a recorded run, next to guarantees and as a picture, for its report."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from securevfl.config.disclosure import coverage, status
from securevfl.desk.report.plots import attacks_plot
from securevfl.runtime.run_folder import AUDIT, read_measured

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
