"""What docs/privacy.md quotes of a promise is what the program says and computes."""

import math
import re
import shlex
from pathlib import Path

import pytest
from helpers.warm import printed
from scipy.special import ndtr

from securevfl.dp.gaussian import gaussian_delta, gaussian_noise_multiplier
from securevfl.dp.privacy import Privacy
from securevfl.dp.release_plan import FittingPlan, ReleasePlan
from securevfl.dp.statement import WEAK_EPSILON, bounded_statement, odds_in_words
from securevfl.dp.symbols import SymbolPlan, cell_probabilities
from securevfl.linkage.stage.linkage_parts import PROTECTIONS

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/privacy.md").read_text(encoding="utf-8")


def quoted(page: str) -> str:
    """Return the page's one block quote as one line."""
    (block,) = re.findall(r"(?:^> .*\n)+", page, flags=re.MULTILINE)
    return " ".join(re.sub(r"^> ", "", block, flags=re.MULTILINE).split())


def rows_of(table: str) -> list[list[str]]:
    """Return the cells below the head of the table that starts with ``table``."""
    lines = PAGE[PAGE.index(table) :].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_the_statement_that_is_explained_is_the_programs() -> None:
    said = bounded_statement(
        unit="secondary-record",
        encoder="frozen",
        epsilon=4.0,
        delta=1e-6,
        parties=2,
        colluding=0,
        links_per_record=1,
    )
    assert quoted(PAGE) == said.text


def test_the_calculators_answer_is_the_one_that_is_shown() -> None:
    """The bank's command and figures, to where the statement that is explained above begins."""
    (block,) = re.findall(r"\$ (securevfl budget .*?--compare)\n(.*?)```", PAGE, flags=re.DOTALL)
    arguments = shlex.split(block[0].replace("\\\n", " "))[1:]

    said = printed("securevfl.cli.main", *arguments)

    shown, rest = block[1].split("...")
    assert rest.split() == []
    assert shown.split() == said.split()[: len(shown.split())]
    assert "Suppose the primary together with any 1 of the 2 secondaries" in shown


def test_odds_and_suspicions_are_computed() -> None:
    """Odds of 1 to 99, times the factor, as a probability."""
    rows = rows_of("| epsilon | the odds' factor |")
    assert len(rows) == 5
    for epsilon, factor, suspicion in rows:
        odds = math.exp(float(epsilon)) / 99
        assert factor == odds_in_words(float(epsilon))
        # Its last digit is right to within one, and what is left to 100 % to within a tenth.
        shown, decimals = float(suspicion.removesuffix(" %")), len(suspicion.split(".")[1]) - 2
        assert shown == pytest.approx(100 * odds / (1 + odds), abs=10.0**-decimals)


def test_how_often_epsilon_is_reached_is_computed() -> None:
    """Of Gaussian noise delta at epsilon 0, of a symbol p - 1/M, in plans such as ``auto``'s."""
    rows = rows_of("| epsilon | Gaussian noise | a symbol")
    assert len(rows) == 4
    for (epsilon, noise, symbol), cells in zip(rows, (64, 24, 5, 3), strict=True):
        z = gaussian_noise_multiplier(epsilon=float(epsilon), delta=1e-5)
        assert noise == f"{gaussian_delta(epsilon=0.0, noise_multiplier=z):.2f}"
        plan = ReleasePlan(
            privacy=Privacy(
                epsilon=float(epsilon), delta=1e-5, encoder="frozen", links_per_record=1
            ),
            parties=1,
            min_active=1,
            rounds=1,
            rows_per_round=9,
            row_releases=9,
            releases_per_row=1,
            links=1,
            fitting=FittingPlan(share=0.05, steps=3),
            linked_rows=9,
            symbols=SymbolPlan(cells=cells, exchanged=False),
        )
        own, _ = cell_probabilities(cells, plan.noise_share_std())
        assert symbol == f"{own - 1 / cells:.2f}"


def test_how_often_computed_odds_pass_the_factor() -> None:
    """The privacy loss of a Gaussian release is normal: mean 1/(2 z^2), deviation 1/z."""
    z = gaussian_noise_multiplier(epsilon=4.0, delta=1e-6)
    beyond = [float(ndtr(1 / (2 * z) - epsilon * z)) for epsilon in (4, 5)]

    (shown,) = re.findall(r"in (\d+) of a million runs, and .* in (\d+) of a billion", PAGE)
    assert [round(beyond[0] * 1e6), round(beyond[1] * 1e9)] == [int(number) for number in shown]


def test_misreadings_are_answered() -> None:
    """One row for each of those that matter most, and the warning's threshold is the program's."""
    rows = rows_of("| it does not say | but |")
    wrong = " ".join(row[0] for row in rows)
    for word in ("probability", "Delta", "24", "company", "many", "labels", "later", "another"):
        assert word in wrong
    assert all(len(row) == 2 and row[1] for row in rows)
    assert f"is above {WEAK_EPSILON:g}, where noise" in PAGE.replace("\n  ", " ")


def test_whatever_shows_record_counts_is_listed() -> None:
    """Under these protections a count, exact, reaches the primary beside the promise.

    Their messages say so, and what they say that the primary learns.
    """
    (counts,) = [row for row in rows_of("| channel | who may learn") if "record counts" in row[0]]
    shows = {
        name
        for name, protection in PROTECTIONS.items()
        if any(
            "record counts" in one.COVERS and "to primary" in one.WAY for one in protection.messages
        )
    }
    assert shows == {"psi", "shares", "paillier"}
    assert all("how many" in PROTECTIONS[name].learned["primary"] for name in shows)
    assert set(re.findall(r"`(\w+)`", counts[0])) == shows | {"pad_to"}
    assert counts[2] == "not covered"
