"""Scaling: by own statistics, by declared bounds, by common statistics."""

import json
import math
from typing import Any

import numpy as np
import pandas as pd
import pytest

from securevfl.core.errors import ConfigError, DataError
from securevfl.data.frames import from_frame
from securevfl.data.scaling import FeatureScaler, KeyScaler, LabelScaler, feature_scaler

FEATURES = np.array([[1, 5, 0], [3, 5, 1], [5, 5, 1]], dtype=np.float32)
NAMES = ("area", "floor", "town=east")


def test_standard_scaling_has_mean_0_and_deviation_1() -> None:
    """A constant feature becomes 0; the scaler says that it depends on the data."""
    scaler = feature_scaler(FEATURES, NAMES, scaling="standard")
    scaled = scaler.apply(FEATURES)

    assert scaled.mean(axis=0) == pytest.approx([0, 0, 0], abs=1e-6)
    assert scaled.std(axis=0) == pytest.approx([1, 0, 1], abs=1e-6)
    assert not scaler.data_independent


def test_clamped_scaling_is_standard_scaling_within_five_deviations() -> None:
    """A word that one record of 500 has is 22 deviations off, and 5 after the clamp."""
    features = np.zeros((500, 2), dtype=np.float32)
    features[7, 0] = 1
    features[:, 1] = np.arange(500)
    standard = feature_scaler(features, NAMES[:2], scaling="standard").apply(features)
    scaler = feature_scaler(features, NAMES[:2], scaling="clamped")

    assert standard[7, 0] == pytest.approx(499**0.5)
    assert np.array_equal(scaler.apply(features), standard.clip(-5, 5))
    assert not scaler.data_independent


def test_a_constant_that_float32_can_not_hold_stays_constant() -> None:
    """The rounding error of a constant's deviation is not blown up."""
    features = np.full((1000, 1), 0.1, dtype=np.float32)

    assert not FeatureScaler.standard(features).apply(features).any()


@pytest.mark.parametrize("unit", [1e-12, 1e-30, 1e12])
def test_the_unit_of_a_column_does_not_decide_whether_it_is_used(unit: float) -> None:
    """Features and keys in farads scale to what they are in picofarads."""
    values = np.random.default_rng(0).normal(size=(50, 2))
    features = values.astype(np.float32)
    small = (values * unit).astype(np.float32)
    scaled = FeatureScaler.standard(small).apply(small)

    assert scaled == pytest.approx(FeatureScaler.standard(features).apply(features), abs=1e-5)
    assert KeyScaler.fit(values * unit).width == pytest.approx(values.std(axis=0) * unit)


def test_declared_bounds_are_independent_of_the_data() -> None:
    """Bounds map to -1 and 1, what lies outside is clamped, and other rows have no influence."""
    scaler = feature_scaler(FEATURES, NAMES, scaling="bounds", bounds=[1.0, 3.0])

    assert scaler.apply(FEATURES).tolist() == [[-1, 1, -1], [1, 1, -1], [1, 1, -1]]
    assert np.array_equal(scaler.apply(FEATURES[:1]), scaler.apply(FEATURES)[:1])
    assert scaler.data_independent


def test_bounds_for_each_feature() -> None:
    """A one-hot column needs no bounds of its own."""
    bounds = {"area": [0.0, 10.0], "floor": [5.0, 6.0]}
    scaled = FeatureScaler.from_bounds(NAMES, bounds).apply(FEATURES)

    assert scaled == pytest.approx(np.array([[-0.8, -1, -1], [-0.4, -1, 1], [0, -1, 1]]))


def test_no_scaling_changes_nothing() -> None:
    """``none`` is the identity."""
    scaler = feature_scaler(FEATURES, NAMES, scaling="none")

    assert np.array_equal(scaler.apply(FEATURES), FEATURES)
    assert scaler.data_independent


@pytest.mark.parametrize(
    ("scaling", "bounds", "message"),
    [
        ("standard", [0.0, 1.0], "goes with scaling"),
        ("bounds", None, "goes with scaling"),
        ("bounds", [1.0, 0.0], r"'area' must be finite \[low, high\]"),
        ("bounds", [0.0, math.nan], r"'area' must be finite \[low, high\]"),
        ("bounds", [0.0, 1.0, 2.0], r"'area' must be finite \[low, high\]"),
        ("bounds", {"area": [0.0, 1.0]}, "the feature 'floor' has none"),
    ],
)
def test_impossible_bounds_are_refused(scaling: str, bounds: object, message: str) -> None:
    """The message names the feature and the form."""
    with pytest.raises(ConfigError, match=message):
        feature_scaler(FEATURES, NAMES, scaling=scaling, bounds=bounds)


def test_another_number_of_columns_is_refused() -> None:
    """A scaler fits one table's columns."""
    with pytest.raises(DataError, match=r"features: have 2 columns, the scaler 3"):
        FeatureScaler.identity(3).apply(FEATURES[:, :2])
    with pytest.raises(DataError, match=r"keys: have 1 dimensions, the scaler 2"):
        KeyScaler(centre=(0.0, 0.0), width=(1.0, 1.0)).apply(np.zeros((3, 1)))


def test_common_key_statistics_keep_one_place_one_place() -> None:
    """The same coordinates get the same scaled keys at every party."""
    primary = np.array([[103.8, 1.30], [103.9, 1.35], [104.0, 1.45]])
    scaler = KeyScaler.fit(primary)
    other = np.array([[103.9, 1.35], [1.0, 50.0]])

    assert np.array_equal(scaler.apply(primary)[1], scaler.apply(other)[0])


def test_neighbours_survive_float32_when_centred_first() -> None:
    """Two houses 10 cm apart stay apart; rounding the raw longitudes would merge them."""
    keys = np.array([[103.85387990], [103.85388080], [103.9]])
    scaled = KeyScaler.fit(keys).apply(keys)

    assert np.float32(keys[0, 0]) == np.float32(keys[1, 0])
    assert scaled[0, 0] < scaled[1, 0]


def test_labels_come_back_in_their_unit() -> None:
    """``invert`` undoes ``apply`` to float32 precision."""
    labels = np.array([200.0, 350.0, 900.0])
    scaler = LabelScaler.fit(labels)

    assert scaler.apply(labels).mean() == pytest.approx(0, abs=1e-6)


def test_labels_are_centred_before_they_become_float32() -> None:
    """At 100,000,000 float32 has steps of 8; labels a tenth apart stay apart."""
    labels = 1e8 + np.arange(30) / 10
    scaled = LabelScaler.fit(labels).apply(labels)

    assert scaled.dtype == np.float32
    assert np.diff(scaled) == pytest.approx(0.1 / labels.std(), rel=1e-5)


def test_constant_training_labels_are_refused() -> None:
    """Labels may be constant in the training rows though they are not in the table."""
    with pytest.raises(DataError, match=r"constant in the training rows"):
        LabelScaler.fit(np.full(7, 0.1))
    with pytest.raises(ConfigError, match=r"mean must be finite"):
        LabelScaler(mean=math.nan, deviation=1.0)


SCALERS = {
    "fitted": FeatureScaler.standard(FEATURES / 3, limit=5.0),
    "bounded": FeatureScaler.from_bounds(NAMES, {"area": [0.1, 0.7], "floor": [0, 30]}),
    "labels": LabelScaler.fit(FEATURES[:, 0].astype(np.float64) / 3),
}


@pytest.mark.parametrize("scaler", SCALERS.values(), ids=SCALERS)
def test_a_scaler_survives_json(scaler: FeatureScaler | LabelScaler) -> None:
    """To the last bit, so that a kept model scales as the run did."""
    content = json.loads(json.dumps(scaler.as_json(), allow_nan=False))
    again = type(scaler).from_json(content)
    values: Any = FEATURES[:, 0] if isinstance(scaler, LabelScaler) else FEATURES
    values = values if isinstance(scaler, FeatureScaler) else values.astype(np.float64)
    assert again.apply(values).tobytes() == scaler.apply(values).tobytes()
    assert again.as_json() == scaler.as_json()


@pytest.mark.parametrize(
    ("name", "damage", "message"),
    [
        ("fitted", {"width": [1.0, 0.0, 1.0]}, "width must be finite and > 0, got 0.0"),
        ("fitted", {"width": [1.0]}, "centre and width must be equally long"),
        ("fitted", {"limit": -1.0}, "limit must be finite and > 0"),
        ("fitted", {"centre": [math.nan, 0.0, 0.0]}, "centre must be finite"),
        ("fitted", {"centre": "0"}, "centre: must be a list"),
        ("labels", {"deviation": 0.0}, "deviation must be finite and > 0"),
        ("labels", {"unit": "euro"}, "unit: no such field"),
    ],
)
def test_a_damaged_scaler_gets_one_line(name: str, damage: Any, message: str) -> None:
    """A file that somebody edited is refused, not used."""
    scaler = SCALERS[name]
    with pytest.raises(DataError, match=rf"^model: is damaged: .*{message}"):
        type(scaler).from_json({**scaler.as_json(), **damage}, where="model")
    with pytest.raises(DataError, match=r"^model: is damaged: must be a table, got list"):
        type(scaler).from_json([], where="model")


def test_labels_that_float32_would_merge_are_named_and_others_are_not() -> None:
    random = np.random.default_rng(0)
    frame = pd.DataFrame({"k": random.random(400), "a": random.random(400)})
    for label, named in (
        (100_000_000 + random.normal(0, 2, 400), True),
        (random.random(400), False),
        (random.integers(0, 9, 400).astype(float), False),
    ):
        table = from_frame(
            frame.assign(y=label), name="bank", key=["k"], label="y", task="regression"
        )
        assert any("float32's step" in note for note in table.notes) is named
        assert table.labels is not None
        assert np.array_equal(table.labels, label)
