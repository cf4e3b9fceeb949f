"""New rows of a party from a file, and schemas that tables are fitted to."""

from pathlib import Path

import pandas as pd

from securevfl.data.party_tables import columns_of_schema, new_rows
from securevfl.data.scaling import ColumnSettings
from securevfl.data.schema import TableSchema, first_problem, fit_schema
from securevfl.data.sources.read import read_frame
from securevfl.data.sources.settings import AS_IT_IS, Reading
from securevfl.data.tables import PartyTable


def read_new_rows(
    path: Path, schema: TableSchema, *, name: str, reading: Reading = AS_IT_IS
) -> PartyTable:
    """Read rows as those were read that a schema was fitted to."""
    where = f"table {path} of {name!r}"
    frame = read_frame(path, where=where, reading=reading, wanted=columns_of_schema(schema))
    return new_rows(frame, schema, name=name, where=where)


def fitted_schema(frame: pd.DataFrame, settings: ColumnSettings) -> TableSchema:
    """Return the encoding of all columns of a table."""
    schema, _, problems = fit_schema(frame, list(frame.columns), settings, where="table")
    if problems:
        raise first_problem(problems)
    return schema
