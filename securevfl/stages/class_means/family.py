"""The family of class means: its settings, and no network."""

from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from securevfl.core import checks
from securevfl.core.errors import ConfigError
from securevfl.models import family


@dataclass(frozen=True, kw_only=True, slots=True)
class ClassMeansConfig:
    """The ``[model]`` table of ``family = "class-means"``."""

    neighbours: checks.Links = 1
    """K, records of a row at every secondary. Of a score, 1 counts a row of several as one without,
    which costs less of epsilon than their mean."""

    numbers: checks.Width = 1
    """Numbers of a row's release: 1, a score, for a label of two classes or a number; else one for
    each class."""

    keys_as_features: bool = True
    """Keys, which must be numbers, are inputs of the primary's own models."""

    party_dropout: ClassVar[float] = 0.0
    """All secondaries take part in every round."""

    average_positions_every: ClassVar[int] = 0
    """There are no positional encodings."""

    def __post_init__(self) -> None:
        checks.require_limits(self)

    @property
    def cut_shape(self) -> tuple[int, int]:
        """(L, H) of the aggregate."""
        return 1, self.numbers


class ClassMeansFamily(family.Family[ClassMeansConfig]):
    """``family = "class-means"``: frozen encoders, and a correction of the primary's own model.

    An addition to the papers. An ``[encoder]`` table makes the secondaries' half, and ``model.top``
    names the primary's.
    """

    name = "class-means"
    settings_class = ClassMeansConfig

    def build_bottom(self, settings: ClassMeansConfig, **_: object) -> nn.Module:
        """Refuse a federation without encoders.

        Raises:
            ConfigError: Always: an ``[encoder]`` table makes them.
        """
        raise ConfigError(
            'model.family: "class-means" has no network of its own; add [encoder] with method = '
            '"auto" or "class-means"'
        )

    def build_top(self, settings: ClassMeansConfig, **_: object) -> nn.Module:
        """Refuse a federation without a top model that is fitted in one go.

        Raises:
            ConfigError: Always: ``model.top`` names it.
        """
        raise ConfigError(
            'model.top: "class-means" has no network of its own; write top = "mixed", "tied", or '
            "an estimator"
        )

    def pools_records(self, settings: ClassMeansConfig, *, frozen: bool) -> bool:
        """Return True: a row's records are clipped one by one and added up."""
        return True
