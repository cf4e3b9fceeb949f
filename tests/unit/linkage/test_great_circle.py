"""Distances along the surface of the earth."""

import numpy as np
import pytest

from securevfl.core.errors import ConfigError, DataError
from securevfl.linkage.metrics.metric import KeySpec
from securevfl.linkage.metrics.points import EARTH_RADIUS_M, EarthKeys, GreatCircle

SINGAPORE = np.array([[103.8198, 1.3521]])


def haversine(one: np.ndarray, other: np.ndarray) -> float:
    """The textbook formula, as an oracle."""
    (lon_1, lat_1), (lon_2, lat_2) = np.radians(one), np.radians(other)
    chord = (
        np.sin((lat_2 - lat_1) / 2) ** 2
        + np.cos(lat_1) * np.cos(lat_2) * np.sin((lon_2 - lon_1) / 2) ** 2
    )
    return float(2 * EARTH_RADIUS_M * np.arcsin(np.sqrt(chord)))


def test_distances_are_those_of_the_haversine_formula() -> None:
    """Over random places all over the earth, to a millimetre and a part in a million."""
    rng = np.random.default_rng(0)
    places = np.column_stack([rng.uniform(-180, 180, 50), rng.uniform(-90, 90, 50)])
    links = EarthKeys.of(SINGAPORE, places).nearest(None, 50)
    expected = sorted(haversine(SINGAPORE[0], place) for place in places)

    assert links.distances[0] == pytest.approx(expected, rel=1e-6, abs=1e-3)


def test_the_date_line_is_no_border() -> None:
    """179.9 degrees east is near 179.9 degrees west; raw degrees would say otherwise."""
    places = np.array([[170.0, 0.0], [-179.9, 0.0]])
    links = EarthKeys.of(np.array([[179.9, 0.0]]), places).nearest(None, 1)

    assert links.indices.tolist() == [[1]]
    assert links.distances[0, 0] == pytest.approx(0.2 * np.pi / 180 * EARTH_RADIUS_M)


def test_a_degree_of_longitude_shrinks_towards_the_poles() -> None:
    """At 60 degrees north, 1.5 degrees east is nearer than 1 degree north."""
    places = np.array([[10.0, 61.0], [11.5, 60.0]])
    links = EarthKeys.of(np.array([[10.0, 60.0]]), places).nearest(None, 1)

    assert links.indices.tolist() == [[1]]


def test_missing_links_stay_infinitely_far() -> None:
    """No record, no metres."""
    keys = EarthKeys.of(SINGAPORE, np.array([[0.0, 0.0], [1.0, 1.0]]))
    links = keys.nearest(None, 2, eligible=np.array([True, False]))

    assert links.distances[0, 1] == np.inf


def test_swapped_columns_are_noticed() -> None:
    """A latitude of 103 degrees is none."""
    with pytest.raises(DataError, match=r"row 1: .* are the two columns swapped\?"):
        EarthKeys.of(SINGAPORE[:, ::-1].copy(), SINGAPORE).nearest(None, 1)


def test_longitudes_of_0_to_360_are_those_west_of_greenwich() -> None:
    """One place has one key: 231 is -129, and no distance is a turn around the earth."""
    spec = KeySpec(columns=("lon", "lat"), metric=GreatCircle())
    turned = spec.normal({"lon": np.array([231.0, 359.5, 180.0, -129.0]), "lat": np.zeros(4)})
    assert turned["lon"].tolist() == [-129.0, -0.5, 180.0, -129.0]
    again = spec.normal(turned)
    assert again["lon"].tolist() == turned["lon"].tolist()


@pytest.mark.parametrize(
    ("names", "wrong"),
    [
        (["lat", "lon"], True),
        (["home_latitude", "home_longitude"], True),
        (["Latitude", "lng"], True),
        (["lon", "lat"], False),
        (["y", "x"], False),
        (["lat", "height"], False),
    ],
)
def test_axes_in_the_wrong_order_are_known_by_their_names(names: list[str], wrong: bool) -> None:
    """Both orders lie in the valid range near Europe, so only names tell."""
    if wrong:
        with pytest.raises(ConfigError, match="longitude first, and by their names"):
            GreatCircle().check_names(names)
    else:
        GreatCircle().check_names(names)
