"""Augmentations of tables and images for self-supervised pretraining.

An augmentation is called with a batch and a generator, and returns a new batch. It draws on the
generator's device, so that one seed gives one view on any device.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional

from securevfl.core import checks
from securevfl.core.errors import ConfigError
from securevfl.models.fedhssl.encoders import CategoricalColumn, continuous_places


@runtime_checkable
class Augmentation(Protocol):
    """Creates a random view of a batch."""

    def __call__(
        self, batch: Float[Tensor, "rows features"], generator: torch.Generator
    ) -> Float[Tensor, "rows features"]:
        """Return a view; the batch does not change."""
        ...


class CorruptedFeatures:
    """Augmentation that replaces some features of each row by the same features of other rows.

    In each row, ``round(rate * M)`` of the M numbers, drawn afresh, get the value of a random row
    of the table: a draw from the column's empirical marginal. The same share of categorical columns
    becomes "replaced", which an encoder gives an untrained embedding. If that share is no whole
    number of columns, some rows get one more than others.

    References:
        [SCARF] Algorithm 1 (rate c, uniform over the training rows of each column); [FedHSSL] V-A:
        30 % of the features, and categorical ones as extra untrained embeddings.

    Differs from [SCARF]: it corrupts one of two views; FedHSSL's Algorithm 1 (line 19) augments
    both, and so does our pretraining.
    """

    def __init__(
        self,
        table: Float[Tensor, "table_rows features"],
        *,
        rate: float = 0.3,
        columns: Sequence[CategoricalColumn] = (),
    ) -> None:
        """Store the table that values are drawn from.

        Args:
            table: The party's own training rows, scaled as the batches will be.
            rate: Share of the features that a view replaces, in [0, 1].
            columns: Its categorical columns.

        Raises:
            ConfigError: If the rate or a column is out of range, or the table is empty.
        """
        checks.closed_unit(rate=rate)
        checks.at_least(1, table_rows=len(table))
        self._table = table
        self._columns = tuple(columns)
        self._places = [
            torch.tensor(column.places, device=table.device) for column in self._columns
        ]
        self._continuous = torch.tensor(
            continuous_places(table.shape[1], columns), dtype=torch.int64, device=table.device
        )
        self._numbers = round(rate * len(self._continuous))
        self._words = rate * len(self._columns)

    def __call__(
        self, batch: Float[Tensor, "rows features"], generator: torch.Generator
    ) -> Float[Tensor, "rows features"]:
        """Return a corrupted copy."""
        view = batch.clone()
        if self._numbers:
            which = _choose(len(batch), len(self._continuous), self._numbers, generator)
            donors = torch.randint(
                len(self._table), which.shape, generator=generator, device=generator.device
            )
            places = self._continuous[which.to(batch.device)]
            # Position of the value in the flattened table: one index is faster than two.
            donors = donors.to(self._table.device).mul_(self._table.shape[1]).add_(places)
            view.scatter_(1, places, self._table.take(donors))
        if self._words:
            self._replace_words(view, generator)
        return view

    def _replace_words(
        self, view: Float[Tensor, "rows features"], generator: torch.Generator
    ) -> None:
        # Not rounded like the numbers: 0.3 of one column would always be none.
        most = math.ceil(self._words)
        chosen = _choose(len(view), len(self._columns), most, generator).to(view.device)
        drawn = torch.rand(len(view), generator=generator, device=generator.device)
        spared = drawn.to(view.device) < most - self._words
        chosen[spared, -1] = len(self._columns)
        for number, (column, places) in enumerate(zip(self._columns, self._places, strict=True)):
            rows = (chosen == number).any(dim=1)
            replaced = 0.0 if column.one_hot else float(column.categories)
            view[:, places] = torch.where(rows[:, None], replaced, view[:, places])


def _choose(
    rows: int, available: int, number: int, generator: torch.Generator
) -> Int[Tensor, "rows number"]:
    """Draw ``number`` distinct integers below ``available`` for each row."""
    order = torch.rand(rows, available, generator=generator, device=generator.device)
    return order.topk(number, dim=1, sorted=False).indices


_GREY = (0.299, 0.587, 0.114)  # ITU-R BT.601 luma
_TAPS = 6  # pixels on either side of a blurred one: three of the largest deviation

Images = Float[Tensor, "rows channels height width"]


@dataclass(frozen=True, kw_only=True, slots=True)
class AugmentedImages:
    """Augmentation of images: crop, flip, colour jitter, grey and blur, drawn for each image.

    Each view is a random crop, resized to the full size. Then, each with its probability, it is
    mirrored; jittered in brightness, contrast, saturation and hue; turned grey; and blurred. Images
    without three channels have no colours: saturation, hue and grey do not apply.

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
    """Value of a black pixel."""

    high: float = 1.0
    """Value of a full pixel."""

    smallest_crop: checks.Rate = 0.2
    """Smallest share of the area in a crop."""

    flip: checks.ClosedUnit = 0.5
    """Probability that an image is mirrored left to right."""

    jitter: checks.ClosedUnit = 0.8
    """Probability that colours are jittered."""

    brightness: checks.ClosedUnit = 0.4
    """Brightness, contrast and saturation are scaled by up to 1 plus or minus this."""

    hue: checks.ClosedUnit = 0.1
    """Largest turn of the hue, as a share of the circle."""

    grey: checks.ClosedUnit = 0.2
    """Probability that an image turns grey."""

    blur: checks.ClosedUnit = 0.5
    """Probability that an image is blurred, with a deviation of 0.1 to 2 pixels."""

    def __post_init__(self) -> None:
        if len(self.image) != 3 or min(self.image) < 1:
            raise ConfigError(f"image must be (channels, height, width), got {self.image}")
        if not self.low < self.high:
            raise ConfigError(f"low must be below high, got {self.low} and {self.high}")
        checks.require_limits(self)

    def __call__(
        self, batch: Float[Tensor, "rows features"], generator: torch.Generator
    ) -> Float[Tensor, "rows features"]:
        """Return a view of every image."""
        draw = _Draws(len(batch), generator, batch)
        images = (batch.reshape(-1, *self.image) - self.low) / (self.high - self.low)
        images = _crop(images, draw, smallest=self.smallest_crop, flip=self.flip)
        jittered = self._jitter(images, draw)
        images = torch.where(draw.happens(self.jitter), jittered, images)
        if self.image[0] == 3:
            images = torch.where(draw.happens(self.grey), _luma(images), images)
        blurred = _blur(images, draw.uniform(0.1, 2.0))
        images = torch.where(draw.happens(self.blur), blurred, images)
        return images.reshape(batch.shape) * (self.high - self.low) + self.low

    def _jitter(self, images: Images, draw: "_Draws") -> Images:
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
    """Random numbers, one for each image, in a shape that broadcasts over images."""

    def __init__(self, rows: int, generator: torch.Generator, like: Tensor) -> None:
        self._shape = (rows, 1, 1, 1)
        self._generator = generator
        self._like = like

    def uniform(self, low: float, high: float) -> Float[Tensor, "rows 1 1 1"]:
        drawn = torch.rand(self._shape, generator=self._generator, device=self._generator.device)
        return low + (high - low) * drawn.to(self._like)

    def happens(self, probability: float) -> Tensor:
        return self.uniform(0, 1) < probability


def _crop(images: Images, draw: _Draws, *, smallest: float, flip: float) -> Images:
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


def _blur(images: Images, deviation: Float[Tensor, "rows 1 1 1"]) -> Images:
    steps = torch.arange(-_TAPS, _TAPS + 1, dtype=images.dtype, device=images.device)
    weights = (-(steps**2) / (2 * deviation**2)).exp()
    weights = weights / weights.sum(dim=3, keepdim=True)
    for axis in (2, 3):
        padding = [0, 0, _TAPS, _TAPS] if axis == 2 else [_TAPS, _TAPS, 0, 0]
        padded = functional.pad(images, padding, mode="replicate")
        size = images.shape[axis]
        # A sum over shifted copies is faster than a grouped convolution with a kernel for each
        # image.
        images = sum(
            (
                padded.narrow(axis, tap, size) * weights[..., tap : tap + 1]
                for tap in range(2 * _TAPS + 1)
            ),
            start=torch.zeros_like(images),
        )
    return images
