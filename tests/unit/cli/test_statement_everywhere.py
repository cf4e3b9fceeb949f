"""Console, metrics, report and calculator show the text that one function makes."""

import html
import json
import re
from pathlib import Path
from typing import Any

import pytest
from helpers.command_line import securevfl
from helpers.federations import FROZEN
from helpers.patience import PATIENCE_S
from helpers.warm import printed
from rich.ansi import AnsiDecoder

from securevfl.dp.statement import NO_PROMISE, Statement, bounded_statement
from securevfl.testing import write_federation

Capture = pytest.CaptureFixture[str]
NONE = {"mechanism": "none", "encoder": "frozen", "links_per_record": 2}


def promised(epsilon: float) -> Statement:
    """Return what the federation of this file promises at an epsilon."""
    return bounded_statement(
        unit="secondary-record",
        encoder="frozen",
        epsilon=epsilon,
        delta=1e-4,
        parties=2,
        colluding=1,
        links_per_record=2,
    )


def federation(folder: Path, privacy: dict[str, Any]) -> Path:
    return write_federation(
        folder,
        rows=60,
        training={"epochs": 1, "batch_size": 32},
        privacy=privacy,
        runtime={"join_timeout_s": PATIENCE_S, "round_timeout_s": PATIENCE_S},
        of_secondaries={"scaling": "bounds", "bounds": [-4.0, 4.0]},
    )


YELLOW = 3


def colours(printed: str, wanted: str) -> set[int | None]:
    """Return the terminal's colours, by number, of what it shows of ``wanted``."""
    found: set[int | None] = set()
    for line in AnsiDecoder().decode(printed):
        for span in line.spans:
            shown = line.plain[span.start : span.end].strip()
            if len(shown) > 20 and shown in wanted:
                colour = getattr(span.style, "color", None)
                found.add(colour.number if colour else None)
    return found


@pytest.mark.parametrize(
    ("privacy", "text", "warned"),
    [
        ({**FROZEN, "colluding": 1}, promised(50.0).text, True),
        ({**FROZEN, "colluding": 1, "epsilon": 4.0}, promised(4.0).text, False),
        (NONE, NO_PROMISE, True),
    ],
    ids=["weak", "strong", "none"],
)
def test_a_run_shows_it_on_the_console_in_its_figures_and_in_its_report(
    privacy: dict[str, Any],
    text: str,
    warned: bool,
    tmp_path: Path,
    capfd: Capture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Word by word, and in a warning's colour where there is one; nowhere green."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    path = federation(tmp_path, privacy)
    ended = securevfl(capfd, "simulate", path, "--out", tmp_path / "run")
    assert ended.code == 0, ended.err

    plain = " ".join(line.plain.strip() for line in AnsiDecoder().decode(ended.out))
    assert colours(ended.out, text) == ({YELLOW} if warned else set())

    figures = json.loads((tmp_path / "run" / "metrics.json").read_text())["privacy"]
    assert figures["statement"] == text
    assert (figures["warning"] is not None) == warned
    # Check and the report have the whole sentence; a run has what warns of it.
    assert (f"privacy: {figures['warning']} " in plain) == warned
    assert "Suppose" not in plain
    checked = securevfl(capfd, "check", path).out
    lines = " ".join(line.plain.strip() for line in AnsiDecoder().decode(checked))
    assert f"promise: {text} " in lines
    assert figures["total_epsilon"] == figures["epsilon"]

    report = (tmp_path / "run" / "report.html").read_text()
    promised = report[report.index("What is promised") : report.index("Who learns what")]
    (box,) = re.findall(r'<p class="(statement[^"]*)">(.*?)</p>', promised)
    assert html.unescape(box[1]) == text
    assert box[0] == ("statement warned" if warned else "statement")
    shades = {tuple(bytes.fromhex(one)) for one in re.findall(r"#([0-9a-f]{6})\b", report)}
    assert len(shades) > 5
    assert [one for one in shades if one[1] > max(one[0], one[2]) + 3] == []


def budget(epsilon: int, *more: str) -> str:
    """Return what ``securevfl budget`` prints, from a process without run-time type checks."""
    plan = f"--epsilon {epsilon} --delta 1e-4 --secondaries 2 --colluding 1 --links-per-record 2"
    return printed("securevfl.cli.main", "budget", *plan.split(), *more)


@pytest.mark.parametrize("epsilon", [4, 50])
def test_the_calculator_says_the_same_of_the_same_plan(epsilon: int) -> None:
    """As text, and with its parts as JSON."""
    said = promised(epsilon)

    assert " ".join(budget(epsilon).split()).endswith(f" {said.text}")
    answer = json.loads(budget(epsilon, "--json"))
    assert answer["statement"] == said.text
    assert answer["against"] == said.against
    assert answer["hides"] == said.hides
    assert answer["warning"] == said.warning
    assert answer["odds_factor"] == pytest.approx(said.odds_factor, rel=1e-6)
