"""ResNet-18, cut after its first stage; torchvision's does not load beside a CPU build of torch.

Its four stages have c, 2c, 4c and 8c channels, two basic blocks each; c is 64 in the original.
"""

from collections.abc import Callable
from typing import Literal

from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

Stem = Literal["imagenet", "small"]
MakeNorm = Callable[[int], nn.Module]


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut.

    References:
        [HZRS16] Figure 2 and Figure 5 (left); projection shortcuts (B) where the shape changes.
    """

    def __init__(self, inputs: int, outputs: int, *, stride: int, make_norm: MakeNorm) -> None:
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False)
        self.first_norm = make_norm(outputs)
        self.second = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.second_norm = make_norm(outputs)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False), make_norm(outputs)
            )

    def forward(
        self, images: Float[Tensor, "rows inputs height width"]
    ) -> Float[Tensor, "rows outputs new_height new_width"]:
        """Return the block's feature maps."""
        hidden = functional.relu(self.first_norm(self.first(images)))
        return functional.relu(self.second_norm(self.second(hidden)) + self.shortcut(images))


class ResNetBottom(nn.Module):
    """The stem and the first stage."""

    def __init__(
        self, channels: int, stem_channels: int, *, stem: Stem, make_norm: MakeNorm
    ) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *_stem(channels, stem_channels, stem, make_norm),
            *_stage(stem_channels, stem_channels, stride=1, make_norm=make_norm),
        )

    def forward(
        self, images: Float[Tensor, "rows channels height width"]
    ) -> Float[Tensor, "rows stem_channels new_height new_width"]:
        """Return feature maps."""
        maps: Tensor = self.layers(images)
        return maps


class ResNetTop(nn.Module):
    """The last three stages and the average over pixels."""

    def __init__(self, stem_channels: int, *, make_norm: MakeNorm) -> None:
        super().__init__()
        blocks: list[nn.Module] = []
        for stage in range(3):
            inputs = stem_channels * 2**stage
            blocks += _stage(inputs, 2 * inputs, stride=2, make_norm=make_norm)
        self.layers = nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten())

    def forward(
        self, maps: Float[Tensor, "rows stem_channels height width"]
    ) -> Float[Tensor, "rows outputs"]:
        """Return one vector an image."""
        outputs: Tensor = self.layers(maps)
        return outputs


def _stem(channels: int, outputs: int, stem: Stem, make_norm: MakeNorm) -> list[nn.Module]:
    if stem == "small":
        convolution = nn.Conv2d(channels, outputs, 3, padding=1, bias=False)
        return [convolution, make_norm(outputs), nn.ReLU()]
    convolution = nn.Conv2d(channels, outputs, 7, stride=2, padding=3, bias=False)
    return [convolution, make_norm(outputs), nn.ReLU(), nn.MaxPool2d(3, stride=2, padding=1)]


def _stage(inputs: int, outputs: int, *, stride: int, make_norm: MakeNorm) -> list[nn.Module]:
    return [
        BasicBlock(inputs, outputs, stride=stride, make_norm=make_norm),
        BasicBlock(outputs, outputs, stride=1, make_norm=make_norm),
    ]
