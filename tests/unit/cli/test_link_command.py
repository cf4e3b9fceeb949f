"""``securevfl link``: figures on stdout, each party's lists in its own folder, made once."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from helpers.command_line import securevfl

from securevfl.testing import save_federation, write_federation

Capture = pytest.CaptureFixture[str]
NAMES = ["ann", "bob", "cleopatra", "dietrich", "eve", "ferdinand", "gwendolyn", "heinz"]


def people(folder: Path, linkage: dict[str, Any], **changes: Any) -> Path:
    """Write two tables of 64 people, the second misspelled and shuffled, without features."""
    places = np.arange(64)
    first = [NAMES[place % 8] for place in places]
    last = [NAMES[place // 8] + "son" for place in places]
    born = 1930.0 + places
    order = np.random.default_rng(0).permutation(64)
    primary = pd.DataFrame({"first": first, "last": last, "born": born, "who": places})
    second = primary.iloc[order].copy()
    second["first"] = [f"{name[:-1]}x" for name in second["first"]]
    primary.to_csv(folder / "clinic.csv", index=False)
    second.to_csv(folder / "registry.csv", index=False)
    key = changes.get("key", ["first", "last", "born"])
    return save_federation(
        folder,
        {
            "federation": {"name": "people", "task": "regression"},
            "model": {"family": "fet", "neighbours": changes.get("neighbours", 3)},
            "privacy": {"mechanism": "none"},
            "linkage": {"truth": "who", "protection": "none", **linkage},
            "party": [
                {
                    "name": "clinic",
                    "role": "primary",
                    "data": "clinic.csv",
                    "key": key,
                    "address": "127.0.0.1:0",
                },
                {"name": "registry", "role": "secondary", "data": "registry.csv", "key": key},
            ],
        },
    )


MIXED = {
    "first": {"kind": "text"},
    "last": {"kind": "text", "weight": 2.0},
    "born": {"kind": "number", "scale": 20.0},
}
WAYS: dict[str, dict[str, Any]] = {
    "levenshtein": {"metric": "levenshtein"},
    "rules": {"metric": "levenshtein", "blocking": ["last", "left(first, 3), born"]},
    "mixed by rules": {"metric": "mixed", "fields": MIXED, "blocking": ["last"]},
    "mixed": {"metric": "mixed", "fields": MIXED},
    "codes of one text": {"metric": "levenshtein", "protection": "bloom"},
    "codes of fields": {
        "metric": "mixed",
        "protection": "bloom",
        "fields": MIXED,
        "ranges": [[1900.0, 2000.0]],
    },
    "public codes": {"metric": "bloom"},
}


@pytest.mark.parametrize("way", WAYS)
def test_every_way_finds_the_true_matches(way: str, tmp_path: Path, capfd: Capture) -> None:
    """One JSON object with the figures by secondary, the recall among them."""
    path = people(tmp_path, WAYS[way])
    ended = securevfl(capfd, "link", path, "--out", tmp_path / "run", "--json")
    found = json.loads(ended.out)["secondaries"]["registry"]

    assert found["recall_at_1"] > 0.9
    assert found["recall_at_k"] >= found["recall_at_1"]
    assert found["reduction_ratio"] == pytest.approx(1 - 3 / 64)
    assert found["seconds"] >= 0
    assert json.loads((tmp_path / "run" / "links.json").read_text())["secondaries"]


@pytest.mark.parametrize("way", ["rules", "mixed by rules"])
def test_what_blocking_loses_is_told(way: str, tmp_path: Path, capfd: Capture) -> None:
    """Never silently: the recall against all pairs, also when links are read again."""
    path = people(tmp_path, WAYS[way])
    for _ in range(2):
        ended = securevfl(capfd, "link", path, "--out", tmp_path / "run", "--json")
        lost = json.loads(ended.out)["secondaries"]["registry"]["blocking"]
        assert lost["recall_at_1"] > 0.9
        assert 0 < lost["reduction_ratio"] < 1


def test_what_cells_spare_is_told_of_these_links(tmp_path: Path, capfd: Capture) -> None:
    """Also when links of an earlier file are read again: its figures, not the last file's."""
    ranges, told = [[-1.0, 11.0], [-1.0, 11.0]], []
    for cell in (0.5, 4.0, 0.5, None):
        linkage: dict[str, Any] = {"protection": "shares", "ranges": ranges, "cell": cell}
        if cell is None:
            linkage = {"protection": "none"}
        path = write_federation(tmp_path, rows=120, secondaries=1, linkage=linkage)
        ended = securevfl(capfd, "link", path, "--out", tmp_path / "run", "--json")
        told.append(json.loads(ended.out)["secondaries"]["bank-1"].get("comparing"))

    assert told[0] == told[2] != told[1]
    assert 0 < told[0]["share_of_pairs"] < told[1]["share_of_pairs"] <= 1
    assert told[3] is None


def test_equal_keys_are_ties(tmp_path: Path, capfd: Capture) -> None:
    """Eight people of one name: linked by record number, and counted."""
    path = people(tmp_path, {"metric": "levenshtein"}, key=["first"])
    ended = securevfl(capfd, "link", path, "--out", tmp_path / "run", "--json")
    found = json.loads(ended.out)["secondaries"]["registry"]
    assert found["tied_rows"] == 64
    assert found["records_used"] < 64


def test_a_secondary_gets_distances_only_if_it_knows_the_keys(
    tmp_path: Path, capfd: Capture
) -> None:
    """Its folder holds what it would learn between processes, and no more."""
    for protection in ("none", "bloom"):
        run = tmp_path / protection
        path = people(tmp_path, {"metric": "levenshtein", "protection": protection})
        securevfl(capfd, "link", path, "--out", run, "--json")
        with np.load(run / "parties" / "registry" / "lists.npz") as lists:
            assert ("distances" in lists) == (protection == "none")
            assert lists["indices"].shape == (64, 3)


def test_links_are_made_once(tmp_path: Path, capfd: Capture) -> None:
    """A second call reads them; another metric makes its own."""
    path, run = people(tmp_path, {"metric": "levenshtein"}), tmp_path / "run"
    first = json.loads(securevfl(capfd, "link", path, "--out", run, "--json").out)
    again = json.loads(securevfl(capfd, "link", path, "--out", run, "--json").out)
    path = people(tmp_path, {"metric": "bloom"})
    other = json.loads(securevfl(capfd, "link", path, "--out", run, "--json").out)

    taken = [one["secondaries"]["registry"]["cached"] for one in (first, again, other)]
    assert taken == [False, True, False]
    assert (
        first["secondaries"]["registry"]["most_used"]
        == again["secondaries"]["registry"]["most_used"]
    )


def test_the_table_and_the_plot(tmp_path: Path, capfd: Capture) -> None:
    """People read a table, with what each role learns."""
    path = people(tmp_path, {"metric": "levenshtein"})
    ended = securevfl(capfd, "link", path, "--out", tmp_path / "run")

    for words in ("recall@1", "a secondary learns", "edits"):
        assert words in ended.out
    assert (tmp_path / "run" / "similarities.svg").read_text().startswith("<svg")


def test_the_table_shows_every_rule_and_what_it_costs(
    tmp_path: Path, capfd: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that a user sees which rule to mend."""
    monkeypatch.setenv("COLUMNS", "120")
    path = people(tmp_path, WAYS["rules"])
    told = securevfl(capfd, "link", path, "--out", tmp_path / "run").out

    assert "blocking: recall@K of all pairs, on 64 rows" in told
    assert "blocking: pairs of left(first, 3), born" in told


def test_a_missing_faiss_is_named(
    tmp_path: Path, capfd: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the extra that brings it, where codes are compared without it."""
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setattr("securevfl.stages.bloom.codes.find_spec", lambda _: None)
    path = people(tmp_path, {"metric": "bloom"})
    told = securevfl(capfd, "link", path, "--out", tmp_path / "run").out

    assert "numpy; securevfl[faiss] is three times as fast" in told


BAD: dict[str, tuple[dict[str, Any], dict[str, Any], list[str]]] = {
    "K above the records": ({"metric": "levenshtein"}, {"neighbours": 65}, ["64 records", "65"]),
    "a word for a number": ({}, {"key": ["first"]}, ["'first'", "must be numeric"]),
    "no such column": ({"metric": "levenshtein"}, {"key": ["frist"]}, ["'frist'", "'first'"]),
    "a value outside its range": (
        {"protection": "shares", "ranges": [[1930.0, 1980.0]]},
        {"key": ["born"]},
        ["clinic", "row 52", "1981.0", "[1930.0, 1980.0]"],
    ),
    "a rule that counts others": (
        {"metric": "levenshtein", "blocking": ["first", "count(*)"]},
        {},
        ["linkage.blocking", "'count(*)'", "may not call"],
    ),
    "longitude alone": (
        {"metric": "great-circle"},
        {"key": ["born"]},
        ["great-circle", "two key columns"],
    ),
    "a latitude of 1930": (
        {"metric": "great-circle"},
        {"key": ["born", "who2"]},
        ["'who2'"],
    ),
}


@pytest.mark.parametrize("mistake", BAD)
def test_a_mistake_is_one_line(mistake: str, tmp_path: Path, capfd: Capture) -> None:
    """What, where, and what to do; exit code 2."""
    linkage, changes, words = BAD[mistake]
    path = people(tmp_path, linkage, **changes)
    ended = securevfl(capfd, "link", path, "--out", tmp_path / "run")
    assert ended.code == 2
    assert all(word in ended.complaint for word in words), ended.complaint


@pytest.mark.parametrize(
    ("text", "words"),
    [("", ["linkage secret", "16 to 64"]), ("what", ["hexadecimal"])],
)
def test_an_impossible_secret(text: str, words: list[str], tmp_path: Path, capfd: Capture) -> None:
    """A secret file must hold enough hexadecimal digits."""
    linkage = {"metric": "levenshtein", "protection": "bloom"}
    path = people(tmp_path, linkage)
    (tmp_path / "linkage.secret").write_text(text)
    ended = securevfl(capfd, "link", path, "--out", tmp_path / "run")
    assert ended.code == 2
    assert all(word in ended.complaint for word in words), ended.complaint


@pytest.mark.parametrize("column", ["first", "born"])
def test_missing_values(column: str, tmp_path: Path, capfd: Capture) -> None:
    """Texts may be missing; a number without a rule for that may not."""
    path = people(tmp_path, {"metric": "levenshtein"} if column == "first" else {}, key=[column])
    frame = pd.read_csv(tmp_path / "registry.csv")
    frame.loc[4, column] = None
    frame.to_csv(tmp_path / "registry.csv", index=False)
    ended = securevfl(capfd, "link", path, "--out", tmp_path / "run", "--json")
    assert ended.code == (0 if column == "first" else 2)
    if column == "born":
        assert "row 5" in ended.complaint


def test_an_empty_table(tmp_path: Path, capfd: Capture) -> None:
    """A header without rows is named."""
    path = people(tmp_path, {"metric": "levenshtein"})
    frame = pd.read_csv(tmp_path / "registry.csv")
    frame.iloc[:0].to_csv(tmp_path / "registry.csv", index=False)
    ended = securevfl(capfd, "link", path, "--out", tmp_path / "run")
    assert ended.code == 2
    assert "has no rows" in ended.complaint


def test_long_and_foreign_texts(tmp_path: Path, capfd: Capture) -> None:
    """10,000 letters and combining accents are compared like any others."""
    path = people(tmp_path, {"metric": "levenshtein"}, key=["first"])
    for name, text in (("clinic", "Ame\u0301lie" * 1500), ("registry", "AMÉLIE" * 1500)):
        frame = pd.read_csv(tmp_path / f"{name}.csv")
        frame.loc[frame["who"] == 0, "first"] = text
        frame.to_csv(tmp_path / f"{name}.csv", index=False)
    ended = securevfl(capfd, "link", path, "--out", tmp_path / "run", "--json")
    found = json.loads(ended.out)["secondaries"]["registry"]
    assert found["first_distance_quantiles"]["0"] == 0.0
