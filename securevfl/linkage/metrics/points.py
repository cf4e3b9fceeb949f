"""Exact K nearest records of numeric keys: by Euclidean and by great-circle distance.

``scipy.spatial.cKDTree`` finds candidates; the order is decided by distances that are computed
again in one canonical way, then by record number. A tree alone breaks ties by where it stores a
point.

A degree of longitude is shorter than one of latitude everywhere but at the equator, and 179.9 is
next to -179.9; Euclidean distance of raw degrees knows neither. For great-circle distance, points
become unit vectors, whose straight-line distance has the same order as that along the surface.

Memory, besides the keys, the tree and the result (16 bytes a link): at most :data:`_CHUNK_CELLS`
candidate cells at a time, each of 16 bytes plus 24 for every key dimension.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Final

import numpy as np
import scipy  # its trees load when they are first named
from jaxtyping import Float64, Int64

from securevfl.core.column_names import axis_of
from securevfl.core.errors import ConfigError, DataError
from securevfl.data.tables import KeyTable
from securevfl.linkage.links import Chosen, LinkTable, place_in_run, write_nearest
from securevfl.linkage.metrics.metric import ComparedKeys, KeySpec, Metric, numbers_of

# Candidates (rows x width) that are looked at together: about 40 MB at two dimensions.
_CHUNK_CELLS: Final = 2**19

# Squares of larger keys overflow float64.
_LARGEST_KEY: Final = 1e150


@dataclass(frozen=True, kw_only=True, eq=False)
class EuclideanKeys(ComparedKeys):
    """Numeric keys in one common unit."""

    primary: Float64[np.ndarray, "rows key_dim"]
    """The primary's keys."""

    records: Float64[np.ndarray, "records other_dim"]
    """The secondary's keys."""

    def __post_init__(self) -> None:
        check_keys(self.primary, self.records)

    def nearest_of(
        self, keys: Float64[np.ndarray, "rows key_dim"], ids: Chosen, k: int
    ) -> LinkTable:
        """Link by a tree of the records."""
        if len(ids) < self.num_records:
            return RecordIndex(self.records, ids, k).links(keys)
        if k not in self._indexes:
            self._indexes.clear()
            self._indexes[k] = RecordIndex(self.records, ids, k)
        return self._indexes[k].links(keys)

    @cached_property
    def _indexes(self) -> dict[int, "RecordIndex"]:
        """The last index of all records by its K: rows are often linked part by part."""
        return {}


class Euclidean(Metric):
    """The straight line between two points of one common unit."""

    name: ClassVar[str] = "euclidean"
    unit: ClassVar[str] = "the keys' unit"
    quick: ClassVar[bool] = True
    quantised: ClassVar[bool] = True

    def compare(
        self, spec: KeySpec, primary: KeyTable, records: KeyTable, *, neighbours: int
    ) -> EuclideanKeys:
        """Take key columns for coordinates."""
        return EuclideanKeys(primary=numbers_of(primary), records=numbers_of(records))


class RecordIndex:
    """Records in a tree, to be searched for up to ``k`` of them."""

    def __init__(
        self, record_keys: Float64[np.ndarray, "records key_dim"], ids: Chosen, k: int
    ) -> None:
        """Build the tree.

        Args:
            record_keys: KeyTable of the secondary's records, checked (:func:`check_keys`).
            ids: Numbers of the records that may be linked, ascending.
            k: Links a row.
        """
        self._k = k
        self._ids = _first_copies(record_keys, ids, k) if len(ids) else ids
        self._points = record_keys[self._ids]
        self._tree = scipy.spatial.cKDTree(self._points) if len(ids) else None

    def links(self, primary_keys: Float64[np.ndarray, "rows key_dim"]) -> LinkTable:
        """Return the exact links of rows with these keys."""
        links, tree = LinkTable.empty(len(primary_keys), self._k), self._tree
        if tree is None:
            return links
        # Rows at one place (flats of one block) have one answer, so each place is searched once.
        first_row, place_of = _places(primary_keys)
        write_nearest(
            links,
            first_row,
            self._ids,
            lambda rows, width: tree.query(primary_keys[rows], k=np.arange(1, width + 1)),
            lambda rows, position, _found: canonical_distances(
                self._points[position], primary_keys[rows][:, None]
            ),
            width=self._k + 1,
            chunk_cells=_CHUNK_CELLS,
        )
        found_at = first_row[place_of]
        copies = np.flatnonzero(found_at != np.arange(len(primary_keys)))
        step = max(1, _CHUNK_CELLS // self._k)
        for start in range(0, len(copies), step):
            rows = copies[start : start + step]
            links.put(rows, links.take(found_at[rows]))
        return links


def check_keys(
    primary_keys: Float64[np.ndarray, "rows key_dim"],
    record_keys: Float64[np.ndarray, "records other_dim"],
) -> None:
    """Check that two parties' keys can be compared.

    Raises:
        DataError: If a table is empty, the dimensions differ, or a key is not finite or too large.
    """
    for whose, keys in (("the primary", primary_keys), ("the secondary", record_keys)):
        if keys.ndim != 2 or 0 in keys.shape:
            raise DataError(f"keys of {whose}: must be a matrix that is not empty, {keys.shape=}")
        if keys.dtype != np.float64:
            raise DataError(f"keys of {whose}: must be float64, got {keys.dtype}")
        # NaN fails this comparison, so it is found here too.
        bad = ~(np.abs(keys) <= _LARGEST_KEY)
        if bad.any():
            row, column = np.argwhere(bad)[0]
            raise DataError(
                f"keys of {whose}: row {row + 1}, dimension {column + 1}: must be finite and at "
                f"most 1e150, got {keys[row, column]}"
            )
    if primary_keys.shape[1] != record_keys.shape[1]:
        raise DataError(
            f"keys: the primary's have {primary_keys.shape[1]} dimensions, the secondary's "
            f"{record_keys.shape[1]}; both must link by the same columns"
        )


def canonical_distances(
    points: Float64[np.ndarray, "*shape key_dim"], others: Float64[np.ndarray, "*shape_2 key_dim"]
) -> Float64[np.ndarray, "*joint"]:
    """Return distances in the one way that decides order; symmetric to the last bit."""
    return np.sqrt(((points - others) ** 2).sum(axis=-1))


def _places(
    keys: Float64[np.ndarray, "rows key_dim"],
) -> tuple[Int64[np.ndarray, " places"], Int64[np.ndarray, " rows"]]:
    """Return the first row at each different place, and each row's place.

    ``np.unique(axis=0)`` does the same in ten times the time.
    """
    order = np.lexsort(keys.T)
    in_order = keys[order]
    new = np.concatenate([[True], (in_order[1:] != in_order[:-1]).any(axis=1)])
    place_of = np.empty(len(keys), dtype=np.int64)
    place_of[order] = np.cumsum(new) - 1
    # lexsort is stable, so the first of a run of equal keys has the lowest row number.
    return order[new], place_of


def _first_copies(
    keys: Float64[np.ndarray, "records key_dim"], ids: Chosen, k: int
) -> Int64[np.ndarray, " kept"]:
    """Drop records that can't be linked: all but the ``k`` lowest numbers at one place."""
    _, place_of = _places(keys[ids])
    counts = np.bincount(place_of)
    if counts.max() <= k:
        return ids
    # A stable sort by place keeps numbers ascending, so the position in its place is a rank.
    order = np.argsort(place_of, kind="stable")
    return np.sort(ids[order[place_in_run(counts) < k]])


EARTH_RADIUS_M: Final = 6_371_008.8
"""Mean radius of the earth in metres (IUGG)."""


@dataclass(frozen=True, kw_only=True, eq=False)
class EarthKeys(EuclideanKeys):
    """Places as points on the unit sphere, linked by metres along the surface of the earth."""

    @classmethod
    def of(
        cls, primary: Float64[np.ndarray, "rows 2"], records: Float64[np.ndarray, "records 2"]
    ) -> "EarthKeys":
        """Read longitudes and latitudes in degrees.

        Raises:
            DataError: As :func:`check_keys`, or if a longitude is outside [-180, 180]
                (:meth:`GreatCircle.normal` turns 180 to 360 into these) or a latitude outside
                [-90, 90].
        """
        check_keys(primary, records)
        return cls(
            primary=unit_vectors(primary, whose="the primary"),
            records=unit_vectors(records, whose="the secondary"),
        )

    def nearest_of(self, keys: Float64[np.ndarray, "rows 3"], ids: Chosen, k: int) -> LinkTable:
        """Link by the tree; distances are right to about a millimetre between neighbours."""
        links = super().nearest_of(keys, ids, k)
        present, arc = links.present, links.distances
        # The table was made for this call, and three more of its size would be much.
        np.minimum(np.divide(arc, 2, out=arc), 1, out=arc)
        np.multiply(np.arcsin(arc, out=arc), 2 * EARTH_RADIUS_M, out=arc)
        arc[~present] = np.inf
        return links


class GreatCircle(Metric):
    """Metres along the surface of the earth."""

    name: ClassVar[str] = "great-circle"
    unit: ClassVar[str] = "metres"
    quick: ClassVar[bool] = True
    coded: ClassVar[bool] = False

    def check(self, spec: KeySpec) -> None:
        """Ask for two columns."""
        if len(spec.columns) != 2:
            raise ConfigError(
                'linkage.metric: "great-circle" takes two key columns, longitude and latitude in '
                f"degrees, in this order; party.key names {len(spec.columns)}"
            )

    def check_names(self, names: Sequence[str]) -> None:
        """Refuse a latitude in front of a longitude."""
        if [axis_of(name) for name in names] == ["latitude", "longitude"]:
            raise ConfigError(
                f'party.key: metric = "great-circle" takes the longitude first, and by their names '
                f"{list(names)} are in the other order; write key = {list(names)[::-1]}"
            )

    def normal(self, columns: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return longitudes of 180 to 360 degrees as those west of Greenwich."""
        by_name = dict(columns)
        if by_name:
            name, degrees = next(iter(by_name.items()))
            by_name[name] = np.where((degrees > 180) & (degrees <= 360), degrees - 360, degrees)
        return by_name

    def compare(
        self, spec: KeySpec, primary: KeyTable, records: KeyTable, *, neighbours: int
    ) -> EarthKeys:
        """Take the first column for the longitude, the second one for the latitude."""
        return EarthKeys.of(numbers_of(primary), numbers_of(records))


def unit_vectors(
    degrees: Float64[np.ndarray, "rows 2"], *, whose: str
) -> Float64[np.ndarray, "rows 3"]:
    """Return points on the unit sphere.

    Raises:
        DataError: If a value is no longitude or latitude.
    """
    longitude, latitude = degrees.T
    bad = ~((np.abs(longitude) <= 180) & (np.abs(latitude) <= 90))
    if bad.any():
        row = int(np.argmax(bad))
        swapped = abs(longitude[row]) <= 90 < abs(latitude[row]) <= 360
        raise DataError(
            f"keys of {whose}: row {row + 1}: {degrees[row].tolist()} is not [longitude, latitude] "
            f"in degrees" + ("; are the two columns swapped?" if swapped else "")
        )
    across = np.cos(np.radians(latitude))
    return np.column_stack(
        [
            across * np.cos(np.radians(longitude)),
            across * np.sin(np.radians(longitude)),
            np.sin(np.radians(latitude)),
        ]
    )
