"""from_frame: one path for frames of any library and for files, up to a simulated run."""

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest

import securevfl as sv
from securevfl.core.errors import ConfigError, DataError
from securevfl.data.frames import from_frame

CELLS = {
    "lon": [1.5, 2.5, 3.5],
    "area": [70, None, 80],
    "town": ["east", "west", None],
    "price": [1.5, 2.5, 3.5],
}


class Other:
    """A frame of a library that knows pandas, and not Arrow."""

    def to_pandas(self) -> pd.DataFrame:
        return pd.DataFrame(CELLS)


FRAMES = {
    "pandas": lambda: pd.DataFrame(CELLS),
    "pandas on Arrow": lambda: pd.DataFrame(CELLS).convert_dtypes(dtype_backend="pyarrow"),
    "nullable pandas": lambda: pd.DataFrame(CELLS).convert_dtypes(),
    "a named index": lambda: pd.DataFrame(CELLS).set_index("lon"),
    "polars": lambda: pl.DataFrame(CELLS),
    "pyarrow": lambda: pa.table(CELLS),
    "another": Other,
}


@pytest.mark.parametrize("make", FRAMES.values(), ids=FRAMES)
def test_frames_give_the_table_that_a_file_gives(make, tmp_path) -> None:
    pd.DataFrame(CELLS).to_csv(tmp_path / "t.csv", index=False)
    table = from_frame(make(), name="bank", key=["lon"], label="price")
    roles = sv.data.ColumnRoles(key=["lon"], label="price", task="regression")
    expected = sv.data.read_table(tmp_path / "t.csv", roles, name="bank")

    assert table.feature_names == expected.feature_names
    assert np.array_equal(table.keys, expected.keys)
    assert np.array_equal(table.features, expected.features)
    assert np.array_equal(table.labels, expected.labels)
    assert table.schema == expected.schema


@pytest.mark.parametrize(
    ("labels", "task"),
    [(["no", "yes", "no"], 2), ([True, False, True], 2), (["a", "b", "c"], None)],
)
def test_words_and_truth_values_are_classes(labels: list[object], task: int | None) -> None:
    frame = pd.DataFrame({"k": [1.0, 2, 3] * 4, "a": 1.0, "y": labels * 4})
    table = from_frame(frame, name="bank", key=["k"], label="y")
    assert table.classes is not None
    assert len(table.classes) == (task or 3)


@pytest.mark.parametrize(
    ("frame", "changes", "message"),
    [
        (
            [1, 2],
            {},
            "frame of 'bank': must be a pandas or polars DataFrame, a pyarrow Table, or a tensor "
            "or map-style dataset of torch, got list",
        ),
        (pd.DataFrame(CELLS), {"key": ["lan"]}, "has no column 'lan'; did you mean 'lon'?"),
        (pd.DataFrame(CELLS), {"exclude": ["x"]}, "has no column 'x'"),
        (pd.DataFrame(CELLS)[:0], {}, "has no rows"),
        (pd.DataFrame([[1, 2]], columns=["lon", "lon"]), {}, "two columns are called 'lon'"),
        (pd.DataFrame({"lon": [1.0]}), {}, "has no feature columns"),
    ],
)
def test_a_bad_frame_gets_one_line(frame: object, changes: dict[str, object], message: str) -> None:
    with pytest.raises(DataError, match="frame of 'bank': ") as caught:
        from_frame(frame, **{"name": "bank", "key": ["lon"], **changes})
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_whole_numbers_as_labels_are_asked_about() -> None:
    frame = pd.DataFrame({"k": np.arange(9.0), "a": 1.0, "y": [0, 1, 2] * 3})
    with pytest.raises(ConfigError, match="label 'y' holds whole numbers"):
        from_frame(frame, name="bank", key=["k"], label="y")
    table = from_frame(frame, name="bank", key=["k"], label="y", task="multiclass")
    assert table.classes == (0, 1, 2)


def test_two_values_are_two_classes_and_a_key_may_be_one_name() -> None:
    """As ``init`` and the estimators take them."""
    frame = pd.DataFrame({"key_id": [1.0, 2.0], "a": 1.0, "y": [0, 1]})
    table = from_frame(frame, name="bank", key="key_id", label="y")
    assert table.classes == (0, 1)
    assert table.key_names == ("key_id",)


@pytest.mark.parametrize("kind", ["numbers", "long ids"])
def test_a_simulation_takes_them(kind: str) -> None:
    """Long ids as exact texts, whatever the secondary calls them; positions as numbers."""
    random = np.random.default_rng(3)
    values = random.normal(size=(120, 2))
    ids = 2**60 + np.arange(120)
    word = np.where(values.sum(axis=1) > 0, "yes", "no")
    bank = pd.DataFrame({"id": ids, "x": values[:, 0], "a": values[:, 0], "y": word})
    bureau = pl.DataFrame({"ident": ids[::-1], "x": values[::-1, 0], "b": values[::-1, 1]})
    exact = kind == "long ids"
    parties = [
        from_frame(
            bank,
            name="bank",
            key={"id": "text"} if exact else ["x"],
            exclude=["x" if exact else "id"],
            label="y",
        ),
        from_frame(
            bureau,
            name="bureau",
            key={"ident": "text"} if exact else ["x"],
            exclude=["x" if exact else "ident"],
        ),
    ]
    result = sv.simulate(
        parties,
        sv.models.Top1Sim() if exact else sv.models.FeT(neighbours=1),
        privacy=sv.dp.Privacy(mechanism="none"),
        training=sv.TrainingSettings(epochs=1),
        base="none",
        with_alone=False,
        **({"linkage": sv.LinkageSettings(metric="exact", protection="none")} if exact else {}),
    )
    assert len(result.history) == 1


ROWS = 24
DAYS = pd.Series(pd.date_range("2020", periods=ROWS))
KINDS = {
    "timestamps": (DAYS.astype("timestamp[us][pyarrow]"), DAYS),
    "zones": (DAYS.astype(pd.ArrowDtype(pa.timestamp("us", "UTC"))), DAYS),
    "days": (pd.Series(DAYS.dt.date, dtype=pd.ArrowDtype(pa.date32())), DAYS),
    "decimals": (
        pd.Series([str(n / 4) for n in range(ROWS)]).astype(pd.ArrowDtype(pa.decimal128(9, 2))),
        pd.Series([n / 4 for n in range(ROWS)]),
    ),
    "dictionaries": (
        pd.Series(["a", "b"] * 12).astype(pd.ArrowDtype(pa.dictionary(pa.int8(), pa.string()))),
        pd.Series(["a", "b"] * 12),
    ),
    "sparse": (pd.Series(pd.arrays.SparseArray([0.0, 1.5] * 12)), pd.Series([0.0, 1.5] * 12)),
    "sparse truth": (
        pd.Series(pd.arrays.SparseArray([False, True] * 12)),
        pd.Series([False, True] * 12),
    ),
}


@pytest.mark.parametrize(("values", "as_numpy"), KINDS.values(), ids=KINDS)
def test_pandas_own_types_are_read_as_numpys(values, as_numpy) -> None:
    """Of Arrow, as ``dtype_backend="pyarrow"`` reads a file, and of sparse dummies."""
    tables = [
        from_frame(pd.DataFrame({"k": range(ROWS), "a": column}), name="bank", key=["k"])
        for column in (values, as_numpy)
    ]
    assert tables[0].schema == tables[1].schema
    assert np.array_equal(tables[0].features, tables[1].features)


def test_an_index_that_is_a_column_too_is_one_column() -> None:
    frame = pd.DataFrame({"k": range(ROWS), "a": np.linspace(0, 1, ROWS)})
    table = from_frame(frame.set_index("k", drop=False), name="bank", key=["k"])
    assert (table.key_names, table.feature_names) == (("k",), ("a",))
    series = from_frame(frame.set_index("k")["a"], name="bank", key=["k"])
    assert np.array_equal(series.features, table.features)
    other = frame.set_index("k", drop=False).assign(k=1)
    with pytest.raises(DataError, match="two columns are called 'k'"):
        from_frame(other, name="bank", key=["k"])


def test_what_a_library_raises_names_the_column(monkeypatch) -> None:
    def fail(_values):
        raise KeyError("TypeOfTomorrow")

    monkeypatch.setattr("securevfl.data.frames.plain", fail)
    with pytest.raises(DataError, match=r"frame of 'bank': column 'k' .*TypeOfTomorrow"):
        from_frame(pd.DataFrame({"k": [1.0], "a": [1.0]}), name="bank", key=["k"])


def test_what_is_no_table_is_refused_in_one_line() -> None:
    with pytest.raises(DataError, match="no table that Arrow reads"):
        from_frame(pa.chunked_array([[1, 2]]), name="bank", key=["k"])
