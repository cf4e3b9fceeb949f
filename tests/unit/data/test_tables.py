"""PartyTable: what may be in one, and what it shows of itself."""

import numpy as np
import pytest

from securevfl.core.errors import DataError
from securevfl.data.tables import PartyTable


def make(**changes: object) -> PartyTable:
    values = {
        "name": "agency",
        "key_names": ("lon", "lat"),
        "keys": np.array([[103.123456, 1.0], [104.0, 2.0], [105.0, 3.0]]),
        "feature_names": ("area",),
        "features": np.array([[1], [2], [3]], dtype=np.float32),
        "labels": np.array([0, 1, 1]),
        "classes": ("no", "yes"),
        "entities": np.array([5, 6, 7]),
    }
    return PartyTable(**{**values, **changes})


def test_rows_are_taken_together() -> None:
    """Keys, features, labels and entities of a row stay together, in the order asked for."""
    table = make().take(np.array([2, 0, 2]))

    assert table.keys[:, 1].tolist() == [3, 1, 3]
    assert table.features[:, 0].tolist() == [3, 1, 3]
    assert table.labels is not None
    assert table.labels.tolist() == [1, 0, 1]
    assert table.entities is not None
    assert table.entities.tolist() == [7, 5, 7]


def test_a_table_shows_sizes_only() -> None:
    """Its text holds no key, feature or label."""
    text = repr(make())

    assert "3 rows" in text
    assert "103" not in text


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"key_names": ("lon",)}, "keys have the shape"),
        ({"feature_names": ("area", "floor")}, "features have the shape"),
        (
            {
                "keys": np.empty((0, 2)),
                "features": np.empty((0, 1), dtype=np.float32),
                "labels": None,
                "entities": None,
            },
            "has no rows",
        ),
        (
            {"features": np.array([[1], [np.nan], [np.inf]], dtype=np.float32)},
            r"column 'area', row 2: is a missing value \(NaN\).*2 such values",
        ),
        (
            {"labels": np.array([1, 2, np.inf]), "classes": None},
            "column 'label', row 3: is an infinite value",
        ),
    ],
)
def test_an_impossible_table_is_refused(changes: dict[str, object], message: str) -> None:
    """Tables made in Python meet the same checks as files."""
    with pytest.raises(DataError, match=message):
        make(**changes)
