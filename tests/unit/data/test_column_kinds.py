"""What a column is taken for, whatever type holds it, and what is no feature at all."""

import datetime
from decimal import Decimal
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from securevfl.data.cells import days_since_epoch
from securevfl.data.column_kinds import infer

DAY = datetime.date(2024, 2, 29)
NOON = datetime.datetime(2024, 2, 29, 12)


def arrow(values: list[Any], kind: pa.DataType) -> "pd.Series[Any]":
    return pd.Series(values, dtype=pd.ArrowDtype(kind))


COLUMNS = {
    "floats": (pd.Series([1.5, None]), "number"),
    "nullable integers": (pd.Series([1, None], dtype="Int64"), "number"),
    "unsigned": (pd.Series([1, 2], dtype="uint64"), "number"),
    "decimals": (pd.Series([Decimal("1.5"), None], dtype=object), "number"),
    "decimals and floats": (pd.Series([Decimal("1.5"), 2.5, None], dtype=object), "number"),
    "arrow decimals": (arrow([Decimal("1.5"), None], pa.decimal128(9, 2)), "number"),
    "arrow durations": (arrow([datetime.timedelta(3), None], pa.duration("us")), "number"),
    "numbers as texts": (pd.Series(["1", "-2.5", None]), "number"),
    "codes with leading zeros": (pd.Series(["01", "2", "03"]), "words"),
    "bools": (pd.Series([True, False]), "boolean"),
    "bools with gaps": (pd.Series([True, None, False], dtype=object), "boolean"),
    "nullable bools": (pd.Series([True, None], dtype="boolean"), "boolean"),
    "arrow bools": (arrow([True, None], pa.bool_()), "boolean"),
    "yes and no": (pd.Series(["Yes", "no", None]), "boolean"),
    "yes and maybe": (pd.Series(["yes", "no", "maybe"]), "words"),
    "texts": (pd.Series(["a", "b", None]), "words"),
    "half a character": (pd.Series(["\ud800", "a", None], dtype=object), "words"),
    "arrow texts": (arrow(["a", None], pa.string()), "words"),
    "arrow dictionary": (arrow(["a", None], pa.dictionary(pa.int32(), pa.string())), "words"),
    "categories": (pd.Series(["a", "b", None], dtype="category"), "words"),
    "numbered categories": (pd.Series([1, 2, None]).astype("category"), "words"),
    "texts and numbers": (pd.Series(["a", 1, None], dtype=object), "words"),
    "date texts": (pd.Series(["2024-02-29", "2024-02-29T12:00:00+01:00", None]), "date"),
    "dates": (pd.Series([DAY, None], dtype=object), "date"),
    "dates and times": (pd.Series([DAY, NOON], dtype=object), "date"),
    "datetimes": (pd.Series(pd.to_datetime([NOON, None])), "date"),
    "zoned": (pd.Series(pd.to_datetime([NOON, None])).dt.tz_localize("Europe/Berlin"), "date"),
    "arrow dates": (arrow([DAY, None], pa.date32()), "date"),
    "arrow times": (arrow([NOON, None], pa.timestamp("ns", "UTC")), "date"),
    "date categories": (pd.Series(["2024-02-29", None], dtype="category"), "date"),
}


@pytest.mark.parametrize(("values", "kind"), COLUMNS.values(), ids=COLUMNS)
def test_one_value_is_one_value_in_any_type(values: "pd.Series[Any]", kind: str) -> None:
    """Neither the library nor the database that a table comes from decides what it means."""
    found = infer(values)

    assert found.kind == kind
    assert found.problem is None
    assert found.identifier is None
    assert found.missing == values.isna().sum()


UNUSABLE = {
    "empty": (pd.Series([None, None], dtype=object), "is empty in every row; exclude it"),
    "bytes": (pd.Series([None, b"x"], dtype=object), "holds bytes values, as in row 2"),
    "times": (pd.Series([datetime.time(3)]), "holds time values"),
    "lists": (pd.Series([[1], [2]]), "holds list values"),
    "a word among numbers": (pd.Series(["1", "2", "12x"]), "holds numbers, but row 3 holds '12x'"),
    "a word among dates": (
        pd.Series(["2024-01-01", "2024-01-02", "soon"]),
        "holds dates, but row 3 holds 'soon'",
    ),
    "no such day": (
        pd.Series(["2024-01-01", "2024-01-02", "2023-02-29"]),
        "holds dates, but row 3 holds '2023-02-29'",
    ),
    "another country's dates": (pd.Series(["1/2/2024", "13.2.24"]), "write them as 2020-12-31"),
    "infinite": (pd.Series([1.0, -np.inf]), "holds an infinite value in row 2"),
    "beyond float32": (pd.Series([1, 10**40], dtype=object), "row 2 is too large for float32"),
    "beyond float64": (pd.Series([1, 10**400], dtype=object), "in row 2"),
    "complex": (pd.Series([1j, 2j]), "holds complex numbers"),
    "free text": (
        pd.Series([f"word {number}" for number in range(60)]),
        "holds 60 different words in 60 rows, which looks like an identifier",
    ),
    "16-digit ids": (
        pd.Series(10**15 + np.arange(200)),
        "holds 200 different numbers, of which float32 distinguishes 1, so it looks like an ident",
    ),
    "ticks of a clock": (
        pd.Series(np.repeat(1_700_000_000_000 + 10_000 * np.arange(100), 3)),
        "float32 distinguishes 8; subtract what they have in common, or exclude it",
    ),
}


@pytest.mark.parametrize(("values", "problem"), UNUSABLE.values(), ids=UNUSABLE)
def test_what_is_no_feature_is_said_with_what_to_do(values: "pd.Series[Any]", problem: str) -> None:
    """One sentence, without an exception: a whole table can be looked at."""
    found = infer(values)

    assert found.problem is not None
    assert problem in found.problem
    assert "\n" not in found.problem


@pytest.mark.parametrize(
    ("values", "suspicious"),
    [
        (pd.Series(np.arange(100) + 5000), True),
        (pd.Series(np.arange(100.0) * 15), True),
        (pd.Series(np.arange(100) % 99), False),
        (pd.Series(np.arange(100) * 7919), False),
        (pd.Series(np.arange(100) / 8), False),
        (pd.Series(np.arange(10)), False),
        (pd.Series([f"c{number}" for number in range(100)]), True),
        (pd.Series([f"c{number % 60}" for number in range(1000)]), False),
    ],
)
def test_numbers_that_were_dealt_out_look_like_identifiers(
    values: "pd.Series[Any]", suspicious: bool
) -> None:
    """Whole numbers that never repeat where chance would repeat them; words nearly all different.

    Amounts that lie far apart, fractions and short tables do not.
    """
    found = infer(values)
    assert (found.identifier is not None) == suspicious
    if suspicious:
        assert "100" in found.identifier


@pytest.mark.parametrize(
    "values",
    [
        pd.Series(["2024-02-29", None, "2024-02-29T18:00", "1969-12-31"]),
        pd.Series([DAY, None, datetime.datetime(2024, 2, 29, 18), datetime.date(1969, 12, 31)]),
        pd.Series(["2024-02-29T01:00+01:00", None, "2024-02-29 18:00:00Z", "1969-12-31"]),
        pd.Series(
            np.array(["2024-02-29", "NaT", "2024-02-29T18:00", "1969-12-31"], dtype="datetime64[s]")
        ),
        arrow(
            [datetime.datetime(2024, 2, 29), None, datetime.datetime(2024, 2, 29, 18),
             datetime.datetime(1969, 12, 31)],
            pa.timestamp("s"),
        ),
    ],
    ids=["texts", "objects", "zones", "datetimes", "arrow"],
)  # fmt: skip
def test_the_same_day_is_the_same_number_at_every_party(values: "pd.Series[Any]") -> None:
    """Dates are keys too: 2024-02-29 is day 19,782 after 1970-01-01, however it is stored."""
    days = days_since_epoch(values)
    assert np.array_equal(days, [19782.0, np.nan, 19782.75, -1.0], equal_nan=True)
