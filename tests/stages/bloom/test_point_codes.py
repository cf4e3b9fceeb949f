"""Codes of points: near codes are near points, in any direction."""

import numpy as np
import pytest
from helpers.nearest import nearest_codes, nearest_records

from securevfl.core.errors import ConfigError, DataError
from securevfl.linkage.spec import LinkageSecret
from securevfl.stages.bloom.codes import NumberCode, PointCode, encode_keys, secret_directions

SECRET = LinkageSecret(b"s" * 32)


def encode(points: np.ndarray, code: PointCode, secret: LinkageSecret = SECRET) -> np.ndarray:
    return encode_keys({"at": points}, {"at": code}, secret)


def box(key_dim: int, **changes: float) -> PointCode:
    return PointCode(low=(0.0,) * key_dim, high=(1.0,) * key_dim, **changes)


@pytest.mark.parametrize("key_dim", [1, 2, 3])
def test_every_point_has_equally_many_ones(key_dim: int) -> None:
    """In the corners of the box as in its middle."""
    corners = np.array(np.meshgrid(*[[0.0, 0.5, 1.0]] * key_dim)).reshape(key_dim, -1).T
    ones = np.bitwise_count(encode(corners, box(key_dim))).sum(axis=1)

    assert set(ones.tolist()) == {512}


def test_hamming_distance_follows_the_distance_in_every_direction() -> None:
    """In the plane, within 5 % and the steps of the pivots, as far as a code sees."""
    code = box(2, bits=8192)
    middle = np.array([0.5, 0.5])
    angles = np.linspace(0, 2 * np.pi, 60)
    around = middle + 0.1 * np.stack([np.cos(angles), np.sin(angles)], axis=1)
    codes = encode(np.vstack([middle, around]), code)
    far = np.bitwise_count(codes[1:] ^ codes[0]).sum(axis=1)

    assert far.max() / far.min() < 1.05


def test_points_are_found_better_than_by_their_coordinates() -> None:
    """With the same number of bits: 20 nearest of 1,000 in a plane, seeds fixed."""
    rng = np.random.default_rng(0)
    rows, records = rng.random((200, 2)), rng.random((1000, 2))
    exact = nearest_records(rows, records, 20).indices
    axes = {name: NumberCode(low=0.0, high=1.0, bits=1024) for name in "xy"}

    def recall(mine: np.ndarray, theirs: np.ndarray) -> float:
        found = nearest_codes(mine, theirs, 20).indices
        return float(np.mean([np.isin(*pair).mean() for pair in zip(exact, found, strict=True)]))

    by_point = recall(*(encode(keys, box(2)) for keys in (rows, records)))
    by_axis = recall(
        *(encode_keys({"x": k[:, 0], "y": k[:, 1]}, axes, SECRET) for k in (rows, records))
    )
    assert 1 - by_point < 0.7 * (1 - by_axis)


def test_directions_are_secret() -> None:
    """Two secrets turn differently, one always the same; a field has directions of its own."""
    points = np.random.default_rng(1).random((50, 2))
    other = encode(points, box(2), LinkageSecret(b"t" * 32))

    assert np.array_equal(encode(points, box(2)), encode(points, box(2)))
    assert not np.array_equal(encode(points, box(2)), other)
    assert not np.array_equal(SECRET.subkey("directions", "a"), SECRET.subkey("directions", "b"))


@pytest.mark.parametrize("key_dim", [1, 2, 3, 5])
def test_directions_have_unit_length_and_frames_right_angles(key_dim: int) -> None:
    """Evenly spread over half a turn in the plane."""
    found = secret_directions(key_dim, 8, b"k" * 32)

    assert found.shape == (key_dim, 8)
    assert np.linalg.norm(found, axis=0) == pytest.approx(1)
    if key_dim > 2:
        frame = found[:, :key_dim]
        assert frame.T @ frame == pytest.approx(np.eye(key_dim), abs=1e-12)
    if key_dim == 2:
        assert np.abs((found[:, 1:] * found[:, :-1]).sum(axis=0)) == pytest.approx(
            np.cos(np.pi / 8)
        )


@pytest.mark.parametrize("value", [-0.01, 1.01, np.nan])
def test_a_point_outside_the_agreed_box_is_refused(value: float) -> None:
    """With its row."""
    with pytest.raises(
        DataError, match=r"field 'at': row 2, dimension 2 is .*outside the agreed range"
    ):
        encode(np.array([[0.5, 0.5], [0.5, value]]), box(2))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"bits": 1000}, "multiple of 8 x 8 directions"),
        ({"directions": 0}, "directions must be at least 1"),
        ({"concentration": 0.0}, r"concentration must lie in \(0, 1\)"),
        ({"high": (1.0, 0.0)}, "must be finite and ascend"),
        ({"high": (1.0,)}, "one value for each key dimension"),
    ],
)
def test_impossible_codes_are_refused(settings: dict[str, object], message: str) -> None:
    """By name."""
    with pytest.raises(ConfigError, match=message):
        PointCode(**{"low": (0.0, 0.0), "high": (1.0, 1.0), **settings})
