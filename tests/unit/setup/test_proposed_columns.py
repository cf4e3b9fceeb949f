"""Which columns ``securevfl init`` proposes as keys and features, and which it leaves out."""

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from helpers.command_line import securevfl

from securevfl import read_federation
from securevfl.core.column_names import meaning_of
from securevfl.desk.setup.proposed_columns import names_one_person

Capture = pytest.CaptureFixture[str]
ROWS = 240
_GIVEN = ("Anna", "Ben", "Cleo", "Dirk", "Eva", "Fritz")


def write_customers(folder: Path) -> list[object]:
    """Write two tables about the same ids, each with columns that tell who a person is."""
    random = np.random.default_rng(7)
    names = random.choice(_GIVEN, ROWS)  # few enough to be words
    for name, signal in (("bank", "income"), ("bureau", "rating")):
        frame = pd.DataFrame(
            {
                "customer_id": np.arange(1000, 1000 + ROWS),
                signal: random.normal(size=ROWS).round(3),
                "Kunde Name": names,
                "e-mail": [f"{one.lower()}@example.org" for one in names],
                "card number": random.integers(4000, 4009, ROWS),
                "birth date": random.choice(["1980-01-31", "1975-05-02", "1990-12-24"], ROWS),
                "birth_weight": random.normal(3.4, 0.3, ROWS).round(2),
                "job": [f"job {number}" for number in random.integers(0, 70, ROWS)],
                "plan": random.choice(["basic", "gold"], ROWS),
            }
        )
        frame["default"] = random.random(ROWS) < 0.5
        if name == "bureau":
            frame = frame.drop(columns="default")
        frame.to_csv(folder / f"{name}.csv", index=False)
    return ["--primary", folder / "bank.csv", "--label", "default"]


PERSONAL = {"Kunde Name", "e-mail", "card number", "birth date"}


@pytest.mark.parametrize("by_list", [False, True])
def test_what_tells_one_person_is_no_feature_at_any_party(
    tmp_path: Path, capfd: Capture, by_list: bool
) -> None:
    """Nor are more words than get features of their own: nobody is asked to fill them in."""
    arguments = write_customers(tmp_path)
    bureau: tuple[object, ...] = ("--secondary", tmp_path / "bureau.csv")
    if by_list:
        listed = tmp_path / "bureau.json"
        told = securevfl(capfd, "columns", tmp_path / "bureau.csv", "--out", listed)
        assert told.code == 0, told.err
        assert "Kunde Name: no feature: its name says that it identifies one person" in told.out
        assert not any(name in told.out.partition("nothing is declared")[2] for name in PERSONAL)
        bureau = ("--columns", listed)
    out = tmp_path / "fed.toml"

    ended = securevfl(capfd, "init", *arguments, *bureau, "--out", out, "--json")

    assert ended.code == 0, ended.err
    for party in read_federation(out).parties:
        assert set(party.exclude) == PERSONAL | {"job"}
    columns = json.loads(ended.out)["columns"]["bureau"]
    assert columns["Kunde Name"]["why"] == "its name says that it identifies one person"
    assert columns["job"]["use"] == "excluded"
    assert "FILL IN: job" not in out.read_text(encoding="utf-8")
    assert {name for name, told in columns.items() if told["use"] == "feature"} == {
        "rating",
        "birth_weight",
        "plan",
    }


def test_words_that_somebody_lists_make_it_a_feature(tmp_path: Path, capfd: Capture) -> None:
    """A name can mislead, and of many words a few may matter: whoever knows has the last word."""
    arguments = [*write_customers(tmp_path), "--secondary", tmp_path / "bureau.csv"]
    said = ("--words", "job=job 1,job 2,other", "--words", "Kunde Name=Anna,other")
    out = tmp_path / "fed.toml"

    ended = securevfl(capfd, "init", *arguments, *said, "--out", out)

    assert ended.code == 0, ended.err
    (bureau,) = read_federation(out).secondaries
    assert bureau.categories is not None
    assert bureau.categories["job"] == ("job 1", "job 2", "other")
    assert not {"job", "Kunde Name"} & set(bureau.exclude)


@pytest.mark.parametrize(
    ("name", "kind", "personal"),
    [
        ("full_name", "words", True),
        ("lastName", "words", True),
        ("home address", "text", True),
        ("dob", "number", True),
        ("birth_weight", "number", False),
        ("country_of_birth", "words", False),
        ("product_name", "words", False),
        ("family_status", "words", False),
        ("city", "words", False),
        ("rename_count", "number", False),
    ],
)
def test_whose_name_a_column_says_that_it_holds(name: str, kind: str, personal: bool) -> None:
    assert names_one_person(name, kind) is personal


@pytest.mark.parametrize("name", ["card_number", "Kunden-Nr", "accountNo", "Telefon", "userId"])
def test_what_numbers_people_is_an_identifier(name: str) -> None:
    assert meaning_of(name) == "identity"


def write_machines(folder: Path, *, zone: str = "+01:00") -> list[object]:
    """Write two tables about the same moments, a few seconds apart, in two zones."""
    random = np.random.default_rng(11)
    at = np.datetime64("2024-03-01T06:00:00") + np.cumsum(random.integers(60, 900, ROWS)).astype(
        "timedelta64[s]"
    )
    jitter = random.integers(-5, 6, ROWS).astype("timedelta64[s]")
    local = at + np.timedelta64(1, "h")
    signal = random.normal(size=ROWS).round(3)
    pd.DataFrame(
        {
            "time": [f"{one}{zone}" for one in local.astype(str)],
            "speed": random.normal(size=ROWS).round(3),
            "defects": (signal * 10).round(2),
        }
    ).to_csv(folder / "plant.csv", index=False)
    pd.DataFrame({"time": [f"{one}Z" for one in (at + jitter).astype(str)], "heat": signal}).to_csv(
        folder / "sensors.csv", index=False
    )
    tables = ("--primary", folder / "plant.csv", "--secondary", folder / "sensors.csv")
    return [*tables, "--label", "defects", "--bounds-from-data"]


@pytest.mark.parametrize("asked", [(), ("--key", "time")])
def test_times_are_near_by_the_clock(
    tmp_path: Path, capfd: Capture, asked: tuple[str, ...]
) -> None:
    """Two spellings of one moment are one: edits between the texts would say nothing."""
    out = tmp_path / "fed.toml"

    ended = securevfl(capfd, "init", *write_machines(tmp_path), *asked, "--out", out, "--json")
    checked = securevfl(capfd, "check", out, "--json")

    assert ended.code == 0, ended.err
    assert json.loads(ended.out)["warnings"] == []
    config = read_federation(out)
    assert (config.linkage.metric, config.primary.key) == ("euclidean", ("time",))
    links = json.loads(checked.out)["links"]["sensors"]
    assert links["rows_linked"] == ROWS
    assert links["median_distance"] < 6 / 86_400


def test_a_time_without_a_zone_is_warned_of(tmp_path: Path, capfd: Capture) -> None:
    ended = securevfl(
        capfd, "init", *write_machines(tmp_path, zone=""), "--out", tmp_path / "fed.toml", "--json"
    )

    assert ended.code == 0, ended.err
    zone, few = json.loads(ended.out)["warnings"]
    assert zone.startswith("plant: key 'time' has times without a zone (Z, +01:00)")
    assert few.startswith("sensors: only 71% of the rows get a link")


def test_keys_of_repeated_records_and_far_texts_are_warned_of(
    tmp_path: Path, capfd: Capture
) -> None:
    """A person of two records, and nearest names that are other people's."""
    arguments = write_customers(tmp_path)
    bureau = pd.read_csv(tmp_path / "bureau.csv")
    pd.concat([bureau, bureau.head(9)]).to_csv(tmp_path / "bureau.csv", index=False)
    tables = (*arguments, "--secondary", tmp_path / "bureau.csv", "--bounds-from-data")
    out = tmp_path / "fed.toml"

    ended = securevfl(capfd, "init", *tables, "--out", out, "--json")

    assert ended.code == 0, ended.err
    (warning,) = json.loads(ended.out)["warnings"]
    assert "18 of 249 records have a key that another record has too" in warning
    assert 'privacy.unit = "entity" counts one record at each secondary too' in warning
    assert "protects a person" not in warning

    for name in ((), ("--name", "bureau")):
        checked = securevfl(capfd, "check", out, "--json", *name)
        assert warning in json.loads(checked.out)["warnings"], name


def test_columns_in_common_are_named_as_they_are(tmp_path: Path, capfd: Capture) -> None:
    """What the message names can be said back to ``--key``."""
    random = np.random.default_rng(2)
    for name, columns in (("a", ("Key Id", "x 0")), ("b", ("key_id", "x_0"))):
        frame = pd.DataFrame(random.normal(size=(50, 2)), columns=list(columns))
        frame["y" if name == "a" else "z"] = random.normal(size=50)
        frame.to_csv(tmp_path / f"{name}.csv", index=False)
    tables = ("--primary", tmp_path / "a.csv", "--secondary", tmp_path / "b.csv", "--label", "y")

    ended = securevfl(capfd, "init", *tables, "--out", tmp_path / "fed.toml")

    assert ended.code == 2
    assert "columns in common: Key Id=key_id, x 0=x_0. Name" in ended.complaint


def write_days(folder: Path) -> list[object]:
    """Write two tables about the same stays, with two dates each, and a date of birth."""
    random = np.random.default_rng(12)
    came = np.datetime64("2024-01-01") + random.integers(0, 300, ROWS).astype("timedelta64[D]")
    left = came + random.integers(1, 30, ROWS).astype("timedelta64[D]")
    born = np.datetime64("1940-01-01") + np.arange(ROWS).astype("timedelta64[D]") * 17
    keys = {"came": came.astype(str), "went": left.astype(str), "birth date": born.astype(str)}
    keys["room"] = random.integers(1, 90, ROWS) / 2
    signal = random.normal(size=ROWS).round(3)
    for name, column in (("hotel", {"spent": signal * 3}), ("city", {"tax": signal})):
        pd.DataFrame({**keys, **column}).to_csv(folder / f"{name}.csv", index=False)
    tables = ("--primary", folder / "hotel.csv", "--secondary", folder / "city.csv")
    return [*tables, "--label", "spent", "--bounds-from-data"]


@pytest.mark.parametrize(
    ("asked", "metric"),
    [
        ((), "exact"),
        (("--key", "came", "--key", "went"), "euclidean"),
        (("--key", "came", "--key", "room"), "exact"),
        (("--key", "birth date", "--key", "came"), "euclidean"),
    ],
)
def test_dates_are_never_compared_by_edits(
    tmp_path: Path, capfd: Capture, asked: tuple[str, ...], metric: str
) -> None:
    """One edit is a day or a thousand years: dates are near in days, or equal."""
    out = tmp_path / "fed.toml"

    ended = securevfl(capfd, "init", *write_days(tmp_path), *asked, "--out", out)
    checked = securevfl(capfd, "check", out, "--json")

    assert ended.code == 0, ended.err
    assert read_federation(out).linkage.metric == metric
    assert checked.code == 0, checked.err
    assert json.loads(checked.out)["links"]["city"]["rows_linked"] > 0.9 * ROWS
