"""Merge gates: from the K weighted outputs of a row's pairs to the outputs of the task.

B = rows of a batch, K = links, P = outputs of a pair, C = channels, O = outputs of the task.
"""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from securevfl.models.fedsim.config import FedSimConfig


class CheapDropout(nn.Module):
    """Dropout by random bytes: a third of the time that torch's own takes on a CPU.

    The share is rounded to a multiple of 1/256.
    """

    def __init__(self, share: float) -> None:
        super().__init__()
        self.dropped = round(256 * share)

    def forward(self, inputs: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        """Drop a share of all numbers in training, and scale the others up."""
        if not self.training or not self.dropped:
            return inputs
        words = torch.empty((inputs.numel() + 7) // 8, dtype=torch.int64, device=inputs.device)
        bytes_ = words.random_(-(2**63), None).view(torch.uint8)[: inputs.numel()]
        kept = (bytes_ >= self.dropped).view(inputs.shape)
        return (inputs * kept).mul_(256 / (256 - self.dropped))


class ConvolutionMerge(nn.Module):
    """A convolution with a k_conv x 1 kernel over the K x P outputs, then a perceptron.

    Each of the P outputs is convolved along the links by the same kernel.

    References:
        [FedSim] section 4.2, "Merge Gate", and section 6.1, "Training".
    """

    def __init__(self, config: FedSimConfig, *, outputs: int) -> None:
        super().__init__()
        self.kernel = config.kernel
        # A linear layer over windows is the convolution; it is as fast, for one input channel.
        self.convolution = nn.Linear(config.kernel, config.channels)
        places = config.neighbours - config.kernel + 1
        self.perceptron = nn.Sequential(
            CheapDropout(config.dropout),
            nn.Linear(places * config.pair_outputs * config.channels, config.merge_width),
            nn.ReLU(),
            nn.Linear(config.merge_width, outputs),
        )

    def forward(
        self, pairs: Float[Tensor, "batch links pair_outputs"]
    ) -> Float[Tensor, "batch outputs"]:
        """Return the task's outputs."""
        windows_BWPk = pairs.unfold(1, self.kernel, 1)
        channels_BWPC: Tensor = self.convolution(windows_BWPk).relu_()
        out: Tensor = self.perceptron(channels_BWPC.flatten(1))
        return out


class PerceptronMerge(nn.Module):
    """A perceptron over all K x P outputs, with about as many weights as the convolution's gate.

    References:
        [FedSim] section 6.1, "FedSim-MLP".
    """

    def __init__(self, config: FedSimConfig, *, outputs: int) -> None:
        super().__init__()
        inputs = config.neighbours * config.pair_outputs
        weights = sum(p.numel() for p in ConvolutionMerge(config, outputs=outputs).parameters())
        width = max(1, round((weights - outputs) / (inputs + 1 + outputs)))
        self.perceptron = nn.Sequential(
            CheapDropout(config.dropout),
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


def build_merge(config: FedSimConfig, *, outputs: int) -> nn.Module:
    """Return the merge gate that the settings name."""
    if config.merge == "average":
        return AverageMerge()
    kind = ConvolutionMerge if config.merge == "convolution" else PerceptronMerge
    return kind(config, outputs=outputs)
