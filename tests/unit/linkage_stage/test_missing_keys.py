"""A missing key equals no other, by any metric and protection; two spellings of one id are one."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from helpers.linking import HELPERS, link_spec

from securevfl.core.errors import DataError
from securevfl.data.frames import from_frame
from securevfl.data.keys_and_labels import read_key_table
from securevfl.data.tables import KeyTable
from securevfl.linkage.metrics.metric import Field, KeySpec
from securevfl.linkage.spec import LinkSpec
from securevfl.linkage.stage.linkage_parts import METRICS
from securevfl.linkage.stage.linking import Linker
from securevfl.linkage.stage.party_keys import keys_of
from securevfl.linkage.text import Spelling

NAMES = ["Anna Meyer", "Bert Unger", "Carl Oswald", "Dora Lindner"]
FIELDS = (Field(name="id", kind="text"), Field(name="town", kind="exact"))
WAYS: dict[str, dict[str, Any]] = {
    "exact": {"metric": "exact"},
    "exact, hashes": {"metric": "exact", "protection": "hashes"},
    "levenshtein": {"metric": "levenshtein"},
    "levenshtein by rules": {"metric": "levenshtein", "blocking": ("id", "town")},
    "levenshtein, bloom": {"metric": "levenshtein", "protection": "bloom"},
    "mixed": {"metric": "mixed", "fields": FIELDS},
    "mixed by rules": {"metric": "mixed", "fields": FIELDS, "blocking": ("id", "town")},
    "mixed, missing alike": {"metric": "mixed", "fields": FIELDS, "missing_similarity": 1.0},
    "mixed, bloom": {"metric": "mixed", "fields": FIELDS, "protection": "bloom"},
    "bloom": {"metric": "bloom"},
}


def spec_of(way: str) -> LinkSpec:
    """Return how two columns are linked, K = 2."""
    how = dict(WAYS[way])
    spec = link_spec(how.pop("protection", "none"))
    keys = KeySpec(columns=("id", "town"), metric=METRICS[how.pop("metric")], **how)
    helpers = {} if spec.hiding.protection == "none" else {"coordinator": HELPERS["coordinator"]}
    return replace(
        spec,
        keys=keys,
        choice=replace(spec.choice, neighbours=2),
        roles=replace(spec.roles, helpers=helpers),
    )


def keys(name: str, gap: str | None) -> KeyTable:
    """Return four people, of whom two have no key."""
    columns = {"id": [NAMES[0], gap, NAMES[2], gap], "town": ["Ulm", gap, "Bonn", gap]}
    if name == "bank":
        columns = {key: [*column[::-1], gap] for key, column in columns.items()}
    return KeyTable(name=name, columns={k: np.array(v, object) for k, v in columns.items()})


@pytest.mark.parametrize("gap", [None, "", "  ", "\u200b"])
@pytest.mark.parametrize("way", WAYS)
def test_a_missing_key_equals_no_other(way: str, gap: str | None) -> None:
    """The two people with keys find each other first; those without are linked to nobody.

    Codes hide from a coordinator which keys are missing, so there a missing one is merely far from
    all others.
    """
    spec = spec_of(way)
    metric = Linker(spec, keys("agency", gap)).metric(keys("bank", gap))
    links = metric.nearest(None, 2)
    assert links.indices[[0, 2], 0].tolist() == [3, 1]
    assert (links.distances[[0, 2], 0] == 0).all()
    if spec.hiding.protection == "bloom":
        assert links.distances[[1, 3]].min() > 200
    else:
        assert not links.present[[1, 3]].any()
    back = metric.swap_roles().nearest(None, 2)
    assert back.indices[[1, 3], 0].tolist() == [2, 0]
    assert not (back.distances[[0, 2, 4]] == 0).any()


def test_a_missing_field_of_two_is_half_alike_even_if_blank() -> None:
    """A town that neither says is no agreement of towns."""
    spec = spec_of("mixed")
    tables = [
        KeyTable(name=name, columns={"id": np.array(["Anna"], object), "town": town})
        for name, town in (
            ("agency", np.array([" "], object)),
            ("bank", np.array([None], object)),
        )
    ]
    spec = replace(spec, choice=replace(spec.choice, neighbours=1))
    assert Linker(spec, tables[0]).metric(tables[1]).nearest(None, 1).distances[0, 0] == 0.25


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("1001.0", "1001"),
        ("-7.000", "-7"),
        ("\ufeff1001", "1001"),
        ("\u200b10\u200d01", "1001"),
        ("A\u00adB", "AB"),
        ("Gro\u0308\u00dfe", "Größe"),
        ("0012.0", "0012"),
    ],
)
@pytest.mark.parametrize("way", ["exact", "levenshtein", "bloom", "mixed"])
def test_two_spellings_of_one_id_are_one(tmp_path: Path, way: str, one: str, other: str) -> None:
    """As a CSV file holds them, cell by cell: what other rows hold does not decide."""
    tables = []
    for name, text in (("agency", one), ("bank", other)):
        frame = pd.DataFrame({"id": [text, "x-1.5", "other"], "town": ["Ulm", "Bonn", "Jena"]})
        frame.to_csv(tmp_path / f"{name}.csv", index=False)
        path = tmp_path / f"{name}.csv"
        tables.append(read_key_table(path, name=name, key=["id", "town"]))
    links = Linker(spec_of(way), tables[0]).metric(tables[1]).nearest(None, 1)
    assert links.indices[:, 0].tolist() == [0, 1, 2]
    assert (links.distances[:, 0] == 0).all()


@pytest.mark.parametrize(
    ("one", "other"), [("0123", "123"), ("10.5", "10"), ("1.10", "1.1"), ("a1.0", "a1")]
)
def test_other_ids_stay_others(tmp_path: Path, one: str, other: str) -> None:
    """Leading zeros and decimals count."""
    tables = []
    for name, text in (("agency", one), ("bank", other)):
        (tmp_path / f"{name}.csv").write_text(f"id\n{text}\n")
        tables.append(read_key_table(tmp_path / f"{name}.csv", name=name, key=["id"]))
    assert not Linker(spec_of("exact"), tables[0]).metric(tables[1]).nearest(None, 1).present.any()


@pytest.mark.parametrize("text", ["4.929E+15", "1.00007e5", "5E+12"])
def test_ids_that_a_spreadsheet_shortened_are_refused(tmp_path: Path, text: str) -> None:
    """Their digits are lost; a hexadecimal id such as 7e12 is none of them."""
    (tmp_path / "keys.csv").write_text(f"id\n7e12\n{text}\n")
    with pytest.raises(DataError, match=r"row 2: is .*spreadsheets write long numbers"):
        read_key_table(tmp_path / "keys.csv", name="agency", key=["id"])


def test_keys_of_frames_are_spelled_as_the_settings_say() -> None:
    """A table that Python made is linked by the same keys as a file."""
    frame = pd.DataFrame({"id": ["0012", "x1"], "x": [1.0, 2.0]})
    table = from_frame(frame, name="agency", key={"id": "text"})
    spec = KeySpec(columns=("id",), metric=METRICS["exact"], spelling=Spelling(strip_zeros=True))
    assert keys_of(spec, table).columns["id"].tolist() == ["12", "x1"]
