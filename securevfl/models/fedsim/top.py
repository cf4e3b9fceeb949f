"""The primary's part of FedSim: outputs of every pair, weighed, sorted and merged."""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from securevfl.models.fedsim.explain import merge_importance, similarity_curve
from securevfl.models.fedsim.fedsim_config import FedSimConfig
from securevfl.models.fedsim.gates import SimilarityModel, SortGate
from securevfl.models.fedsim.merge import build_merge, merged_width
from securevfl.models.mean_similarities import mean_similarities
from securevfl.models.pairs import PairModel
from securevfl.models.tracing import is_traced


class FedSimTop(nn.Module):
    """Aggregation model, weight gate, sort gate and merge gate.

    References:
        [FedSim] figure 3 and Algorithm 1, lines 6 to 11.
    """

    def __init__(
        self,
        config: FedSimConfig,
        *,
        num_features: int,
        key_dim: int,
        outputs: int,
        classes: bool = False,
    ) -> None:
        super().__init__()
        self.weight = config.weight
        self.positions = nn.Identity()
        width = merged_width(config, outputs=outputs)
        self.pairs = PairModel(config, num_features=num_features, key_dim=key_dim, outputs=width)
        weights = {"per-output": width, "learned": 1}.get(config.weight)
        self.similarity_model = (
            SimilarityModel(config.similarity_width, weights=weights) if weights else None
        )
        self.sort = SortGate(config.sort)
        self.merge = build_merge(config, outputs=outputs, classes=classes)

    def forward(
        self,
        features: Float[Tensor, "batch features"],
        keys: Float[Tensor, "batch dimension"],
        aggregate: Float[Tensor, "batch links width"],
        similarities: Float[Tensor, "batch secondaries links"] | None,
    ) -> Float[Tensor, "batch outputs"]:
        """Return the outputs of a batch."""
        out: Tensor = self.merge(self.sorted_pairs(features, keys, aggregate, similarities))
        return out

    def sorted_pairs(
        self,
        features: Float[Tensor, "batch features"],
        keys: Float[Tensor, "batch dimension"],
        aggregate: Float[Tensor, "batch links width"],
        similarities: Float[Tensor, "batch secondaries links"] | None,
    ) -> Float[Tensor, "batch links pair_outputs"]:
        """Return what the merge gate reads: every pair's outputs, weighed and sorted."""
        assert similarities is not None, "the family asks for similarities"
        similarity, present = mean_similarities(similarities)
        weights = self._weights(similarity)
        if is_traced() or not bool(present.all()):
            weights = weights * present.unsqueeze(-1)
        pairs = self.pairs(features, keys, aggregate) * weights
        out: Tensor = self.sort(
            pairs, similarities=similarity, weights=weights.mean(dim=2), present=present
        )
        return out

    def explain(
        self,
        features: Float[Tensor, "batch features"],
        keys: Float[Tensor, "batch dimension"],
        aggregate: Float[Tensor, "batch links width"],
        similarities: Float[Tensor, "batch secondaries links"] | None,
    ) -> dict[str, Any]:
        """Return what a report draws: the similarity model's curve, the merge gate's importance."""
        self.eval()
        with torch.no_grad():
            pairs = self.sorted_pairs(features, keys, aggregate, similarities)
        shown: dict[str, Any] = {"merge_importance": merge_importance(self.merge, pairs).tolist()}
        if self.similarity_model is not None and similarities is not None:
            there = similarities[~similarities.isnan()]
            low, high = (float(end) for end in torch.aminmax(there)) if there.numel() else (-1, 1)
            curve = similarity_curve(self.similarity_model, low=low, high=high)
            shown["similarity"], shown["weight"] = (values.tolist() for values in curve)
        return shown

    def _weights(
        self, similarity: Float[Tensor, "batch links"]
    ) -> Float[Tensor, "batch links weights"]:
        if self.similarity_model is not None:
            weights: Tensor = self.similarity_model(similarity)
            return weights
        if self.weight == "none":
            similarity = torch.ones_like(similarity)
        return similarity.unsqueeze(-1)
