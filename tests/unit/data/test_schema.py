"""A schema is fitted once, kept as JSON, and reads new rows as it read the first ones."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from helpers.new_rows import fitted_schema

from securevfl.core.errors import ConfigError, DataError
from securevfl.data.scaling import ColumnSettings
from securevfl.data.schema import TableSchema, fit_schema

FRAME = pd.DataFrame(
    {
        "debt": [10.0, None, 30.0, 50.0],
        "town": ["east", "west", None, "east"],
        "lift": [True, None, False, True],
        "since": ["2020-03-01", "2021-06-15T12:00", None, "2020-03-02"],
        "rooms": [1, 2, 3, 4],
    }
)


def fit(frame: pd.DataFrame = FRAME, **declared: Any) -> TableSchema:
    return fitted_schema(frame, ColumnSettings(**declared))


def encode(schema: TableSchema, **columns: list[Any]) -> dict[str, list[float]]:
    frame = pd.DataFrame({**{name: FRAME[name].iloc[[0]].tolist() for name in FRAME}, **columns})
    names, values = schema.encode(frame, where="new rows")
    return dict(zip(names, values.T.tolist(), strict=True))


def test_a_table_with_gaps_of_every_kind_is_encoded() -> None:
    """A flag where something is missing; the median, no word, the half of true, no place."""
    names, values = fit().encode(FRAME, where="table")
    features = dict(zip(names, values.T, strict=True))

    assert names == (
        "debt", "debt is missing", "town=east", "town=west", "town is missing", "lift",
        "lift is missing", "since days", "since month sine", "since month cosine",
        "since weekday sine", "since weekday cosine", "since hour sine", "since hour cosine",
        "since is missing", "rooms",
    )  # fmt: skip
    assert values.dtype == np.float32
    assert features["debt"].tolist() == [10, 30, 30, 50]
    assert features["debt is missing"].tolist() == [0, 1, 0, 0]
    assert features["town=east"].tolist() == [1, 0, 0, 1]
    assert features["town is missing"].tolist() == [0, 0, 1, 0]
    assert features["lift"].tolist() == [1, 0.5, 0, 1]
    assert features["since days"].tolist() == [0, 471.5, 1, 1]
    assert features["since month sine"] == pytest.approx([np.sqrt(0.75), 0.5, 0, np.sqrt(0.75)])
    assert features["since month cosine"][2] == 0
    assert features["since hour cosine"] == pytest.approx([1, -1, 0, 1], abs=1e-6)
    week = np.hypot(features["since weekday sine"], features["since weekday cosine"])
    assert week == pytest.approx([1, 1, 0, 1])


def test_rare_words_share_one_feature() -> None:
    """The most frequent words are kept, and equally frequent ones by their letters."""
    words = [f"w{number:02}" for number in range(60) for _ in range(3 if number < 55 else 4)]
    frame = pd.DataFrame({"w": words})
    kept = [f"w={word}" for word in ("w00", "w01", *(f"w{number}" for number in range(55, 60)))]
    schema = fit(frame, max_categories=7)
    names, values = schema.encode(frame, where="table")

    assert names == (*kept, "w=other")
    assert values.sum(axis=1).tolist() == [1.0] * len(words)
    assert schema.encode(pd.DataFrame({"w": ["unseen"]}), where="new")[1].tolist() == [
        [0, 0, 0, 0, 0, 0, 0, 1]
    ]


def test_new_rows_may_come_otherwise() -> None:
    """In another order, with more columns and other types of the same values."""
    frame = FRAME.assign(extra=b"x")[["rooms", "extra", "since", "lift", "town", "debt"]]
    frame["since"] = pd.to_datetime(frame["since"], format="ISO8601")
    frame["town"] = frame["town"].astype("category")
    frame["lift"] = pd.Series(["TRUE", None, "no", "yes"])
    frame["debt"] = frame["debt"].astype("Float64")
    frame["rooms"] = frame["rooms"].astype(str)

    assert np.array_equal(
        fit().encode(frame, where="new rows")[1], fit().encode(FRAME, where="table")[1]
    )


def test_an_unknown_word_is_none_of_those_known() -> None:
    """Without "other" it is 0 everywhere, also where the list was declared; no row is refused."""
    for schema in (fit(), fit(categories={"town": ["east", "west"]})):
        row = encode(schema, town=["north"])
        assert (row["town=east"], row["town=west"], row["town is missing"]) == ([0], [0], [0])
    row = encode(fit(categories={"town": ["east", "other"]}), town=["north"])
    assert (row["town=east"], row["town=other"]) == ([0], [1])


def test_whole_numbers_with_a_gap_keep_their_spelling() -> None:
    """An empty cell turns integers into floats, and code 3 must not become the word 3.0."""
    frame = pd.DataFrame({"code": [3, None, 1]})
    schema = fit(frame, categories={"code": ["1", "3"]})
    assert schema.encode(frame, where="table")[1].tolist() == [[0, 1, 0], [0, 0, 1], [1, 0, 0]]


def test_a_value_missing_where_none_was_is_filled_in() -> None:
    """Without a flag, since the model knows none."""
    row = encode(fit(), rooms=[None])
    assert row["rooms"] == [2.5]
    assert "rooms is missing" not in row


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rooms": ["two"]}, "column 'rooms', row 1: must be a number, got 'two'"),
        ({"rooms": [True, b"x"]}, "column 'rooms', row 2: must be a number, got \"b'x'\""),
        ({"rooms": [pd.Timestamp("2020-01-01")]}, "column 'rooms', row 1: must be a number"),
        ({"rooms": [np.inf]}, "column 'rooms', row 1: is infinite or beyond float32"),
        ({"lift": ["maybe"]}, "column 'lift', row 1: must be true or false, got 'maybe'"),
        ({"lift": [2]}, "column 'lift', row 1: must be true or false, got '2'"),
        ({"since": [20200301]}, "column 'since', row 1: must be a date such as 2020-12-31"),
        ({"since": ["2020-02-30"]}, "must be a date such as 2020-12-31, got '2020-02-30'"),
        ({"town": [7.5]}, "column 'town': must be words, got float64 values"),
    ],
)
def test_a_retyped_column_is_named(changes: dict[str, list[Any]], message: str) -> None:
    """One line says which column, where, and what was expected."""
    rows = max(len(column) for column in changes.values())
    frame = pd.concat([FRAME.iloc[[0]]] * rows).assign(**changes)
    with pytest.raises(DataError, match=r"^new rows: ") as caught:
        fit().encode(frame, where="new rows")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_column_is_named() -> None:
    """With the nearest name that is there."""
    frame = FRAME.rename(columns={"rooms": "room"})
    with pytest.raises(DataError, match="has no column 'rooms'; did you mean 'room'"):
        fit().encode(frame, where="new rows")


def test_gaps_can_be_refused() -> None:
    """In the table that is fitted and in new rows."""
    whole = FRAME.dropna()
    schema = fit(whole, missing="refuse")
    assert schema.feature_names[:2] == ("debt", "town=east")
    with pytest.raises(DataError, match=r"column 'debt', row 2: is missing .*\(and 3 more"):
        fit(FRAME, missing="refuse")
    with pytest.raises(DataError, match=r"column 'rooms', row 1: is missing \(1 such"):
        encode(schema, rooms=[None])


def test_what_is_declared_is_not_taken_from_the_records() -> None:
    """Middles of bounds, declared words and flags leave nothing that rests on the data."""
    schema = fit(
        bounds={"debt": [0, 100], "rooms": [1, 5], "since": ["2015-01-01", "2025-01-01T00:00"]},
        categories={"town": ["east", "west"]},
        missing_columns=["debt", "town", "lift", "since", "rooms"],
        own_statistics=False,
    )

    assert schema.data_dependent == ()
    row = encode(schema, debt=[None], rooms=[None], since=[None])
    assert (row["debt"], row["rooms"], row["since days"]) == ([50], [3], [1826.5])
    whole = FRAME.dropna().iloc[[0, 0]]
    other = fit(
        whole,
        bounds={"debt": [0, 100], "rooms": [1, 5], "since": ["2015-01-01", "2025-01-01T00:00"]},
        categories={"town": ["east", "west"]},
        missing_columns=["debt", "town", "lift", "since", "rooms"],
        own_statistics=False,
    )
    assert other == schema


def test_all_that_is_taken_from_the_records_is_told() -> None:
    """Medians, words, flags and the first day, each with what would be declared instead."""
    taken = {(one.column, one.what): one.declare for one in fit().data_dependent}

    assert set(taken) == {
        ("debt", "the median that stands for missing values"),
        ("debt", "whether values are missing"),
        ("town", "which words there are"),
        ("town", "whether values are missing"),
        ("lift", "whether values are missing"),
        ("since", "the earliest date, from which days are counted,"),
        ("since", "whether values are missing"),
    }
    assert taken["town", "whether values are missing"] == 'party.missing_columns = ["town"]'
    assert "town = [" in taken["town", "which words there are"]


def test_no_median_is_kept_where_a_promise_is_made() -> None:
    """Not even for new rows: they are refused with what to declare."""
    schema = fit(FRAME[["rooms"]], own_statistics=False)
    assert schema.data_dependent == ()
    with pytest.raises(DataError, match=r"row 1: is missing .* declare those of 'rooms'"):
        encode(schema, rooms=[None])


def test_bounds_of_columns_become_ranges_of_features() -> None:
    """Only numbers and days need a declaration; a feature's own comes first."""
    schema = fit(FRAME.drop(columns="debt"))
    ranges = schema.feature_bounds(
        {"rooms": [1, 5], "since": ["2020-03-01", "2020-03-11"], "town=east": [0, 2]}
    )
    assert ranges["rooms"] == (1, 5)
    assert ranges["since days"] == (0, 10)
    assert ranges["since hour sine"] == (-1, 1)
    assert (ranges["town=east"], ranges["town=west"], ranges["lift"]) == ((0, 2), (0, 1), (0, 1))
    assert set(ranges) == set(schema.feature_names)
    whole = fit(FRAME[["debt", "lift", "town"]]).feature_bounds([0, 500])
    assert whole["debt"] == (0, 500)
    assert whole["debt is missing"] == whole["lift"] == whole["town=east"] == (0, 1)
    for wrong in ([0, 500], {"since": [1, 2]}, {}):
        with pytest.raises(ConfigError, match=r"since.* need their own: since = \[\"2015"):
            schema.feature_bounds(wrong)
    with pytest.raises(ConfigError, match="of 'rooms' must be numbers"):
        fit(FRAME[["rooms"]]).feature_bounds({"rooms": ["a", "b"]})


def test_declared_bounds_say_that_a_column_is_of_numbers_or_dates() -> None:
    """An empty column is then one that happens to be empty, and words in it are refused."""
    empty = pd.DataFrame({"a": [None, None]})
    assert fit(empty, bounds={"a": [0, 1]}).feature_names == ("a", "a is missing")
    days = fit(empty, bounds={"a": ["2020-01-01", "2021-01-01"]})
    assert days.feature_names[0] == "a days"
    with pytest.raises(DataError, match="must be a number, got 'x'"):
        fit(pd.DataFrame({"a": ["x"]}), bounds={"a": [0, 1]})
    with pytest.raises(DataError, match="must be a date such as 2020-12-31, got '7'"):
        fit(pd.DataFrame({"a": [7]}), bounds={"a": ["2020-01-01", "2021-01-01"]})


def test_features_of_one_name_are_refused() -> None:
    """Names tell features apart, in bounds and in models."""
    frame = pd.DataFrame({"a": [1.0, None], "a is missing": [0.0, 1.0]})
    with pytest.raises(DataError, match="two features would be called 'a is missing'; rename"):
        fit(frame)


def test_every_problem_is_collected() -> None:
    """One line each; what is raised is the first, with how many more there are."""
    frame = pd.DataFrame({"a": ["1", "2", "x"], "b": [1.0, 2.0, np.inf], "c": [b"x"] * 3, "d": 1.0})
    schema, values, problems = fit_schema(frame, list(frame), ColumnSettings(), where="table")

    assert [problem.split(": ")[1] for problem in problems] == [
        "column 'a'", "column 'b'", "column 'c'",
    ]  # fmt: skip
    assert schema.feature_names == ("d",)
    assert values.tolist() == [[1]] * 3
    with pytest.raises(DataError, match=r"column 'a': .*\(and 2 more; securevfl check lists them"):
        fit(frame)


def test_a_column_is_described_without_its_values() -> None:
    """Kind, encoding and features, for people who check what a run would do."""
    assert fit().describe() == [
        "debt: number; as it is, and whether it is missing; 2 features",
        "town: words; one 0/1 feature a word, and whether it is missing; 3 features",
        "lift: boolean; 1 and 0, and whether it is missing; 2 features",
        "since: date; days since 2020-03-01; month, weekday, hour as sine and cosine, and "
        "whether it is missing; 8 features",
        "rooms: number; as it is; 1 feature",
    ]


def test_a_schema_survives_json(tmp_path: Path) -> None:
    """Equal after a file, and so are all features, to the last bit."""
    path = tmp_path / "schema.json"
    path.write_text(json.dumps(fit().as_json(), allow_nan=False))
    again = TableSchema.from_json(json.loads(path.read_text()))

    assert again == fit()
    assert (
        again.encode(FRAME, where="a")[1].tobytes() == fit().encode(FRAME, where="a")[1].tobytes()
    )


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda kept: [kept], "format: must be 3"),
        (lambda kept: {**kept, "format": 4}, "format: must be 3, got 4"),
        (lambda kept: {**kept, "more": 1}, "more: no such field"),
        (lambda kept: {**kept, "columns": {}}, "columns: must be a list, got dict"),
        (lambda kept: {**kept, "columns": [3]}, r"columns\[0\].kind: must be one of number"),
        (
            lambda kept: {**kept, "columns": kept["columns"] * 2},
            "columns: two are called 'debt'",
        ),
        (lambda kept: {**kept, "missing": "drop"}, "missing: must be one of 'fill', 'refuse'"),
        (lambda kept: {**kept, "keys": [{"name": "x"}]}, r"keys\[0\].kind: is missing"),
        (
            lambda kept: {**kept, "label": {"name": "y", "task": "rank", "classes": None}},
            "label.task: must be one",
        ),
        (lambda kept: {k: v for k, v in kept.items() if k != "columns"}, "columns: is missing"),
        (
            lambda kept: {**kept, "columns": [{**kept["columns"][0], "fill": float("nan")}]},
            r"columns\[0\].fill: must be finite",
        ),
        (
            lambda kept: {**kept, "columns": [{**kept["columns"][0], "fill": "30"}]},
            r"columns\[0\].fill: must be a number, got '30'",
        ),
    ],
)
def test_a_damaged_schema_gets_one_line(damage: Any, message: str) -> None:
    """Whatever of it is changed by hand, it is not a traceback."""
    kept = json.loads(json.dumps(fit().as_json()))
    with pytest.raises(DataError, match=f"^model: is damaged: .*{message}") as caught:
        TableSchema.from_json(damage(kept), where="model")
    assert "\n" not in str(caught.value)


def test_declared_words_and_cells_are_compared_without_blanks_and_in_one_unicode_form() -> None:
    """A Mac's file and a list that Windows wrote mean the same word."""
    frame = pd.DataFrame({"town": ["gro\u0308\u00dfe ", "klein", "gr\u00f6\u00dfe"]})
    schema = fit(frame, categories={"town": ["gr\u00f6\u00dfe", "klein "]})

    assert schema.feature_names == ("town=gr\u00f6\u00dfe", "town=klein")
    assert fit(frame).feature_names == schema.feature_names
