"""The weight gate and the sort gate.

B = rows of a batch, K = links, P = outputs of a pair.
"""

from typing import Final, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from securevfl.models.tracing import is_traced

_EVALUATION_SEED: Final = 0


class SimilarityModel(nn.Module):
    """Map a similarity to the weights of its pair's outputs: a perceptron from one number.

    The paper has one weight for all outputs of a pair. With one each, some outputs can speak for
    near links and others for far ones.

    References:
        [FedSim] section 4.2, "Weight Gate": one hidden layer.
    """

    def __init__(self, width: int, *, weights: int = 1) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(1, width), nn.Tanh(), nn.Linear(width, weights))

    def forward(self, similarities: Float[Tensor, "*links"]) -> Float[Tensor, "*links weights"]:
        """Return the weights of each similarity."""
        weights: Tensor = self.layers(similarities.unsqueeze(-1))
        return 1 + weights


class SortGate(nn.Module):
    """Order a row's pairs by a score, highest first; equal scores keep the order they came in.

    Pairs without a link come last.

    References:
        [FedSim] section 4.2, "Sort Gate", and Algorithm 1, line 10.
    """

    def __init__(self, by: Literal["similarity", "weight", "none"]) -> None:
        super().__init__()
        self.by = by

    def forward(
        self,
        pairs: Float[Tensor, "batch links pair_outputs"],
        *,
        similarities: Float[Tensor, "batch links"],
        weights: Float[Tensor, "batch links"],
        present: Bool[Tensor, "batch links"],
    ) -> Float[Tensor, "batch links pair_outputs"]:
        """Return the pairs in their new order."""
        if self.by == "none":
            # Links arrive nearest first: without the gate that order must not be seen.
            score = self._arbitrary(similarities)
        else:
            score = (weights if self.by == "weight" else similarities).detach()
            score = score.masked_fill(~present, float("-inf"))
            if not is_traced() and bool((score[:, 1:] <= score[:, :-1]).all()):
                return pairs
        if torch.onnx.is_in_onnx_export():
            # ONNX has no stable sort; its TopK keeps equal scores in their order.
            return _reorder(pairs, score.topk(score.shape[1], dim=1).indices)
        return _reorder(pairs, score.argsort(dim=1, descending=True, stable=True))

    def _arbitrary(self, like: Tensor) -> Tensor:
        if self.training:
            return torch.rand_like(like)
        fixed = torch.Generator().manual_seed(_EVALUATION_SEED)
        return torch.rand(like.shape, generator=fixed).to(like.device)


def _reorder(pairs: Tensor, order: Int[Tensor, "batch links"]) -> Tensor:
    batch, links, width = pairs.shape
    first = torch.arange(0, batch * links, links, device=order.device).unsqueeze(1)
    flat = pairs.reshape(-1, width).index_select(0, (order + first).flatten())
    return flat.view(batch, links, width)
