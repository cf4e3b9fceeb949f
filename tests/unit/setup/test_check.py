"""What ``securevfl check`` says before anything is done, and that it finds all that is wrong."""

import json
import sqlite3
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import tomli_w
from helpers.command_line import securevfl

from securevfl import read_federation
from securevfl.core.progress import LinksCounted
from securevfl.desk.setup import check, party_check
from securevfl.desk.setup.check import ExpectedLinks, check_federation
from securevfl.testing import write_federation

Capture = pytest.CaptureFixture[str]

PROMISED: dict[str, dict[str, Any]] = {
    "model": {
        "family": "fet",
        "neighbours": 2,
        "hidden": 4,
        "release": "pooled",
        "top": "additive",
    },
    "encoder": {"method": "principal"},
    "training": {"epochs": 2, "batch_size": 64},
    "privacy": {"epsilon": 8.0, "delta": 1e-5, "encoder": "frozen", "links_per_record": 1},
    "linkage": {"metric": "euclidean", "protection": "none", "choose": "records"},
}


def federation(folder: Path) -> tuple[Path, dict[str, Any]]:
    """Write a federation of 240 rows that keeps a promise; return its source, too."""
    path = write_federation(folder, **PROMISED)
    source = dict(read_federation(path).source)
    for party in source["party"][1:]:
        party |= {"scaling": "bounds", "bounds": [-4.0, 4.0]}
    save(path, source)
    return path, source


def save(path: Path, source: dict[str, Any]) -> None:
    path.write_text(tomli_w.dumps(source), encoding="utf-8")


def test_it_lists_features_keys_links_and_costs(tmp_path: Path, capfd: Capture) -> None:
    """Every column has its place, and every record its link."""
    path, _ = federation(tmp_path)

    checked = securevfl(capfd, "check", path, "--json")

    assert checked.code == 0, checked.err
    said = json.loads(checked.out)
    assert set(said["parties"]["bank-1"]["columns"]) == {"x0", "x1", "x2"}
    assert said["parties"]["agency"]["dropped"] == {
        "lon": "a key",
        "lat": "a key",
        "y": "the label",
    }
    assert said["links"]["bank-1"]["rows_linked"] == 240
    # Two numbers a row and secondary, in lanes of at least two bytes.
    assert said["costs"]["bytes_received"] > 2 * 240 * 2 * 2


def test_people_read_it_too(tmp_path: Path, capfd: Capture) -> None:
    path, _ = federation(tmp_path)

    ended = securevfl(capfd, "check", path, "--long")

    assert ended.code == 0, ended.err
    assert ended.err == ""
    for said in (
        "bank-1: secondary, 240 rows",
        "x0, x1, x2: number",
        "no features │ y (the label)",
        "links of bank-2: 240 of 240 rows (100%)",
        "a factor of 2,981 (epsilon = 8)",
        "what each party will learn",
        "nothing is wrong; next: securevfl simulate",
    ):
        assert said in " ".join(ended.out.split())
    assert '(not covered by epsilon: protection = "none"; about all, to all)' in " ".join(
        ended.out.split()
    )


def test_a_decision_takes_forty_lines(tmp_path: Path, capfd: Capture) -> None:
    """Of three parties: who has what, links, the sentence to sign, who learns what, the verdict."""
    path, _ = federation(tmp_path)

    ended = securevfl(capfd, "check", path)

    lines = ended.out.splitlines()
    assert ended.code == 0, ended.err
    assert len(lines) <= 40, ended.out
    assert [line for line in lines if len(line) > 80 and str(tmp_path) not in line] == []
    text = " ".join(ended.out.split())
    for shown in (
        "bank-1: secondary, 240 rows; 3 features of x0, x1, x2",
        "links of bank-2: 240 of 240 rows (100%)",
        "a factor of 2,981 (epsilon = 8)",
        "learns: not covered: linkage (the primary: ",
        "'lon', 'lat' tell where a row is: of homes, who lives there",
        "nothing is wrong; next: securevfl simulate",
    ):
        assert shown in text


def test_everything_wrong_at_once(tmp_path: Path, capfd: Capture) -> None:
    """Settings, a missing file, columns, values, words, bounds and a label, in one go.

    A run names the first alone.
    """
    path, source = federation(tmp_path)
    source["model"] |= {"nieghbours": 2, "neighbours": 2}
    source["training"] |= {"epochs": 0, "batch_size": "many"}
    source["privacy"]["delta"] = 2.0
    source["party"][0] |= {"exclude": ["x9"], "label": "yy"}
    source["party"][1] |= {"bounds": {"x0": [-4, 4], "x7": [0, 1]}}
    source["party"][2] |= {"data": "nowhere.csv"}
    save(path, source)
    table = pd.read_csv(tmp_path / "bank-1.csv").astype(object)
    table.loc[3, "lon"] = "north"
    table.loc[5, "x1"] = np.inf
    table["colour"] = ["red", "blue"] * 120
    table.loc[9, "x2"] = None
    table.to_csv(tmp_path / "bank-1.csv", index=False)

    ended = securevfl(capfd, "check", path, "--json")

    assert ended.code == 2
    problems = json.loads(ended.out)["problems"]
    assert ended.complaint == f"{path}: {len(problems)} problems"
    for said in (
        "model.nieghbours: no such field; did you mean 'neighbours'?",
        "training.epochs must be at least 1, got 0",
        "training.batch_size: must be a whole number, got 'many'",
        "privacy.delta must lie in (0, 1), got 2.0",
        "'agency': party.exclude: names 'x9', and there is no such column",
        "'agency': party.label: names 'yy', and there is no such column; did you mean 'y'?",
        "'bank-1': party.bounds: names 'x7', and there is no such column",
        "'bank-1': key 'lon'",
        "'bank-1': column 'x1': holds an infinite value in row 6",
        "'bank-1': column 'colour': which words there are depends on the records",
        "nowhere.csv",
    ):
        assert sum(said in problem for problem in problems) == 1, (said, problems)
    assert all("\n" not in problem for problem in problems)
    # A promise of settings that nobody wrote would be none.
    assert json.loads(ended.out)["privacy"] is None

    run = securevfl(capfd, "simulate", path, "--out", tmp_path / "run")
    assert run.code == 2
    assert sum(problem.split(";")[0] in run.complaint for problem in problems) == 1


def test_rules_and_methods_are_checked_next_to_settings(tmp_path: Path) -> None:
    """What two sections do not allow together, and a method's own table, in the same go."""
    path, source = federation(tmp_path)
    source["training"] |= {"epohcs": 3, "label_epsilon": 0.5}
    source["methods"] = {"wide": {"family": "fet", "hidden": "many"}}
    save(path, source)

    problems = check_federation(path).problems

    assert len(problems) == 3
    for said in (
        "training.epohcs: no such field; did you mean 'epochs'?",
        "training.label_epsilon: frozen encoders",
        "method 'wide': model.hidden: must be a whole number, got 'many'",
    ):
        assert sum(said in problem for problem in problems) == 1, (said, problems)


def test_every_undeclared_column_is_named(tmp_path: Path, capfd: Capture) -> None:
    """Under a promise: a word column, gaps, and numbers without bounds, each with what to write."""
    path, source = federation(tmp_path)
    source["party"][1]["bounds"] = {"x0": [-4.0, 4.0]}
    save(path, source)
    table = pd.read_csv(tmp_path / "bank-1.csv")
    table["colour"] = ["red", "blue"] * 120
    table.loc[9, "x0"] = None
    table.to_csv(tmp_path / "bank-1.csv", index=False)

    ended = securevfl(capfd, "check", path, "--json")

    assert ended.code == 2
    problems = json.loads(ended.out)["problems"]
    assert len(problems) == 4
    for said in (
        'missing_columns = ["x0"]',
        "categories = { colour =",
        "'x1' has none",
        "'x2' has",
    ):
        assert sum(said in problem for problem in problems) == 1, (said, problems)


def test_one_party_alone_needs_no_other_table(tmp_path: Path, capfd: Capture) -> None:
    """A secondary hears of its own table and of the promise; the others' files are not here."""
    path, _ = federation(tmp_path)
    whole = json.loads(securevfl(capfd, "check", path, "--json").out)
    (tmp_path / "agency.csv").unlink()
    (tmp_path / "bank-2.csv").unlink()

    alone = securevfl(capfd, "check", path, "--name", "bank-1", "--json")
    together = securevfl(capfd, "check", path, "--json")
    nobody = securevfl(capfd, "check", path, "--name", "bank-9", "--json")

    assert (alone.code, together.code, nobody.code) == (0, 2, 2)
    said = json.loads(alone.out)
    assert list(said["parties"]) == ["bank-1"]
    # A frozen encoder's noise is the same for any number of the primary's rows.
    assert said["privacy"] == whole["privacy"]
    assert (said["links"], said["costs"]) == ({}, None)
    assert len(json.loads(together.out)["problems"]) == 2
    assert "which has agency, bank-1, bank-2" in nobody.complaint


@pytest.mark.parametrize(
    ("written", "said"),
    [
        (None, "No such file or directory; check the path"),
        ("[federation", "is not TOML"),
        ("a = 1", "[a]: no such section"),
        ("party = 3", "[[party]]: must be a list of tables"),
        ("model = 3", "[model]: must be a table of settings, got 3"),
    ],
)
def test_what_is_no_federation_file(
    tmp_path: Path, capfd: Capture, written: str | None, said: str
) -> None:
    path = tmp_path / "fed.toml"
    if written is not None:
        path.write_text(written, encoding="utf-8")

    ended = securevfl(capfd, "check", path, "--json")

    assert ended.code == 2
    assert any(said in problem for problem in json.loads(ended.out)["problems"])


def test_few_links_are_worth_a_warning(tmp_path: Path, capfd: Capture) -> None:
    path, _ = federation(tmp_path)
    table = pd.read_csv(tmp_path / "bank-1.csv").head(30)
    table.to_csv(tmp_path / "bank-1.csv", index=False)

    ended = securevfl(capfd, "check", path, "--json")

    assert ended.code == 0
    warnings = [text for text in json.loads(ended.out)["warnings"] if "get a link" in text]
    assert len(warnings) == 1
    assert warnings[0].startswith("bank-1: only ")


@pytest.mark.parametrize(
    ("section", "name", "value"),
    [
        ("federation", "task", "classification"),
        ("privacy", "epsilon", "8"),
        ("privacy", "links_per_record", "1"),
        ("privacy", "encoder", "frozn"),
        ("linkage", "protection", "nothing"),
        ("model", "release", "x"),
        ("model", "hidden", "4"),
        ("encoder", "method", "x"),
        ("party", "role", "second"),
        ("party", "key", "lon"),
        ("party", "name", 7),
        ("party", "data", 7),
        ("party", "bounds", [4.0, -4.0]),
        ("party", "scaling", "bound"),
    ],
)
def test_one_wrong_value_is_one_line(
    tmp_path: Path, section: str, name: str, value: object
) -> None:
    """It is not missing, too, and nothing else is wrong because of it."""
    path, source = federation(tmp_path)
    (source["party"][1] if section == "party" else source[section])[name] = value
    save(path, source)

    (problem,) = check_federation(path).problems

    assert problem.startswith("party[1]." + name if section == "party" else f"{section}.{name}")


def test_a_column_that_is_wrong_still_has_its_place(tmp_path: Path, capfd: Capture) -> None:
    path, source = federation(tmp_path)
    table = tmp_path / source["party"][1]["data"]
    frame = pd.read_csv(table)
    frame.loc[3, "x1"] = np.inf
    frame.to_csv(table, index=False)

    ended = securevfl(capfd, "check", path)
    said = json.loads(securevfl(capfd, "check", path, "--json").out)

    (row,) = [line for line in ended.out.splitlines() if line.startswith("│ wrong as they are")]
    assert "x1" in row
    assert said["parties"]["bank-1"]["unusable"] == ["x1"]
    assert set(said["parties"]["bank-1"]["columns"]) == {"x0", "x2"}


def test_equal_keys_have_no_distance_in_words() -> None:
    """Also where the share is estimated from a part."""
    counts = LinksCounted(
        name="bureau",
        rows=10,
        records=10,
        rows_linked=9,
        records_linked=9,
        tied_rows=0,
        repeated_records=0,
        median_distance=0.0,
        unit="",
    )
    links = ExpectedLinks(counts=counts, all_rows=20, all_records=20, share=0.9)
    assert links.in_words().endswith("drawn at random), to equal keys")


def test_steps_that_take_long_are_announced(
    tmp_path: Path, capfd: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On standard error, by check and by init; small tables need no such line."""
    path, _ = federation(tmp_path)
    assert securevfl(capfd, "check", path, "--json").err == ""
    monkeypatch.setattr(party_check, "LARGE_FILE", 1)
    monkeypatch.setattr(check, "LARGE_LINKAGE", 480)
    tables = ("--primary", tmp_path / "agency.csv", "--secondary", tmp_path / "bank-1.csv")
    more = ("--label", "y", "--bounds-from-data", "--out", tmp_path / "new.toml")
    for arguments in (("check", path), ("init", *tables, *more)):
        ended = securevfl(capfd, *arguments, "--json")
        assert ended.code == 0, ended.err
        assert f"bank-1: reading {tmp_path / 'bank-1.csv'}, 0 MB\n" in ended.err
        assert "linking bank-1: 240 rows, 240 records\n" in ended.err


def test_a_query_is_shown_before_it_is_run(tmp_path: Path, capfd: Capture) -> None:
    """On the terminal, so that its owner sees what a copied source file would ask."""
    _, source = federation(tmp_path)
    query = "select lon, lat, x0, x1, x2 from t order by lon"
    with sqlite3.connect(tmp_path / "bank.sqlite") as database:
        pd.read_csv(tmp_path / "bank-1.csv").to_sql("t", database, index=False)
    database.close()
    own = tmp_path / "bank.source.toml"
    own.write_text(f'file = "bank.sqlite"\nquery = "{query}"\n')
    source["party"][1]["data"] = own.name
    path = tmp_path / "fed.toml"
    path.write_text(tomli_w.dumps(source))

    ended = securevfl(capfd, "check", path, "--json")
    assert ended.code == 0, ended.err
    assert ended.err == f"bank-1: {own} runs the query {query}\n"

    own.write_text('file = "bank.sqlite"\nquery = "drop table t -- order by"\n')
    ended = securevfl(capfd, "check", path, "--json")
    assert ended.code == 2
    assert "runs the query drop table t" in ended.err
    assert "query: must be one SELECT" in json.loads(ended.out)["problems"][0]
