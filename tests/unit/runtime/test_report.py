"""A run's report: what a reader must find on it, in the light and in the dark."""

import html
import re
from pathlib import Path

import pytest
from helpers.federations import FROZEN
from helpers.labelled_runs import write

from securevfl import read_federation
from securevfl.core.column_names import keys_in_clear
from securevfl.desk.report import plots
from securevfl.desk.report.page import write_report
from securevfl.desk.report.plots import epsilon_plot, loss_plot, metric_figure, svg
from securevfl.dp.statement import suspicion_in_words
from securevfl.testing import run_in_process, write_federation

pytestmark = pytest.mark.pictures


def marks(svg: str) -> int:
    """Return how many markers are drawn: each is used from its definition."""
    return len(re.findall(r"<use xlink:href=\"#m", svg))


def test_a_curve_of_one_epoch_is_drawn() -> None:
    one = [{"epoch": 1, "train": 0.5, "validation": 0.6, "loss": 0.7}]
    two = [*one, {**one[0], "epoch": 2}]
    for draw in (
        lambda rows: svg(metric_figure(rows, metric="auc", alone=None, name="")),
        loss_plot,
        lambda rows: epsilon_plot([row["epoch"] for row in rows], [1.0] * len(rows), budget=None),
    ):
        assert "1.02" not in draw(one)
        # Axes have markers for ticks, and the only point of a curve has one too.
        plots = draw(one), draw(two)
        paths = [plot.count("clip-path") - plot.count("<clipPath") for plot in plots]
        assert paths[0] > 0
        assert re.search(r'clip-path="[^"]*">\s*<use', draw(one))
        assert not re.search(r'clip-path="[^"]*">\s*<use', draw(two))
    alone = metric_figure(one, metric="auc", alone=0.5, name="the primary alone")
    assert ">the primary alone<" in svg(alone)


def test_a_report_says_when_and_of_which_rows(tmp_path: Path) -> None:
    path = write_federation(tmp_path, rows=60, training={"epochs": 1, "batch_size": 32})
    run = run_in_process(path, tmp_path / "run")
    page = write_report(tmp_path / "run").read_text(encoding="utf-8")
    assert run.metrics["run"] in page
    assert run.metrics["ended"][:10] in page
    assert f"{run.metrics['rows']['train']} training" in page
    assert sum(run.metrics["rows"].values()) == 60
    assert "records; half of these rows within" in page
    assert "prefers-color-scheme: dark" in page
    assert "tell where a row is" in page
    promise, _, appendix = page.partition("Appendix: figures of the accounting")
    assert "formula" not in promise
    assert "epsilon by the papers' formula (no guarantee)" in html.unescape(appendix)
    assert "1 epoch;" in page


@pytest.mark.parametrize("name", ["full_name", "birthDate", "Kunden-Nr", "card_number", "email"])
def test_keys_of_people_in_clear_are_a_warning(name: str) -> None:
    assert name in (keys_in_clear("none", ["x", name]) or "")
    assert keys_in_clear("bloom", [name]) is None
    assert keys_in_clear("none", ["x0"]) is None


def test_places_of_homes_in_clear_are_a_warning() -> None:
    assert "of homes, who lives there" in (keys_in_clear("none", ["lon", "homeLatitude"]) or "")
    assert keys_in_clear("shares", ["lon", "lat"]) is None


@pytest.mark.parametrize("ground", ["#ffffff", "#14181d"])
def test_plots_can_be_read_on_a_light_and_a_dark_page(ground: str) -> None:
    """They have no ground of their own, axes take the page's colour, and lines show on both."""

    def luminance(colour: str) -> float:
        parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
        red, green, blue = (
            one / 12.92 if one <= 0.03928 else ((one + 0.055) / 1.055) ** 2.4 for one in parts
        )
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    drawn = plots.loss_plot([{"epoch": 1, "loss": 2.0}, {"epoch": 2, "loss": 1.0}])
    assert "#000000" not in drawn
    assert "fill: #ffffff" not in drawn
    assert "text{fill:currentColor}" in drawn
    assert "stroke: currentColor" in drawn
    for colour in (plots.BLUE, plots.ORANGE, plots.GREY):
        low, high = sorted((luminance(colour), luminance(ground)))
        assert (high + 0.05) / (low + 0.05) >= 3, colour


def test_a_report_has_a_box_of_keys_in_clear(tmp_path: Path) -> None:
    path = write_federation(tmp_path, rows=60, training={"epochs": 1, "batch_size": 32})
    text = path.read_text(encoding="utf-8")
    keys = re.search(r'key = \[\s*"(\w+)"', text)
    assert keys is not None
    path.write_text(text.replace(f'"{keys[1]}"', '"birth_date"'), encoding="utf-8")
    for table in tmp_path.glob("*.csv"):
        head, rest = table.read_text().split("\n", 1)
        table.write_text("\n".join([head.replace(keys[1], "birth_date"), rest]))
    run_in_process(path, tmp_path / "run")
    page = write_report(tmp_path / "run").read_text(encoding="utf-8")
    assert re.search(r'class="statement warned">Warning: linkage.protection[^<]*birth_date', page)


def test_a_report_is_read_from_the_first_page_to_the_signature(tmp_path: Path) -> None:
    """Who, worth, promise, who learns what, ledgers, settings, lines to sign: in this order."""
    path = write(tmp_path, {"privacy": FROZEN})
    run = run_in_process(path, tmp_path / "run")
    page = write_report(tmp_path / "run").read_text(encoding="utf-8")
    headings = re.findall(r"<h2>([^<]*)</h2>", page)
    wanted = ["In short", "Is it worth it", "What is promised", "Who learns what", "Ledgers"]
    wanted += ["Curves, traffic and time", "Settings", "To sign"]
    assert [one for one in headings if one in wanted] == wanted
    config = read_federation(tmp_path / "run" / "federation.toml")
    assert page.count(config.digest) == 1
    signed = page[page.index("To sign") :]
    for party in config.parties:
        assert f"<td>{party.name}</td><td>{party.role}</td>" in page
        assert (f"<tr><td>{party.name}</td>" in signed) == (not party.is_helper)
    spent = max(run.metrics["privacy"]["epsilon"], run.metrics["privacy"]["epsilon_planned"])
    assert f"may become {suspicion_in_words(spent)} sure" in page
    assert "What a simulation cannot show" in page
    assert str(tmp_path) not in page


def test_a_report_names_what_no_guarantee_covers(tmp_path: Path) -> None:
    """Without noise the averages too; with it what noise has nothing to do with."""
    uncovered = {}
    for name, privacy in (("plain", {"mechanism": "none"}), ("noised", FROZEN)):
        folder = tmp_path / name
        folder.mkdir()
        path = write(folder, {"privacy": privacy})
        run_in_process(path, folder / "run")
        page = write_report(folder / "run").read_text(encoding="utf-8")
        (found,) = re.findall(r"No guarantee covers: ([^<]*)\.</p>", page)
        uncovered[name] = found.split("; ")
    assert "aggregates" in uncovered["plain"]
    assert "gradients" in uncovered["plain"]
    assert "aggregates" not in uncovered["noised"]
    assert "linkage" in uncovered["noised"]


def test_a_report_says_that_a_ledger_was_changed(tmp_path: Path) -> None:
    path = write(tmp_path, {"privacy": FROZEN})
    run_in_process(path, tmp_path / "run")
    assert "none failed" in write_report(tmp_path / "run").read_text(encoding="utf-8")
    (ledger, *_) = sorted((tmp_path / "run").glob("parties/*/ledger.jsonl"))[1:]
    lines = ledger.read_text().splitlines()
    ledger.write_text("\n".join([*lines[:-2], lines[-1]]) + "\n")
    page = write_report(tmp_path / "run").read_text(encoding="utf-8")
    assert "2 FAILED" in page, "the chain, and a checkpoint that rests on what was cut"
    assert re.search(r"<td>chain</td><td>bank-\d</td><td>BAD</td>", page)
