"""Keys that are equal or not: ids of any length, several columns, and hashes of them."""

import tomllib
from collections.abc import Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from securevfl.config.reading import read_federation
from securevfl.config.rules import require_linkable, require_trainable
from securevfl.core.errors import ConfigError, DataError
from securevfl.data.keys_and_labels import read_key_table
from securevfl.data.party_tables import ColumnRoles, read_table
from securevfl.data.tables import KeyTable
from securevfl.linkage.metrics.exact import Exact, ExactKeys, exact_texts
from securevfl.linkage.metrics.metric import KeySpec
from securevfl.linkage.sampling import eligible_pairs
from securevfl.testing import save_federation, write_federation

LONG_IDS = [9_007_199_254_740_993 + number for number in range(200)]
"""Neighbours of 16 digits, of which float64 holds every second one."""


def keys(name: str, **columns: Sequence[str | None]) -> KeyTable:
    """Return a party's key columns as they are read."""
    return KeyTable(
        name=name, columns={key: np.array(column, object) for key, column in columns.items()}
    )


def compared(mine: KeyTable, theirs: KeyTable, **changes: Any) -> ExactKeys:
    """Compare two tables by the metric."""
    spec = KeySpec(columns=tuple(mine.columns), metric=Exact(), **changes)
    return Exact().compare(spec, mine, theirs, neighbours=1)


def stored(folder: Path, kind: str, ids: Sequence[int | None]) -> Path:
    """Write ids as a column of one type, and return the file."""
    if kind == "csv":
        path = folder / "ids.csv"
        pd.DataFrame({"id": pd.array(list(ids), dtype="Int64"), "x": 1}).to_csv(path, index=False)
        return path
    types = {
        "int64": pa.int64(),
        "uint64": pa.uint64(),
        "decimal": pa.decimal128(20, 2),
        "text": pa.string(),
    }
    cells: list[Any] = list(ids)
    if kind == "decimal":
        cells = [None if one is None else Decimal(one) for one in ids]
    if kind == "text":
        cells = [None if one is None else f" {one}" for one in ids]
    pq.write_table(pa.table({"id": pa.array(cells, types[kind])}), folder / f"{kind}.parquet")
    return folder / f"{kind}.parquet"


@pytest.mark.parametrize("kind", ["csv", "int64", "uint64", "decimal", "text"])
def test_every_long_id_finds_its_record(tmp_path: Path, kind: str) -> None:
    """200 of 200, whatever type a party holds them in, and with an empty cell among them."""
    mine = read_key_table(stored(tmp_path, "csv", LONG_IDS), name="agency", key=["id"])
    path = stored(tmp_path, kind, [*LONG_IDS[::-1], None])
    theirs = read_key_table(path, name="bank", key=["id"])
    links = compared(mine, theirs).nearest(None, 2)

    assert links.indices[:, 0].tolist() == list(range(199, -1, -1))
    assert not links.present[:, 1].any()
    assert (links.distances[:, 0] == 0).all()


@pytest.mark.parametrize("kind", ["csv", "int64", "decimal"])
@pytest.mark.parametrize("gap", [[], [None]])
def test_numbers_that_could_be_taken_for_others_are_refused(
    tmp_path: Path, kind: str, gap: list[None]
) -> None:
    """By both readers of keys, whether or not an empty cell has made floats of them."""
    path = stored(tmp_path, kind, [*LONG_IDS, *gap])
    roles = ColumnRoles(key=["id"], task="regression")
    readers = [lambda: read_key_table(path, name="agency", key={"id": "number"})]
    if kind == "csv" and not gap:
        readers.append(lambda: read_table(path, roles, name="a"))
    for read in readers:
        with pytest.raises(DataError, match=r'key \'id\'.*metric = "exact"') as caught:
            read()
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("rows", [slice(None), np.array([3, 0])])
def test_what_is_equal(rows: Any) -> None:
    """Blanks at the ends and combining letters do not count; zeros, case and inner blanks do."""
    mine = keys("agency", id=["0123", "Ame\u0301lie", "ab  c", None, "  ", "x"])
    theirs = keys("bank", id=["123", " Am\u00e9lie", "AB c", None, "", "x", "x ", "0123"])
    links = compared(mine, theirs).nearest(None, 2)
    folded = compared(mine, theirs, fold=True).nearest(None, 2)

    assert links.indices.tolist() == [[7, -1], [1, -1], [-1, -1], [-1, -1], [-1, -1], [5, 6]]
    assert folded.indices[2].tolist() == [2, -1]
    chosen = np.arange(6)[rows]
    some = compared(mine, theirs).nearest(chosen, 2)
    assert np.array_equal(some.indices, links.indices[chosen])


def test_all_columns_must_be_equal() -> None:
    """Texts are not run together, and a row without one of its columns is linked to nothing."""
    mine = keys("agency", a=["1", "12", "7", None], b=["23", "3", "8", "9"])
    theirs = keys("bank", a=["12", "1", "7", None], b=["3", "23", "9", "9"])

    assert compared(mine, theirs).nearest(None, 1).indices[:, 0].tolist() == [1, 0, -1, -1]


def test_records_of_one_key_fill_a_row_in_order_and_within_caps() -> None:
    """K of them by number; under a cap each record picks its first m rows."""
    mine, theirs = keys("agency", id=["a"] * 3 + ["b"]), keys("bank", id=["a"] * 5 + ["c"])
    metric = compared(mine, theirs)
    eligible = np.array([False, True, True, True, True, True])

    assert metric.nearest(None, 2, eligible=eligible).indices.tolist() == [[1, 2]] * 3 + [[-1, -1]]
    capped = eligible_pairs(metric, cap=2).links(np.arange(4), 6)
    assert capped.present.sum(axis=1).tolist() == [5, 5, 0, 0]
    assert metric.nearest(None, 2, eligible=np.zeros(6, bool)).present.sum() == 0


@pytest.mark.parametrize(
    ("cells", "expected"),
    [
        ([1234.0, None], ["1234", None]),
        ([-3.0, 0.0], ["-3", "0"]),
        ([Decimal("12.00"), Decimal(10**25)], ["12", str(10**25)]),
        ([pd.Timestamp("2020-12-31"), None], ["2020-12-31", None]),
        ([12.5], "has many spellings"),
        ([Decimal("12.50")], "has many spellings"),
        ([1e16], "may have lost digits"),
        ([float("inf")], "has many spellings"),
    ],
)
def test_numbers_have_one_spelling_or_none(
    tmp_path: Path, cells: list[Any], expected: list[str] | str
) -> None:
    """What a file holds as a float, a decimal or a day is the text of the same, or refused."""
    pq.write_table(pa.table({"id": pa.array(cells)}), tmp_path / "table.parquet")
    if isinstance(expected, str):
        with pytest.raises(DataError, match=f"key 'id', row 1: .*{expected}"):
            read_key_table(tmp_path / "table.parquet", name="agency", key=["id"])
        return
    table = read_key_table(tmp_path / "table.parquet", name="agency", key=["id"])

    assert table.columns["id"].tolist() == expected


def test_bad_keys_are_refused() -> None:
    """Numbers that nobody spelled, and empty tables."""
    spec = KeySpec(columns=("id",), metric=Exact())
    for table, message in (
        (KeyTable(name="bank", columns={"id": np.array([1.0])}), "'id', row 1: must be text"),
        (keys("bank", id=[]), "keys of bank: has no rows"),
    ):
        with pytest.raises(DataError, match=message):
            exact_texts(spec, table)


@pytest.mark.parametrize(
    ("linkage", "model", "message"),
    [
        ({"protection": "bloom"}, {}, 'links similar keys.* goes with "none", "hashes" or "psi"'),
        ({"protection": "shares"}, {}, 'goes with "none", "hashes" or "psi"'),
        ({"protection": "hashes", "metric": "levenshtein"}, {}, "finds equal keys alone"),
        ({"max_distance": 1.0}, {}, "max_distance: distances are at most 0"),
        ({"metric": "levenshtein", "fold": True}, {}, 'fold: goes with metric = "exact"'),
        ({}, {"family": "fedsim"}, "are all equally near; choose top1sim or avgsim"),
        ({}, {}, r"gives no numeric keys .* alone \(top1sim, avgsim\)"),
    ],
)
def test_settings_that_do_not_go_with_exact_keys_are_refused(
    tmp_path: Path, linkage: dict[str, Any], model: dict[str, Any], message: str
) -> None:
    """In one line, with what to use instead."""
    path = write_federation(tmp_path, linkage={"metric": "exact", **linkage})
    source = tomllib.loads(path.read_text())
    source["linkage"].pop("ranges", None)
    if model:
        source["model"] = model
    path = save_federation(tmp_path, source)

    def check() -> None:
        config = read_federation(path)
        require_linkable(config)
        require_trainable(config)

    with pytest.raises(ConfigError, match=message):
        check()
