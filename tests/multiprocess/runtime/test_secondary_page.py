"""A secondary's own page after a run between processes: what left, what it cost, what is left."""

import itertools
import json
import re
import shutil
from pathlib import Path

import pytest
from helpers.command_line import securevfl

from securevfl.ledger.book import Limit
from securevfl.ledger.ledger_file import ledger_of_table, set_limit, summary_of
from securevfl.testing import write_federation

pytestmark = [pytest.mark.pictures, pytest.mark.multiprocess]


@pytest.fixture(scope="module")
def promised(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a federation file under a promise; bank-1's owner has set a limit, bank-2's none."""
    folder = tmp_path_factory.mktemp("promised")
    path = write_federation(
        folder,
        rows=60,
        training={"epochs": 1, "batch_size": 32},
        model={
            "family": "fet",
            "neighbours": 4,
            "release": "pooled",
            "top": "additive",
            "hidden": 6,
        },
        privacy={"epsilon": 8.0, "delta": 1e-5, "encoder": "frozen", "links_per_record": 1},
        linkage={"choose": "records"},
        prediction={"epsilon": 16.0},
    )
    text = path.read_text(encoding="utf-8")
    bounds = 'role = "secondary"\nscaling = "bounds"\nbounds = [-5, 5]'
    path.write_text(text.replace('role = "secondary"', bounds), encoding="utf-8")
    limit = Limit(unit="secondary-record", epsilon=20, delta=1e-5)
    set_limit(ledger_of_table(folder / "bank-1.csv"), limit)
    return path


def test_a_secondary_has_a_page_of_its_own(
    promised: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = promised.parent / "run"
    trained = securevfl(capfd, "train", promised, "--out", run, "--json")
    assert trained.code == 0, trained.err
    own = run / "parties" / "bank-1"
    page = (own / "report.html").read_text(encoding="utf-8")
    assert (own / "report.html").stat().st_mode & 0o077 == 0
    summary = summary_of(ledger_of_table(promised.parent / "bank-1.csv"))
    assert summary.head in page
    assert summary.runs[0].run in page
    lead = page.split("<h2>")[0]
    assert "1 % sure" in lead
    assert re.search(
        r"more than 99 % sure by all that this run shows: epsilon = 2[34][.\d]*, [78][.\d]* by the "
        r"training and up to 16 by all predictions of its model, except .* of delta = 2e-05",
        lead,
    )
    assert f"{summary.runs[0].row_releases:,} rows in all" in page
    assert " records" in page.split("<h2>Links</h2>")[1].split("</p>")[0]
    assert "limit of epsilon = 20" in page
    assert "may spend epsilon = 16 " in page
    assert "no guarantee" in page
    # Nothing of what others alone know.
    for private in ("bank-2.csv", "agency.csv", "Verdict", "accuracy"):
        assert private not in page
    other = (run / "parties" / "bank-2" / "report.html").read_text(encoding="utf-8")
    assert "has set no limit" in other
    assert "So far 0 rows, each record in 1 at most" in page

    (own / "report.html").unlink()
    assert str(own / "report.html") in securevfl(capfd, "report", own).out
    assert (own / "report.html").read_text(encoding="utf-8") == page

    # What it says of a run that was lost between linking and the first release.
    lost = shutil.copytree(run, run.parent / "lost") / "parties" / "bank-1"
    lines = (lost / "ledger.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    before = itertools.takewhile(lambda line: json.loads(line)["kind"] != "charge", lines)
    (lost / "ledger.jsonl").write_text("".join(before), encoding="utf-8")
    assert securevfl(capfd, "report", lost).code == 0
    lost_page = (lost / "report.html").read_text(encoding="utf-8")
    assert "Nothing was released, and nothing was spent." in lost_page
    assert " warned" not in lost_page.split("<h2>")[0].split("<body")[1]

    rows, out = run.parent / "new.csv", run.parent / "out.csv"
    table = (promised.parent / "agency.csv").read_text(encoding="utf-8").splitlines()
    rows.write_text("\n".join(table[:21]), encoding="utf-8")
    asked = securevfl(
        capfd, "predict", run, "--rows", rows, "--out", out, "--data-root", run.parent
    )
    assert asked.code == 0, asked.err
    asked_page = (own / "report.html").read_text(encoding="utf-8")
    assert "So far 20 rows, each record in 1 at most" in asked_page


def test_a_folder_without_a_secondary_gets_one_line(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    ended = securevfl(capfd, "report", tmp_path)
    assert ended.code == 2
    assert "is it a finished run?" in ended.err
