"""A secondary's encoder: attention among the K records linked to a row."""

from typing import Any, cast

from jaxtyping import Bool, Float, Int64
from torch import Tensor, nn

from securevfl.models.fet.attention import EncoderBlock, gathered, last_norm
from securevfl.models.fet.embedding import RecordEmbedding
from securevfl.models.fet.explain import attention_by_rank, mask_by_rank, mask_pictures
from securevfl.models.fet.fet_config import FeTConfig
from securevfl.models.fet.masking import attention_bias, dynamic_mask
from securevfl.models.fet.positions import FourierPositions
from securevfl.models.link_ranks import rank_scores


class FeTBottom(nn.Module):
    """Encode a row's links, which come nearest first.

    Reordering the links reorders a sequence, and leaves a pooled row as it is, unless the model is
    told the order (``ranked``) or reads it (``mask_reads = "keys"``).

    References:
        [FeT] section 5.1 and Algorithm 1, line 7. With ``release = "pooled"`` the K vectors are
        averaged by the softmax of the dynamic mask.
    """

    recordwise = False
    stackable = True

    def __init__(self, config: FeTConfig, *, num_features: int, key_dim: int) -> None:
        super().__init__()
        self.pools = config.release == "pooled"
        self.embedding = RecordEmbedding(config, num_features=num_features, key_dim=key_dim)
        self.mask = dynamic_mask(config, key_dim) if config.dynamic_masking else None
        self.rank_bias = (
            nn.Parameter(rank_scores(config.neighbours, decay=config.rank_decay))
            if config.ranked
            else None
        )
        self.blocks = nn.ModuleList(EncoderBlock(config) for _ in range(config.encoder_blocks))
        self.norm = last_norm(config)

    @property
    def positions(self) -> FourierPositions:
        """The positional encoding, which parties average."""
        return self.embedding.positions

    def forward(
        self,
        features: Float[Tensor, "batch links features"],
        keys: Float[Tensor, "batch links dimension"],
        present: Bool[Tensor, "batch links"],
    ) -> Float[Tensor, "batch positions width"]:
        """Return (B, K, H), zero at absent links, or (B, 1, H) if pooled."""
        bias = attention_bias(self._link_scores(keys, present), present)
        hidden = self.embedding(features, keys)
        for block in self.blocks:
            hidden = block(hidden, bias)
        hidden = self.norm(hidden)
        return _pool(hidden, bias, present) if self.pools else _of_links(hidden, present)

    def of_distinct(
        self,
        features: Float[Tensor, "records features"],
        keys: Float[Tensor, "records dimension"],
        place: Int64[Tensor, "batch links"],
        present: Bool[Tensor, "batch links"],
    ) -> Float[Tensor, "batch positions width"]:
        """Return what :meth:`forward` makes of ``features[place]`` and ``keys[place]``."""
        bias = attention_bias(self._link_scores(gathered(keys, place), present), present)
        first = cast(EncoderBlock, self.blocks[0])
        hidden = first.of_distinct(self.embedding(features, keys), place, bias)
        for block in self.blocks[1:]:
            hidden = block(hidden, bias)
        hidden = self.norm(hidden)
        if self.pools:
            return _pool(hidden, bias, present)
        return hidden if bool(present.all()) else _of_links(hidden, present)

    def explain(
        self,
        features: Float[Tensor, "batch links features"],
        keys: Float[Tensor, "batch links dimension"],
        present: Bool[Tensor, "batch links"],
    ) -> dict[str, Any]:
        """Return the mask over key space, and which links attention goes to.

        ``mask`` is :func:`securevfl.models.fet.explain.mask_pictures`, ``mask_by_rank`` what mask
        and ranks weigh links by, and ``attention`` what links get of one another's attention, a
        list a block; ``notes`` say what is missing and why.

        References:
            [FeT] section 5.1, Figure 3.

        Reveals:
            Weights that were trained on private records, and means over them: it stays at the
            party whose model this is.
        """
        told: dict[str, Any] = {"key_dim": keys.shape[2], "notes": []}
        if self.mask is None:
            told["notes"].append("no mask was learned: model.dynamic_masking is false")
        else:
            told["mask"] = mask_pictures(self.mask, keys, present)
        if present.shape[1] == 1 or not bool(present.any()):
            told["notes"].append("attention has no choice: rows have one link at most")
            return told
        scores = self._link_scores(keys, present)
        if scores is not None:
            told["mask_by_rank"] = mask_by_rank(scores, present)
        bias = attention_bias(scores, present)
        told["attention"] = []
        hidden = self.embedding(features, keys)
        for block in self.blocks:
            weights = cast(EncoderBlock, block).weights(hidden, bias)
            told["attention"].append(attention_by_rank(weights, present))
            hidden = block(hidden, bias)
        return told

    def _link_scores(self, keys: Tensor, present: Tensor) -> Tensor | None:
        scores = None if self.mask is None else self.mask(keys, present)
        if self.rank_bias is None:
            return scores
        # Gathered, not broadcast: attention kernels want a bias of the batch's own shape.
        ranks = self.rank_bias.expand(keys.shape[0], -1)
        return ranks if scores is None else scores + ranks


def _of_links(hidden: Tensor, present: Tensor) -> Tensor:
    return hidden * present.unsqueeze(-1)


def _pool(hidden: Tensor, bias: Tensor, present: Tensor) -> Tensor:
    pooled = bias.softmax(dim=1).unsqueeze(1) @ hidden
    return pooled * present.any(dim=1)[:, None, None]
