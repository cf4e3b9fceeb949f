"""nearest_records on cases whose answer can be read off."""

import numpy as np
import pytest
import scipy
from helpers.nearest import nearest_records

from securevfl.core.errors import ConfigError, DataError
from securevfl.linkage.links import NO_RECORD
from securevfl.linkage.metrics.points import EuclideanKeys


def points(*values: float) -> np.ndarray:
    return np.array(values, dtype=np.float64)[:, None]


def test_nearest_first_with_distances() -> None:
    """A row's links ascend by distance, in the keys' unit."""
    links = nearest_records(points(0, 10), points(7, 1, 9, 4), 3)

    assert links.indices.tolist() == [[1, 3, 0], [2, 0, 3]]
    assert links.distances.tolist() == [[1, 4, 7], [1, 3, 6]]


def test_ties_go_to_the_lower_record_number() -> None:
    """Also where more records tie for the last place than a tree's first answer holds."""
    records = points(*([1, -1] * 100), 0.5)
    links = nearest_records(points(0), records, 4)

    assert links.indices.tolist() == [[200, 0, 1, 2]]


def test_more_copies_than_links() -> None:
    """Of many records at one place the lowest numbers are linked."""
    links = nearest_records(points(0, 5), points(*[5] * 50, *[0] * 50), 3)

    assert links.indices.tolist() == [[50, 51, 52], [0, 1, 2]]


def test_rows_at_one_place_have_equal_links() -> None:
    """Searching a place once gives every row at it the answer, whatever the order of rows."""
    rows = points(3, 1, 3, 2, 1)
    links = nearest_records(rows, points(1, 2, 3), 1)

    assert links.indices[:, 0].tolist() == [2, 0, 2, 1, 0]


def test_only_eligible_records_are_linked() -> None:
    """Slots beyond the eligible records hold none, at infinite distance."""
    eligible = np.array([False, True, False, True])
    links = nearest_records(points(0), points(0, 3, 1, 2), 3, eligible=eligible)

    assert links.indices.tolist() == [[3, 1, NO_RECORD]]
    assert links.distances.tolist() == [[2, 3, np.inf]]
    assert links.present.tolist() == [[True, True, False]]


def test_no_eligible_record() -> None:
    """An empty sample leaves every slot empty."""
    links = nearest_records(points(0), points(1, 2), 2, eligible=np.zeros(2, dtype=np.bool_))

    assert not links.present.any()


def test_float32_would_lose_neighbours() -> None:
    """Raw longitudes 1 cm apart are told apart; float32 keys, which could not, are refused."""
    records = np.array([[103.8538799, 1.3620045], [103.8538800, 1.3620045]])
    links = nearest_records(records[1:], records, 1)

    assert links.indices.tolist() == [[1]]
    with pytest.raises(Exception, match=r"float64|Float64"):
        nearest_records(records.astype(np.float32), records.astype(np.float32), 1)


@pytest.mark.parametrize(
    ("rows", "records", "k", "error", "message"),
    [
        (points(1), points(1, 2), 3, DataError, "K = 3 links .* only 2 records"),
        (points(1), points(1, 2), 0, ConfigError, "k must be at least 1"),
        (np.empty((0, 1)), points(1), 1, DataError, "keys of the primary: .* not empty"),
        (points(1), np.empty((0, 1)), 1, DataError, "keys of the secondary: .* not empty"),
        (points(1, np.nan), points(1), 1, DataError, "keys of the primary: row 2, dimension 1"),
        (points(1), points(np.inf), 1, DataError, "keys of the secondary: row 1"),
        (points(1), points(1e200), 1, DataError, "at most 1e150"),
    ],
)
def test_bad_keys_are_refused(
    rows: np.ndarray, records: np.ndarray, k: int, error: type[Exception], message: str
) -> None:
    """Empty tables, too large a K, and values that have no distance."""
    with pytest.raises(error, match=message):
        nearest_records(rows, records, k)


def test_wrong_eligibility_is_refused() -> None:
    """One truth value a record."""
    with pytest.raises(Exception, match="eligible"):
        nearest_records(points(1), points(1, 2), 1, eligible=np.ones(3, dtype=np.bool_))


def test_keys_of_different_dimension_are_named() -> None:
    """The mistake of two parties that chose different columns."""
    with pytest.raises(DataError, match="primary's have 1 dimensions, the secondary's 2"):
        nearest_records(points(1), np.ones((3, 2)), 1)


def test_parts_are_searched_in_one_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    """Linking a million rows part by part builds one tree of the records, not one a part."""
    built = []
    build = scipy.spatial.cKDTree
    monkeypatch.setattr(
        scipy.spatial, "cKDTree", lambda points: built.append(len(points)) or build(points)
    )
    rng = np.random.default_rng(0)
    keys = EuclideanKeys(primary=rng.random((60, 2)), records=rng.random((50, 2)))
    parts = [keys.nearest(np.arange(start, start + 20), 4) for start in (0, 20, 40)]
    assert built == [50]
    sample = rng.random(50) < 0.5
    expected = nearest_records(keys.primary, keys.records, 4, eligible=sample)
    assert keys.nearest(None, 4, eligible=sample).indices.tolist() == expected.indices.tolist()
    whole = keys.nearest(None, 50)

    assert built == [50, sample.sum(), sample.sum(), 50]
    assert np.concatenate([part.indices for part in parts]).tolist() == (
        whole.indices[:, :4].tolist()
    )
