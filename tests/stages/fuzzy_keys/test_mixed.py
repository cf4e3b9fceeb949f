"""Keys of several fields."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from helpers.nearest import nearest_mixed

from securevfl.core.errors import ConfigError, DataError
from securevfl.data.keys_and_labels import KeyKind, read_key_table
from securevfl.linkage.metrics.metric import Field
from securevfl.linkage.sampling import eligible_pairs
from securevfl.stages.fuzzy_keys.mixed import MixedKeys

NAME = Field(name="name", kind="text")
BORN = Field(name="born", kind="number", scale=10.0)
STATE = Field(name="state", kind="exact", weight=2.0)

PRIMARY = {"name": ["anna"], "born": np.array([1980.0]), "state": ["nsw"]}
RECORDS = {
    "name": ["hans", "anne", "anna"],
    "born": np.array([1980.0, 1985.0, 1995.0]),
    "state": ["nsw", "nsw", "vic"],
}


def test_distance_is_the_weighted_mean_of_what_fields_lack() -> None:
    """Counted by hand: anne is 1 edit of 4 and 5 years of 10 away, weights are 1, 1 and 2."""
    links = nearest_mixed(PRIMARY, RECORDS, [NAME, BORN, STATE], 3)

    assert links.indices.tolist() == [[0, 1, 2]]
    assert links.distances == pytest.approx(np.array([[0.75 / 4, 0.75 / 4, 3 / 4]]))


def test_a_missing_field_counts_the_same_everywhere() -> None:
    """Missing here or there, a field has the similarity that was set, whatever its kind."""
    records = {"name": [None, "anna"], "born": np.array([1980.0, np.nan])}
    primary = {"name": ["anna"], "born": np.array([1980.0])}
    links = nearest_mixed(primary, records, [NAME, BORN], 2, missing_similarity=0.5)

    assert links.distances.tolist() == [[0.25, 0.25]]
    assert links.indices.tolist() == [[0, 1]]


def test_telling_nothing_is_not_near() -> None:
    """A record without values is farther than one that agrees in half of the fields."""
    records = {"name": [None, "anna"], "born": np.array([np.nan, 1989.0])}
    links = nearest_mixed({"name": ["anna"], "born": np.array([1980.0])}, records, [NAME, BORN], 2)

    assert links.indices.tolist() == [[1, 0]]


def test_columns_without_any_value() -> None:
    """All values missing at one party leaves the others to decide."""
    records = {"name": [None, None], "born": np.array([1990.0, 1981.0])}
    links = nearest_mixed({"name": ["anna"], "born": np.array([1980.0])}, records, [NAME, BORN], 1)

    assert links.indices.tolist() == [[1]]


def test_only_eligible_records() -> None:
    """Record numbers are those of the table, not of the sample."""
    eligible = np.array([False, False, True])
    links = nearest_mixed(PRIMARY, RECORDS, [NAME], 2, eligible=eligible)

    assert links.indices.tolist() == [[2, -1]]
    assert links.distances.tolist() == [[0, np.inf]]


def test_a_cap_works_with_any_metric() -> None:
    """Records pick their nearest rows by names, and rows keep what picked them."""
    rows = {"name": ["anna", "anne", "hans"]}
    records = {"name": ["anna", "ann", "hanse", "hansen"]}
    pairs = eligible_pairs(MixedKeys.of(rows, records, (NAME,)), cap=1)
    links = pairs.links(np.arange(3), 2)

    assert links.indices.tolist() == [[0, 1], [-1, -1], [2, 3]]


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ([Field(name="born", kind="text")], DataError, "field 'born': row 1: must be text"),
        ([Field(name="name", kind="number", scale=1.0)], DataError, "'name': must be float64"),
    ],
)
def test_bad_fields_are_refused(fields: list[Field], error: type[Exception], message: str) -> None:
    """Each with its name."""
    with pytest.raises(error, match=message):
        nearest_mixed(PRIMARY, RECORDS, fields, 1)


def test_impossible_settings_are_refused() -> None:
    """Weights and scales have ranges."""
    with pytest.raises(ConfigError, match="scale goes with kind number"):
        Field(name="a", kind="text", scale=1.0)
    with pytest.raises(ConfigError, match="weight must be finite and > 0"):
        Field(name="a", kind="text", weight=float("nan"))


def test_text_number_date_and_exact_columns_together(tmp_path: Path) -> None:
    """Dates are days, however a party stores them; ids keep their digits beside fuzzy names."""
    born = ["1980-05-01", None, "1990-01-31"]
    ids = [9_007_199_254_740_993 + number for number in range(3)]
    frame = pd.DataFrame({"name": ["anna", "bob", "eve"], "born": born, "id": ids})
    frame.to_csv(tmp_path / "a.csv", index=False)
    theirs = frame.assign(born=pd.to_datetime(frame["born"]), name=["ana", "bob", "eva"])
    theirs.iloc[::-1].to_parquet(tmp_path / "b.parquet")
    kinds: dict[str, KeyKind] = {"name": "text", "born": "number", "id": "text"}
    mine, other = (
        read_key_table(tmp_path / file, name="agency", key=kinds) for file in ("a.csv", "b.parquet")
    )
    fields = (
        *(NAME, Field(name="born", kind="number", scale=365.0)),
        Field(name="id", kind="exact"),
    )
    links = nearest_mixed(mine.columns, other.columns, fields, 1)

    assert links.indices.tolist() == [[2], [1], [0]]
    assert links.distances[:, 0] == pytest.approx([0.25 / 3, 0.5 / 3, (1 / 3) / 3])
