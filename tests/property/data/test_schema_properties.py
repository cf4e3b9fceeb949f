"""What a schema does to a table does not depend on how the table lies there."""

import json

import numpy as np
import pandas as pd
from hypothesis import given, settings
from hypothesis import strategies as st

from securevfl.data.scaling import ColumnSettings
from securevfl.data.schema import TableSchema, fit_schema

CELLS = {
    "number": st.floats(-1e6, 1e6),
    "whole": st.integers(-50, 50),
    "truth": st.sampled_from(["yes", "no"]),
    "word": st.text(alphabet="abß =", min_size=1, max_size=2),
    "day": st.dates().map(str),
    "time": st.datetimes().map(str),
}


@st.composite
def tables(draw: st.DrawFn) -> pd.DataFrame:
    """Draw a table with gaps, in which every column has a value."""
    rows = draw(st.integers(2, 8))
    columns = {}
    for name, cells in CELLS.items():
        drawn = draw(st.lists(cells | st.none(), min_size=rows - 1, max_size=rows - 1))
        columns[name] = pd.Series([draw(cells), *drawn], dtype=object)
    return pd.DataFrame(columns)


@settings(deadline=None, max_examples=20)
@given(frame=tables(), data=st.data())
def test_only_cells_decide(frame: pd.DataFrame, data: st.DataObject) -> None:
    """JSON, the order of rows and that of columns change no bit; nor does encoding twice."""
    declared = ColumnSettings(max_categories=data.draw(st.integers(1, 5)))
    schema, values, problems = fit_schema(frame, list(CELLS), declared, where="table")
    assert problems == []
    assert np.isfinite(values).all()
    assert values.shape == (len(frame), len(schema.feature_names))
    assert schema.encode(frame, where="table")[1].tobytes() == values.tobytes()

    kept = TableSchema.from_json(json.loads(json.dumps(schema.as_json(), allow_nan=False)))
    rows = data.draw(st.permutations(range(len(frame))))
    other = frame.iloc[rows][data.draw(st.permutations(list(CELLS)))]
    assert kept == schema
    assert kept.encode(other, where="rows")[1].tobytes() == values[rows].tobytes()
    again, permuted, _ = fit_schema(other, list(CELLS), declared, where="rows")
    assert again == schema
    assert permuted.tobytes() == values[rows].tobytes()


@settings(deadline=None, max_examples=20)
@given(frame=tables(), data=st.data())
def test_a_row_is_encoded_by_itself(frame: pd.DataFrame, data: st.DataObject) -> None:
    """Under a schema, no other row of the table moves a row's features."""
    schema, values, _ = fit_schema(frame, list(CELLS), ColumnSettings(), where="table")
    row = data.draw(st.integers(0, len(frame) - 1))
    alone = schema.encode(frame.iloc[[row]].reset_index(drop=True), where="row")[1]
    assert alone.tobytes() == values[[row]].tobytes()
