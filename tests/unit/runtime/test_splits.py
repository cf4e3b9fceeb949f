"""Splits of the primary's rows as a federation file asks for them."""

import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import securevfl.lab.methods  # noqa: F401 - it registers the section that comparisons read
from securevfl import read_federation
from securevfl.config.federation import link_spec
from securevfl.config.rules import require_trainable
from securevfl.core.errors import ConfigError, DataError
from securevfl.data.keys_and_labels import split_places
from securevfl.federation.run_plan import run_facts
from securevfl.linkage.stage.linking import Linker
from securevfl.linkage.stage.noised_similarities import scaling_rows
from securevfl.linkage.stage.party_keys import keys_of
from securevfl.testing import read_tables, run_in_process, save_federation, write_federation


def write(folder: Path, *, ones: int | None = None, **training: Any) -> Path:
    """Write 200 rows of ids, with customers or days; ``ones`` rows of the second class of two."""
    path = write_federation(
        folder,
        secondaries=1,
        rows=200,
        model={"family": "top1sim", "hidden": 8},
        training={"epochs": 1},
        linkage={"metric": "exact"},
    )
    source = tomllib.loads(path.read_text())
    source["training"] = {"epochs": 1, **training}
    for party in source["party"]:
        table = pd.read_csv(folder / party["data"])
        number = np.arange(200)
        table.insert(
            0, "id", 9_007_199_254_740_993 + (number if "label" in party else number[::-1])
        )
        if "label" in party:
            days = pd.Timestamp("2020-01-31") + pd.to_timedelta(number[::-1], unit="D")
            if training.get("split_column") == "customer":
                table["customer"] = [f"c{row % 20}" for row in number]
            if training.get("split_column") == "day":
                table["day"] = days
            if ones is not None:
                table["y"] = np.where(number < ones, "bad", "good")
                source["federation"]["task"] = "binary"
        table.drop(columns=["lon", "lat"]).to_csv(folder / party["data"], index=False)
        party["key"] = ["id"]
    return save_federation(folder, source)


@pytest.mark.parametrize("column", ["customer", "day"])
def test_a_run_is_split_by_a_column(tmp_path: Path, column: str) -> None:
    """Linked by ids of 16 digits, shown as they are; the column is no feature."""
    kind = "group" if column == "customer" else "time"
    config = read_federation(write(tmp_path, split=kind, split_column=column))
    tables = read_tables(config, tmp_path)
    split, facts = run_facts(config, tables["agency"])
    raw = pd.read_csv(tmp_path / "agency.csv")[column]
    train, validation, test = (raw[rows] for rows in (split.train, split.validation, split.test))
    result = run_in_process(config, tmp_path / "run", tables=tables)

    assert tables["agency"].feature_names == ("x0", "x1", "x2")
    assert facts.rows == facts.train_rows + facts.validation_rows + facts.test_rows == 200
    spec = link_spec(config)
    mine, theirs = (keys_of(spec.keys, tables[name]) for name in ("agency", "bank-1"))
    links = Linker(spec, mine)(theirs).source.link(np.arange(200))
    assert links.indices[:, 0].tolist() == list(range(199, -1, -1))
    assert np.isfinite(result.metrics["test"])
    if kind == "group":
        sides = [set(part) for part in (train, validation, test)]
        assert [len(side) for side in sides] == [12, 4, 4]
        assert len(set.union(*sides)) == 20
    else:
        assert len(test) == 40
        assert train.max() < validation.min() <= validation.max() < test.min()


@pytest.mark.parametrize("excluded", [["x1"], ["x1", "day"]])
def test_excluded_columns_are_no_features_where_a_column_splits(
    tmp_path: Path, excluded: list[str]
) -> None:
    """The column that splits is read in any case, and is a feature in none."""
    path = write(tmp_path, split="time", split_column="day")
    source = tomllib.loads(path.read_text())
    source["party"][0]["exclude"] = excluded
    config = read_federation(save_federation(tmp_path, source))
    table = read_tables(config, tmp_path)["agency"]
    assert table.feature_names == ("x0", "x2")
    assert table.split_by is not None


@pytest.mark.parametrize(
    ("ones", "training", "message"),
    [
        (1, {}, "label 'y': 1 of 200 rows are of class 'bad', and none of these is for validation"),
        (2, {}, "get more such rows, or choose another training.metric"),
        (3, {"split": "random"}, 'or another training.split than "random"'),
        (1, {"metric": "accuracy"}, None),
        (3, {}, None),
    ],
)
def test_a_rare_class_stops_no_run_that_can_measure(
    tmp_path: Path, ones: int, training: dict[str, Any], message: str | None
) -> None:
    """Three rows reach every part; of fewer, one line names table, label and class."""
    config = read_federation(write(tmp_path, ones=ones, **training))
    table = read_tables(config, tmp_path)["agency"]
    if message is not None:
        with pytest.raises(DataError, match=message) as caught:
            run_facts(config, table)
        assert str(caught.value).startswith("table of 'agency': label 'y': ")
        assert "\n" not in str(caught.value)
        return
    split, _ = run_facts(config, table)
    assert table.labels is not None
    bad = 1 - table.labels if table.classes == ("bad", "good") else table.labels
    parts = [int(bad[rows].sum()) for rows in (split.train, split.validation, split.test)]
    assert parts == ([1, 0, 0] if ones == 1 else [1, 1, 1])


@pytest.mark.parametrize(
    ("cells", "kind", "message"),
    [
        (["2020-01-01", "1/2/2020"], "time", "row 2: '1/2/2020' is neither a number nor a date"),
        (["2020-01-01", None], "time", r"row 2: is missing, .* \(1 in all\)"),
        (["a", None], "group", "row 2: is missing"),
        ([1.0, np.inf], "time", "row 2: is infinite"),
    ],
)
def test_bad_split_columns_are_refused(cells: list[Any], kind: Any, message: str) -> None:
    """In one line, with the row."""
    frame = pd.DataFrame({"x": cells, "other": 1})
    with pytest.raises(DataError, match=message) as caught:
        split_places(frame, "x", kind=kind, where="table")
    assert "\n" not in str(caught.value)


def test_columns_of_every_kind_give_groups_and_times() -> None:
    """Times in order, equal ones in one place; groups as they are spelled."""
    frame = pd.DataFrame(
        {
            "day": ["2020-01-02", "2019-12-31", "2020-01-02T00:00:00Z"],
            "number": [3, -1, 3],
            "who": ["01", "1", "01"],
        }
    )
    for column, kind in (("day", "time"), ("number", "time"), ("who", "group")):
        read = split_places(frame, column, kind=kind, where="table")
        assert read.tolist() == ([1, 0, 1] if kind == "time" else [0, 1, 0])


def check(path: Path) -> None:
    """Read a federation file and all that training rests on."""
    require_trainable(read_federation(path))


@pytest.mark.parametrize(
    ("training", "message"),
    [
        ({"split": "group"}, 'split_column: goes with split = "group" or "time"'),
        ({"split_column": "day"}, 'split_column: goes with split = "group" or "time"'),
        ({"split": "time", "split_column": "y"}, "split_column: is the label"),
        ({"split": "stratified"}, "needs classes, and the task is regression"),
    ],
)
def test_settings_that_do_not_go_together(
    tmp_path: Path, training: dict[str, Any], message: str
) -> None:
    """In one line."""
    path = write(tmp_path, **training)
    if "column" not in message:
        source = tomllib.loads(path.read_text())
        source["federation"]["task"] = "regression"
        path = save_federation(tmp_path, source)
    with pytest.raises(ConfigError, match=message):
        check(path)


def test_methods_of_a_comparison_share_the_split(tmp_path: Path) -> None:
    """They are compared on equal rows."""
    path = write_federation(tmp_path, methods={"fet": {"split": "random"}})
    with pytest.raises(ConfigError, match="must be the same for all methods"):
        read_federation(path)


def test_a_table_without_its_column_is_refused(tmp_path: Path) -> None:
    """One that was made in Python, say."""
    config = read_federation(write(tmp_path, split="time", split_column="day"))
    table = read_tables(config, tmp_path)["agency"]

    with pytest.raises(DataError, match="has no split_by"):
        run_facts(config, replace(table, split_by=None))


@pytest.mark.parametrize(("split", "rows"), [("random", 120), ("stratified", 200)])
def test_similarities_are_scaled_by_rows_that_others_can_tell(
    tmp_path: Path, split: str, rows: int
) -> None:
    """A split by classes is not known to secondaries, nor to a coordinator."""
    spec = link_spec(read_federation(write(tmp_path, split=split)))

    assert len(scaling_rows(spec, 200)) == rows
