"""Dropout from random bytes, in every model of the package."""

import math
from typing import Final

import torch
from jaxtyping import Float
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
        rows, units = len(inputs), math.prod(inputs.shape[1:])
        words = inputs.new_empty((rows, -(-units // _BYTES_A_WORD)), dtype=torch.int64)
        drawn = words.random_(-(2**63), None).view(torch.uint8)[:, :units].reshape(inputs.shape)
        # 1 from the byte ``dropped`` on, and 0 below it: comparing bytes takes far longer on a CPU.
        kept = drawn.clamp(self.dropped - 1, self.dropped).sub_(self.dropped - 1)
        return inputs * kept.to(inputs.dtype).mul_(_LEVELS / (_LEVELS - self.dropped))
