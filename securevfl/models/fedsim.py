"""FedSim: settings, similarity gates, merge gates, and the family.

B = rows of a batch, K = links, P = outputs of a pair, C = channels, O = outputs.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from securevfl.core import checks
from securevfl.core.errors import ConfigError
from securevfl.models.family import Aggregate, Present, Preset, RowFeatures, RowKeys, Similarities
from securevfl.models.layers import ByteDropout, RankPrior, known_full, rank_scores
from securevfl.models.pairs import (
    PAPER_TRAINING,
    ManyLinksSettings,
    PairFamily,
    PairModel,
    mean_similarities,
)

_KERNEL: Final = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class FedSimConfig(ManyLinksSettings):
    """The ``[model]`` table of a federation with ``family = "fedsim"``; all parties share it.

    References:
        [FedSim] section 4.2 and appendix E.
    """

    weight: Literal["per-output", "learned", "similarity", "none"] = "per-output"
    """Weight gate: the similarity model's weight for each output of a pair, one for all
    (``learned``, the paper's), the similarity itself, or none."""

    similarity_width: checks.Width = 10
    """Units of the similarity model's hidden layer."""

    sort: Literal["similarity", "weight", "none"] = "similarity"
    """Sort gate: most similar first, heaviest first, or an arbitrary fresh order."""

    merge: Literal["residual", "convolution", "perceptron", "average"] = "residual"
    """Merge gate: a mean over places corrected by the paper's convolution, that convolution alone,
    a perceptron, or the mean."""

    rank_prior: RankPrior = 1.0
    """Head start of near links in ``residual``: place j starts with a weight in proportion to
    j^-rank_prior."""

    pair_outputs: checks.Width = 5
    """l_m, outputs for one pair; ``residual`` adds the task's number, ``average`` takes that
    alone."""

    kernel: checks.Links | None = None
    """k_conv, links in one step of the convolution; default 5, at most K."""

    channels: checks.Width = 4
    """Channels of the convolution."""

    merge_width: checks.Width = 100
    """Units of the merge gate's hidden layer."""

    dropout: checks.Fraction | None = None
    """Share of units dropped inside the merge gate; default 0.3 for a regression, 0.7 for
    classes."""

    def __post_init__(self) -> None:
        ManyLinksSettings.__post_init__(self)
        if self.merge in ("residual", "convolution") and self.step > self.neighbours:
            raise ConfigError(
                f"kernel must be at most neighbours={self.neighbours}, got {self.kernel}"
            )
        if self.sort == "weight" and self.weight == "none":
            raise ConfigError('sort: "weight" needs weights, and weight = "none" makes none')

    @property
    def step(self) -> int:
        """Links that one step of the convolution sees."""
        return min(_KERNEL, self.neighbours) if self.kernel is None else self.kernel

    def dropout_rate(self, *, classes: bool) -> float:
        """Return the share of dropped units; ``classes`` is True for a classification task.

        The paper tunes it for each table against over-fitting to noised keys; its code has 0.2 and
        0.3 for regressions, 0.7 and 0.8 for classes.
        """
        if self.dropout is not None:
            return self.dropout
        return 0.7 if classes else 0.3


_EVALUATION_SEED: Final = 0


class SimilarityModel(nn.Module):
    """A perceptron that maps a similarity to the weights of its pair's outputs.

    The paper has one weight for all outputs of a pair. With ``weights`` of them, some outputs can
    stand for near links and others for far ones.

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
    """Sorts a row's pairs by a score, highest first; equal scores keep their order.

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
        present: Present,
    ) -> Float[Tensor, "batch links pair_outputs"]:
        """Return the sorted pairs."""
        if self.by == "none":
            # Links arrive nearest first: without the gate that order must not be seen.
            score = self._arbitrary(similarities)
        else:
            score = (weights if self.by == "weight" else similarities).detach()
            score = score.masked_fill(~present, float("-inf"))
            in_order = score[:, 1:] <= score[:, :-1]
            if known_full(in_order):
                return pairs
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


class ConvolutionMerge(nn.Module):
    """Merge gate: a convolution with a k_conv x 1 kernel over the K x P outputs, then a perceptron.

    Each of the P outputs is convolved along the links by the same kernel.

    References:
        [FedSim] section 4.2, "Merge Gate", and section 6.1, "Training".
    """

    def __init__(
        self,
        config: FedSimConfig,
        *,
        outputs: int,
        dropout: float,
        last: type[nn.Linear] = nn.Linear,
    ) -> None:
        super().__init__()
        self.kernel = config.step
        # A linear layer over windows is the convolution; it is as fast, for one input channel.
        self.convolution = nn.Linear(config.step, config.channels)
        places = config.neighbours - config.step + 1
        self.perceptron = nn.Sequential(
            ByteDropout(dropout),
            nn.Linear(places * config.pair_outputs * config.channels, config.merge_width),
            nn.ReLU(),
            last(config.merge_width, outputs),
        )

    def forward(
        self, pairs: Float[Tensor, "batch links pair_outputs"]
    ) -> Float[Tensor, "batch outputs"]:
        """Return the task's outputs."""
        windows_BWPk = pairs.unfold(1, self.kernel, 1)
        channels_BWPC: Tensor = self.convolution(windows_BWPk).relu_()
        out: Tensor = self.perceptron(channels_BWPC.flatten(1))
        return out


class ResidualMerge(nn.Module):
    """Merge gate: a mean over the places of the sorted links, corrected by the convolution.

    A pair has O outputs that are its prediction and P for the convolution. Every output has its own
    softmax weights over places, which start in proportion to j^-rank_prior at place j: all weight
    on the first place is Top1Sim, equal weights are AvgSim. The convolution's last layer starts at
    zero, so that training starts from the mean of the pairs' predictions. A convolution alone has
    to learn the mean too, and over-fits to small tables meanwhile.

    References:
        [FedSim] section 4.2, "Merge Gate": an average where a linear aggregation is enough, a
        convolution where it is not. Their sum is ours.
    """

    def __init__(self, config: FedSimConfig, *, outputs: int, dropout: float) -> None:
        super().__init__()
        self.outputs = outputs
        self.rank_prior = config.rank_prior
        self.places = nn.Parameter(
            torch.empty(config.neighbours, merged_width(config, outputs=outputs))
        )
        self._start()
        self.linear = nn.Linear(config.pair_outputs, outputs, bias=False)
        self.correction = ConvolutionMerge(
            config, outputs=outputs, dropout=dropout, last=SilentLinear
        )

    def draw(self, generator: torch.Generator) -> None:
        """Reset the weights of places; none of them is random."""
        self._start()

    @torch.no_grad()
    def _start(self) -> None:
        scores = rank_scores(len(self.places), decay=self.rank_prior)
        self.places.copy_(scores.unsqueeze(1).expand_as(self.places))

    def forward(
        self, pairs: Float[Tensor, "batch links pair_outputs"]
    ) -> Float[Tensor, "batch outputs"]:
        """Return the task's outputs."""
        mean = (pairs * self.places.softmax(dim=0)).sum(dim=1)
        linear = mean[:, : self.outputs] + self.linear(mean[:, self.outputs :])
        out: Tensor = linear + self.correction(pairs[:, :, self.outputs :])
        return out


class SilentLinear(nn.Linear):
    """A linear layer that starts at zero."""

    def draw(self, generator: torch.Generator) -> None:
        """Set all weights to zero."""
        with torch.no_grad():
            for weights in self.parameters():
                weights.zero_()


class PerceptronMerge(nn.Module):
    """Merge gate: a perceptron over all K x P outputs, with about the convolution's weights.

    References:
        [FedSim] section 6.1, "FedSim-MLP".
    """

    def __init__(self, config: FedSimConfig, *, outputs: int, dropout: float) -> None:
        super().__init__()
        inputs = config.neighbours * config.pair_outputs
        convolution = ConvolutionMerge(config, outputs=outputs, dropout=dropout)
        weights = sum(p.numel() for p in convolution.parameters())
        width = max(1, round((weights - outputs) / (inputs + 1 + outputs)))
        self.perceptron = nn.Sequential(
            ByteDropout(dropout),
            nn.Linear(inputs, width),
            nn.ReLU(),
            nn.Linear(width, outputs),
        )

    def forward(
        self, pairs: Float[Tensor, "batch links pair_outputs"]
    ) -> Float[Tensor, "batch outputs"]:
        """Return the task's outputs."""
        out: Tensor = self.perceptron(pairs.flatten(1))
        return out


class AverageMerge(nn.Module):
    """Merge gate: the mean over links, for pairs with the task's outputs."""

    def forward(
        self, pairs: Float[Tensor, "batch links pair_outputs"]
    ) -> Float[Tensor, "batch outputs"]:
        """Return the task's outputs."""
        return pairs.mean(dim=1)


_KINDS: Final[Mapping[str, Callable[..., nn.Module]]] = {
    "residual": ResidualMerge,
    "convolution": ConvolutionMerge,
    "perceptron": PerceptronMerge,
}


def build_merge(config: FedSimConfig, *, outputs: int, classes: bool) -> nn.Module:
    """Return the merge gate that the settings name, for a task with ``outputs`` outputs."""
    if config.merge == "average":
        return AverageMerge()
    dropout = config.dropout_rate(classes=classes)
    return _KINDS[config.merge](config, outputs=outputs, dropout=dropout)


def merged_width(config: FedSimConfig, *, outputs: int) -> int:
    """Return the number of outputs of each pair that the merge gate reads."""
    if config.merge == "average":
        return outputs
    return config.pair_outputs + (outputs if config.merge == "residual" else 0)


class FedSimTop(nn.Module):
    """FedSim's top model: aggregation model, weight gate, sort gate and merge gate.

    References:
        [FedSim] figure 3 and Algorithm 1, lines 6 to 11.
    """

    stackable = True

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
        self, features: RowFeatures, keys: RowKeys, aggregate: Aggregate, similarities: Similarities
    ) -> Float[Tensor, "batch outputs"]:
        """Return the outputs of a batch."""
        assert similarities is not None, "the family asks for similarities"
        similarity, present = mean_similarities(similarities)
        weights = self._weights(similarity)
        if not known_full(present):
            weights = weights * present.unsqueeze(-1)
        pairs = self.pairs(features, keys, aggregate) * weights
        in_order = self.sort(
            pairs, similarities=similarity, weights=weights.mean(dim=2), present=present
        )
        out: Tensor = self.merge(in_order)
        return out

    def _weights(
        self, similarity: Float[Tensor, "batch links"]
    ) -> Float[Tensor, "batch links weights"]:
        if self.similarity_model is not None:
            weights: Tensor = self.similarity_model(similarity)
            return weights
        if self.weight == "none":
            similarity = torch.ones_like(similarity)
        return similarity.unsqueeze(-1)


class FedSimFamily(PairFamily[FedSimConfig]):
    """``family = "fedsim"``; its gates need the vector of every link, so nothing is pooled."""

    name = "fedsim"
    settings_class = FedSimConfig
    presets = MappingProxyType(
        {
            "paper": Preset(
                base="none",
                model={
                    "weight": "learned",
                    "merge": "convolution",
                    "pair_scale": "none",
                    "neighbours": 50,
                    "layer_width": 100,
                },
                training={**PAPER_TRAINING, "batch_size": 128},
            )
        }
    )
    """[FedSim] section 4.2, section 6.1 ("Training"), and appendix C of its first version for
    what it tunes."""

    def build_top(
        self,
        settings: FedSimConfig,
        *,
        num_features: int,
        key_dim: int,
        outputs: int,
        classes: bool = False,
        **_: object,
    ) -> nn.Module:
        """Return the split network with its gates."""
        return FedSimTop(
            settings, num_features=num_features, key_dim=key_dim, outputs=outputs, classes=classes
        )

    def needs_similarities(self, settings: FedSimConfig) -> bool:
        """Return True: the gates do."""
        return True
