"""The baselines that link: exact, top1sim, avgsim and featuresim, on FedSim's split network."""

import math
from collections.abc import Sequence
from typing import Any

from jaxtyping import Float
from torch import Tensor, nn

from securevfl.models.baselines.linked_config import (
    AvgSimConfig,
    ExactConfig,
    FeatureSimConfig,
    Top1SimConfig,
)
from securevfl.models.family import Family
from securevfl.models.pair_settings import PairSettings
from securevfl.models.pairs import PairModel, build_record_bottom
from securevfl.models.similarities import mean_similarities


class AverageTop(nn.Module):
    """Predict with each of a row's links and average: with one link, plain SplitNN.

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
            out: Tensor = self.pairs(features, keys, aggregate).mean(dim=1)
            return out
        similarity, present = mean_similarities(similarities)
        pairs = self.pairs(features, keys, aggregate, similarity)
        links = present.unsqueeze(-1).to(pairs.dtype)
        return (pairs * links).sum(dim=1) / links.sum(dim=1).clamp_min(1)


def _build_top(
    config: PairSettings,
    *,
    num_features: int,
    key_dim: int,
    feature_names: Sequence[str] = (),  # noqa: ARG001 - a BuildTop
    outputs: int,
    classes: bool = False,  # noqa: ARG001
) -> nn.Module:
    return AverageTop(
        config,
        num_features=num_features,
        key_dim=key_dim,
        outputs=outputs,
        reads_similarity=_reads_similarity(config),
    )


def _cut_shape(config: Any) -> tuple[int, int]:
    shape: tuple[int, int] = config.cut_shape
    return shape


def _pooled(config: PairSettings, *, frozen: bool) -> bool:  # noqa: ARG001
    # The aggregation model reads every link's own vector.
    return False


def _reads_similarity(config: PairSettings) -> bool:
    return isinstance(config, FeatureSimConfig)


def _family(name: str, config_class: type[Any], *, max_distance: float = math.inf) -> Family:
    return Family(
        name=name,
        config_class=config_class,
        build_bottom=build_record_bottom,
        build_top=_build_top,
        cut_shape=_cut_shape,
        pooled=_pooled,
        needs_similarities=_reads_similarity,
        max_distance=max_distance,
    )


EXACT = _family("exact", ExactConfig, max_distance=0.0)
"""Records of the very same key; a row without one gets zeros."""

TOP1SIM = _family("top1sim", Top1SimConfig)
"""The most similar record."""

AVGSIM = _family("avgsim", AvgSimConfig)
"""The mean over K records."""

FEATURESIM = _family("featuresim", FeatureSimConfig)
"""The mean over K records, each with its similarity."""
