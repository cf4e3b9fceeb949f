"""Positional encodings of bottom and top models, which parties average."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from securevfl.models.layers import PositionsTaken


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
