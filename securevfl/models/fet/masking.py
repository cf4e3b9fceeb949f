"""Dynamic masking: how much attention a link deserves, learned from keys alone."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from securevfl.models.fet.fet_config import FeTConfig
from securevfl.models.mlp import MLP


def dynamic_mask(config: FeTConfig, key_dim: int) -> nn.Module:
    """Return the mask that ``mask_reads`` names: keys and presence in, (B, K) numbers out."""
    if config.mask_reads == "keys":
        return JoinedMask(key_dim, links=config.neighbours)
    return DynamicMask(key_dim, hidden=config.hidden)


class JoinedMask(nn.Module):
    """One perceptron from the K keys of a row, joined end to end, to the K numbers.

    It can only know a link by its place in the list, and has K times the inputs.

    References:
        [FeT] section 5.1, "Dynamic Masking"; widths as in the published code.
    """

    def __init__(self, key_dim: int, *, links: int) -> None:
        super().__init__()
        self.score = MLP(links * key_dim, [2 * links * key_dim], links)

    def forward(
        self,
        keys: Float[Tensor, "batch links dimension"],
        present: Bool[Tensor, "batch links"],
    ) -> Float[Tensor, "batch links"]:
        """Return the additive mask; entries of absent links mean nothing."""
        there = keys.masked_fill(~present.unsqueeze(-1), 0.0)
        score: Tensor = self.score(there.flatten(1))
        return score


class DynamicMask(nn.Module):
    """Give every link of a row one number that is added to its attention scores.

    A perceptron reads the link's key, and how it lies to the centre of the row's links, which
    stands in for the primary's key: a secondary need not know that one to see which links are
    outlying. The same perceptron serves every link, so reordering the links reorders the mask.

    References:
        [FeT] section 5.1, "Dynamic Masking".
    """

    def __init__(self, key_dim: int, *, hidden: int) -> None:
        super().__init__()
        self.score = MLP(2 * key_dim + 1, [hidden], 1)

    def forward(
        self,
        keys: Float[Tensor, "batch links dimension"],
        present: Bool[Tensor, "batch links"],
    ) -> Float[Tensor, "batch links"]:
        """Return the additive mask; entries of absent links mean nothing."""
        there = present.unsqueeze(-1).to(keys.dtype)
        count = there.sum(dim=1, keepdim=True).clamp_min(1)
        centre = (keys * there).sum(dim=1, keepdim=True) / count
        offset = keys - centre
        spread = (offset.square().sum(dim=-1, keepdim=True) * there).sum(
            dim=1, keepdim=True
        ) / count
        # Relative to the neighbourhood's own extent: dense and sparse places then look alike.
        offset = offset / spread.clamp_min(1e-12).sqrt()
        distance = offset.square().sum(dim=-1, keepdim=True)
        score: Tensor = self.score(torch.cat([keys, offset, distance], dim=-1))
        return score.squeeze(-1)


def attention_bias(
    mask: Float[Tensor, "batch links"] | None, present: Bool[Tensor, "batch links"]
) -> Float[Tensor, "batch links"]:
    """Return what is added to attention scores: the mask, and minus infinity at absent links.

    A row without any link gets its mask (or zeros), since a softmax over nothing is NaN; what such
    a row yields must be dropped by the caller. What is computed does not depend on which links
    there are, so that gradients can be taken row by row (:mod:`torch.func`).
    """
    bias = torch.zeros(present.shape, device=present.device) if mask is None else mask
    empty = ~present.any(dim=1, keepdim=True)
    return bias.masked_fill(~(present | empty), float("-inf"))
