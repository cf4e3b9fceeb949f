"""A party's table made of a frame: all that is wrong at once, and new rows by a known schema."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from securevfl.core.conventions import Task
from securevfl.core.errors import ConfigError, DataError
from securevfl.data.keys_and_labels import encode_labels
from securevfl.data.party_tables import (
    ColumnRoles,
    columns_of_schema,
    fit_party_table,
    fit_table,
    new_rows,
)
from securevfl.data.scaling import ColumnSettings
from securevfl.data.schema import TableSchema
from securevfl.data.sources.read import read_frame
from securevfl.data.tables import PartyTable

FRAME = pd.DataFrame(
    {
        "id": [3.0, 1.0, 2.0, 4.0],
        "day": ["2024-01-01", "2024-01-02", "2024-01-03", "2024-01-03"],
        "debt": [1.5, None, 2.5, 3.5],
        "who": [7, 8, 9, 10],
        "paid": ["yes", "no", "yes", "no"],
    }
)
ROLES = ColumnRoles(key=["id", "day"], task="binary", label="paid", truth="who")


def fit(frame: pd.DataFrame = FRAME, roles: ColumnRoles = ROLES, **declared: Any) -> PartyTable:
    return fit_party_table(frame, roles, ColumnSettings(**declared), name="bank", where="table")


def kept(table: PartyTable) -> TableSchema:
    """Return a table's schema as a file gives it back."""
    assert table.schema is not None
    return TableSchema.from_json(json.loads(json.dumps(table.schema.as_json())))


def test_a_date_may_be_a_key() -> None:
    """As days since 1970, beside a number: euclidean and mixed metrics compare them."""
    assert fit().keys.tolist() == [[3, 19723], [1, 19724], [2, 19725], [4, 19725]]


def test_new_rows_are_read_as_the_first_ones_were() -> None:
    """The same table gives the same table; a schema keeps keys, features and labels."""
    table = fit()
    shuffled = FRAME[["paid", "who", "debt", "day", "id"]].assign(more=1)
    again = new_rows(shuffled, kept(table), name="bank", where="new", truth="who")

    assert again.feature_names == table.feature_names == ("debt", "debt is missing")
    assert np.array_equal(again.features, table.features)
    assert np.array_equal(again.keys, table.keys)
    assert again.labels is not None
    assert again.labels.tolist() == [1, 0, 1, 0]
    assert again.classes == table.classes == ("no", "yes")
    assert again.labelled is None
    assert again.entities is not None
    assert again.entities.tolist() == [7, 8, 9, 10]
    assert again.schema == table.schema


@pytest.mark.parametrize(
    ("labels", "numbers", "labelled"),
    [
        (["yes", None, "yes", "no"], [1, 0, 1, 0], [True, False, True, True]),
        (["yes"] * 4, [1] * 4, None),
        ([None] * 4, None, None),
        (None, None, None),
    ],
)
def test_new_rows_may_lack_labels(
    labels: list[Any] | None, numbers: list[int] | None, labelled: list[bool] | None
) -> None:
    """Some, all of them or the column; one class alone is no reason to refuse new rows."""
    frame = FRAME.drop(columns="paid") if labels is None else FRAME.assign(paid=labels)
    table = new_rows(frame, kept(fit()), name="bank", where="new")

    assert (None if table.labels is None else table.labels.tolist()) == numbers
    assert (None if table.labelled is None else table.labelled.tolist()) == labelled


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"paid": "perhaps"},
            "label 'paid', row 1: 'perhaps' is not among the classes .*'no', 'yes'",
        ),
        ({"id": "2024-01-01"}, r"key columns must be id \(number\), day \(date\)"),
        ({"day": "soon"}, "key 'day': must be numeric or dates, but row 1 holds 'soon'"),
        ({"day": None}, r"key 'day', row 1: is missing \(4 such cells"),
        ({"debt": "much", "id": np.inf}, r"key 'id', row 1: is infinite \(and 1 more"),
    ],
)
def test_new_rows_that_do_not_fit_get_one_line(changes: dict[str, Any], message: str) -> None:
    """Naming the column and what it was when the schema was fitted."""
    with pytest.raises(DataError, match=rf"^new: .*{message}") as caught:
        new_rows(FRAME.assign(**changes), kept(fit()), name="bank", where="new")
    assert "\n" not in str(caught.value)


def test_no_rows_and_no_column_are_named() -> None:
    """An empty file of new rows, and one without a key."""
    schema = kept(fit())
    with pytest.raises(DataError, match=r"^new: has no rows"):
        new_rows(FRAME.iloc[:0], schema, name="bank", where="new")
    with pytest.raises(DataError, match=r"^new: has no column 'day'"):
        new_rows(FRAME.drop(columns="day"), schema, name="bank", where="new")


def test_everything_that_is_wrong_with_a_table_is_said_at_once() -> None:
    """Keys, features, label, truth and declarations, one line each."""
    frame = FRAME.assign(
        id=["1", "2", "x", None],
        debt=[1.0, np.inf, 2.0, 3.0],
        when=["1/2/2024"] * 4,
        number=10**15 + np.arange(4),
        blob=[b"x"] * 4,
        empty=None,
        paid=["yes", None, "no", "no"],
        who=[1, 2, 3, None],
    )
    settings = ColumnSettings(missing_columns=["depth"])
    problems = fit_table(frame, ROLES, settings, name="bank", where="table").problems

    assert [problem.split("; ")[0] for problem in problems] == [
        "table: has no column 'depth'",
        "table: key 'id', row 4: is missing (1 such cells in all)",
        "table: column 'debt': holds an infinite value in row 2",
        "table: column 'when': looks like dates",
        "table: column 'number': holds 4 different numbers, of which float32 distinguishes 1, so "
        "it looks like an identifier",
        "table: column 'blob': holds bytes values, as in row 1",
        "table: column 'empty': is empty in every row",
        "table: label 'paid', row 2: is missing",
        "table: truth 'who': must be whole numbers without gaps",
    ]
    with pytest.raises(DataError, match=r"'depth'.*\(and 8 more; securevfl check lists them\)$"):
        fit(frame, missing_columns=["depth"])
    fitted = fit_table(FRAME, ROLES, ColumnSettings(), name="bank", where="table")
    assert fitted.problems == []


LABELS = {
    "words": (pd.Series(["b", "a", "b"]), "binary", ("a", "b")),
    "categories": (pd.Series(["b", "a", "b"], dtype="category"), "binary", ("a", "b")),
    "words with blanks": (pd.Series(["b ", "a", "b"]), "binary", ("a", "b")),
    "words in two forms": (pd.Series(["o\u0308", "a", "\u00f6"]), "binary", ("a", "\u00f6")),
    "numbered categories": (pd.Series([10, 9, 10], dtype="category"), "binary", (9, 10)),
    "bools": (pd.Series([True, False, True]), "binary", (False, True)),
    "nullable bools": (pd.Series([True, False, True], dtype="boolean"), "binary", (False, True)),
    "nullable integers": (pd.Series([1, 0, 1], dtype="Int64"), "binary", (0, 1)),
    "floats of integers": (pd.Series([1.0, 0.0, 1.0]), "binary", (0, 1)),
    "arrow integers": (
        pd.Series([1, 0, 1], dtype=pd.ArrowDtype(pa.int8())), "binary", (0, 1),
    ),
    "arrow texts": (
        pd.Series(["b", "a", "b"], dtype=pd.ArrowDtype(pa.string())), "binary", ("a", "b"),
    ),
    "words and numbers": (pd.Series(["b", 1, "b"], dtype=object), "binary", ("1", "b")),
    "fractions": (pd.Series([0.5, 0.25, 0.5]), "binary", (0.25, 0.5)),
}  # fmt: skip


@pytest.mark.parametrize(("values", "task", "classes"), LABELS.values(), ids=LABELS)
def test_labels_of_any_type_are_classes(
    values: "pd.Series[Any]", task: Task, classes: tuple[Any, ...]
) -> None:
    """In sorted order, as plain values that JSON keeps; and found again in new rows."""
    roles = ColumnRoles(key=["id"], task=task, label="paid", exclude=["day", "who"])
    frame = FRAME.iloc[:3].assign(paid=values)
    table = fit(frame, roles)

    assert table.classes == classes
    assert [type(value) for value in table.classes] == [type(value) for value in classes]
    assert table.labels is not None
    assert table.labels.tolist() == [1, 0, 1]
    again = new_rows(frame, kept(table), name="bank", where="new")
    assert again.labels is not None
    assert again.labels.tolist() == [1, 0, 1]


@pytest.mark.parametrize(
    "labels", [[True, None, False], ["TRUE", None, "no"], [1, None, 0], [1.0, None, 0.0]]
)
def test_truth_in_labels_is_read_in_any_spelling(labels: list[Any]) -> None:
    """A database gives 0 and 1 where a file has true and false."""
    roles = ColumnRoles(key=["id"], task="binary", label="paid", exclude=["day", "who"])
    schema = kept(fit(FRAME.iloc[:3].assign(paid=[False, True, True]), roles))
    table = new_rows(FRAME.iloc[:3].assign(paid=labels), schema, name="bank", where="new")
    assert table.labels is not None
    assert table.labels.tolist() == [1, 0, 0]


@pytest.mark.parametrize("kind", ["Int64", "Float64", "float32", "object", "string"])
def test_regression_labels_of_any_type_are_numbers(kind: str) -> None:
    """Also where some rows lack one."""
    roles = ColumnRoles(key=["id"], task="regression", label="paid", exclude=["day", "who"])
    frame = FRAME.assign(paid=pd.Series([4, None, 6, 5]).astype(kind))
    table = fit(frame, roles, empty_labels=True)
    assert table.labels is not None
    assert table.labels.tolist() == [4, 0, 6, 5]
    assert table.labelled is not None
    assert table.labelled.tolist() == [True, False, True, True]
    constant = new_rows(FRAME.assign(paid=["5"] * 4), kept(table), name="bank", where="new")
    assert constant.labels is not None
    assert constant.labels.tolist() == [5] * 4
    with pytest.raises(DataError, match=r"label 'paid': must be numeric .* such as 'dear'"):
        new_rows(FRAME.assign(paid="dear"), kept(table), name="bank", where="new")


@pytest.mark.parametrize(
    "name", ["unnamed-1", "Unnamed: 0", "Unnamed: 0.1", "...1", "__index_level_0__", ""]
)
def test_a_stored_row_number_is_no_feature(name: str) -> None:
    """In a table sorted by its label it would be the label; a file may still name it."""
    frame = FRAME.assign(**{name: [0, 1, 2, 3]})
    table = fit(frame)

    assert table.feature_names == ("debt", "debt is missing")
    assert [note.split(" and is")[0] for note in table.notes] == [
        f"column {name!r} has no name of its own, as a stored row number has none,"
    ]
    used = ColumnRoles(key=[name], task="binary", label="paid", exclude=["id", "day", "who"])
    assert fit(frame, used).keys.tolist() == [[0], [1], [2], [3]]
    listed = ColumnRoles(key=["id"], task="binary", label="paid", features=[name])
    assert fit(frame, listed).feature_names == (name,)


def test_a_column_that_numbers_rows_is_warned_of() -> None:
    """By every command that reads the table, not by init alone; amounts are not."""
    frame = pd.DataFrame(
        {
            "id": range(100),
            "line": range(1, 101),
            "count": [number // 2 for number in range(100)],
            "amount": [number / 8 for number in range(100)],
        }
    )
    table = fit(frame, ColumnRoles(key=["id"], task="regression"))

    assert [note.split(",")[0] for note in table.notes] == [
        "column 'line' looks like an identifier (all 100 values differ)"
    ]
    assert table.feature_names == ("line", "count", "amount")


def test_a_renamed_feature_of_new_rows_is_found_among_the_files_names(tmp_path: Path) -> None:
    """The name that the model does not know is what was meant, though it is not read."""
    FRAME.rename(columns={"debt": "DEBT of it"}).to_csv(tmp_path / "new.csv", index=False)
    with pytest.raises(DataError, match=r"has no column 'debt'; .*It has DEBT of it, "):
        read_frame(tmp_path / "new.csv", where="new", wanted=columns_of_schema(kept(fit())))


@pytest.mark.parametrize(
    "roles",
    [
        {"key": ["id", "y"], "label": "y"},
        {"key": ["id"], "truth": "id"},
        {"key": ["id"], "label": "y", "truth": "y"},
        {"key": ["id"], "label": "y", "features": ["x", "y"]},
    ],
)
def test_a_column_has_one_role(roles) -> None:
    with pytest.raises(ConfigError, match="one column has one role"):
        ColumnRoles(task="regression", **roles)


@pytest.mark.parametrize(
    ("words", "positive"), [("ja,nein,nein", "ja"), ("no,no,yes,yes,yes", "yes"), ("b,a,b,a", "b")]
)
def test_the_rarer_of_two_words_is_positive(words: str, positive: str) -> None:
    """But truth values are what they say, and of equally many the last one counts."""
    labels = pd.Series(words.split(","))
    _, classes = encode_labels(labels, task="binary", where="label", rarer=True)
    assert classes is not None
    assert classes[1] == positive
    assert encode_labels(labels, task="binary", where="label")[1] == tuple(sorted(set(labels)))
