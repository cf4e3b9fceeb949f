"""The baselines that link: exact, top1sim, avgsim and featuresim, on FedSim's split network."""

from collections.abc import Sequence

from jaxtyping import Float
from torch import Tensor, nn

from securevfl.models.baselines.linked_config import (
    AvgSimConfig,
    ExactConfig,
    FeatureSimConfig,
    Top1SimConfig,
)
from securevfl.models.mean_similarities import mean_similarities
from securevfl.models.pair_settings import PairSettings
from securevfl.models.pairs import L, PairFamily, PairModel


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


class _LinkedFamily(PairFamily[L]):
    """A baseline that links, on the mean over a row's links."""

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
    settings_class = ExactConfig
    max_distance = 0.0


class Top1SimFamily(_LinkedFamily[Top1SimConfig]):
    """``family = "top1sim"``: the most similar record."""

    name = "top1sim"
    settings_class = Top1SimConfig


class AvgSimFamily(_LinkedFamily[AvgSimConfig]):
    """``family = "avgsim"``: the mean over K records."""

    name = "avgsim"
    settings_class = AvgSimConfig


class FeatureSimFamily(_LinkedFamily[FeatureSimConfig]):
    """``family = "featuresim"``: the mean over K records, each with its similarity."""

    name = "featuresim"
    settings_class = FeatureSimConfig

    def needs_similarities(self, settings: FeatureSimConfig) -> bool:  # noqa: ARG002
        """Return that the aggregation model does."""
        return True
