"""Shared layers, their initialisation, and the alignment of positional encodings."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Annotated, Any, Final, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int64, UInt8
from torch import Tensor, nn

from securevfl.core import checks, devices


@runtime_checkable
class Drawn(Protocol):
    """A module that draws its parameters or buffers from a generator."""

    def draw(self, generator: torch.Generator) -> None:
        """Draw this module's values, without those of its children."""
        ...


def initialise(model: nn.Module, *, seed: int, positions_seed: int) -> None:
    """Draw every weight of a bottom or top model in place, from two seeds.

    torch builds layers with its global generator, which all parties of a simulated federation
    share. Afterwards the weights depend on the two seeds only. Draws are made on the CPU, so call
    this before the model moves to a GPU.

    Args:
        model: A bottom or top model.
        seed: The party's own seed.
        positions_seed: Seed of ``model.positions``. Parties with the same seed start with aligned
            encodings.

    References:
        [FeT] section 5.1, "Positional Encoding Averaging", which repairs encodings that differ
        between parties.
    """
    _draw_all(model, torch.Generator().manual_seed(seed))
    positions = getattr(model, "positions", None)
    if positions is not None:
        _draw_all(positions, torch.Generator().manual_seed(positions_seed))


def _draw_all(model: nn.Module, generator: torch.Generator) -> None:
    for module in model.modules():
        if isinstance(module, Drawn):
            module.draw(generator)
        elif isinstance(module, nn.Linear):
            _draw_linear(module, generator)
        elif isinstance(module, nn.Conv2d):
            _draw_convolution(module, generator)
        elif isinstance(module, nn.Embedding):
            with torch.no_grad():
                module.weight.normal_(std=module.embedding_dim**-0.5, generator=generator)
        elif isinstance(module, nn.modules.batchnorm._BatchNorm):
            # This resets the running statistics too, which are weights as well.
            module.reset_parameters()


def _draw_linear(layer: nn.Linear, generator: torch.Generator) -> None:
    # torch's own default for a linear layer: uniform within 1 / sqrt(inputs).
    bound = 1 / math.sqrt(max(1, layer.in_features))
    with torch.no_grad():
        layer.weight.uniform_(-bound, bound, generator=generator)
        if layer.bias is not None:
            layer.bias.uniform_(-bound, bound, generator=generator)


def _draw_convolution(layer: nn.Conv2d, generator: torch.Generator) -> None:
    # [HRZS15] Equation 14: variance 2 / fan_out keeps the gradient's size through ReLU layers.
    fan_out = layer.out_channels * math.prod(layer.kernel_size)
    with torch.no_grad():
        layer.weight.normal_(std=math.sqrt(2 / fan_out), generator=generator)
        if layer.bias is not None:
            layer.bias.zero_()


_LEVELS: Final = 256
_BYTES_A_WORD: Final = 8


class ByteDropout(nn.Dropout):
    """Dropout that draws a byte for each unit: a quarter of the time of ``nn.Dropout`` on a CPU.

    On a GPU it is ``nn.Dropout``, one kernel each way.

    A byte has 256 values, so ``p`` is rounded to a multiple of 1/256, but never to 0 or 1: with t =
    round(256 p) in 1 to 255, a unit is dropped with probability t/256, and every other unit is
    multiplied by 256 / (256 - t), so that expectations do not change. ``p = 0`` drops nothing.

    Bytes come from torch's global generator of the input's device, as in ``nn.Dropout``. Every
    entry along the first dimension starts a new word of that stream, so a batch draws the same
    bytes as ``torch.func.vmap`` draws row by row.
    """

    @property
    def dropped_values(self) -> int:
        """Number of a byte's 256 values that drop a unit."""
        return min(max(round(_LEVELS * self.p), 1), _LEVELS - 1) if self.p else 0

    def forward(self, inputs: Float[Tensor, "rows *shape"]) -> Float[Tensor, "rows *shape"]:
        """Drop units and scale up the others in training; return the inputs in evaluation."""
        dropped = self.dropped_values if self.training else 0
        if not dropped:
            return inputs
        if inputs.is_cuda:
            out: Tensor = torch.native_dropout(inputs, self.p, True)[0]
            return out
        if _STREAMS.get(None) is None:
            drawn = _as_bytes(_empty_words(inputs).random_(-(2**63), None), inputs)
        else:
            drawn = _DrawnApart.apply(inputs)  # type: ignore[no-untyped-call]
        # This gives 1 from the byte ``dropped`` on, and 0 below it; comparing bytes takes far
        # longer on a CPU.
        kept = drawn.clamp(dropped - 1, dropped).sub_(dropped - 1)
        return inputs * kept.to(inputs.dtype).mul_(_LEVELS / (_LEVELS - dropped))


@contextmanager
def drawing_apart(streams: Sequence[torch.Generator]) -> Iterator[None]:
    """Give each model stacked by ``torch.func.vmap`` its own stream for dropout.

    Inside the block, every :class:`ByteDropout` with ``p > 0`` must be mapped over ``len(streams)``
    models. Each model then gets the bytes that it would get alone.
    """
    before = _STREAMS.set(streams)
    try:
        yield
    finally:
        _STREAMS.reset(before)


_STREAMS: Final[ContextVar[Sequence[torch.Generator]]] = ContextVar("streams")


class _DrawnApart(torch.autograd.Function):
    """Draws a byte for each unit of all models' inputs; ``vmap`` calls it once for all models."""

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
        inputs = inputs.movedim(in_dims[0], 0)
        words = _empty_words(inputs, models=1)
        for drawn, stream in zip(words, _STREAMS.get(), strict=True):
            drawn.random_(-(2**63), None, generator=stream)
        return _as_bytes(words, inputs), 0


def _empty_words(
    inputs: Float[Tensor, "*shape"], *, models: int = 0
) -> Int64[Tensor, "*rows words"]:
    """Return words with a byte per unit; every row, behind ``models`` dimensions, starts a word."""
    rows, units = inputs.shape[: models + 1], math.prod(inputs.shape[models + 1 :])
    return inputs.new_empty((*rows, -(-units // _BYTES_A_WORD)), dtype=torch.int64)


def _as_bytes(
    words: Int64[Tensor, "*rows words"], inputs: Float[Tensor, "*shape"]
) -> UInt8[Tensor, "*shape"]:
    """Return one byte of the words per unit."""
    units = math.prod(inputs.shape[words.dim() - 1 :])
    drawn = words.view(torch.uint8)
    # Indexing takes longer than a small draw, and widths are mostly whole words.
    whole = drawn if drawn.shape[-1] == units else drawn[..., :units]
    return whole.reshape(inputs.shape)


class LayerNorm(nn.LayerNorm):
    """Layer normalisation in single precision, as torch does on a GPU by default."""

    def forward(self, inputs: Float[Tensor, "*rows width"]) -> Float[Tensor, "*rows width"]:
        """Return the rows normalised, in at least 32 bits."""
        return super().forward(devices.widen_floats(inputs))


class MLP(nn.Module):
    """Multi-layer perceptron: linear layers with GELU and dropout between them."""

    def __init__(
        self, num_inputs: int, hidden: Sequence[int], num_outputs: int, *, dropout: float = 0.0
    ) -> None:
        super().__init__()
        checks.fraction(dropout=dropout)
        layers: list[nn.Module] = []
        width = num_inputs
        for next_width in hidden:
            layers += [nn.Linear(width, next_width), nn.GELU(), ByteDropout(dropout)]
            width = next_width
        self.layers = nn.Sequential(*layers, nn.Linear(width, num_outputs))

    def forward(self, inputs: Float[Tensor, "*rows inputs"]) -> Float[Tensor, "*rows outputs"]:
        """Return the outputs of the last linear layer, one vector for each vector of ``inputs``."""
        outputs: Tensor = self.layers(inputs)
        return outputs


STEEPEST: Final = 16
"""Largest decay: a second link starts with a share of 2^-16."""

RankPrior = Annotated[float, partial(checks.at_least, 0), partial(checks.at_most, STEEPEST)]
"""A field's decay of :func:`rank_scores`."""


def rank_scores(links: int, *, decay: float) -> Tensor:
    """Return (links,) scores whose softmax gives the j-th nearest link a share of j^-decay.

    Distance is the best sign of a true link. A softmax that starts with equal shares would need
    more steps than a run has to learn that.

    Args:
        links: K, links of a row.
        decay: 0 gives equal shares; larger values favour near links.
    """
    return -decay * torch.arange(1, links + 1).log()


def known_full(mask: Bool[Tensor, "*shape"]) -> bool:
    """Return whether a mask is known to be true everywhere, so that masking can be skipped.

    Always False on a GPU, whose result would have to be awaited, and while torch is tracing, which
    would make the shortcut permanent.
    """
    tracing: bool = torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call]
    return not tracing and mask.device.type == "cpu" and bool(mask.all())
