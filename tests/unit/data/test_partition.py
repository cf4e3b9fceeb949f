"""Splitting one table between parties."""

import numpy as np
import pytest
import sklearn.datasets

from research.common.linked_tables import split_pair
from securevfl.core.errors import ConfigError, DataError
from securevfl.lab.datasets import split_table, split_views

X, Y = sklearn.datasets.load_digits(return_X_y=True)


def test_features_are_dealt_out_equally_and_once() -> None:
    """64 pixels over five parties: 13 at four of them, 12 at one, none twice."""
    tables = split_table(X, Y, parties=5)

    assert [table.num_features for table in tables] == [13, 13, 13, 13, 12]
    assert len({name for table in tables for name in table.feature_names}) == 64
    assert [table.name for table in tables][:2] == ["primary", "secondary-1"]
    assert [table.labels is not None for table in tables] == [True] + [False] * 4


def test_entities_name_the_row_each_record_came_from() -> None:
    """Ordered by entity, every party's features are its columns of the original table."""
    for table in split_table(X, Y, parties=3):
        assert table.entities is not None
        columns = [int(name[1:]) for name in table.feature_names]
        assert np.array_equal(table.features, X[table.entities][:, columns].astype(np.float32))


def test_row_numbers_do_not_give_the_match_away() -> None:
    """Every secondary has its own order of rows."""
    tables = split_table(X, Y, parties=3)
    assert all(table.entities is not None for table in tables)

    assert np.array_equal(tables[0].entities, np.arange(len(X)))
    assert not np.array_equal(tables[1].entities, tables[0].entities)
    assert not np.array_equal(tables[1].entities, tables[2].entities)


def test_keys_are_standardised_and_noised_at_every_party() -> None:
    """Deviation 1 a dimension; two parties' keys of one entity differ by their own noises.

    The difference has standard deviation 0.05 sqrt(2) = 0.0707; over 7,188 values its estimate is
    within 5 % unless a one in a billion event happens, and the seed is fixed.
    """
    primary, secondary, _ = split_table(X, Y, parties=3, key_noise=0.05)
    assert secondary.entities is not None
    order = np.argsort(secondary.entities)
    difference = primary.keys - secondary.keys[order]

    assert primary.keys.std(axis=0) == pytest.approx(np.sqrt(1 + 0.05**2), rel=0.02)
    assert difference.std() == pytest.approx(0.05 * np.sqrt(2), rel=0.05)


def test_without_noise_all_parties_have_equal_keys() -> None:
    """Negative control of the test above."""
    primary, secondary = split_table(X, Y, parties=2, key_noise=0.0)
    assert secondary.entities is not None

    assert np.array_equal(primary.keys[secondary.entities], secondary.keys)


def test_the_split_follows_its_seed() -> None:
    """One seed, one split; another seed, other columns and other noise."""
    one, same, other = (split_table(X, Y, parties=2, seed=seed)[0] for seed in (1, 1, 2))

    assert np.array_equal(one.keys, same.keys)
    assert one.feature_names == same.feature_names
    assert one.feature_names != other.feature_names


def test_common_features_of_the_pair_are_keys_only() -> None:
    """FedSim's protocol: keys are features of the table, and nobody trains on them."""
    columns = X[:, X.std(axis=0) > 0]
    tables = split_pair(columns, Y, key_dim=5, key_noise=0.0, seed=1)
    used = {name for table in tables for name in table.feature_names}

    assert len(used) == columns.shape[1] - 5
    assert tables[0].keys.min() == 0
    assert tables[0].keys.max() == 1
    assert tables[1].entities is not None
    assert np.array_equal(tables[0].keys[tables[1].entities], tables[1].keys)


def test_views_keep_their_columns() -> None:
    """Halves of an image stay halves."""
    upper, lower = split_views(X, Y, views={"upper": range(32), "lower": range(32, 64)})

    assert upper.feature_names == tuple(f"x{column}" for column in range(32))
    assert lower.feature_names == tuple(f"x{column}" for column in range(32, 64))


def test_regression_labels_stay_numbers() -> None:
    """The task decides what becomes of y."""
    table, _ = split_table(X, Y + 0.5, parties=2, task="regression")

    assert table.labels is not None
    assert table.labels.dtype == np.float64
    assert table.classes is None


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"parties": 1}, ConfigError, "parties must be at least 2"),
        ({"parties": 65}, DataError, "64 features, too few for 65 parties"),
        ({"parties": 5, "key_dim": 14}, DataError, "too few for key_dim=14"),
        ({"parties": 5, "key_dim": 0}, ConfigError, "key_dim must be at least 1"),
        ({"parties": 5, "key_noise": -1.0}, ConfigError, "key_noise must be finite and >= 0"),
        ({"parties": 5, "key_noise": float("nan")}, ConfigError, "key_noise must be finite"),
        ({"parties": 2, "names": ["a", "a"]}, ConfigError, "2 different names"),
        ({"parties": 2, "task": "binary"}, DataError, "binary needs two values, found 10"),
    ],
)
def test_impossible_splits_are_refused(
    arguments: dict[str, object], error: type[Exception], message: str
) -> None:
    """Each with the argument's name."""
    with pytest.raises(error, match=message):
        split_table(X, Y, **arguments)


def test_bad_arrays_are_refused() -> None:
    """Shapes, values that are not finite, and features without enough directions."""
    spoilt = X.copy()
    spoilt[7, 3] = np.nan
    flat = np.tile(np.arange(50.0)[:, None], (1, 8))

    with pytest.raises(DataError, match="row 8, column 3: is not finite"):
        split_table(spoilt, Y, parties=2)
    with pytest.raises(DataError, match="matrix and a vector of equal length"):
        split_table(X, Y[:-1], parties=2)
    with pytest.raises(DataError, match="fewer than key_dim=4 directions"):
        split_table(flat, np.arange(50) % 2, parties=2)
    with pytest.raises(ConfigError, match="given to two parties"):
        split_views(X, Y, views={"a": [0, 1], "b": [1, 2]})
    with pytest.raises(DataError, match="need 66"):
        split_pair(X, Y, key_dim=64)
