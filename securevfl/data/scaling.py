"""Declared columns, and the scaling of features, keys and regression labels.

Nothing here reads a table: federation files are read by processes that have none.

A mean and a deviation fitted to a private table are statistics of it. A frozen encoder's guarantee
(docs/privacy.md, section 4) needs one record's representation to depend on that record alone, so
it goes with declared bounds, never with fitted statistics: see
:attr:`FeatureScaler.data_independent`.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeVar

import numpy as np
from jaxtyping import Float32, Float64

from securevfl.core import checks
from securevfl.core.errors import ConfigError, DataError
from securevfl.core.settings import read_settings

T = TypeVar("T")

Scaling = Literal["standard", "clamped", "bounds", "none"]

Bounds = Sequence[float] | Mapping[str, Sequence[float | str]]
"""``[low, high]`` for all features, or one such pair for each column, of dates as texts."""

DEVIATIONS: Final = 5.0
"""End of ``clamped`` scaling, in standard deviations from the mean."""


MAX_CATEGORIES: Final = 50
"""Most words of a column that get a 0/1 column each; the others share one. More would let a model
memorise rows."""

Pair = tuple[float, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class ColumnSettings:
    """Declared settings of a party's columns."""

    categories: Mapping[str, Sequence[str]] | None = None
    """Words by column."""

    bounds: Bounds | None = None
    """``[low, high]`` of every column of numbers, or such a pair by column, of dates as texts."""

    missing: Literal["fill", "refuse"] = "fill"
    """Treatment of missing values: filled in or refused."""

    missing_columns: Sequence[str] = ()
    """Columns declared to have missing values, without looking at the data."""

    empty_labels: bool = False
    """Accept a row without a label; it is then marked so."""

    max_categories: int = MAX_CATEGORIES
    """Words of a column without a list that get a feature of their own."""

    own_statistics: bool = True
    """Allow the table's own median in place of a missing value; not under a promise."""

    def pair(self, column: str) -> Sequence[float | str] | None:
        """Return the declared bounds of a column."""
        if isinstance(self.bounds, Mapping):
            return self.bounds.get(column)
        return self.bounds

    def words(self, column: str) -> tuple[str, ...] | None:
        """Return the declared words of a column."""
        words = (self.categories or {}).get(column)
        return None if words is None else tuple(words)


NOTHING_DECLARED: Final = ColumnSettings()
"""Nothing is declared: encodings are fitted to the table."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Dependence:
    """Statistic of a table's records that features depend on."""

    column: str
    """Name of the column."""

    what: str
    """The statistic, as the subject of a sentence."""

    declare: str
    """Setting that would replace it in the federation file."""


def declared_range(pair: Sequence[float | str]) -> Pair:
    """Return declared bounds as numbers; dates as days since 1970-01-01.

    Raises:
        DataError: If they are not two numbers or two dates, the first below the second.
    """
    ends = [_day_number(end) if isinstance(end, str) else float(end) for end in pair]
    if (
        len(ends) != 2
        or isinstance(pair[0], str) != isinstance(pair[1], str)
        or not -np.inf < ends[0] < ends[1] < np.inf
    ):
        raise DataError(f"must be [low, high], got {list(pair)}")
    return ends[0], ends[1]


def _day_number(text: str) -> float:
    # Imported here: it reads dates with pandas, which loads for as long as CrypTen.
    from securevfl.data.cells import day_number

    return day_number(text)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class FeatureScaler:
    """``(features - centre) / width``, clamped to [-limit, limit] if there is a limit."""

    centre: Float64[np.ndarray, " features"]
    """Values that become 0, in the feature's unit."""

    width: Float64[np.ndarray, " features"]
    """Widths that become 1, in the feature's unit, > 0."""

    limit: float | None
    """Largest absolute scaled value; None does not clamp."""

    data_independent: bool
    """False if centre and width were fitted to a table, and so depend on its every record."""

    @classmethod
    def standard(
        cls, features: Float32[np.ndarray, "rows features"], *, limit: float | None = None
    ) -> "FeatureScaler":
        """Fit mean and standard deviation; a constant feature becomes 0. Not data-independent.

        Args:
            features: What they are fitted to.
            limit: Largest absolute scaled value, in deviations. Without one, the one-hot column of
                a word that one record in 20,000 has is 141 there, and dominates every model.
        """
        values = features.astype(np.float64)
        deviation = values.std(axis=0)
        # A constant column's deviation is rounding error, and dividing by it makes noise of it.
        # The test is relative: a column in farads is as good as the same one in picofarads.
        constant = deviation <= 1e-9 * np.abs(values).max(axis=0)
        return cls(
            centre=values.mean(axis=0),
            width=np.where(constant, 1.0, deviation),
            limit=limit,
            data_independent=False,
        )

    @classmethod
    def from_bounds(
        cls,
        feature_names: Sequence[str],
        bounds: Bounds,
    ) -> "FeatureScaler":
        """Map declared bounds to [-1, 1], and clamp what lies outside them. Data-independent.

        Args:
            feature_names: The table's features.
            bounds: ``[low, high]`` for every feature, or one such pair for each name. A one-hot
                column ``column=value`` without bounds of its own has [0, 1].

        Raises:
            ConfigError: If a feature has no bounds, or its bounds are not finite and ascending.
        """
        pairs = [_bounds_of(name, bounds) for name in feature_names]
        low = np.array([pair[0] for pair in pairs], dtype=np.float64)
        high = np.array([pair[1] for pair in pairs], dtype=np.float64)
        return cls(
            centre=(low + high) / 2, width=(high - low) / 2, limit=1.0, data_independent=True
        )

    @classmethod
    def identity(cls, num_features: int) -> "FeatureScaler":
        """Leave features as they are. Data-independent."""
        return cls(
            centre=np.zeros(num_features),
            width=np.ones(num_features),
            limit=None,
            data_independent=True,
        )

    def as_json(self) -> dict[str, Any]:
        """Return what :meth:`from_json` reads."""
        return {
            "centre": self.centre.tolist(),
            "width": self.width.tolist(),
            "limit": self.limit,
            "data_independent": self.data_independent,
        }

    @classmethod
    def from_json(cls, content: Any, *, where: str = "feature scaler") -> "FeatureScaler":
        """Read a saved scaler.

        Raises:
            DataError: If it is damaged.
        """
        kept = _parse_stored(_KeptFeatureScaler, content, where=where)
        return cls(
            centre=np.array(kept.centre, dtype=np.float64),
            width=np.array(kept.width, dtype=np.float64),
            limit=kept.limit,
            data_independent=kept.data_independent,
        )

    def apply(
        self, features: Float32[np.ndarray, "rows features"]
    ) -> Float32[np.ndarray, "rows features"]:
        """Return the scaled features; each row depends on that row and the scaler alone.

        Raises:
            DataError: If the features have another number of columns.
        """
        if features.shape[1] != len(self.centre):
            raise DataError(
                f"features: have {features.shape[1]} columns, the scaler {len(self.centre)}"
            )
        scaled = (features.astype(np.float64) - self.centre) / self.width
        if self.limit is not None:
            np.clip(scaled, -self.limit, self.limit, out=scaled)
        return scaled.astype(np.float32)


@dataclass(frozen=True, kw_only=True, slots=True)
class KeyScaler:
    """Scale the keys of all parties by common statistics, so that one place stays one place.

    Scaled per party, the same coordinates would differ between parties. Centring happens in
    float64, before float32 could round the coordinates of neighbours together.
    """

    centre: tuple[float, ...]
    """Values that become 0, in the key's unit."""

    width: tuple[float, ...]
    """Widths that become 1, in the key's unit, > 0."""

    @classmethod
    def fit(cls, keys: Float64[np.ndarray, "rows key_dim"]) -> "KeyScaler":
        """Take mean and deviation of the keys of one party, usually the primary's."""
        deviation = keys.std(axis=0)
        constant = deviation <= 1e-12 * np.abs(keys).max(axis=0)
        width = np.where(constant, 1.0, deviation)
        return cls(centre=tuple(keys.mean(axis=0).tolist()), width=tuple(width.tolist()))

    def apply(
        self, keys: Float64[np.ndarray, "rows key_dim"]
    ) -> Float32[np.ndarray, "rows key_dim"]:
        """Return scaled keys for a model; linkage itself uses the unscaled float64 keys.

        Raises:
            DataError: If the keys have another dimension.
        """
        if keys.shape[1] != len(self.centre):
            raise DataError(
                f"keys: have {keys.shape[1]} dimensions, the scaler {len(self.centre)}; "
                f"all parties must link by the same key columns"
            )
        return ((keys - self.centre) / self.width).astype(np.float32)


@dataclass(frozen=True, kw_only=True, slots=True)
class LabelScaler:
    """Standardise regression labels by the training rows, and bring predictions back."""

    mean: float
    """Mean of the training labels, in the label's unit."""

    deviation: float
    """Standard deviation of the training labels, in the label's unit, > 0."""

    def __post_init__(self) -> None:
        checks.positive(deviation=self.deviation)
        if not math.isfinite(self.mean):
            raise ConfigError(f"mean must be finite, got {self.mean!r}")

    @classmethod
    def fit(cls, training_labels: Float64[np.ndarray, " rows"]) -> "LabelScaler":
        """Take mean and deviation of the training labels.

        Raises:
            DataError: If they are constant.
        """
        # Not by their deviation, which rounding keeps from 0.
        if training_labels.min() == training_labels.max():
            raise DataError("labels: are constant in the training rows; nothing can be learned")
        return cls(mean=float(training_labels.mean()), deviation=float(training_labels.std()))

    def as_json(self) -> dict[str, float]:
        """Return what :meth:`from_json` reads."""
        return {"mean": self.mean, "deviation": self.deviation}

    @classmethod
    def from_json(cls, content: Any, *, where: str = "label scaler") -> "LabelScaler":
        """Read a saved scaler.

        Raises:
            DataError: If it is damaged.
        """
        return _parse_stored(cls, content, where=where)

    def apply(self, labels: Float64[np.ndarray, " rows"]) -> Float32[np.ndarray, " rows"]:
        """Return standardised labels: float32, which they fit once they are centred."""
        return ((labels - self.mean) / self.deviation).astype(np.float32)


@dataclass(frozen=True, kw_only=True, slots=True)
class _KeptFeatureScaler:
    """A feature scaler as JSON has it."""

    centre: tuple[float, ...]
    width: tuple[float, ...]
    limit: float | None
    data_independent: bool

    def __post_init__(self) -> None:
        if len(self.centre) != len(self.width):
            raise ConfigError("centre and width must be equally long")
        if not all(math.isfinite(value) for value in self.centre):
            raise ConfigError("centre must be finite")
        for value in self.width:
            checks.positive(width=value)
        if self.limit is not None:
            checks.positive(limit=self.limit)


def _parse_stored(cls: type[T], content: Any, *, where: str) -> T:
    try:
        if not isinstance(content, dict):
            raise ConfigError(f"must be a table, got {type(content).__name__}")
        return read_settings(cls, content, where=where)
    except ConfigError as error:
        raise DataError(f"{where}: is damaged: {error}") from None


def feature_scaler(
    features: Float32[np.ndarray, "rows features"],
    feature_names: Sequence[str],
    *,
    scaling: Scaling,
    bounds: Bounds | None = None,
) -> FeatureScaler:
    """Make the scaler that a federation file asks for.

    Raises:
        ConfigError: If ``bounds`` are missing, superfluous or impossible.
    """
    checks.one_of(("standard", "clamped", "bounds", "none"), scaling=scaling)
    if (scaling == "bounds") != (bounds is not None):
        raise ConfigError('bounds: goes with scaling = "bounds", and only with it')
    if bounds is not None:
        return FeatureScaler.from_bounds(feature_names, bounds)
    if scaling in ("standard", "clamped"):
        limit = DEVIATIONS if scaling == "clamped" else None
        return FeatureScaler.standard(features, limit=limit)
    return FeatureScaler.identity(len(feature_names))


def _bounds_of(name: str, bounds: Bounds) -> tuple[float, float]:
    pair: Sequence[float | str] | None
    if isinstance(bounds, Mapping):
        pair = bounds.get(name, (0.0, 1.0) if "=" in name else None)
        if pair is None:
            raise ConfigError(f"bounds: the feature {name!r} has none; add {name} = [low, high]")
    else:
        pair = bounds
    ends = [math.nan if isinstance(end, str) else float(end) for end in pair]
    if len(ends) != 2 or not -math.inf < ends[0] < ends[1] < math.inf:
        raise ConfigError(
            f"bounds: of the feature {name!r} must be finite [low, high], got {list(pair)}"
        )
    return ends[0], ends[1]
