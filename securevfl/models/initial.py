"""Initial weights from named seeds, so that a party draws the same ones in every runner."""

import math
from typing import Protocol, runtime_checkable

import torch
from torch import nn


@runtime_checkable
class Drawn(Protocol):
    """A module that draws parameters or buffers of its own from a generator."""

    def draw(self, generator: torch.Generator) -> None:
        """Draw all values that the module holds directly, not those of its children."""
        ...


def initialise(model: nn.Module, *, seed: int, positions_seed: int) -> None:
    """Draw every weight of a bottom or top model again, in place.

    Layers are built with torch's global generator, which all parties of a simulated federation
    share; this makes the weights depend on the two seeds alone. Draws are made on the CPU, so
    call it before the model moves to a GPU.

    Args:
        model: A bottom or top model.
        seed: The party's own seed.
        positions_seed: Seed of ``model.positions``. Where all parties have the same one, their
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
    bound = 1 / math.sqrt(layer.in_features)
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
