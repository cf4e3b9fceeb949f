"""Each kind of doubt is said of a table that has it, and of none that only looks like it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn import datasets

from securevfl.core.errors import DataError
from securevfl.data.keys_and_labels import read_key_table
from securevfl.data.party_tables import ColumnRoles, fit_table, new_rows
from securevfl.data.scaling import ColumnSettings, FeatureScaler
from securevfl.data.sources.pieces import LOST
from securevfl.data.sources.read import read_frame
from securevfl.data.sources.settings import Reading, Wanted

ROWS = 200
DAYS = pd.date_range("2019-11-01", periods=ROWS)
RANDOM = np.random.default_rng(0)
PLAIN = pd.DataFrame(
    {
        "id": np.arange(1000, 1000 + ROWS),
        "c": RANDOM.normal(size=ROWS),
        "day": DAYS.astype(str),
        "plan": np.where(np.arange(ROWS) % 3, "gold", "silver"),
    }
)
SOME = np.arange(ROWS) % 4 == 0


def doubts_of(frame: pd.DataFrame, settings: ColumnSettings | None = None, **roles: Any) -> str:
    """Return a table's doubts and problems, one a line."""
    own = ColumnRoles(**{"key": ["id"], "task": "regression", **roles})
    fitted = fit_table(frame, own, settings or ColumnSettings(), name="bank", where="table")
    return "\n".join([*fitted.problems, *fitted.notes])


def test_a_plain_table_raises_no_doubt() -> None:
    assert doubts_of(PLAIN) == ""
    assert doubts_of(PLAIN.assign(y=PLAIN.c), label="y") == ""


@pytest.mark.parametrize(
    ("column", "cells", "words"),
    [
        ("c", PLAIN.c.where(~SOME, -9999), "column 'c': 50 of 200 cells are -9999"),
        ("c", PLAIN.c.where(~SOME, 999999), "column 'c': 50 of 200 cells are 999999"),
        ("c", PLAIN.c.where(~SOME, 1e12), "column 'c': 50 of 200 cells are 1000000000000"),
        ("day", PLAIN.day.where(~SOME, "9999-12-31"), "column 'day': 50 of 200 cells are 9999-12"),
        ("day", DAYS.strftime("%Y%m%d").astype(int), "column 'day' holds dates as whole numbers"),
        ("fee", [f"EUR {10 * (i % 30)}" for i in range(ROWS)], "with the unit 'EUR'"),
        ("fee", [f"{10 * (i % 30)} kg" for i in range(ROWS)], "with the unit 'kg'"),
        (
            "t",
            [f"{day}T09:30{'' if i % 2 else 'Z'}" for i, day in enumerate(PLAIN.day)],
            "column 't' has times with and times without a zone",
        ),
        ("n", np.arange(ROWS), "column 'n' looks like an identifier"),
        ("Unnamed: 0", np.arange(ROWS), "column 'Unnamed: 0' has no name of its own"),
    ],
)
def test_a_feature_in_doubt_is_named(column: str, cells: Any, words: str) -> None:
    said = doubts_of(PLAIN.assign(**{column: cells}))
    assert words in said
    assert "\n" not in said


@pytest.mark.parametrize(
    "cells",
    [
        RANDOM.integers(0, 10_000, ROWS).clip(max=9999),
        np.where(SOME, 1, 0),
        np.where(SOME, 100, np.arange(ROWS) % 90),
        RANDOM.integers(19_000_000, 20_000_000, ROWS).repeat(1) * 1.5,
    ],
)
def test_numbers_that_are_values_raise_none(cells: np.ndarray) -> None:
    assert doubts_of(PLAIN.assign(c=cells)) == ""


def test_a_number_for_nothing_is_found_in_a_label_too() -> None:
    frame = PLAIN.assign(y=PLAIN.c.where(~SOME, -999))
    assert "label 'y': 50 of 200 cells are -999," in doubts_of(frame, label="y")


def test_a_key_that_stands_for_none_is_said_without_its_value() -> None:
    """Of numbers and of texts; two rows a key are no such thing."""
    for cells in (PLAIN.id.where(~SOME, 0), PLAIN.id.astype(str).where(~SOME, "UNKNOWN")):
        text = cells.dtype == "str"
        roles = {"key": (), "text_key": ("id",), "exclude": ("id",)} if text else {}
        said = doubts_of(PLAIN.assign(id=cells), **roles)
        assert "key 'id': 50 of 200 rows have the same key" in said
        assert "'UNKNOWN'" not in said
    assert "same key" not in doubts_of(PLAIN.assign(id=PLAIN.id // 2))


def test_rows_of_one_key_on_both_sides_are_named_with_the_split() -> None:
    """At a primary whose rows are split at random; few pairs among many rows are no doubt."""
    frame = PLAIN.assign(id=1000 + np.arange(ROWS) // 8, y=PLAIN.c)
    assert 'split = "group" and split_column = "id"' in doubts_of(frame, label="y")
    assert doubts_of(frame, label="y", random_split=False) == ""
    assert doubts_of(frame) == ""
    few = PLAIN.assign(id=PLAIN.id.where(PLAIN.id > 1004, 1005), y=PLAIN.c)
    assert doubts_of(few, label="y") == ""


def test_a_key_of_times_without_a_zone_counts_as_utc() -> None:
    times = pd.Series(DAYS + pd.Timedelta(hours=9)).astype(str)
    keyed = PLAIN.assign(t=times)
    assert "key 't' has times without a zone" in doubts_of(keyed, key=["t"], exclude=["id"])
    assert doubts_of(keyed.assign(t=times + "Z"), key=["t"], exclude=["id"]) == ""
    assert doubts_of(PLAIN, key=["day"], exclude=["id"]) == ""


@pytest.mark.parametrize(
    ("cells", "doubtful"),
    [
        ([f"{i % 90}.5%" for i in range(ROWS)], True),
        (np.arange(ROWS) % 90 * 1000.0, True),
        (np.arange(ROWS) % 90 * 1.0, False),
    ],
)
def test_bounds_in_another_unit_than_the_cells(cells: Any, doubtful: bool) -> None:
    settings = ColumnSettings(bounds={"rate": (0.0, 100.0), "c": (-5.0, 5.0)})
    said = doubts_of(PLAIN.drop(columns="day").assign(rate=cells), settings)
    assert ("column 'rate': most cells lie" in said) == doubtful


@pytest.mark.parametrize(
    ("kind", "content", "words"),
    [
        ("words", "NA", "column 'plan' has 'NA', which counts as an empty cell"),
        ("merged", 7, "column 'plan' has 7 empty cells that are merged"),
        ("formulas", 27, "table: column 'plan' has 27 formulas without a value"),
    ],
)
def test_what_a_source_shows_and_its_cells_lack(kind: str, content: Any, words: str) -> None:
    frame = PLAIN.copy()
    frame.attrs[LOST] = {kind: {"plan": content}}
    assert words in doubts_of(frame)


def test_formulas_without_a_value_stop() -> None:
    """They are no gaps: the numbers are there for whoever opens the workbook."""
    frame = PLAIN.copy()
    frame.attrs[LOST] = {"formulas": {"c": 27}}
    roles = ColumnRoles(key=["id"], task="regression")
    assert fit_table(frame, roles, ColumnSettings(), name="b", where="t").table is None
    table = fit_table(PLAIN, roles, ColumnSettings(), name="b", where="t").table
    assert table is not None
    assert table.schema is not None
    with pytest.raises(DataError, match="column 'c' has 27 formulas"):
        new_rows(frame, table.schema, name="b", where="new")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda cells: cells.where(cells > 0), "column 'c' is empty in"),
        (lambda cells: cells * 1000, "column 'c': most new cells lie far from"),
        (lambda cells: cells / 1000, "column 'c': most new cells lie much closer together"),
        (lambda cells: cells, ""),
    ],
)
def test_new_rows_with_gaps_or_in_another_unit(
    change: Callable[["pd.Series[Any]"], "pd.Series[Any]"], words: str
) -> None:
    roles = ColumnRoles(key=["id"], task="regression")
    table = fit_table(PLAIN, roles, ColumnSettings(), name="b", where="t").table
    assert table is not None
    assert table.schema is not None
    scaler = FeatureScaler.standard(table.features)
    new = new_rows(
        PLAIN.assign(c=change(PLAIN.c)), table.schema, name="b", where="new", scaler=scaler
    )
    assert "\n".join(new.notes).startswith(words)
    assert bool(new.notes) == bool(words)


def test_keys_that_are_read_alone_are_asked_too(tmp_path: Any) -> None:
    """As ``securevfl link`` reads them."""
    path = tmp_path / "keys.csv"
    path.write_text("id\n" + "NA\n" + "".join(f"Name{i}\n" for i in range(30)))
    (note,) = read_key_table(path, name="bank", key=["id"]).notes
    assert note.startswith("column 'id' has 'NA', which counts as an empty cell")
    assert "categories" not in note


NOTHING = (-1, -99, -999, -9999, 999, 9999, 99999, 888, -9999.25, 32767, -32768, 2147483647, 1e12)


@settings(max_examples=25, deadline=None)
@given(
    value=st.sampled_from(NOTHING),
    whole=st.booleans(),
    share=st.integers(3, 30),
    high=st.integers(20, 400),
    seed=st.integers(0, 2**31),
)
def test_any_number_for_nothing_is_named(
    value: float, whole: bool, share: int, high: int, seed: int
) -> None:
    """Whatever the others are: whole or not, few or many, of any range below it."""
    random = np.random.default_rng(seed)
    others = random.integers(0, high, ROWS) if whole else random.uniform(0, high, ROWS)
    cells = pd.Series(np.where(np.arange(ROWS) % share, others, value))
    hidden = whole and high < 30 and value == -1
    if not hidden:  # of so few numbers each is as frequent as the one for nothing
        assert f"cells are {value:.15g}, which" in doubts_of(PLAIN.assign(c=cells))
    assert "may stand for no value" not in doubts_of(PLAIN.assign(c=pd.Series(others)))


@settings(max_examples=25, deadline=None)
@given(
    day=st.sampled_from(("1900-01-01", "1899-12-30", "1970-01-01", "2099-12-31", "9999-12-31")),
    first=st.integers(1930, 1990),
    share=st.integers(3, 20),
    seed=st.integers(0, 2**31),
)
def test_any_day_for_nothing_is_named(day: str, first: int, share: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    start, length = np.datetime64(f"{first}-01-02"), 20 * 365
    others = pd.Series(start + random.choice(length, ROWS, replace=False)).astype(str)
    frame = PLAIN.assign(day=others.where(np.arange(ROWS) % share != 0, day))
    assert f"cells are {day}, which" in doubts_of(frame)
    assert "may stand for" not in doubts_of(PLAIN.assign(day=others))


@pytest.mark.parametrize(
    "placeholder",
    ["UNKNOWN", "unknown", "N/A", "n.a.", "-", "0000", "99999", "Null", "keine Angabe", "xxx"],
)
def test_few_keys_for_nothing_are_enough(placeholder: str) -> None:
    """A key that says that it is none needs no tenth of the rows; one of the others does."""
    names = pd.Series([f"Name{i}" for i in range(ROWS)])
    roles = {"key": (), "text_key": ("id",), "exclude": ("id",)}
    for word, doubtful in ((placeholder, True), ("Name3", False)):
        cells = names.where(np.arange(ROWS) % 30 != 0, word)
        assert ("same key" in doubts_of(PLAIN.assign(id=cells), **roles)) == doubtful


@pytest.mark.parametrize("place", [(0, 0), (90, 180), (-90, -180), (9999, 9999)])
def test_few_places_for_nothing_are_enough(place: tuple[float, float]) -> None:
    frame = PLAIN.drop(columns="id").assign(
        lat=RANDOM.uniform(45, 55, ROWS), lon=RANDOM.uniform(5, 15, ROWS)
    )
    assert doubts_of(frame, key=["lat", "lon"]) == ""
    frame.loc[:5, ["lat", "lon"]] = place
    assert "6 of 200 rows have the same key" in doubts_of(frame, key=["lat", "lon"])


def test_a_word_for_nothing_in_one_of_several_keys_is_named() -> None:
    """A postal code tells strangers called UNKNOWN apart, but not from one another there."""
    frame = PLAIN.assign(name=[f"N{i}" if i % 20 else "Unknown" for i in range(ROWS)])
    frame["town"] = [f"T{i % 50}" for i in range(ROWS)]
    keys = ("name", "town")
    said = doubts_of(frame, key=(), text_key=keys, exclude=(*keys, "id"))
    assert said.startswith("key 'name': 10 of 200 cells hold a word for no value")


@pytest.mark.parametrize(
    "cells",
    [
        [f"EUR {i % 30}" for i in range(ROWS)],
        [f"CHF {i % 30 + 1}'200.50" for i in range(ROWS)],
        [f"{i % 30 + 1} 200,50 zł" for i in range(ROWS)],
        [f"Rs. {i % 30}" for i in range(ROWS)],
        [f"US$ {i % 30}" for i in range(ROWS)],
        [f"{'EUR' if i % 2 else 'USD'} {i % 30}" for i in range(ROWS)],
        [f"{i % 30} km/h" for i in range(ROWS)],
        [f"{i % 30} °C" for i in range(ROWS)],
    ],
)
def test_any_unit_is_named(cells: list[str]) -> None:
    assert "column 'fee' holds numbers with the unit" in doubts_of(PLAIN.assign(fee=cells))


@pytest.mark.parametrize(
    "cells",
    [
        [f"c{i % 30}" for i in range(ROWS)],
        [f"{i % 9}{'ab'[i % 2]}" for i in range(ROWS)],
        [f"{i % 3 + 1}{('st', 'nd', 'rd')[i % 3]}" for i in range(ROWS)],
        [f"SKU {i % 30}" for i in range(ROWS)],
    ],
)
def test_words_with_digits_are_no_numbers_with_a_unit(cells: list[str]) -> None:
    assert doubts_of(PLAIN.assign(fee=cells)) == ""


@pytest.mark.parametrize("form", ["%Y%m%d", "%d%m%Y", "%Y%m", "%Y%m%d%H%M", "%Y%m%d%H%M%S"])
def test_dates_in_whole_numbers_are_read_as_the_doubt_says(form: str, tmp_path: Path) -> None:
    days = pd.Series(pd.date_range("2018-01-05", periods=ROWS, freq="9D"))
    frame = PLAIN.assign(day=days.dt.strftime(form).astype("int64"))
    assert f'reading = {{ dates = "{form}" }}' in doubts_of(frame)
    frame.to_csv(tmp_path / "t.csv", index=False)
    read = read_frame(tmp_path / "t.csv", where="t", reading=Reading(dates=form))
    whole = days if form != "%Y%m" else days.dt.to_period("M").dt.to_timestamp()
    assert read.day.str[:10].tolist() == whole.astype(str).str[:10].tolist()
    assert doubts_of(read) == ""


@pytest.mark.parametrize("factor", [1, 1000, 10**6])
def test_seconds_since_1970_are_named(factor: int) -> None:
    seconds = 1_500_000_000 + 86_400 * RANDOM.integers(0, 60, ROWS)
    assert "points in time, counted since 1970" in doubts_of(PLAIN.assign(c=seconds * factor))


def test_a_word_for_nothing_far_down_a_key_is_named(tmp_path: Path) -> None:
    """The first lines of a file show what it is; a person called Null may come late."""
    path = tmp_path / "keys.csv"
    path.write_text("id\n" + "".join(f"Name{i}\n" for i in range(60_000)) + "NULL\n")
    wanted = Wanted(as_text=["id"])
    frame = read_frame(path, where="t", wanted=wanted)
    assert frame.attrs[LOST] == {"words": {"id": "NULL"}}
    assert frame.id.isna().sum() == 1
    frame = read_frame(path, where="t", wanted=wanted, reading=Reading(empty=("",)))
    assert not frame.id.isna().any()


@pytest.mark.parametrize("name", ["iris", "wine", "breast_cancer", "digits", "diabetes"])
@pytest.mark.parametrize("unit", [1.0, 1000.0])
def test_ordinary_tables_raise_none(name: str, unit: float) -> None:
    """As the data sets of scikit-learn are, in their units and in others."""
    bunch = getattr(datasets, f"load_{name}")(as_frame=True)
    frame = (bunch.data * unit).assign(y=bunch.target)
    frame["id"] = np.random.default_rng(0).permutation(len(frame)) + 5000
    task = {"diabetes": "regression", "breast_cancer": "binary"}.get(name, "multiclass")
    assert doubts_of(frame, label="y", task=task) == ""


@settings(max_examples=60, deadline=None)
@given(kind=st.integers(0, 5), seed=st.integers(0, 2**31), rows=st.integers(30, 400))
def test_ordinary_numbers_raise_none(kind: int, seed: int, rows: int) -> None:
    """Counts, scores with a cap, amounts with many zeros, heavy tails, halves, and grades."""
    random = np.random.default_rng(seed)
    numbers = [
        random.poisson(4, rows),
        random.normal(70, 20, rows).clip(0, 99).round(),
        np.where(random.random(rows) < 0.7, 0, random.lognormal(5, 1, rows).round(2)),
        random.standard_cauchy(rows),
        random.integers(-8, 9, rows) / 2,
        random.integers(-1, 3, rows),
    ][kind]
    frame = pd.DataFrame({"id": np.arange(rows) + 10, "c": numbers})
    assert "may stand for no value" not in doubts_of(frame)
