"""A family of any two torch modules: one for every secondary, one for the primary."""

import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

import torch
from torch import Tensor, nn

from securevfl.models.family import Family
from securevfl.models.registry import register

Half: TypeAlias = nn.Module | Callable[[int, int], nn.Module]
"""A module, or a function of its numbers of inputs and outputs that returns one."""


@dataclass(frozen=True, kw_only=True)
class SplitSettings:
    """The ``[model]`` table of a family that :func:`split_model` has made."""

    neighbours: int = 1
    """K, links of a row at every secondary."""

    width: int = 8
    """Numbers that a secondary's module returns for a row."""

    party_dropout: float = 0.0
    """Share of the secondaries left out of a training round."""

    keys_as_features: ClassVar[bool] = False
    average_positions_every: ClassVar[int] = 0

    @property
    def cut_shape(self) -> tuple[int, int]:
        """Every row becomes one vector."""
        return 1, self.width


def split_model(
    bottom: Half,
    top: Half,
    *,
    neighbours: int = 1,
    width: int = 8,
    party_dropout: float = 0.0,
    name: str = "split",
) -> SplitSettings:
    """Register two torch modules as a model family in this process, and return its settings.

    The modules are checked like every family: shapes are tried on two rows, and in a private run a
    bottom module that mixes rows is refused. ``securevfl.train`` accepts the settings too, if its
    processes can import the functions or modules from a file.

    Args:
        bottom: Every secondary's module, or a function of the numbers of inputs and outputs that
            returns it. Inputs are the features of a row's K links, nearest first, with zeros for
            absent links; outputs are ``width`` numbers.
        top: The primary's module, likewise: from its features followed by the ``width`` averaged
            numbers to the task's outputs.
        neighbours: K, links of a row at every secondary.
        width: Numbers that a secondary releases for a row.
        party_dropout: Share of the secondaries left out of a training round.
        name: The family's name; an earlier registration in this process is replaced.

    Returns:
        The ``model`` argument of ``securevfl.simulate`` or ``train``. Each party gets a copy of its
        module, with linear layers, 2-D convolutions and embeddings initialised from the run's seed.

    Raises:
        ConfigError: If the name is taken.
    """
    settings = _register_family(bottom, top, name)
    return settings(neighbours=neighbours, width=width, party_dropout=party_dropout)


def _register_family(bottom: Half, top: Half, name: str) -> type[SplitSettings]:
    """Register the family in this process, or in one that it has started."""

    class Settings(SplitSettings):
        """Settings class of this family alone, by which the family is looked up."""

    class Split(Family[SplitSettings]):
        """``split_model``'s family."""

        settings_class = Settings
        made_by = staticmethod(functools.partial(_register_family, bottom, top, name))

        def build_bottom(self, settings: SplitSettings, **sizes: Any) -> nn.Module:
            return _Bottom(
                _built(bottom, settings.neighbours * sizes["num_features"], settings.width)
            )

        def build_top(self, settings: SplitSettings, **sizes: Any) -> nn.Module:
            inputs = sizes["num_features"] + settings.width
            return _Top(_built(top, inputs, sizes["outputs"]))

    Split.name = name
    register(Split)
    return Settings


def _built(half: Half, inputs: int, outputs: int) -> nn.Module:
    return copy.deepcopy(half) if isinstance(half, nn.Module) else half(inputs, outputs)


class _Half(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.positions = nn.Identity()  # no positional encoding


class _Bottom(_Half):
    recordwise = False  # the vector depends on all linked records together

    def forward(self, features: Tensor, keys: Tensor, present: Tensor) -> Tensor:
        """Return (rows, 1, width)."""
        vector: Tensor = self.module((features * present.unsqueeze(-1)).flatten(1))
        return vector.unsqueeze(1)


class _Top(_Half):
    def forward(self, features: Tensor, keys: Tensor, aggregate: Tensor, links: None) -> Tensor:
        """Return (rows, outputs)."""
        outputs: Tensor = self.module(torch.cat([features, aggregate.flatten(1)], dim=1))
        return outputs
