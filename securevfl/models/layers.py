"""Shared layers, their initialisation, and the alignment of positional encodings."""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Final, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int64, UInt8
from torch import Tensor, nn

from securevfl.core import checks, devices

# Initial weights from named seeds, so that a party draws the same weights in every runner.


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


# Dropout from random bytes.

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
        if not self.training or not self.dropped_values:
            return inputs
        if inputs.is_cuda:
            out: Tensor = torch.native_dropout(inputs, self.p, True)[0]
            return out
        if _STREAMS.get() is None:
            drawn = _as_bytes(_empty_words(inputs).random_(-(2**63), None), inputs)
        else:
            drawn = _DrawnApart.apply(inputs)  # type: ignore[no-untyped-call]
        # This gives 1 from the byte ``dropped`` on, and 0 below it; comparing bytes takes far
        # longer on a CPU.
        kept = drawn.clamp(self.dropped_values - 1, self.dropped_values).sub_(
            self.dropped_values - 1
        )
        return inputs * kept.to(inputs.dtype).mul_(_LEVELS / (_LEVELS - self.dropped_values))


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


_STREAMS: Final[ContextVar[Sequence[torch.Generator] | None]] = ContextVar("streams", default=None)


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
    """Return words with a byte per unit; every row, behind ``models`` dimensions, starts a word."""
    rows, units = inputs.shape[: models + 1], math.prod(inputs.shape[models + 1 :])
    return inputs.new_empty((*rows, -(-units // _BYTES_A_WORD)), dtype=torch.int64)


def _as_bytes(
    words: Int64[Tensor, "*rows words"], inputs: Float[Tensor, "*shape"]
) -> UInt8[Tensor, "*shape"]:
    """Return one byte of the words per unit."""
    units = math.prod(inputs.shape[words.dim() - 1 :])
    return words.view(torch.uint8)[..., :units].reshape(inputs.shape)


class LayerNorm(nn.LayerNorm):
    """Layer normalisation in single precision, as torch does on a GPU by default."""

    def forward(self, inputs: Float[Tensor, "*rows width"]) -> Float[Tensor, "*rows width"]:
        """Return the rows normalised, in at least 32 bits."""
        return super().forward(devices.widen_floats(inputs))


# Multi-layer perceptron.


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


# Prior weight of a link's rank; links are listed nearest first.

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


# Shortcuts by values.


def known_full(mask: Bool[Tensor, "*shape"]) -> bool:
    """Return whether a mask is known to be true everywhere, so that masking can be skipped.

    Always False on a GPU, whose result would have to be awaited, and while torch is tracing, which
    would make the shortcut permanent.
    """
    tracing: bool = torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call]
    return not tracing and mask.device.type == "cpu" and bool(mask.all())


# Alignment of positional encodings, within a party and between two.

_GRID: Final = 625
_REACH: Final = 2.0
# In more dimensions, a grid of three steps a side would have thousands of keys.
_MOST_GRID_DIMENSIONS: Final = 6
_SHOWN_PAIRS: Final = 250


@dataclass(frozen=True, kw_only=True, eq=False)
class PositionsTaken:
    """A party's positional encoding before and after an average."""

    own: Mapping[str, Tensor]
    """The party's weights before the average, by name."""

    mean: Mapping[str, Tensor]
    """The average."""


def key_grid(key_dim: int) -> Float[Tensor, "keys dimension"]:
    """Return about 600 synthetic keys within two standard deviations.

    They form a grid or, in more than six dimensions, are random; the same in every run, from no
    table.
    """
    if key_dim <= _MOST_GRID_DIMENSIONS:
        axis = torch.linspace(-_REACH, _REACH, round(_GRID ** (1 / key_dim)))
        return torch.cartesian_prod(*[axis] * key_dim).view(-1, key_dim)
    generator = torch.Generator().manual_seed(0)
    return (2 * torch.rand(_GRID, key_dim, generator=generator) - 1) * _REACH


def encode_keys(
    positions: nn.Module, weights: Mapping[str, Tensor], keys: Float[Tensor, "keys dimension"]
) -> Float[Tensor, "keys width"]:
    """Return the encodings of keys with the given weights, on the CPU."""
    device = next(positions.parameters()).device
    moved = {name: value.to(device) for name, value in weights.items()}
    with torch.no_grad():
        encoding: Tensor = torch.func.functional_call(positions, moved, (keys.to(device),))
    return encoding.cpu()


def distance_correlation(
    keys: Float[Tensor, "keys dimension"],
    first: Float[Tensor, "keys width"],
    second: Float[Tensor, "keys width"],
) -> float | None:
    """Return the correlation of keys' distances with the distances of their encodings.

    It correlates ||x - y|| with ||first(x) - second(y)|| over all pairs of keys (x, y); None if
    either is constant. ``first`` and ``second`` are the encodings of one party or of two.

    References:
        [FeT] section 5.1, Figure 4.
    """
    apart = torch.stack([torch.cdist(keys, keys), torch.cdist(first, second)]).flatten(1)
    correlation = float(torch.corrcoef(apart)[0, 1])
    return correlation if -2 < correlation < 2 else None


def alignment(
    positions: nn.Module,
    taken: PositionsTaken,
    *,
    key_dim: int,
    others: Mapping[str, Mapping[str, Tensor]],
) -> dict[str, Any]:
    """Return the data of [FeT] Figure 4 for a party: distances of keys and of their encodings.

    Args:
        positions: Its positional encoding, with any weights.
        taken: Its weights before and after an average.
        key_dim: Key columns.
        others: Other parties' weights before the average, by name; empty where parties are separate
            processes and do not know them.

    Returns:
        ``key_distance``: distances of some pairs of synthetic keys. ``pictures``: for each
        comparison its ``name``, the ``encoding_distance`` of the same pairs, and the
        ``correlation`` over all pairs.

    References:
        [FeT] section 5.1, Figure 4: (b) within a party, (a) and (c) between two.

    Reveals:
        To whoever reads the result: encodings of synthetic keys by the weights of each named party.
    """
    keys = key_grid(key_dim)
    own = encode_keys(positions, taken.own, keys)
    mean = encode_keys(positions, taken.mean, keys)
    compared = {"before: its own": (own, own)}
    for name, weights in others.items():
        compared[f"before: its own and that of {name}"] = own, encode_keys(positions, weights, keys)
    if not others:
        compared["its own before, and the average"] = own, mean
    compared["after: the average, which all have"] = mean, mean
    generator = torch.Generator().manual_seed(0)
    a, b = torch.randint(len(keys), (2, _SHOWN_PAIRS), generator=generator)
    return {
        "key_distance": finite((keys[a] - keys[b]).norm(dim=1)),
        "pictures": [
            {
                "name": name,
                "encoding_distance": finite((first[a] - second[b]).norm(dim=1)),
                "correlation": distance_correlation(keys, first, second),
            }
            for name, (first, second) in compared.items()
        ],
    }


def finite(values: Float[Tensor, "*shape"]) -> list[Any]:
    """Return values as nested lists for JSON: rounded to six decimals, 0 where not finite."""
    exact = values.detach().cpu().double().nan_to_num(0.0, 0.0, 0.0)
    rounded: list[Any] = exact.round(decimals=6).tolist()
    return rounded
