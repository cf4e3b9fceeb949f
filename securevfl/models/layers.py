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
        """Draw the module's own values, without those of its children."""
        ...


def initialise(model: nn.Module, *, seed: int, positions_seed: int) -> None:
    """Initialise every weight of a bottom or top model in place, from two seeds.

    Layers are built with torch's global generator, which all parties of a simulated federation
    share; afterwards the weights depend on the two seeds only. Draws are made on the CPU, so call
    this before the model moves to a GPU.

    Args:
        model: A bottom or top model.
        seed: The party's own seed.
        positions_seed: Seed of ``model.positions``. If all parties have the same one, their
            encodings are aligned from the first round on.

    References:
        [FeT] section 5.1, "Positional Encoding Averaging": encodings that differ between parties
        are what averaging repairs.
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
            # Also forgets the running statistics, which are weights as well.
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

    A byte has 256 values, so the share of dropped units is ``p`` rounded to a multiple of 1/256,
    and never to 0 or 1: with t = round(256 p) in 1 to 255, a unit is dropped with probability
    t/256, and one that is kept is multiplied by 256 / (256 - t), so that means stay as they are.
    ``p = 0`` drops nothing.

    Bytes come from torch's global generator of the input's device, as those of ``nn.Dropout`` do.
    Every entry along the first dimension begins a new word of that stream: rows together draw what
    ``torch.func.vmap`` draws for them one by one.
    """

    @property
    def dropped_values(self) -> int:
        """Number of a byte's 256 values that drop a unit."""
        return min(max(round(_LEVELS * self.p), 1), _LEVELS - 1) if self.p else 0

    def forward(self, inputs: Float[Tensor, "rows *shape"]) -> Float[Tensor, "rows *shape"]:
        """Drop units in training, and scale the others up; in evaluation return the inputs."""
        if not self.training or not self.dropped_values:
            return inputs
        if inputs.is_cuda:
            out: Tensor = torch.native_dropout(inputs, self.p, True)[0]
            return out
        if _STREAMS.get() is None:
            drawn = _as_bytes(_empty_words(inputs).random_(-(2**63), None), inputs)
        else:
            drawn = _DrawnApart.apply(inputs)  # type: ignore[no-untyped-call]
        # 1 from the byte ``dropped`` on, and 0 below it: comparing bytes takes far longer on a CPU.
        kept = drawn.clamp(self.dropped_values - 1, self.dropped_values).sub_(
            self.dropped_values - 1
        )
        return inputs * kept.to(inputs.dtype).mul_(_LEVELS / (_LEVELS - self.dropped_values))


@contextmanager
def drawing_apart(streams: Sequence[torch.Generator]) -> Iterator[None]:
    """Let models stacked by ``torch.func.vmap`` draw dropout from separate streams.

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


class LayerNorm(nn.LayerNorm):
    """Normalises in single precision, as torch does of itself on a GPU."""

    def forward(self, inputs: Float[Tensor, "*rows width"]) -> Float[Tensor, "*rows width"]:
        """Return the rows normalised, in at least 32 bits."""
        return super().forward(devices.widen_floats(inputs))


# Multi-layer perceptron.


class MLP(nn.Module):
    """Linear layers with GELU and dropout between them; the last layer is linear."""

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
        """Return the outputs of the last layer, one vector for each vector of ``inputs``."""
        outputs: Tensor = self.layers(inputs)
        return outputs


# Prior weight of a link's rank; links are listed nearest first.

STEEPEST: Final = 16
"""Largest decay: a second link starts with a share of 2^-16."""

RankPrior = Annotated[float, partial(checks.at_least, 0), partial(checks.at_most, STEEPEST)]
"""A field's decay of :func:`rank_scores`."""


def rank_scores(links: int, *, decay: float) -> Tensor:
    """Return (links,) scores whose softmax gives the j-th nearest link a share of j^-decay.

    Of a key, mostly the distance indicates the true link, and a softmax with equal initial shares
    needs more steps than a run has to become uneven.

    Args:
        links: K, links of a row.
        decay: 0 gives equal shares; larger values favour near links.
    """
    return -decay * torch.arange(1, links + 1).log()


# Shortcuts by values.


def known_full(mask: Bool[Tensor, "*shape"]) -> bool:
    """Return whether all of a mask is known to be true, so that what it hides need not be hidden.

    It is not known of a GPU, which would have to be waited for, nor while torch is tracing, since
    the shortcut would become permanent.
    """
    tracing: bool = torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call]
    return not tracing and mask.device.type == "cpu" and bool(mask.all())


# Alignment of positional encodings, within a party and between two.

_GRID: Final = 625
_REACH: Final = 2.0
# With more dimensions a grid of three steps a side would be thousands of keys.
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
    """Return some 600 synthetic keys within two deviations: a grid, or random in many dimensions.

    They are the same in every run, and not from any table.
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
    """Return the correlation of distances of keys with those of their encodings.

    It is taken over all pairs of keys (x, y), of ||x - y|| and ||first(x) - second(y)||; None if
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
    """Return Figure 4 of a party: distances of keys against distances of their encodings.

    Args:
        positions: Its positional encoding, with any weights.
        taken: Its weights before and after an average.
        key_dim: Key columns.
        others: Other parties' weights before the average, by name; empty where each party is a
            separate process, which does not know them.

    Returns:
        ``key_distance`` of some pairs of synthetic keys, and under ``pictures`` for each comparison
        its ``name``, its ``encoding_distance`` of the same pairs, and its ``correlation`` over all
        pairs.

    References:
        [FeT] section 5.1, Figure 4: (b) within a party, (a) and (c) between two.

    Reveals:
        To the readers: encodings of synthetic keys by the weights of each named party.
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
    """Return numbers for a picture, as JSON can hold them: six decimals, 0 where not finite."""
    exact = values.detach().cpu().double().nan_to_num(0.0, 0.0, 0.0)
    rounded: list[Any] = exact.round(decimals=6).tolist()
    return rounded


def position_weights(model: nn.Module) -> dict[str, Tensor]:
    """Return the positional-encoding weights of a bottom or top model."""
    positions = model.get_submodule("positions")
    return {name: value.detach() for name, value in positions.named_parameters()}


def positions_around(model: nn.Module, mean: Mapping[str, Tensor]) -> PositionsTaken:
    """Return a model's positional-encoding weights, with the names of those that replace them."""
    own = {name: value.clone() for name, value in position_weights(model).items()}
    return PositionsTaken(own=own, mean=mean)


def load_positions(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Copy averaged positional-encoding weights into a bottom or top model."""
    with torch.no_grad():
        for name, parameter in model.get_submodule("positions").named_parameters():
            parameter.copy_(weights[name].to(parameter))
