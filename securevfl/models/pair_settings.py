"""Settings that FedSim and its baselines share: the split network of one pair of records."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar, Final, Literal

from securevfl.core import checks

PAPER_TRAINING: Final[Mapping[str, Any]] = MappingProxyType(
    {
        "optimizer": "lamb",
        "learning_rate": 1e-2,
        "weight_decay": 1e-5,
        "validation_fraction": 0.1,
        "test_fraction": 0.2,
    }
)
"""What [FedSim] trains all methods with (section 6.1, "Training"). It picks the step size from
3e-4 to 1e-2 and the decay from 1e-5 and 1e-4 for each table (its first version, appendix C)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PairSettings:
    """Sizes of the split network that all of them put around one linked pair.

    References:
        [FedSim] section 6.1: local and aggregation models have one hidden layer each.
    """

    hidden: int = 32
    """H, width of every representation at the cut."""

    layer_width: int = 100
    """Units of the one hidden layer of every local model and of the aggregation model."""

    party_dropout: float = 0.0
    """Share of the secondaries left out of a training round."""

    keys_as_features: bool = False
    """Whether keys are model inputs beside the features; the papers leave them out."""

    pair_scale: Literal["unit", "none"] = "unit"
    """Scale at which the primary reads a row of the aggregate: a root mean square of one, since a
    clipped row has the norm C whatever K is; or as it comes, as in the papers."""

    frozen_map: Literal["fourier", "linear"] = "fourier"
    """Random features of a frozen encoder: cosines, or a projection."""

    frozen_bandwidth: float = 1.0
    """Length scale of the cosine features, relative to sqrt(inputs); larger is smoother."""

    average_positions_every: ClassVar[int] = 0
    """There are no positional encodings to average."""

    def __post_init__(self) -> None:
        checks.within(1, checks.MOST_WIDTH, hidden=self.hidden, layer_width=self.layer_width)
        checks.fraction(party_dropout=self.party_dropout)
        checks.one_of(("unit", "none"), pair_scale=self.pair_scale)
        checks.one_of(("fourier", "linear"), frozen_map=self.frozen_map)
        checks.positive(frozen_bandwidth=self.frozen_bandwidth)


@dataclass(frozen=True, kw_only=True, slots=True)
class OneLinkSettings(PairSettings):
    """Settings of methods that link a row to one record."""

    neighbours: ClassVar[int] = 1
    """One link a row."""

    @property
    def cut_shape(self) -> tuple[int, int]:
        """(L, H) of the aggregate."""
        return 1, self.hidden


@dataclass(frozen=True, kw_only=True, slots=True)
class ManyLinksSettings(PairSettings):
    """Settings of methods that link a row to several records."""

    neighbours: int = 50
    """K, links of a row at every secondary."""

    def __post_init__(self) -> None:
        PairSettings.__post_init__(self)
        checks.within(1, checks.MOST_LINKS, neighbours=self.neighbours)

    @property
    def cut_shape(self) -> tuple[int, int]:
        """(L, H) of the aggregate."""
        return self.neighbours, self.hidden
