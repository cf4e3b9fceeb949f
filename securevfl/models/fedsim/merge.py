"""Merge gates: from the K weighted outputs of a row's pairs to the outputs of the task.

B = rows of a batch, K = links, P = outputs of a pair, C = channels, O = outputs of the task.
"""

from collections.abc import Callable, Mapping
from typing import Final

import torch
from jaxtyping import Float
from torch import Tensor, nn

from securevfl.models.dropout import ByteDropout
from securevfl.models.fedsim.fedsim_config import FedSimConfig
from securevfl.models.link_ranks import rank_scores


class ConvolutionMerge(nn.Module):
    """A convolution with a k_conv x 1 kernel over the K x P outputs, then a perceptron.

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
    """A mean over the places of the sorted links, and the convolution as its correction.

    A pair has O outputs that are its prediction and P for the convolution. Every output has its
    own weights over places, a softmax that starts with j^-rank_decay at place j: one that holds on
    to the first place is Top1Sim, an even one AvgSim. The convolution's last layer starts at zero,
    so that training starts from the mean of the pairs' predictions, and goes as far from it as that
    helps. The convolution alone has to learn the mean too, and over-fits to small tables on the
    way.

    References:
        [FedSim] section 4.2, "Merge Gate": an average where a linear aggregation is enough, a
        convolution where it is not. Their sum is ours.
    """

    def __init__(self, config: FedSimConfig, *, outputs: int, dropout: float) -> None:
        super().__init__()
        self.outputs = outputs
        self.rank_decay = config.rank_decay
        self.places = nn.Parameter(
            torch.empty(config.neighbours, merged_width(config, outputs=outputs))
        )
        self._start()
        self.linear = nn.Linear(config.pair_outputs, outputs, bias=False)
        self.correction = ConvolutionMerge(
            config, outputs=outputs, dropout=dropout, last=SilentLinear
        )

    def draw(self, generator: torch.Generator) -> None:  # noqa: ARG002 - a Drawn
        """Start the places anew: nothing of it is random."""
        self._start()

    @torch.no_grad()
    def _start(self) -> None:
        scores = rank_scores(len(self.places), decay=self.rank_decay)
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

    def draw(self, generator: torch.Generator) -> None:  # noqa: ARG002 - a Drawn
        """Set all weights to zero."""
        with torch.no_grad():
            for weights in self.parameters():
                weights.zero_()


class PerceptronMerge(nn.Module):
    """A perceptron over all K x P outputs, with about as many weights as the convolution's gate.

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
    """The mean over links; a pair's outputs are the task's own then."""

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
    """Return the merge gate that the settings name, for a task of so many outputs."""
    if config.merge == "average":
        return AverageMerge()
    dropout = config.dropped(classes=classes)
    return _KINDS[config.merge](config, outputs=outputs, dropout=dropout)


def merged_width(config: FedSimConfig, *, outputs: int) -> int:
    """Return how many outputs of each pair the merge gate of these settings reads."""
    if config.merge == "average":
        return outputs
    return config.pair_outputs + (outputs if config.merge == "residual" else 0)
