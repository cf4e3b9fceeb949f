"""Exact K nearest records on a sphere, for keys that are longitude and latitude in degrees.

A degree of longitude is shorter than one of latitude everywhere but at the equator, and 179.9 is
next to -179.9; Euclidean distance of raw degrees knows neither. Points become unit vectors, whose
straight-line distance has the same order as the distance along the surface.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Final

import numpy as np
from jaxtyping import Bool, Float64, Int64

from securevfl.core.column_names import axis_of
from securevfl.core.errors import ConfigError, DataError
from securevfl.linkage.links import LinkTable
from securevfl.linkage.metrics.euclidean import EuclideanKeys, check_keys
from securevfl.linkage.metrics.metric import ComparedKeys, Keys, KeySpec, Metric, numbers_of

EARTH_RADIUS_M: Final = 6_371_008.8
"""Mean radius of the earth in metres (IUGG)."""


@dataclass(frozen=True, kw_only=True, eq=False)
class EarthKeys(ComparedKeys):
    """Longitudes and latitudes in degrees."""

    primary: Float64[np.ndarray, "rows 2"]
    """The primary's keys."""

    records: Float64[np.ndarray, "records 2"]
    """The secondary's keys."""

    workers: int = 1
    """Threads of the tree search; -1 takes every core."""

    def nearest(
        self,
        rows: Int64[np.ndarray, " chosen"] | None,
        k: int,
        *,
        eligible: Bool[np.ndarray, " records"] | None = None,
    ) -> LinkTable:
        """Link the chosen rows (None: all) to their ``k`` nearest eligible records.

        Distances are metres along the surface, right to about a millimetre between neighbours.

        Raises:
            DataError: As :func:`~securevfl.linkage.metrics.euclidean.nearest_records`, or if a
                longitude is outside [-180, 180] (:meth:`GreatCircle.normal`
                turns 180 to 360 into these) or a latitude outside [-90, 90].
        """
        links = self._in_space.nearest(rows, k, eligible=eligible)
        present, arc = links.present, links.distances
        # The table was made for this call, and three more of its size would be much.
        np.minimum(np.divide(arc, 2, out=arc), 1, out=arc)
        np.multiply(np.arcsin(arc, out=arc), 2 * EARTH_RADIUS_M, out=arc)
        arc[~present] = np.inf
        return links

    @cached_property
    def _in_space(self) -> EuclideanKeys:
        """Both parties' points on the unit sphere."""
        check_keys(self.primary, self.records)
        return EuclideanKeys(
            primary=unit_vectors(self.primary, whose="the primary"),
            records=unit_vectors(self.records, whose="the secondary"),
            workers=self.workers,
        )


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
        found = dict(columns)
        if found:
            name, degrees = next(iter(found.items()))
            found[name] = np.where((degrees > 180) & (degrees <= 360), degrees - 360, degrees)
        return found

    def compare(
        self,
        spec: KeySpec,  # noqa: ARG002
        primary: Keys,
        records: Keys,
        *,
        neighbours: int,  # noqa: ARG002
    ) -> EarthKeys:
        """Take the first column for the longitude, the second one for the latitude."""
        return EarthKeys(primary=numbers_of(primary), records=numbers_of(records))


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
