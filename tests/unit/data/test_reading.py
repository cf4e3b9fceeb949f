"""read_table: what becomes of columns, and one clear line for every bad table."""

import contextlib
import gzip
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from securevfl.core.errors import DataError
from securevfl.data.party_tables import ColumnRoles, read_table
from securevfl.data.scaling import ColumnSettings
from securevfl.data.tables import PartyTable

GOOD = "lon,lat,area,town,lift,price\n1.5,2.5,70,east,True,300\n1.25,2.0,80,west,False,350\n"


def write(folder: Path, text: str, name: str = "table.csv") -> Path:
    path = folder / name
    path.write_text(text)
    return path


ROLES = ColumnRoles(key=["lon", "lat"], label="price", task="regression")


def read(path: Path, *, columns: ColumnSettings | None = None, **roles: Any) -> PartyTable:
    return read_table(path, replace(ROLES, **roles), columns or ColumnSettings(), name="agency")


def test_columns_become_keys_features_and_labels(tmp_path: Path) -> None:
    """Keys keep float64, words become one column a value, true and false 1 and 0."""
    table = read(write(tmp_path, GOOD))

    assert table.keys.dtype == np.float64
    assert table.keys.tolist() == [[1.5, 2.5], [1.25, 2.0]]
    assert table.feature_names == ("area", "town=east", "town=west", "lift")
    assert table.features.dtype == np.float32
    assert table.features.tolist() == [[70, 1, 0, 1], [80, 0, 1, 0]]
    assert table.labels is not None
    assert table.labels.dtype == np.float64
    assert table.labels.tolist() == [300, 350]
    assert table.classes is None


def test_gzip_and_parquet_hold_the_same_table(tmp_path: Path) -> None:
    """The three formats give equal tables."""
    plain = write(tmp_path, GOOD)
    (tmp_path / "table.csv.gz").write_bytes(gzip.compress(GOOD.encode()))
    pd.read_csv(plain).to_parquet(tmp_path / "table.parquet")
    expected = read(plain)

    for name in ("table.csv.gz", "table.parquet"):
        table = read(tmp_path / name)
        assert table.feature_names == expected.feature_names
        assert np.array_equal(table.keys, expected.keys)
        assert np.array_equal(table.features, expected.features)
        assert np.array_equal(table.labels, expected.labels)


def test_excluded_and_truth_columns_are_no_features(tmp_path: Path) -> None:
    """A truth column becomes entities, an excluded one nothing."""
    text = "lon,lat,area,entity,note\n1,2,3,7,aa\n2,3,4,9,bb\n"
    table = read(write(tmp_path, text), label=None, truth="entity", exclude=["note"])

    assert table.feature_names == ("area",)
    assert table.entities is not None
    assert table.entities.tolist() == [7, 9]
    assert table.labels is None


def test_named_features_are_taken_in_their_order(tmp_path: Path) -> None:
    """A list of features selects and orders them; an empty one leaves keys alone."""
    path = write(tmp_path, "lon,lat,a,b,c\n1,2,3,4,5\n2,3,4,5,6\n")

    assert read(path, label=None, features=["c", "a"]).features.tolist() == [[5, 3], [6, 4]]
    assert read(path, label=None, features=[]).num_features == 0


def test_declared_words_do_not_depend_on_the_records(tmp_path: Path) -> None:
    """The list decides which columns there are and in which order, numbers in it are words."""
    path = write(tmp_path, "lon,lat,town,floor\n1,2,west,3\n2,3,east,1\n")
    lists = {"town": ["west", "north", "east"], "floor": ["1", "2", "3"]}
    table = read(path, label=None, columns=ColumnSettings(categories=lists))

    assert table.feature_names[:3] == ("town=west", "town=north", "town=east")
    assert table.features.tolist() == [[1, 0, 0, 0, 0, 1], [0, 0, 1, 1, 0, 0]]
    assert table.data_dependent == ()
    assert [taken.column for taken in read(path, label=None).data_dependent] == ["town"]


@pytest.mark.parametrize(
    ("task", "text", "numbers", "classes"),
    [
        ("binary", "no,yes,no", [0, 1, 0], ("no", "yes")),
        ("binary", "True,False,True", [1, 0, 1], (False, True)),
        ("binary", "-1,1,1", [0, 1, 1], (-1, 1)),
        ("multiclass", "7,3,7,5,3,5", [2, 0, 2, 1, 0, 1], (3, 5, 7)),
    ],
)
def test_classes_are_numbered_in_sorted_order(
    tmp_path: Path, task: str, text: str, numbers: list[int], classes: tuple[object, ...]
) -> None:
    """Class numbers count from 0, and the original values are kept."""
    lines = [f"{i},{i},{i},{word}" for i, word in enumerate(text.split(","))]
    table = read(write(tmp_path, "lon,lat,a,price\n" + "\n".join(lines)), task=task)

    assert table.labels is not None
    assert table.labels.dtype == np.int64
    assert table.labels.tolist() == numbers
    assert table.classes == classes


LONG_WORDS = "lon,lat,area,price\n" + "\n".join(f"{i},{i},word{i},{i}" for i in range(60))

BAD_TABLES = {
    "no such column": (GOOD, {"key": ["lon", "latt"]}, "has no column 'latt'; did you mean 'lat'?"),
    "no such label": (GOOD, {"label": "cost"}, "has no column 'cost'; It has area, town"),
    "no such exclusion": (GOOD, {"exclude": ["adress"]}, "has no column 'adress'"),
    "NaN feature": (
        "lon,lat,area,price\n1,2,3,4\n1,2,,5\n",
        {"columns": ColumnSettings(missing="refuse")},
        r"column 'area', row 2: is missing \(1 such cells in all\); fill them in",
    ),
    "infinite feature": (
        "lon,lat,area,price\n1,2,inf,4\n1,2,3,5\n",
        {},
        r"column 'area': holds an infinite value in row 1",
    ),
    "feature beyond float32": (
        "lon,lat,area,price\n1,2,1e39,4\n1,2,3,5\n",
        {},
        r"column 'area': row 1 is too large for float32",
    ),
    "NaN key": (
        "lon,lat,area,price\n1,2,3,4\nNaN,2,3,5\n",
        {},
        "key 'lon', row 2: is missing",
    ),
    "infinite key": (
        "lon,lat,a,price\n1,-inf,3,4\n1,2,3,5\n",
        {},
        "key 'lat', row 1: is infinite",
    ),
    "word as key": (
        "lon,lat,a,price\n1,2,3,4\n1,north,3,5\n",
        {},
        "key 'lat': must be numeric or dates, but row 2",
    ),
    "key beyond 2^53": (
        f"lon,lat,a,price\n{2**53 + 1},2,3,4\n1,2,3,5\n",
        {},
        r"key 'lon', row 1: is above 2\^53.*metric = \"exact\"",
    ),
    "a word among numbers": (
        "lon,lat,a,price\n1,2,3,4\n1,2,12x,5\n1,2,4,6\n",
        {},
        "column 'a': holds numbers, but row 2 holds '12x'",
    ),
    "too many words": (
        LONG_WORDS,
        {},
        "column 'area': holds 60 different words in 60 rows, which looks like an identifier",
    ),
    "an undeclared word": (
        GOOD,
        {"columns": ColumnSettings(categories={"town": ["east"]})},
        "column 'town', row 2: 'west' is not among its declared words",
    ),
    "words declared twice": (
        GOOD,
        {"columns": ColumnSettings(categories={"town": ["east", "west", "east"]})},
        "column 'town': its declared words must be different",
    ),
    "a list without a column": (
        GOOD,
        {"columns": ColumnSettings(categories={"twon": ["a"]})},
        "did you mean 'town'",
    ),
    "missing word": (
        "lon,lat,a,price\n1,2,x,4\n1,2,,5\n",
        {"columns": ColumnSettings(missing="refuse")},
        "column 'a', row 2: is missing",
    ),
    "constant label": (
        "lon,lat,a,price\n1,2,3,4\n1,2,3,4\n",
        {},
        r"label 'price': is constant \(4",
    ),
    "missing label": ("lon,lat,a,price\n1,2,3,\n1,2,3,4\n", {}, "label 'price', row 1: is missing"),
    "infinite label": ("lon,lat,a,price\n1,2,3,1\n1,2,3,inf\n", {}, "label 'price', row 2: is inf"),
    "words to regress": (
        "lon,lat,a,price\n1,2,3,dear\n1,2,3,cheap\n",
        {},
        "label 'price': must be numeric for regression, but holds values such as 'dear'",
    ),
    "three values for binary": (
        "lon,lat,a,price\n1,2,3,0\n1,2,3,1\n1,2,3,2\n",
        {"task": "binary"},
        "the task binary needs two values, found 3",
    ),
    "constant class": (
        "lon,lat,a,price\n1,2,3,x\n1,2,3,x\n",
        {"task": "multiclass"},
        "label 'price': is constant",
    ),
    "numbers as classes": (
        "lon,lat,a,price\n1,2,3,0.1\n1,2,3,1.2\n1,2,3,2.3\n",
        {"task": "multiclass"},
        "3 different values in 3 rows are not classes",
    ),
    "no rows": ("lon,lat,a,price\n", {}, "has no rows"),
    "no columns": ("", {}, "can't be read"),
    "no features": (
        "lon,lat\n1,2\n1,2\n",
        {"label": None},
        "no feature columns besides lon, lat; a sec",
    ),
    "two columns of a name": ("lon,lat,a,a,price\n1,2,3,4,5\n", {}, "two columns are called 'a'"),
    "a row too long": ("lon,lat,a,price\n1,2,3,4\n1,2,3,4,5\n", {}, "can't be read"),
    "all rows too long": ("lon,lat,a,price\n1,2,3,4,5\n1,2,3,4,6\n", {}, "can't be read"),
    "a row too short": ("lon,lat,a,price\n1,2,3,4\n1,2\n", {}, "label 'price', row 2: is missing"),
    "truth with gaps": (
        "lon,lat,a,price,who\n1,2,3,4,5\n1,2,3,5,\n",
        {"truth": "who"},
        "truth 'who': must be whole numbers",
    ),
}


@pytest.mark.parametrize(("text", "changes", "message"), BAD_TABLES.values(), ids=BAD_TABLES)
def test_a_bad_table_gets_one_line(
    tmp_path: Path, text: str, changes: dict[str, object], message: str
) -> None:
    """The message names party and place, is one line, and ends a command with exit code 2."""
    with pytest.raises(DataError, match=message) as caught:
        read(write(tmp_path, text), **changes)

    assert "'agency'" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("table.ods", b"x", "must be a .csv, .tsv or .txt"),
        ("table.csv.gz", b"not gzip", "can't be read"),
        ("table.csv.gz", gzip.compress(GOOD.encode() * 100)[:60], "can't be read"),
        ("table.parquet", b"not parquet", "can't be read"),
        ("table.csv", b"lon,lat,a,price\n1,2,\xff\xfe,4\n", "can't be read"),
        ("table.csv", None, "No such file"),
    ],
    ids=["suffix", "no gzip", "cut gzip", "no parquet", "no UTF-8", "absent"],
)
def test_an_unreadable_file_gets_one_line(
    tmp_path: Path, name: str, content: bytes | None, reason: str
) -> None:
    """Neither the format nor the file system may answer with a traceback of another library."""
    if content is not None:
        (tmp_path / name).write_bytes(content)

    with pytest.raises(DataError, match=reason) as caught:
        read(tmp_path / name)

    assert "\n" not in str(caught.value)


def test_a_folder_is_no_table(tmp_path: Path) -> None:
    """A folder called like a table is refused with the system's reason."""
    (tmp_path / "table.csv").mkdir()

    with pytest.raises(DataError, match="can't be read"):
        read(tmp_path / "table.csv")


@pytest.mark.parametrize(
    "said",
    [
        b"{}",
        b"[]",
        b"null",
        b"not JSON",
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"index_columns": ["nope"], "columns": [], "column_indexes": []}',
        b'{"index_columns": [{"kind": "range"}], "columns": [], "column_indexes": [{}]}',
        b'{"index_columns": [], "columns": [], "column_indexes": [{"pandas_type": "zz", '
        b'"numpy_type": "zz", "name": null, "metadata": {}}]}',
    ],
)
def test_notes_for_pandas_that_are_wrong_do_no_harm(tmp_path: Path, said: bytes) -> None:
    """Whatever another program has left in a Parquet file, its columns are what counts."""
    whole = pa.Table.from_pandas(pd.read_csv(write(tmp_path, GOOD)))
    pq.write_table(whole.replace_schema_metadata({b"pandas": said}), tmp_path / "odd.parquet")
    table = read(tmp_path / "odd.parquet")
    assert table.labels is not None
    assert table.labels.tolist() == [300, 350]


@pytest.mark.parametrize("column", ["town", "price", "lon"])
@pytest.mark.parametrize("width", [-1, 16])
def test_binary_cells_end_in_one_line(tmp_path: Path, column: str, width: int) -> None:
    """Bytes that are no text, such as UUIDs, are no reason for a traceback."""
    frame = pd.concat([pd.read_csv(write(tmp_path, GOOD))] * 60)
    cells = [bytes([0xFF, number]) + bytes(14) for number in range(len(frame))]
    whole = pa.Table.from_pandas(frame, preserve_index=False)
    place = whole.schema.get_field_index(column)
    whole = whole.set_column(place, column, pa.array(cells, type=pa.binary(width)))
    whole = whole.replace_schema_metadata(None)  # which calls it a text
    pq.write_table(whole, tmp_path / "odd.parquet")
    with pytest.raises(DataError, match=column) as caught:
        read(tmp_path / "odd.parquet")
    assert "\n" not in str(caught.value)


def test_texts_that_are_stored_as_bytes_are_texts(tmp_path: Path) -> None:
    """Some programs mark no column as text."""
    whole = pa.Table.from_pandas(pd.read_csv(write(tmp_path, GOOD)), preserve_index=False)
    place = whole.schema.get_field_index("town")
    cells = pa.array([b"east", b"west"], type=pa.binary())
    pq.write_table(whole.set_column(place, "town", cells), tmp_path / "old.parquet")
    assert read(tmp_path / "old.parquet").feature_names == (
        "area", "town=east", "town=west", "lift",
    )  # fmt: skip


def test_damaged_parquet_ends_in_one_line(tmp_path: Path) -> None:
    """Whatever byte is changed, or wherever the file is cut, no other error comes out."""
    path = tmp_path / "table.parquet"
    pd.read_csv(write(tmp_path, GOOD)).to_parquet(path)
    whole, random = path.read_bytes(), np.random.default_rng(5)
    for _ in range(150):
        content = bytearray(whole)
        for place in random.integers(len(content), size=3):
            content[place] = random.integers(256)
        path.write_bytes(bytes(content[: random.integers(1, 2 * len(content))]))
        with contextlib.suppress(DataError):
            read(path)
