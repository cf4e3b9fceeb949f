"""Split network on pairs of linked records, for FedSim and baselines that average over pairs.

B = rows of a batch, K = links of a row, H = width at the cut, A = hidden width, O = outputs.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar, Final, Literal, TypeVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from securevfl.core import checks
from securevfl.models import family
from securevfl.models.frozen import FrozenBottom
from securevfl.models.layers import MLP, known_full

PAPER_TRAINING: Final[Mapping[str, Any]] = MappingProxyType(
    {
        "optimizer": "lamb",
        "learning_rate": 1e-2,
        "weight_decay": 1e-5,
        "validation_fraction": 0.1,
        "test_fraction": 0.2,
    }
)
"""Training settings of all methods in [FedSim] (section 6.1, "Training"). The paper picks the step
size from 3e-4 to 1e-2 and the decay from 1e-5 and 1e-4 for each table (its first version,
appendix C)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PairSettings:
    """Settings of the split network on one linked pair, in all families that use it.

    References:
        [FedSim] section 6.1: local and aggregation models have one hidden layer each.
    """

    hidden: checks.Width = 32
    """H, width of every representation at the cut."""

    layer_width: checks.Width = 100
    """Units of the hidden layer of local and aggregation models."""

    party_dropout: checks.Fraction = 0.0
    """Share of the secondaries left out of a training round."""

    keys_as_features: bool = False
    """Keys are inputs too; not in the papers."""

    pair_scale: Literal["unit", "none"] = "unit"
    """The primary scales a row of the aggregate to a root mean square of 1, since clipping took its
    scale; or not, as in the papers."""

    frozen_map: Literal["fourier", "linear"] = "fourier"
    """Random features of a frozen encoder: cosines, or a projection."""

    frozen_bandwidth: checks.Positive = 1.0
    """Length scale of the cosine features, relative to sqrt(inputs); larger is smoother."""

    average_positions_every: ClassVar[int] = 0
    """There are no positional encodings to average."""

    def __post_init__(self) -> None:
        checks.require_limits(self)


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

    neighbours: checks.Links = 50
    """K, links of a row at every secondary."""

    @property
    def cut_shape(self) -> tuple[int, int]:
        """(L, H) of the aggregate."""
        return self.neighbours, self.hidden


def mean_similarities(
    similarities: Float[Tensor, "batch secondaries links"],
) -> tuple[Float[Tensor, "batch links"], Bool[Tensor, "batch links"]]:
    """Return every slot's mean similarity over secondaries, as SplitAvg averages vectors.

    Returns:
        The mean similarity of every slot, 0 where no secondary has a link, and a mask of the slots
        that have one.
    """
    absent = similarities.isnan()
    if known_full(~absent):
        mean = similarities.mean(dim=1)
        return mean, torch.ones_like(mean, dtype=torch.bool)
    count = (~absent).sum(dim=1)
    return similarities.masked_fill(absent, 0.0).sum(dim=1) / count.clamp_min(1), count > 0


_SMALLEST: Final = 1e-6


class RecordBottom(nn.Module):
    """A secondary's local model, applied to each linked record separately.

    References:
        [FedSim] Algorithm 1, line 5.
    """

    recordwise = True
    stackable = True
    features_weight = "local.layers.0.weight"

    def __init__(self, config: PairSettings, *, num_features: int, key_dim: int) -> None:
        super().__init__()
        self.keys_as_features = config.keys_as_features
        self.local = _local_model(config, num_features=num_features, key_dim=key_dim)
        self.positions = nn.Identity()

    def forward(
        self, features: family.RecordFeatures, keys: family.RecordKeys, present: family.Present
    ) -> Float[Tensor, "batch links width"]:
        """Return one vector for each link; zeros for empty slots."""
        inputs = torch.cat([features, keys], dim=-1) if self.keys_as_features else features
        out: Tensor = self.local(inputs)
        # Without a branch on which links exist: gradients must be traceable row by row
        # (torch.func).
        return out * present.unsqueeze(-1)


L = TypeVar("L", bound=OneLinkSettings | ManyLinksSettings)


class PairFamily(family.Family[L]):
    """A family with this split network, whose aggregation model reads the vector of every link."""

    def build_bottom(
        self, settings: L, *, num_features: int, key_dim: int, frozen: bool = False, **_: object
    ) -> nn.Module:
        """Return the local model of each linked record; a frozen one keeps its random weights."""
        kind = FrozenBottom if frozen else RecordBottom
        return kind(settings, num_features=num_features, key_dim=key_dim)


class PairModel(nn.Module):
    """The primary's local model and the aggregation model: one output vector for each pair.

    The aggregation model reads a row's representation next to that of each link. Its first layer is
    linear, so the row's part is computed once a row, not once a pair.

    References:
        [FedSim] Algorithm 1, lines 6 and 7.
    """

    def __init__(
        self,
        config: PairSettings,
        *,
        num_features: int,
        key_dim: int,
        outputs: int,
        reads_similarity: bool = False,
    ) -> None:
        super().__init__()
        self.keys_as_features = config.keys_as_features
        self.scaled = config.pair_scale == "unit"
        self.local = _local_model(config, num_features=num_features, key_dim=key_dim)
        self.of_row = nn.Linear(config.hidden, config.layer_width)
        self.of_link = nn.Linear(config.hidden, config.layer_width, bias=False)
        self.of_similarity = (
            nn.Linear(1, config.layer_width, bias=False) if reads_similarity else None
        )
        self.out = nn.Linear(config.layer_width, outputs)

    def forward(
        self,
        features: family.RowFeatures,
        keys: family.RowKeys,
        aggregate: family.Aggregate,
        similarities: Float[Tensor, "batch links"] | None = None,
    ) -> Float[Tensor, "batch links outputs"]:
        """Return the outputs of each pair."""
        inputs = torch.cat([features, keys], dim=-1) if self.keys_as_features else features
        row = self.of_row(self.local(inputs)).unsqueeze(1)
        hidden = self.of_link(_at_unit_scale(aggregate) if self.scaled else aggregate).add_(row)
        if self.of_similarity is not None:
            assert similarities is not None, "the family asks for similarities"
            hidden.add_(self.of_similarity(similarities.unsqueeze(-1)))
        out: Tensor = self.out(hidden.relu_())
        return out


def _local_model(config: PairSettings, *, num_features: int, key_dim: int) -> MLP:
    inputs = num_features + (key_dim if config.keys_as_features else 0)
    return MLP(inputs, [config.layer_width], config.hidden)


def _at_unit_scale(
    aggregate: Float[Tensor, "batch links width"],
) -> Float[Tensor, "batch links width"]:
    """Scale each row of an aggregate to a root mean square of one; a row of zeros stays.

    Clipping leaves a row of K vectors with the norm C in total, for any K. Scaling at the primary
    is post-processing of the release. The scale is on the autograd graph, so that secondaries get
    the loss's true gradient.
    """
    size = torch.linalg.vector_norm(aggregate, dim=(1, 2), keepdim=True)
    return aggregate * (aggregate[0].numel() ** 0.5 / size.clamp_min(_SMALLEST))


@dataclass(frozen=True, kw_only=True, slots=True)
class Top1SimConfig(OneLinkSettings):
    """``family = "top1sim"``: each row is linked to its most similar record."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExactConfig(OneLinkSettings):
    """``family = "exact"``: each row is linked to the record with an equal key, if there is one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AvgSimConfig(ManyLinksSettings):
    """``family = "avgsim"``: the mean of the predictions with each of K records."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FeatureSimConfig(ManyLinksSettings):
    """``family = "featuresim"``: like ``avgsim``, with the similarity as another input."""


class AverageTop(nn.Module):
    """Mean of the predictions with each of a row's links; with one link, plain SplitNN.

    Slots that no secondary fills are left out; a row without any link is predicted from zeros.
    Without similarities, an empty slot is recognised by its zeros; a noised average has none, so
    there every slot counts.

    References:
        [FedSim] section 3, "Exact/Top1Sim", "AvgSim" and "FeatureSim". A classifier's logits are
        averaged; the paper does not say what is averaged.
    """

    stackable = True

    def __init__(
        self,
        config: PairSettings,
        *,
        num_features: int,
        key_dim: int,
        outputs: int,
        reads_similarity: bool,
    ) -> None:
        super().__init__()
        self.positions = nn.Identity()
        self.pairs = PairModel(
            config,
            num_features=num_features,
            key_dim=key_dim,
            outputs=outputs,
            reads_similarity=reads_similarity,
        )

    def forward(
        self,
        features: family.RowFeatures,
        keys: family.RowKeys,
        aggregate: family.Aggregate,
        similarities: family.Similarities,
    ) -> Float[Tensor, "batch outputs"]:
        """Return the outputs of a batch."""
        if similarities is None:
            similarity, present = None, aggregate.detach().ne(0).any(dim=2)
        else:
            similarity, present = mean_similarities(similarities)
        pairs = self.pairs(features, keys, aggregate, similarity)
        counted = present | ~present.any(dim=1, keepdim=True)
        links = counted.unsqueeze(-1).to(pairs.dtype)
        return (pairs * links).sum(dim=1) / links.sum(dim=1)


_PAPER_MODEL: Final[Mapping[str, Any]] = MappingProxyType(
    {"pair_scale": "none", "layer_width": 100}
)


class _LinkedFamily(PairFamily[L]):
    """A baseline that averages predictions over a row's links."""

    presets = MappingProxyType(
        {
            "paper": family.Preset(
                base="none", model=_PAPER_MODEL, training={**PAPER_TRAINING, "batch_size": 4096}
            )
        }
    )
    """Without gates, [FedSim] takes batches of 4096 rows."""

    def build_top(
        self, settings: L, *, num_features: int, key_dim: int, outputs: int, **_: object
    ) -> nn.Module:
        """Return the mean of the predictions with each link."""
        return AverageTop(
            settings,
            num_features=num_features,
            key_dim=key_dim,
            outputs=outputs,
            reads_similarity=self.needs_similarities(settings),
        )


class ExactFamily(_LinkedFamily[ExactConfig]):
    """``family = "exact"``: records with an equal key; a row without one gets zeros."""

    name = "exact"
    links_to_one = True
    settings_class = ExactConfig
    max_distance = 0.0


class Top1SimFamily(_LinkedFamily[Top1SimConfig]):
    """``family = "top1sim"``: the most similar record."""

    name = "top1sim"
    links_to_one = True
    settings_class = Top1SimConfig


class AvgSimFamily(_LinkedFamily[AvgSimConfig]):
    """``family = "avgsim"``: the mean over K records."""

    name = "avgsim"
    settings_class = AvgSimConfig
    presets = MappingProxyType(
        {
            "paper": family.Preset(
                base="none",
                model={**_PAPER_MODEL, "neighbours": 50},
                training={**PAPER_TRAINING, "batch_size": 128},
            )
        }
    )
    """With K links a row, [FedSim] takes smaller batches."""


class FeatureSimFamily(_LinkedFamily[FeatureSimConfig]):
    """``family = "featuresim"``: the mean over K records, each with its similarity."""

    name = "featuresim"
    settings_class = FeatureSimConfig

    def needs_similarities(self, settings: FeatureSimConfig) -> bool:
        """Return True: the aggregation model does."""
        return True
