"""Each kind of doubt is said of a table that has it, and of none that only looks like it."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import pytest

from securevfl.core.errors import DataError
from securevfl.data.keys_and_labels import read_key_table
from securevfl.data.party_tables import ColumnRoles, fit_table, new_rows
from securevfl.data.scaling import ColumnSettings, FeatureScaler
from securevfl.data.sources.pieces import LOST

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
