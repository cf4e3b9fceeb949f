"""What ``securevfl init`` writes: a file that loads and runs, with no more in it than it should."""

import json
import os
import re
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from helpers.command_line import Ended, securevfl
from helpers.housing import write_tables
from helpers.people import PEOPLE, write_people

from securevfl import read_federation
from securevfl.desk.setup.proposed_columns import date_form

Capture = pytest.CaptureFixture[str]

ROWS = 100
BOUNDS = ("--bounds", "rent=0,500", "--bounds", "nights=0,500", "--bounds", "*s=0,100")


def init(capfd: Capture, folder: Path, *arguments: object) -> tuple[Ended, Path]:
    out = folder / "fed.toml"
    return securevfl(capfd, "init", *arguments, "--out", out), out


def of_housing(folder: Path) -> list[object]:
    write_tables(folder, rows=ROWS)
    secondaries = ("--secondary", folder / "rental.csv", "--secondary", folder / "school.csv")
    return ["--primary", folder / "agency.csv", "--label", "price", *secondaries]


def of_people(folder: Path) -> list[object]:
    write_people(folder)
    tables = ("--primary", folder / "bank.csv", "--secondary", folder / "shop.csv")
    return [*tables, "--label", "default", "--bounds-from-data"]


def test_the_readme_tables_run_without_an_edit(tmp_path: Path, capfd: Capture) -> None:
    """With the settings that gain most, and the promise that check has in words."""
    ended, out = init(capfd, tmp_path, *of_housing(tmp_path), *BOUNDS)
    assert ended.code == 0, ended.err
    config = read_federation(out)
    assert config.primary.key == ("lon", "lat")
    assert config.linkage.metric == "great-circle"
    assert config.encoder is not None
    assert (config.encoder.method, config.encoder.labels) == ("class-means", "randomised")
    assert config.family.cut_shape(config.model) == (1, 1)
    assert config.top is not None
    assert config.top.name == "mixed"

    run = securevfl(capfd, "simulate", out, "--out", tmp_path / "run", "--json")

    assert run.code == 0, run.err
    privacy = json.loads(run.out)["privacy"]
    assert privacy["epsilon"] <= 2.0
    checked = " ".join(securevfl(capfd, "check", out).out.split())
    assert privacy["statement"] in checked
    # It is said once, where it is to be signed.
    assert "Suppose" not in " ".join(comments(out))
    assert "Suppose" not in securevfl(capfd, "simulate", out, "--out", tmp_path / "again").out


def test_names_dates_and_gaps_run_without_an_edit(tmp_path: Path, capfd: Capture) -> None:
    """Names are keys, an id that repeats nowhere is no feature, dates and words are features.

    And the run does what ``check`` says beforehand.
    """
    ended, out = init(capfd, tmp_path, *of_people(tmp_path))
    assert ended.code == 0, ended.err
    config = read_federation(out)
    bank, shop = config.parties
    assert bank.key == ("name", "birth_date")
    assert shop.key == ("full name", "birth date")
    assert (config.linkage.metric, config.federation.task) == ("levenshtein", "binary")
    assert bank.exclude == ("customer_id", "remark")
    assert shop.missing_columns == ("spent", "plan")
    assert isinstance(shop.bounds, dict)
    assert set(shop.bounds) == {"spent", "since"}
    assert shop.categories == {"plan": ("basic", "gold", "other")}

    checked = securevfl(capfd, "check", out, "--json")
    run = securevfl(capfd, "simulate", out, "--out", tmp_path / "run", "--json")

    assert checked.code == 0, checked.err
    assert run.code == 0, run.err
    said, done = json.loads(checked.out), json.loads(run.out)["privacy"]
    assert said["privacy"]["epsilon"] == done["epsilon_planned"]
    assert said["learns"] == done["channels"]
    for figure in ("noise_share_std", "sensitivity", "statement", "delta"):
        assert said["privacy"][figure] == done[figure]


def test_what_nobody_declares_is_left_open_and_never_taken_in_silence(
    tmp_path: Path, capfd: Capture
) -> None:
    """The file loads, has no range, does not run, and ``check`` names every column."""
    ended, out = init(capfd, tmp_path, *of_housing(tmp_path), "--bounds", "rent=0,500")
    assert ended.code == 0, ended.err
    config = read_federation(out)
    assert [party.bounds for party in config.secondaries] == [{"rent": (0.0, 500.0)}, {}]
    left = re.findall(r"^# FILL IN: (\w+) = ", out.read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert left == ["nights", "marks", "pupils"]

    checked = securevfl(capfd, "check", out, "--json")
    run = securevfl(capfd, "simulate", out, "--out", tmp_path / "run", "--json")

    assert (checked.code, run.code) == (2, 2)
    problems = json.loads(checked.out)["problems"]
    assert [any(f"'{name}' has none" in line for line in problems) for name in left] == [True] * 3
    assert len(problems) == 3


def test_the_file_holds_no_figure_of_the_records(tmp_path: Path, capfd: Capture) -> None:
    """Tables that differ in their values alone, by a third or so, give the same file."""
    texts = []
    for factor in (1.0, 1.3):
        arguments = of_housing(tmp_path)
        for name in ("agency", "rental", "school"):
            frame = pd.read_csv(tmp_path / f"{name}.csv")
            values = frame.columns.difference(["lon", "lat"])
            frame[values] = frame[values] * factor + 0.25
            frame.to_csv(tmp_path / f"{name}.csv", index=False)
        ended, out = init(capfd, tmp_path, *arguments, "--overwrite")
        assert ended.code == 0, ended.err
        texts.append(out.read_text(encoding="utf-8"))

    assert texts[0] == texts[1]


def test_a_range_from_the_records_shows_no_single_one(tmp_path: Path, capfd: Capture) -> None:
    """One record's extreme moves nothing, and the file says where its ranges come from."""
    arguments = of_housing(tmp_path)
    frame = pd.read_csv(tmp_path / "rental.csv")
    frame.loc[7, "rent"] = 123_456.0
    frame.to_csv(tmp_path / "rental.csv", index=False)

    _, out = init(capfd, tmp_path, *arguments, "--bounds-from-data")

    bounds = read_federation(out).secondaries[0].bounds
    assert isinstance(bounds, dict)
    assert bounds["rent"] == (0.0, 500.0)
    assert "Epsilon does not cover what they tell" in " ".join(comments(out))


def of_places(folder: Path) -> list[object]:
    """Twenty places, with five rows of the primary and one record each."""
    random = np.random.default_rng(4)
    places = random.uniform(0, 1, (20, 2))
    for name, each in (("agency", 5), ("rental", 1)):
        keys = np.repeat(places, each, axis=0) + random.normal(scale=1e-5, size=(20 * each, 2))
        values = random.normal(size=20 * each)
        column = "price" if each > 1 else "rent"
        frame = pd.DataFrame({"lon": keys[:, 0], "lat": keys[:, 1], column: values})
        frame.assign(rooms=random.normal(size=len(frame))).to_csv(
            folder / f"{name}.csv", index=False
        )
    return ["--primary", folder / "agency.csv", "--label", "price"]


def test_it_says_how_many_rows_get_a_link(tmp_path: Path, capfd: Capture) -> None:
    """Of every place one row of five is linked, and the limit stays, with a warning.

    No such figure of the records stands in the file, which goes to others.
    """
    tables = [*of_places(tmp_path), "--secondary", tmp_path / "rental.csv"]
    declared = ("--bounds", "rent=-4,4", "--bounds", "rooms=-4,4")
    for more in (declared, ("--bounds-from-data",)):
        ended, out = init(capfd, tmp_path, *tables, *more, "--overwrite", "--json")
        assert ended.code == 0, ended.err
        found = json.loads(ended.out)
        assert found["links"]["rental"]["share"] == 0.2
        (few,) = [text for text in found["warnings"] if "only 20% of the rows get a link" in text]
        assert "a larger number takes more noise" in few
        assert read_federation(out).privacy.links_per_record == 1
        assert "20%" not in out.read_text(encoding="utf-8")
    spoken, _ = init(capfd, tmp_path, *tables, *declared, "--overwrite")
    said = " ".join(spoken.out.split())
    assert "links of rental: 20 of 100 rows (20%)" in said
    assert "warning: rental: only 20% of the rows get a link" in said


def test_of_a_column_list_no_links_are_counted(tmp_path: Path, capfd: Capture) -> None:
    """Of a table that is elsewhere nothing is said; and nobody is warned without need."""
    tables = of_places(tmp_path)
    out = tmp_path / "rental.json"
    listed = securevfl(capfd, "columns", tmp_path / "rental.csv", "--out", out)
    assert listed.code == 0, listed.err
    ended, _ = init(capfd, tmp_path, *tables, "--columns", out, "--json")
    assert json.loads(ended.out)["links"] == {}
    housing = of_housing(tmp_path)
    ended, _ = init(capfd, tmp_path, *housing, *BOUNDS, "--overwrite", "--json")
    proposed = json.loads(ended.out)
    assert min(links["share"] for links in proposed["links"].values()) > 0.95
    assert not [text for text in proposed["warnings"] if "get a link" in text]


def test_equal_ids_are_linked_exactly(tmp_path: Path, capfd: Capture) -> None:
    """Sixteen digits in all tables: equal or not, whatever else the tables have in common."""
    random = np.random.default_rng(3)
    ids = 4_000_000_000_000_000 + random.permutation(100_000)[:60]
    for name, column in (("bank", "x"), ("shop", "z")):
        frame = pd.DataFrame({"card_id": ids, column: random.normal(size=60)})
        frame["y"] = frame[column] > 0
        frame.sample(frac=1, random_state=1).to_csv(tmp_path / f"{name}.csv", index=False)
    tables = ("--primary", tmp_path / "bank.csv", "--secondary", tmp_path / "shop.csv")

    ended, out = init(capfd, tmp_path, *tables, "--label", "y", "--bounds-from-data")

    assert ended.code == 0, ended.err
    config = read_federation(out)
    assert (config.linkage.metric, config.primary.key) == ("exact", ("card_id",))
    assert config.model.neighbours == 1
    checked = json.loads(securevfl(capfd, "check", out, "--json").out)
    assert checked["problems"] == []
    assert checked["links"]["shop"]["rows_linked"] == 60


def test_stored_row_numbers_neither_link_nor_teach(tmp_path: Path, capfd: Capture) -> None:
    """What pandas writes in front of a table is no key and no feature; check names it too."""
    random = np.random.default_rng(2)
    for name in ("bank", "tel"):
        frame = pd.DataFrame({"id": random.permutation(60) + 1000, "x": random.normal(size=60)})
        frame["paid"] = frame.x > 0
        frame.to_csv(tmp_path / f"{name}.csv")
    tables = ("--primary", tmp_path / "bank.csv", "--secondary", tmp_path / "tel.csv")

    ended, out = init(capfd, tmp_path, *tables, "--label", "paid", "--bounds-from-data")

    assert ended.code == 0, ended.err
    parties = read_federation(out).parties
    assert [party.key for party in parties] == [("id",), ("id",)]
    assert [party.exclude for party in parties] == [("unnamed-1",), ("unnamed-1",)]

    source = out.read_text(encoding="utf-8")
    out.write_text(re.sub(r"\nexclude = \[.*?\]", "", source, flags=re.DOTALL), "utf-8")
    checked = securevfl(capfd, "check", out, "--json")
    said = json.loads(checked.out)
    assert checked.code == 0, said["problems"]
    assert set(said["parties"]["bank"]["columns"]) == {"x"}
    assert said["parties"]["bank"]["dropped"]["unnamed-1"] == "a row number without a name"
    assert sum("'unnamed-1' has no name of its own" in one for one in said["warnings"]) == 2


def test_a_column_list_tells_no_value_and_no_count(tmp_path: Path, capfd: Capture) -> None:
    """It is the same for any records of the same kinds, and is enough to propose a file from."""
    write_people(tmp_path)
    lists = []
    for rows in (PEOPLE, PEOPLE // 2):
        frame = pd.read_csv(tmp_path / "shop.csv").head(rows)
        frame.to_csv(tmp_path / "shop.csv", index=False)
        out = tmp_path / "shop.json"
        said = ("--bounds", "spent=0,900", "--words", "plan=basic,gold,other", "--missing", "plan")
        ended = securevfl(capfd, "columns", tmp_path / "shop.csv", *said, "--out", out)
        assert ended.code == 0, ended.err
        lists.append(json.loads(out.read_text(encoding="utf-8")))
    assert lists[0] == lists[1]
    told = {entry["name"]: entry for entry in lists[0]["columns"]}
    assert told["spent"] == {"name": "spent", "kind": "number", "bounds": [0.0, 900.0]}
    assert told["since"] == {"name": "since", "kind": "date"}

    tables = ("--primary", tmp_path / "bank.csv", "--columns", tmp_path / "shop.json")
    ended, out = init(capfd, tmp_path, *tables, "--label", "default")

    assert ended.code == 0, ended.err
    (shop,) = read_federation(out).secondaries
    assert (shop.bounds, shop.missing_columns) == ({"spent": (0.0, 900.0)}, ("plan",))
    assert "# FILL IN: since = " in out.read_text(encoding="utf-8")


def test_a_table_of_german_excel_runs_without_an_edit(tmp_path: Path, capfd: Capture) -> None:
    """Windows-1252, 28.03.1956: the advice of the first try makes the second one work."""
    arguments = of_people(tmp_path)
    path = tmp_path / "shop.csv"
    frame = pd.read_csv(path, dtype=str)
    frame["since"] = pd.to_datetime(frame["since"]).dt.strftime("%d.%m.%Y")
    frame["plan"] = frame["plan"].where(frame["plan"] != "basic", "günstig")
    path.write_bytes(frame.to_csv(index=False).encode("windows-1252"))

    refused, out = init(capfd, tmp_path, *arguments)
    assert refused.code == 2
    advice = "write --reading encoding=windows-1252 (or into a NAME.source.toml"
    assert advice in refused.complaint
    said = ("--reading", "shop.encoding=windows-1252")
    ended, out = init(capfd, tmp_path, *arguments, *said)

    assert ended.code == 0, ended.err
    (shop,) = read_federation(out).secondaries
    assert (shop.reading.encoding, shop.reading.dates) == ("windows-1252", "%d.%m.%Y")
    assert "since" not in shop.exclude
    assert read_federation(out).primary.reading.encoding is None
    checked = securevfl(capfd, "check", out)
    assert checked.code == 0, checked.err
    listed = tmp_path / "shop.json"
    securevfl(capfd, "columns", path, "--out", listed, *said)
    assert json.loads(listed.read_text(encoding="utf-8"))["reading"] == {
        "encoding": "windows-1252",
        "dates": "%d.%m.%Y",
    }


@pytest.mark.parametrize(
    ("days", "form"),
    [
        (["31/12/2020", "01/02/2021"], "%d/%m/%Y"),
        (["12/31/2020", "01/02/2021"], "%m/%d/%Y"),
        (["01/02/2020", "03/04/2021"], None),
        (["28.03.1956 10:15", "1.4.1956 9:00"], "%d.%m.%Y %H:%M"),
        (["28.03.1956", "1956-04-01"], None),
        (["28.03.56", "01.04.56"], None),
    ],
)
def test_a_form_of_dates_is_proposed_where_one_reads_all(days: list[str], form: str | None) -> None:
    assert date_form(pd.DataFrame({"day": days, "who": ["1.2", "x"]})) == form


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--label", "prise"), "--label prise: of 'agency', no column is called so; did you mean"),
        (("--key", "lone"), "--key lone: of 'agency', no column is called so; did you mean 'lon'?"),
        (("--key", "lon=lno"), "--key lon=lno: 'lno': no column is called so; did you mean 'lon'?"),
        (("--exclude", "rents"), "--exclude rents: no column is called so; did you mean 'rent'?"),
        (("--bounds", "x*=0,1"), "--bounds x*: no column is called so; there are lon, lat, rooms"),
        (("--words", "zone=a,b"), "--words zone: no column is called so; there are lon, lat"),
        (("--missing", "mark"), "--missing mark: no column is called so; did you mean 'marks'?"),
        (("--bounds", "rent=5"), "--bounds rent: bounds: must be low,high"),
        (("--bounds", "rent"), "--bounds: must be COLUMN=LOW,HIGH, got 'rent'"),
        (("--bounds", "rent=9,1"), "--bounds rent: bounds: must be finite and ascending"),
        (("--reading", "encoding"), "--reading: must be NAME=VALUE such as encoding=windows-1252"),
        (("--reading", "agncy.decimal=,"), "--reading agncy.decimal: no party is called so; did"),
        (("--reading", "encodin=utf-8"), "--reading.encodin: no such field; did you mean 'encod"),
        (("--reading", "rental.encoding=utf-9"), "--reading rental.encoding: 'utf-9' is not known"),
        (
            ("--reading", "dates=%d.%m"),
            "--reading.dates: must name the day, the month and all four",
        ),
        (("--positive", "yes"), "--positive yes: is one of two classes; the task is regression"),
        (("--columns", "nowhere.json"), "column list nowhere.json: can't be read"),
        (("--epsilon", "0"), "epsilon must be finite and > 0"),
    ],
)
def test_bad_input_is_one_line(
    tmp_path: Path, capfd: Capture, arguments: tuple[str, ...], said: str
) -> None:
    ended, out = init(capfd, tmp_path, *of_housing(tmp_path), *arguments)

    assert ended.code == 2
    assert ended.complaint.startswith(said)
    assert not out.exists()


def test_a_task_is_one_of_three(tmp_path: Path, capfd: Capture) -> None:
    ended, out = init(capfd, tmp_path, *of_housing(tmp_path), "--task", "guess")
    assert ended.code == 2
    for shown in ("--task", "'guess'", "multiclass"):
        assert shown in ended.err
    assert not out.exists()


def test_the_positive_class_stands_in_the_file(tmp_path: Path, capfd: Capture) -> None:
    """By the label's own word; a word that no row has is refused."""
    tables = of_people(tmp_path)
    words = sorted(pd.read_csv(tmp_path / "bank.csv")["default"].astype(str).unique())
    ended, out = init(capfd, tmp_path, *tables, "--positive", words[0])
    assert ended.code == 0, ended.err
    assert read_federation(out).primary.positive == words[0]
    ended, _ = init(capfd, tmp_path, *tables, "--positive", "perhaps", "--overwrite")
    assert ended.code == 2
    assert "positive: is 'perhaps'" in ended.complaint


def test_a_primary_may_have_keys_and_labels_alone(tmp_path: Path, capfd: Capture) -> None:
    """Its partners have the features; a secondary without any is refused."""
    ids = [f"c{number}" for number in range(120)]
    labels, theirs = np.arange(120) % 3 > 0, np.arange(120.0) % 7
    pd.DataFrame({"id": ids, "y": labels}).to_csv(tmp_path / "bank.csv", index=False)
    pd.DataFrame({"id": ids, "b": theirs}).to_csv(tmp_path / "bureau.csv", index=False)
    pd.DataFrame({"id": ids}).to_csv(tmp_path / "bare.csv", index=False)
    bank = ("--primary", tmp_path / "bank.csv", "--label", "y", "--bounds", "b=0,7")
    ended, out = init(capfd, tmp_path, *bank, "--secondary", tmp_path / "bureau.csv")
    assert ended.code == 0, ended.err
    assert securevfl(capfd, "check", out).code == 0
    again = (*bank[:4], "--overwrite", "--secondary", tmp_path / "bare.csv")
    refused, _ = init(capfd, tmp_path, *again)
    assert refused.code == 2
    assert "party 'bare': no column is left that could be a feature" in refused.err


def test_a_file_that_is_there_stays(tmp_path: Path, capfd: Capture) -> None:
    (tmp_path / "fed.toml").write_text("mine", encoding="utf-8")

    ended, out = init(capfd, tmp_path, *of_housing(tmp_path))

    assert ended.code == 2
    assert "add --overwrite" in ended.complaint
    assert out.read_text(encoding="utf-8") == "mine"


def test_hostile_column_names_stay_text(tmp_path: Path, capfd: Capture) -> None:
    """A name with quotes, line ends and brackets is neither TOML nor a style of the console."""
    name = 'a"]\n[privacy]\nmechanism = "none" #[bold]'
    arguments = of_housing(tmp_path)
    frame = pd.read_csv(tmp_path / "rental.csv").rename(columns={"rent": name})
    frame.to_csv(tmp_path / "rental.csv", index=False)

    ended, out = init(capfd, tmp_path, *arguments, "--bounds-from-data")

    assert ended.code == 0, ended.err
    config = read_federation(out)
    assert config.privacy.mechanism == "gaussian"
    assert name in (config.secondaries[0].bounds or {})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("folder", "label", "metric"),
    [("house_kc", "y", "great-circle"), ("febrl", "key_state", "levenshtein")],
)
def test_real_tables_run_without_an_edit(
    tmp_path: Path, capfd: Capture, folder: str, label: str, metric: str
) -> None:
    if "SECUREVFL_DATA" not in os.environ:
        pytest.skip("SECUREVFL_DATA names the folder of real tables")
    data = Path(os.environ["SECUREVFL_DATA"]) / folder
    truth = ("--truth", "entity") if folder == "febrl" else ()
    tables = ("--primary", data / "primary.csv.gz", "--secondary", data / "secondary.csv.gz")

    ended, out = init(capfd, tmp_path, *tables, *truth, "--label", label, "--bounds-from-data")
    checked = securevfl(capfd, "check", out, "--json")
    run = securevfl(capfd, "simulate", out, "--out", tmp_path / "run", "--json")

    assert (ended.code, checked.code, run.code) == (0, 0, 0), ended.err + checked.err + run.err
    assert read_federation(out).linkage.metric == metric
    assert json.loads(run.out)["privacy"]["epsilon"] <= 8.0


def vars_of(settings: Any) -> dict[str, Any]:
    return {name: getattr(settings, name) for name in type(settings).__dataclass_fields__}


def comments(path: Path) -> list[str]:
    lines = path.read_text(encoding="utf-8").splitlines()
    return [line.removeprefix("# ") for line in lines if line.startswith("# ")]


def test_a_table_elsewhere_is_named_by_a_file_of_this_machine(
    tmp_path: Path, capfd: Capture
) -> None:
    """The shared file has no path of one machine, and runs as it is."""
    (tables := tmp_path / "tables").mkdir()
    (here := tmp_path / "here").mkdir()
    asked = of_housing(tables)
    ended, out = init(capfd, here, *asked, *BOUNDS)
    assert ended.code == 0, ended.err
    assert str(tmp_path) not in out.read_text()
    own = [here / f"{name}.source.toml" for name in ("agency", "rental", "school")]
    assert [here / one.data for one in read_federation(out).parties] == own
    checked = securevfl(capfd, "check", out)
    assert checked.code == 0, checked.out

    out.unlink()
    again, _ = init(capfd, here, *asked, *BOUNDS)
    assert again.complaint.startswith(f"{own[0]}: is there already; add --overwrite")
    elsewhere = tables / "agency.source.toml"
    elsewhere.write_text('file = "agency.csv"\n')
    asked[1] = elsewhere
    refused, _ = init(capfd, here, *asked, *BOUNDS, "--overwrite")
    assert "must lie below the folder of --out" in refused.complaint


def write_spelled_ids(folder: Path, spell: Callable[[int], str]) -> None:
    """A bank that spells ids as they come, and a bureau with eight digits each."""
    random = np.random.default_rng(5)
    ids = random.permutation(np.arange(100_000, 900_000))[:900]
    income = random.lognormal(3.4, 0.5, len(ids)).round(2)
    bureau = {"CustomerID": [f"{number:08d}" for number in ids], "income": income, "place": "CB-1"}
    pd.DataFrame(bureau).to_csv(folder / "bureau.csv", index=False)
    rows = random.choice(len(ids), 400, replace=False)
    bank = pd.DataFrame({"Kunden-Nr": [spell(number) for number in ids[rows]]})
    bank["amount"] = random.normal(size=len(rows)).round(3)
    bank["default"] = np.where(income[rows] > 30, "no", "yes")
    bank.to_csv(folder / "bank.csv", index=False)


@pytest.mark.parametrize(
    "spell",
    [
        lambda number: f"{number}",
        lambda number: [f"{number}", f"{number:08d}", f"C-{number:08d}"][number % 3],
        lambda number: f" {number:08d} ",
    ],
    ids=["without zeros", "three ways", "alike"],
)
def test_two_desks_propose_the_file_that_one_does(
    tmp_path: Path, capfd: Capture, spell: Callable[[int], str]
) -> None:
    write_spelled_ids(tmp_path, spell)
    bounds = ("--bounds", "income=0,200")
    bank = ("--primary", tmp_path / "bank.csv", "--label", "default", "--positive", "yes")
    asked = (*bank, "--key", "Kunden-Nr=CustomerID", "--name", "loans", "--json")
    card = tmp_path / "bureau.json"

    listed = securevfl(capfd, "columns", tmp_path / "bureau.csv", *bounds, "--out", card)
    one = (*asked, "--secondary", tmp_path / "bureau.csv", *bounds, "--out", tmp_path / "one.toml")
    two = (*asked, "--columns", card, "--out", tmp_path / "two.toml")
    proposed = [securevfl(capfd, "init", *arguments) for arguments in (one, two)]

    assert [listed.code, *(ended.code for ended in proposed)] == [0, 0, 0]
    alone, apart = (json.loads(ended.out) for ended in proposed)
    assert apart["warnings"] == alone["warnings"]
    files = [tomllib.loads((tmp_path / f"{desk}.toml").read_text()) for desk in ("one", "two")]
    assert files[1] == files[0]
    checked = securevfl(capfd, "check", tmp_path / "two.toml", "--json")
    assert json.loads(checked.out)["links"]["bureau"]["share"] == 1.0


def test_two_desks_say_that_no_setting_makes_keys_alike(tmp_path: Path, capfd: Capture) -> None:
    write_spelled_ids(tmp_path, lambda number: f"{number}{number}")
    card = tmp_path / "bureau.json"
    bounds = ("--bounds", "income=0,200")
    securevfl(capfd, "columns", tmp_path / "bureau.csv", *bounds, "--out", card)

    bank = ("--primary", tmp_path / "bank.csv", "--label", "default")
    asked = (*bank, "--key", "Kunden-Nr=CustomerID", "--columns", card, "--json")
    ended, _ = init(capfd, tmp_path, *asked)

    (doubt,) = json.loads(ended.out)["warnings"]
    assert "look like 999999999999, those of bureau like 00999999" in doubt


def test_a_card_has_no_value_and_no_rare_form(tmp_path: Path, capfd: Capture) -> None:
    """A form of 19 keys, of few keys altogether, and what is the same in every row."""
    keys = [
        *(f"{n:07d}" for n in range(1_000_000, 1_000_400)),
        *(f"VIP/{n}" for n in range(10, 29)),
    ]
    table = pd.DataFrame({"customer_id": keys, "ward": "oncology", "x": range(len(keys))})
    cards = {}
    for name, rows in {"all": table, "three": table.tail(3), "rare": table.tail(19)}.items():
        rows.to_csv(tmp_path / f"{name}.csv", index=False)
        card = tmp_path / f"{name}.json"
        assert securevfl(capfd, "columns", tmp_path / f"{name}.csv", "--out", card).code == 0
        cards[name] = card.read_text()

    columns = {column["name"]: column for column in json.loads(cards["all"])["columns"]}
    assert columns["customer_id"]["form"] == {"texts": ["9999999"]}
    assert columns["ward"]["no_feature"] == "is the same in every row"
    for text in cards.values():
        assert not re.search(r"VIP|A-|oncology|1000\d{3}", text)
    assert '"form"' not in cards["three"] + cards["rare"]


def test_check_names_what_init_has_left_open_of_a_table_elsewhere(
    tmp_path: Path, capfd: Capture
) -> None:
    """And its next step is that of the party that reads it."""
    write_spelled_ids(tmp_path, str)
    card = tmp_path / "bureau.json"
    securevfl(capfd, "columns", tmp_path / "bureau.csv", "--out", card)
    bank = ("--primary", tmp_path / "bank.csv", "--label", "default", "--columns", card)
    ended, out = init(capfd, tmp_path, *bank, "--key", "Kunden-Nr=CustomerID", "--json")
    assert json.loads(ended.out)["open"] == ["bureau.income"]

    opened = securevfl(capfd, "check", out, "--name", "bank", "--json")
    (problem,) = json.loads(opened.out)["problems"]
    assert "of 'bureau', is left open: income = [LOW, HIGH]" in problem
    assert opened.code == 2

    text = out.read_text(encoding="utf-8")
    out.write_text(re.sub("# FILL IN: income = .*", "income = [0, 200]", text), encoding="utf-8")
    closed = securevfl(capfd, "check", out, "--name", "bank")
    assert closed.code == 0, closed.err
    assert "securevfl party" in " ".join(closed.out.split())
    assert "securevfl simulate" not in closed.out
