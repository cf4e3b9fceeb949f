"""Links that check and init speak of: by the run's own keys, and with what would link more."""

import json
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import tomli_w
from helpers.command_line import securevfl
from helpers.federations import FROZEN

import securevfl as sv
from securevfl.config.linkage import parse_linkage
from securevfl.config.reading import parse_federation
from securevfl.core.errors import ConfigError
from securevfl.data.tables import KeyTable
from securevfl.desk.setup.check import expected_links
from securevfl.linkage.text import Spelling

Capture = pytest.CaptureFixture[str]

PEOPLE = 120


def spelled(form: str) -> list[str]:
    """Return everybody's key in one of the ways in which people write it."""
    numbers = np.random.default_rng(4).permutation(9000)[:PEOPLE] + 1000
    days = pd.to_datetime("1950-01-01") + pd.to_timedelta(np.sort(numbers) * 3, unit="D")
    return [form.format(n=number, d=day) for number, day in zip(numbers, days, strict=True)]


def federation(folder: Path, mine: list[str], theirs: list[str], **linkage: Any) -> Path:
    """Write two tables whose rows belong together one by one, and a federation file."""
    random = np.random.default_rng(2)
    a, b = random.normal(size=(2, PEOPLE))
    frame = pd.DataFrame({"number": mine, "a": a.round(3), "y": (a + b > 0).astype(int)})
    frame.to_csv(folder / "bank.csv", index=False)
    other = pd.DataFrame({"id": theirs, "b": b.round(3)}).sample(frac=1, random_state=1)
    other.to_csv(folder / "shop.csv", index=False)
    source = {
        "federation": {"name": "ids", "task": "binary"},
        "model": {"family": "avgsim", "neighbours": 1},
        "privacy": {"mechanism": "none"},
        "linkage": {"metric": "exact", "protection": "none", **linkage},
        "party": [
            {"name": "bank", "role": "primary", "address": "127.0.0.1:0", "label": "y"},
            {"name": "shop", "role": "secondary"},
        ],
    }
    for party, key in zip(source["party"], ("number", "id"), strict=True):
        party |= {"data": f"{party['name']}.csv", "key": [key]}
    path = folder / "fed.toml"
    path.write_text(tomli_w.dumps(source), encoding="utf-8")
    return path


WRITTEN = {
    "leading zeros": ("{n:08d}", "{n}", {"strip_zeros": True}),
    "case": ("C{n}", "c{n}", {"fold": True}),
    "digits alone": ("C-{n}", "{n}", {"digits_only": True}),
    "day first": ("{d:%d.%m.%Y}", "{d:%Y-%m-%d}", {"dates": "day-first"}),
    "month first": ("{d:%m/%d/%Y}", "{d:%Y-%m-%d} 00:00:00", {"dates": "month-first"}),
    "case and leading zeros": ("00a{n}", "A{n}", {"fold": True, "strip_zeros": True}),
}


@pytest.mark.parametrize("name", WRITTEN)
def test_what_would_link_more_is_found_and_named(tmp_path: Path, capfd: Capture, name: str) -> None:
    """Check refuses what a run would refuse, names the setting, and is content with it."""
    one, other, settings = WRITTEN[name]
    path = federation(tmp_path, spelled(one), spelled(other))
    ended = securevfl(capfd, "check", path, "--json")
    assert ended.code == 2
    said = json.loads(ended.out)
    assert said["links"]["shop"]["rows_linked"] == 0
    assert said["links"]["shop"]["better"]["settings"] == settings
    assert len(said["problems"]) == 1
    assert "100% of the rows have a record with an equal key (now 0%)" in said["problems"][0]
    for setting in settings:
        assert f"linkage.{setting} = " in said["problems"][0]
    path = federation(tmp_path, spelled(one), spelled(other), **settings)
    ended = securevfl(capfd, "check", path, "--json")
    assert ended.code == 0, ended.out
    assert json.loads(ended.out)["links"]["shop"]["rows_linked"] == PEOPLE


def test_keys_that_a_setting_would_merge_are_left_apart(tmp_path: Path, capfd: Capture) -> None:
    """C-1 and D-1 are two people: leaving out letters would link other people."""
    mine = [f"{'CD'[i % 2]}-{i // 2}" for i in range(PEOPLE)]
    theirs = [str(i) for i in range(PEOPLE)]
    ended = securevfl(capfd, "check", federation(tmp_path, mine, theirs), "--json")
    assert json.loads(ended.out)["links"]["shop"]["better"] is None


def test_init_and_the_run_link_the_same_keys(tmp_path: Path, capfd: Capture) -> None:
    """``init`` proposes the setting that links them, and all three count the same links."""
    federation(tmp_path, spelled("{n:08d}"), spelled("{n}"))
    out = tmp_path / "proposed.toml"
    ended = securevfl(
        capfd,
        "init",
        *("--primary", tmp_path / "bank.csv", "--secondary", tmp_path / "shop.csv"),
        *("--label", "y", "--key", "number=id", "--bounds", "b=-4,4", "--out", out, "--json"),
    )
    assert ended.code == 0, ended.err
    assert "100% of the rows have a record with an equal key (now 0%)" in ended.out
    assert json.loads(ended.out)["links"]["shop"]["share"] == 1
    assert sv.read_federation(out).linkage.strip_zeros
    assert (
        "%" not in out.read_text(encoding="utf-8").partition("[linkage]")[0].rpartition("\n\n")[2]
    )
    checked = json.loads(securevfl(capfd, "check", out, "--json").out)
    assert checked["links"]["shop"]["rows_linked"] == PEOPLE
    simulated = securevfl(capfd, "simulate", out, "--out", tmp_path / "run", "--json")
    assert simulated.code == 0, simulated.err
    assert json.loads(simulated.out)["links"]["shop"]["rows_linked"] == PEOPLE


@pytest.mark.parametrize(
    ("settings", "text", "expected"),
    [
        ({"strip_zeros": True}, " 0012 ", "12"),
        ({"strip_zeros": True}, "000", "0"),
        ({"strip_zeros": True}, "", ""),
        ({"digits_only": True}, "+49 (0)151-\u0663", "4901513"),
        ({"digits_only": True}, "none", ""),
        ({"dates": "day-first"}, "1956/3/28", "1956-03-28"),
        ({"dates": "day-first"}, "03/04/1956", "1956-04-03"),
        ({"dates": "month-first"}, "03/04/1956", "1956-03-04"),
        ({"dates": "month-first"}, "28.03.1956", "28.03.1956"),
        ({"dates": "day-first"}, "1956-03-28T00:00", "1956-03-28"),
        ({"dates": "day-first"}, "1956-03-28T10:00", "1956-03-28T10:00"),
        ({"dates": "day-first", "digits_only": True}, "3.4.1956", "19560403"),
    ],
)
def test_every_key_is_spelled_by_itself(settings: dict[str, Any], text: str, expected: str) -> None:
    """What other keys hold decides nothing; spelling twice changes nothing more."""
    spelling = Spelling(**settings)
    assert spelling.of(text) == expected
    assert spelling.of(expected) == expected


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dates": "european"}, "dates.*must be one of .*day-first.*month-first"),
        ({"metric": "euclidean", "strip_zeros": True}, "strip_zeros: goes with keys that are text"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings: dict[str, Any], message: str) -> None:
    """In one line, with the field."""
    with pytest.raises(ConfigError, match=message):
        parse_linkage({"metric": "exact", "protection": "none", **settings})


def names(count: int) -> list[str]:
    """Return as many different names."""
    random = np.random.default_rng(9)
    letters = random.integers(97, 123, (count, 16))
    return ["".join(map(chr, row)) for row in letters.tolist()]


@pytest.mark.parametrize(("perfect", "least", "most"), [(True, 0.8, 1.0), (False, 0.4, 0.75)])
def test_a_part_of_the_records_tells_of_all(
    tmp_path: Path, perfect: bool, least: float, most: float
) -> None:
    """4,000 records of as many rows: perfect links are near all, strangers' no more than chance.

    If each record picks a row at random, 1 - 1/e of the rows are picked: 63 %.
    """
    path = federation(tmp_path, spelled("{n}"), spelled("{n}"))
    source = tomllib.loads(path.read_text(encoding="utf-8"))
    source["linkage"] |= {"metric": "levenshtein", "choose": "records"}
    source["model"] = {"family": "fet", "release": "pooled"}
    source["privacy"] = {**FROZEN, "links_per_record": 1}
    for party in source["party"]:
        party |= {"scaling": "bounds", "bounds": {"a": [-4, 4], "b": [-4, 4]}}
    config = parse_federation(source, file="", only_linkage=True)
    mine = names(4000)
    theirs = mine[::-1] if perfect else names(8000)[4000:]
    tables = [
        KeyTable(name=name, columns={"number": np.array(texts, dtype=object)})
        for name, texts in (("bank", mine), ("shop", theirs))
    ]
    found = expected_links(config, *tables)
    assert not found.complete
    assert f"about {found.share:.0%} of 4,000 rows" in found.in_words()
    assert least <= found.share <= most
    assert bool([text for text in found.doubts if "as far as" in text]) != perfect


def places(folder: Path, *, key: list[str], turned: float = 0.0) -> Path:
    """Write two tables of the same places near the antimeridian, one's longitudes turned."""
    path = federation(folder, spelled("{n}"), spelled("{n}"))
    random = np.random.default_rng(6)
    lon, lat = random.uniform(-170, -120, PEOPLE), random.uniform(20, 50, PEOPLE)
    for name, turn in (("bank", turned), ("shop", 0.0)):
        frame = pd.read_csv(folder / f"{name}.csv").drop(columns=["number", "id"], errors="ignore")
        frame.assign(lon=lon + turn, lat=lat).to_csv(folder / f"{name}.csv", index=False)
    source = tomllib.loads(path.read_text(encoding="utf-8"))
    source["linkage"]["metric"] = "great-circle"
    source["party"][0]["key"], source["party"][1]["key"] = ["lon", "lat"], key
    path.write_text(tomli_w.dumps(source), encoding="utf-8")
    return path


def test_the_axes_of_every_party_are_looked_at(tmp_path: Path, capfd: Capture) -> None:
    """A secondary's latitude in front is refused by its name."""
    ended = securevfl(capfd, "check", places(tmp_path, key=["lat", "lon"]), "--json")
    assert ended.code == 2
    assert "takes the longitude first" in " ".join(json.loads(ended.out)["problems"])


def test_longitudes_up_to_360_are_the_same_places(tmp_path: Path, capfd: Capture) -> None:
    """A turn around the earth is no distance, and the ranges of both keys meet."""
    path = places(tmp_path, key=["lon", "lat"], turned=360.0)
    ended = securevfl(capfd, "check", path, "--json")
    assert ended.code == 0, ended.out
    links = json.loads(ended.out)["links"]["shop"]
    assert links["median_distance"] < 0.01
    assert not [text for text in links["doubts"] if "below or above" in text]


def near_places(folder: Path, *, off: float, metric: str = "great-circle") -> Path:
    """Write two tables of the same places, the secondary's off by so many degrees; K is 5."""
    path = places(folder, key=["lon", "lat"])
    shop = pd.read_csv(folder / "shop.csv")
    random = np.random.default_rng(8)
    shop[["lon", "lat"]] += off * random.normal(size=(len(shop), 2))
    shop.to_csv(folder / "shop.csv", index=False)
    source = tomllib.loads(path.read_text(encoding="utf-8"))
    source["model"]["neighbours"] = 5
    source["linkage"]["metric"] = metric
    path.write_text(tomli_w.dumps(source), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("off", "metric", "said"),
    [(0.0, "great-circle", True), (0.01, "euclidean", True), (5.0, "great-circle", False)],
)
def test_five_links_where_one_is_right_are_named(
    tmp_path: Path, capfd: Capture, off: float, metric: str, said: bool
) -> None:
    """Exact and nearly exact places are one record's; places by chance are nobody's."""
    path = near_places(tmp_path, off=off, metric=metric)
    ended = securevfl(capfd, "check", path, "--json")
    assert ended.code == 0, ended.out
    warnings = json.loads(ended.out)["warnings"]
    assert bool([text for text in warnings if "set model.neighbours = 1" in text]) == said
    path.write_text(
        path.read_text(encoding="utf-8").replace("neighbours = 5", "neighbours = 1"),
        encoding="utf-8",
    )
    again = json.loads(securevfl(capfd, "check", path, "--json").out)["warnings"]
    assert not [text for text in again if "model.neighbours" in text]


@pytest.mark.parametrize(
    ("off", "why"), [(0.01, "far nearer than the next"), (5.0, "would cost more of epsilon")]
)
def test_init_takes_one_link_of_a_score_and_says_why(
    tmp_path: Path, capfd: Capture, off: float, why: str
) -> None:
    near_places(tmp_path, off=off)
    out = tmp_path / "proposed.toml"
    tables = ("--primary", tmp_path / "bank.csv", "--secondary", tmp_path / "shop.csv")
    ended = securevfl(capfd, "init", *tables, "--label", "y", "--bounds", "b=-5,5", "--out", out)
    assert ended.code == 0, ended.err
    text = out.read_text(encoding="utf-8")
    assert tomllib.loads(text)["model"]["neighbours"] == 1
    assert why in text


def test_one_right_link_beats_five_that_stand_in_for_it() -> None:
    """A regression on a column that only the right record has: K = 1 has half the error."""
    random = np.random.default_rng(3)
    rows = 400
    place, value = random.uniform(size=(rows, 2)), random.normal(size=rows)
    keys = ["lon", "lat"]
    mine = pd.DataFrame(place, columns=keys).assign(y=value + 0.1 * random.normal(size=rows))
    theirs = pd.DataFrame(place + 1e-5, columns=keys).assign(value=value)
    errors = {}
    for neighbours in (1, 5):
        run = sv.simulate(
            primary=mine,
            secondaries=[theirs],
            label="y",
            key=keys,
            model=sv.models.AvgSim(neighbours=neighbours),
            privacy=sv.dp.Privacy(mechanism="none"),
            training=sv.TrainingSettings(epochs=30, patience=30),
            base="none",
            with_alone=False,
            progress=False,
        )
        errors[neighbours] = run.metrics["test"]
    assert errors[1] < 0.5 * errors[5], errors
