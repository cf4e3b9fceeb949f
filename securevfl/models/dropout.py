"""Dropout from random bytes, in every model of the package."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Final

import torch
from jaxtyping import Float, Int64, UInt8
from torch import Tensor, nn

_LEVELS: Final = 256
_BYTES_A_WORD: Final = 8


class ByteDropout(nn.Dropout):
    """Dropout that draws a byte for each unit: a quarter of the time of ``nn.Dropout`` on a CPU.

    A byte has 256 values, so the share of dropped units is ``p`` rounded to a multiple of 1/256,
    and never to 0 or 1: with t = round(256 p) in 1 to 255, a unit is dropped with probability
    t/256, and one that is kept is multiplied by 256 / (256 - t), so that means stay as they are.
    ``p = 0`` drops nothing.

    Bytes come from torch's global generator of the input's device, as those of ``nn.Dropout`` do.
    Every entry along the first dimension begins a new word of that stream: rows together draw what
    ``torch.func.vmap`` draws for them one by one.
    """

    @property
    def dropped(self) -> int:
        """How many of a byte's 256 values drop a unit."""
        return min(max(round(_LEVELS * self.p), 1), _LEVELS - 1) if self.p else 0

    def forward(self, inputs: Float[Tensor, "rows *shape"]) -> Float[Tensor, "rows *shape"]:
        """Drop units in training, and scale the others up; in evaluation return the inputs."""
        if not self.training or not self.dropped:
            return inputs
        if _STREAMS.get() is None:
            drawn = _as_bytes(_empty_words(inputs).random_(-(2**63), None), inputs)
        else:
            drawn = _DrawnApart.apply(inputs)  # type: ignore[no-untyped-call]
        # 1 from the byte ``dropped`` on, and 0 below it: comparing bytes takes far longer on a CPU.
        kept = drawn.clamp(self.dropped - 1, self.dropped).sub_(self.dropped - 1)
        return inputs * kept.to(inputs.dtype).mul_(_LEVELS / (_LEVELS - self.dropped))


@contextmanager
def drawing_apart(streams: Sequence[torch.Generator]) -> Iterator[None]:
    """Let models that are stacked by ``torch.func.vmap`` draw their units each from its own stream.

    Inside the block every :class:`ByteDropout` that drops anything must be mapped over as many
    models as there are streams; each stream then gives what it would give to its model alone.
    """
    before = _STREAMS.set(streams)
    try:
        yield
    finally:
        _STREAMS.reset(before)


_STREAMS: Final[ContextVar[Sequence[torch.Generator] | None]] = ContextVar("streams", default=None)


class _DrawnApart(torch.autograd.Function):
    """A byte for each unit of every model's inputs; ``vmap`` asks it for all models at once."""

    @staticmethod
    def forward(inputs: Tensor) -> Tensor:
        raise RuntimeError(f"units of shape {tuple(inputs.shape)} belong to no stacked model")

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        del inputs
        ctx.mark_non_differentiable(output)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int], inputs: Tensor) -> tuple[Tensor, int]:
        del info
        streams = _STREAMS.get()
        assert streams is not None, "units are drawn apart"
        inputs = inputs.movedim(in_dims[0], 0)
        words = _empty_words(inputs, models=1)
        for drawn, stream in zip(words, streams, strict=True):
            drawn.random_(-(2**63), None, generator=stream)
        return _as_bytes(words, inputs), 0


def _empty_words(
    inputs: Float[Tensor, "*shape"], *, models: int = 0
) -> Int64[Tensor, "*rows words"]:
    """Return room for a byte for each unit; behind ``models`` dimensions, a row begins a word."""
    rows, units = inputs.shape[: models + 1], math.prod(inputs.shape[models + 1 :])
    return inputs.new_empty((*rows, -(-units // _BYTES_A_WORD)), dtype=torch.int64)


def _as_bytes(
    words: Int64[Tensor, "*rows words"], inputs: Float[Tensor, "*shape"]
) -> UInt8[Tensor, "*shape"]:
    """Return a byte of the words for each unit."""
    units = math.prod(inputs.shape[words.dim() - 1 :])
    return words.view(torch.uint8)[..., :units].reshape(inputs.shape)
