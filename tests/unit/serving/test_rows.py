"""Rows as JSON, of columns of every kind."""

import json

import numpy as np
import pandas as pd
import pytest
from helpers.new_rows import fitted_schema

from securevfl.data.scaling import ColumnSettings
from securevfl.data.schema import KeyColumn, TableSchema
from securevfl.serving.api import BadRowsError, RowFormat

FRAME = pd.DataFrame(
    {
        "income of 2020": [1.5, 2.5, np.nan, 4.5],
        "model_kind": ["a", "b", "a", "c"],
        "since": ["2020-01-01", "2021-06-05", "2019-03-04", "2020-02-02"],
        "employed": [True, False, True, True],
    }
)


def schema(**settings: object) -> TableSchema:
    fitted = fitted_schema(
        FRAME if settings == {} else FRAME.fillna(0.0),
        ColumnSettings(**settings),  # type: ignore[arg-type]
    )
    return TableSchema(
        columns=fitted.columns,
        missing=fitted.missing,
        keys=(KeyColumn(name="born", kind="date"),),
    )


def test_rows_become_the_frame_that_the_schema_reads() -> None:
    rows = RowFormat.of(schema(), {"name": "text"})
    asked = [
        {
            "born": "1980-01-01",
            "name": None,
            "model_kind": 7,
            "since": "2020-01-01",
            "employed": False,
        },
        {"born": "1990-01-01", "name": "Ann", "income of 2020": 3},
    ]
    frame = rows.read(json.dumps({"rows": asked}).encode(), most_rows=2)
    assert list(frame.columns) == ["born", "name", *FRAME.columns]
    assert frame["income of 2020"].dtype == np.float64
    assert frame["model_kind"].tolist() == ["7", None]
    assert frame["name"].tolist() == [None, "Ann"]
    names, values = schema().encode(frame, where="rows")
    assert values.shape == (2, len(names))


def test_a_text_that_is_no_date_is_named_by_row_and_column_and_not_quoted() -> None:
    rows = RowFormat.of(schema(), {})
    asked = [{"born": "1980-01-01", "since": "1/2/2020"}, {"born": "secret"}]
    with pytest.raises(BadRowsError) as refused:
        rows.read(json.dumps({"rows": asked}).encode(), most_rows=2)
    assert refused.value.lines == (
        "row 1, column 'since': must be a date such as 2020-12-31",
        "row 2, column 'born': must be a date such as 2020-12-31",
    )


def test_what_may_not_be_missing_must_be_there() -> None:
    rows = RowFormat.of(schema(missing="refuse"), {})
    assert all(column.required for column in rows.columns)
    with pytest.raises(BadRowsError) as refused:
        rows.read(b'{"row": {"born": "1980-01-01", "employed": 1}}', most_rows=1)
    told = refused.value.lines
    assert "row 1, column 'income of 2020': is missing" in told
    assert "row 1, column 'employed': must be true or false" in told


def test_a_row_has_the_number_of_a_column_with_signs() -> None:
    """As JSON knows no signs; the features are those of the table to the last bit."""
    cells = ["5%", "12.5%", "0.0000001%", None]
    fitted = fitted_schema(pd.DataFrame({"rate": cells}), ColumnSettings())
    rows = RowFormat.of(fitted, {})
    assert "hundredth" in rows.columns[0].note
    asked = [{"rate": 5}, {"rate": 12.5}, {"rate": 1e-7}, {"rate": None}]
    frame = rows.read(json.dumps({"rows": asked}).encode(), most_rows=4)
    table = pd.DataFrame({"rate": cells})
    assert np.array_equal(
        fitted.encode(frame, where="rows")[1], fitted.encode(table, where="table")[1]
    )
