"""The baselines that link: exact, top1sim, avgsim and featuresim, on FedSim's split network."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

from jaxtyping import Float
from torch import Tensor, nn

from securevfl.models.baselines.settings import (
    AvgSimConfig,
    ExactConfig,
    FeatureSimConfig,
    Top1SimConfig,
)
from securevfl.models.family import Preset
from securevfl.models.pairs import (
    PAPER_TRAINING,
    L,
    PairFamily,
    PairModel,
    PairSettings,
    mean_similarities,
)


class AverageTop(nn.Module):
    """Predict with each of a row's links and average: with one link, plain SplitNN.

    A slot that no secondary fills does not count, and a row without any link is predicted from
    the zeros that stand for them. Without similarities an empty slot is known by its zeros, which
    a noised average has not: every slot counts there.

    References:
        [FedSim] section 3, "Exact/Top1Sim", "AvgSim" and "FeatureSim". A classifier's logits are
        averaged; the paper does not say which numbers are.
    """

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
        features: Float[Tensor, "batch features"],
        keys: Float[Tensor, "batch dimension"],
        aggregate: Float[Tensor, "batch links width"],
        similarities: Float[Tensor, "batch secondaries links"] | None,
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
    """A baseline that links, on the mean over a row's links."""

    presets = MappingProxyType(
        {
            "paper": Preset(
                base="none", model=_PAPER_MODEL, training={**PAPER_TRAINING, "batch_size": 4096}
            )
        }
    )
    """Without gates, [FedSim] takes batches of 4096 rows."""

    def build_top(
        self,
        settings: L,
        *,
        num_features: int,
        key_dim: int,
        feature_names: Sequence[str] = (),  # noqa: ARG002
        outputs: int,
        classes: bool = False,  # noqa: ARG002
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
    """``family = "exact"``: records of the very same key; a row without one gets zeros."""

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
            "paper": Preset(
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

    def needs_similarities(self, settings: FeatureSimConfig) -> bool:  # noqa: ARG002
        """Return that the aggregation model does."""
        return True
