"""Overview of a run in its report: parties, promises in plain words, and checked ledgers."""

import textwrap
from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any, Final

from securevfl.config.federation import FederationConfig
from securevfl.core import files
from securevfl.core.errors import ConfigError
from securevfl.core.formatting import epsilon_in_words
from securevfl.desk.report.verify import verify_run
from securevfl.dp.statement import suspicion_in_words
from securevfl.ledger.book import LABELS
from securevfl.ledger.chain import read_chain
from securevfl.ledger.ledger_file import lines_of_run
from securevfl.runtime import run_folder
from securevfl.runtime.run_folder import own_folders

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


def promised_figures(privacy: dict[str, Any]) -> dict[str, str]:
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


def epsilon_by_release(path: Path, run: str) -> list[float]:
    """Return epsilon after every release of records; empty without a bound."""
    if not path.exists():
        return []
    lines = lines_of_run(path, run)
    values = [line.get("epsilon") for line in lines if line["kind"] != LABELS]
    return [float(value) for value in values if value is not None]
