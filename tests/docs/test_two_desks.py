"""Each page's journey twice: with all tables on one machine, and with each party's on its own."""

import json
import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from helpers.command_line import securevfl

from securevfl import read_federation

Capture = pytest.CaptureFixture[str]
DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGES = ("orders", "tutorial")


def tables_and_init(page: str) -> tuple[str, list[str]]:
    """Return a page's program for its tables, with few rows, and the words of its init."""
    text = (DOCS / f"{page}.md").read_text(encoding="utf-8")
    program = re.findall(r"```python\n(.*?)```", text, re.DOTALL)[0]
    program = re.sub(r"people = \d+", "people = 400", program).replace("2500", "350")
    (line,) = re.findall(r"^securevfl (init .*)$", text, re.MULTILINE)
    return program, shlex.split(line)


def options(words: list[str], name: str) -> list[str]:
    """Return the values of an option that may stand there several times."""
    return [words[place + 1] for place, word in enumerate(words) if word == name]


def asked(ended: Any) -> Any:
    assert ended.code == 0, ended.err
    return json.loads(ended.out)


@pytest.fixture(params=PAGES)
def desks(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    capfd: Capture,
    monkeypatch: pytest.MonkeyPatch,
) -> tuple[Path, dict[str, Path], Any, Any]:
    """One folder with everything, a folder for each party, and what init answers in each way."""
    monkeypatch.chdir(tmp_path)
    program, words = tables_and_init(request.param)
    exec(compile(program, request.param, "exec"), {})
    (out,) = options(words, "--out")
    alone = asked(securevfl(capfd, *words, "--json"))
    partners = options(words, "--secondary")
    of_primary = list(words)
    desks = {Path(options(words, "--primary")[0]).stem: tmp_path / "primary"}
    for table in partners:
        desk = desks.setdefault(Path(table).stem, tmp_path / Path(table).stem)
        desk.mkdir()
        shutil.copy(table, desk)
        columns = pd.read_csv(table, nrows=1).columns
        declared = [
            word
            for name in ("--bounds", "--missing")
            for value in options(words, name)
            if value.partition("=")[0] in columns
            for word in (name, value)
        ]
        card = desk / "card.json"
        assert securevfl(capfd, "columns", desk / table, *declared, "--out", card).code == 0
        place = of_primary.index(table)
        of_primary[place - 1 : place + 1] = ["--columns", str(card)]
    for name in ("--bounds", "--missing"):
        while name in of_primary:
            place = of_primary.index(name)
            del of_primary[place : place + 2]
    first = tmp_path / "primary"
    first.mkdir()
    shutil.copy(options(words, "--primary")[0], first)
    of_primary[of_primary.index("--primary") + 1] = str(
        first / Path(options(words, "--primary")[0]).name
    )
    of_primary[of_primary.index("--out") + 1] = str(first / out)
    apart = asked(securevfl(capfd, *of_primary, "--json"))
    for desk in desks.values():
        if desk != first:
            shutil.copy(first / out, desk)
    return tmp_path / out, {name: desk / out for name, desk in desks.items()}, alone, apart


def test_two_desks_come_to_the_same_run_links_and_warnings(
    desks: tuple[Path, dict[str, Path], Any, Any], capfd: Capture
) -> None:
    """The file has the same digest, of which verdicts follow but for noise."""
    together, apart, by_one, by_cards = desks
    assert by_cards["open"] == by_one["open"] == []
    assert by_cards["keys"] == by_one["keys"]
    configs = [read_federation(path) for path in (together, *apart.values())]
    assert len({config.digest for config in configs}) == 1

    whole = asked(securevfl(capfd, "check", together, "--json"))
    parts = {
        name: asked(securevfl(capfd, "check", path, "--name", name, "--json"))
        for name, path in apart.items()
    }

    assert {warning for part in parts.values() for warning in part["warnings"]} == {
        *whole["warnings"]
    }
    assert all(links["share"] > 0.9 for links in whole["links"].values())
    for part in parts.values():
        assert part["privacy"]["epsilon"] == whole["privacy"]["epsilon"]
        assert part["learns"] == whole["learns"]
