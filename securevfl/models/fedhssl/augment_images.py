"""Augmentations of images that are held as rows of pixels: SimSiam's set, on tensors."""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

from securevfl.core import checks
from securevfl.core.errors import ConfigError

_GREY = (0.299, 0.587, 0.114)  # ITU-R BT.601 luma
_TAPS = 6  # pixels on either side of a blurred one: three of the largest deviation

Images = Float[Tensor, "rows channels height width"]


@dataclass(frozen=True, kw_only=True, slots=True)
class AugmentedImages:
    """Crop, flip, colour jitter, grey and blur, drawn for each image by itself.

    Each view is a random crop, resized to the whole; then, each with its probability, mirrored;
    jittered in brightness, contrast, saturation and hue; turned grey; blurred. Images of other than
    three channels have no colours: saturation, hue and grey leave them alone.

    References:
        [SimSiam] Appendix A gives the set and its numbers, which are the defaults. FedHSSL's
        section V-A follows it; its published code crops to 30 % at least, jitters by 0.3 and never
        turns grey.

    Differs from [SimSiam]: jitter is applied in one order, not in a random one, crops are resized
    without a low-pass filter, and a blur reaches six pixels, three deviations of the widest.
    """

    image: tuple[int, ...]
    """Channels, height and width; a row holds the pixels in that order."""

    low: float = 0.0
    """What a black pixel is in the batches."""

    high: float = 1.0
    """What a full pixel is in the batches."""

    smallest_crop: float = 0.2
    """Least share of the area that a crop keeps."""

    flip: float = 0.5
    """Probability that an image is mirrored left to right."""

    jitter: float = 0.8
    """Probability that colours are jittered."""

    brightness: float = 0.4
    """Brightness, contrast and saturation are scaled by up to 1 plus or minus this."""

    hue: float = 0.1
    """Largest turn of the hue, as a share of the circle."""

    grey: float = 0.2
    """Probability that an image turns grey."""

    blur: float = 0.5
    """Probability that an image is blurred, with a deviation of 0.1 to 2 pixels."""

    def __post_init__(self) -> None:
        if len(self.image) != 3 or min(self.image) < 1:
            raise ConfigError(f"image must be (channels, height, width), got {self.image}")
        if not self.low < self.high:
            raise ConfigError(f"low must be below high, got {self.low} and {self.high}")
        checks.rate(smallest_crop=self.smallest_crop)
        for name in ("flip", "jitter", "grey", "blur", "brightness", "hue"):
            value = getattr(self, name)
            checks.non_negative(**{name: value})
            checks.at_least(0, **{f"1 - {name}": 1 - value})

    def __call__(
        self, batch: Float[Tensor, "rows features"], generator: torch.Generator
    ) -> Float[Tensor, "rows features"]:
        """Return a view of every image."""
        draw = _Draws(len(batch), generator, batch)
        images = (batch.reshape(-1, *self.image) - self.low) / (self.high - self.low)
        images = _cropped(images, draw, smallest=self.smallest_crop, flip=self.flip)
        jittered = self._jittered(images, draw)
        images = torch.where(draw.happens(self.jitter), jittered, images)
        if self.image[0] == 3:
            images = torch.where(draw.happens(self.grey), _luma(images), images)
        blurred = _blurred(images, draw.uniform(0.1, 2.0))
        images = torch.where(draw.happens(self.blur), blurred, images)
        return images.reshape(batch.shape) * (self.high - self.low) + self.low

    def _jittered(self, images: Images, draw: "_Draws") -> Images:
        low, high = 1 - self.brightness, 1 + self.brightness
        images = (images * draw.uniform(low, high)).clamp(0, 1)
        grey = _luma(images) if self.image[0] == 3 else images
        mean = grey.mean(dim=(1, 2, 3), keepdim=True)
        images = (mean + (images - mean) * draw.uniform(low, high)).clamp(0, 1)
        if self.image[0] != 3:
            return images
        grey = _luma(images)
        images = (grey + (images - grey) * draw.uniform(low, high)).clamp(0, 1)
        return turn_hue(images, draw.uniform(-self.hue, self.hue))


class _Draws:
    """Random numbers, one an image, shaped to multiply images and placed beside them."""

    def __init__(self, rows: int, generator: torch.Generator, like: Tensor) -> None:
        self._shape = (rows, 1, 1, 1)
        self._generator = generator
        self._like = like

    def uniform(self, low: float, high: float) -> Float[Tensor, "rows 1 1 1"]:
        drawn = torch.rand(self._shape, generator=self._generator, device=self._generator.device)
        return low + (high - low) * drawn.to(self._like)

    def happens(self, probability: float) -> Tensor:
        return self.uniform(0, 1) < probability


def _cropped(images: Images, draw: _Draws, *, smallest: float, flip: float) -> Images:
    # An area and a ratio between 3:4 and 4:3, as in [SimSiam]; a side that would pass the edge ends
    # there, and the other one then keeps the area.
    area = draw.uniform(smallest, 1.0)
    ratio = draw.uniform(math.log(3 / 4), math.log(4 / 3)).exp()
    width = (area * ratio).sqrt().clamp(max=1).maximum(area)
    height = area / width
    x = (1 - width) * draw.uniform(-1, 1)
    y = (1 - height) * draw.uniform(-1, 1)
    side = torch.where(draw.happens(flip), -1.0, 1.0)
    zero = torch.zeros_like(x)
    rows = [torch.cat([side * width, zero, x], dim=3), torch.cat([zero, height, y], dim=3)]
    grid = functional.affine_grid(
        torch.cat(rows, dim=2)[:, 0], list(images.shape), align_corners=False
    )
    return functional.grid_sample(images, grid, padding_mode="border", align_corners=False)


def _luma(images: Images) -> Images:
    weights = torch.tensor(_GREY, dtype=images.dtype, device=images.device).reshape(1, 3, 1, 1)
    return (images * weights).sum(dim=1, keepdim=True).expand_as(images)


def turn_hue(images: Images, turn: Float[Tensor, "rows 1 1 1"]) -> Images:
    """Turn the hue of RGB images in [0, 1], leaving HSV's saturation and value.

    Args:
        images: Red, green and blue.
        turn: Share of the circle, for each image.
    """
    value, largest = images.max(dim=1, keepdim=True)
    chroma = value - images.amin(dim=1, keepdim=True)
    # In sixths of the circle: 0 at red, 2 at green, 4 at blue.
    following = images.roll(-1, dims=1).gather(1, largest)
    preceding = images.roll(1, dims=1).gather(1, largest)
    hue = 2 * largest + (following - preceding) / torch.where(chroma > 0, chroma, 1.0)
    corners = torch.tensor([5.0, 3.0, 1.0], dtype=images.dtype, device=images.device)
    distance = (corners.reshape(1, 3, 1, 1) + hue + 6 * turn) % 6
    return value - chroma * torch.minimum(distance, 4 - distance).clamp(0, 1)


def _blurred(images: Images, deviation: Float[Tensor, "rows 1 1 1"]) -> Images:
    steps = torch.arange(-_TAPS, _TAPS + 1, dtype=images.dtype, device=images.device)
    weights = (-(steps**2) / (2 * deviation**2)).exp()
    weights = weights / weights.sum(dim=3, keepdim=True)
    for axis in (2, 3):
        padding = [0, 0, _TAPS, _TAPS] if axis == 2 else [_TAPS, _TAPS, 0, 0]
        padded = functional.pad(images, padding, mode="replicate")
        size = images.shape[axis]
        # A sum over shifted copies: a grouped convolution with a kernel an image is slower.
        images = sum(
            (
                padded.narrow(axis, tap, size) * weights[..., tap : tap + 1]
                for tap in range(2 * _TAPS + 1)
            ),
            start=torch.zeros_like(images),
        )
    return images
