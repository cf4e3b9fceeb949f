"""A family of one's own: linked records are projected, averaged, and read by a perceptron."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from securevfl.models import Family


@dataclass(frozen=True, kw_only=True)
class AverageSettings:
    """The ``[model]`` table of ``family = "average"``."""

    neighbours: int = 10
    """K, links of a row at every secondary."""

    hidden: int = 16
    """Width of a projected record."""

    party_dropout: float = 0.0
    """Share of the secondaries left out of a training round."""

    # What users of this family have no say in.
    keys_as_features: ClassVar[bool] = False
    average_positions_every: ClassVar[int] = 0

    @property
    def cut_shape(self) -> tuple[int, int]:
        """K projected records a row."""
        return self.neighbours, self.hidden


class AverageBottom(nn.Module):
    """A secondary's half: every linked record alone."""

    recordwise = True

    def __init__(self, num_features: int, hidden: int) -> None:
        super().__init__()
        self.project = nn.Linear(num_features, hidden)
        self.positions = nn.Identity()

    def forward(self, features: Tensor, keys: Tensor, present: Tensor) -> Tensor:
        """Return (rows, K, hidden), with zeros where a row has no link."""
        projected: Tensor = self.project(features)
        return projected * present.unsqueeze(-1)


class AverageTop(nn.Module):
    """The primary's half: its own features beside the average of the projected records."""

    def __init__(self, num_features: int, hidden: int, outputs: int) -> None:
        super().__init__()
        self.perceptron = nn.Sequential(
            nn.Linear(num_features + hidden, 32), nn.ReLU(), nn.Linear(32, outputs)
        )
        self.positions = nn.Identity()

    def forward(
        self, features: Tensor, keys: Tensor, aggregate: Tensor, similarities: Tensor | None
    ) -> Tensor:
        """Return (rows, outputs)."""
        outputs: Tensor = self.perceptron(torch.cat([features, aggregate.mean(dim=1)], dim=1))
        return outputs


class AverageFamily(Family[AverageSettings]):
    """``family = "average"``."""

    name = "average"
    settings_class = AverageSettings

    def build_bottom(
        self,
        settings: AverageSettings,
        *,
        num_features: int,
        key_dim: int,
        feature_names: Sequence[str] = (),
        frozen: bool = False,
    ) -> nn.Module:
        """Return a secondary's half; it may stay as it was drawn, so ``frozen`` changes nothing."""
        return AverageBottom(num_features, settings.hidden)

    def build_top(
        self,
        settings: AverageSettings,
        *,
        num_features: int,
        key_dim: int,
        feature_names: Sequence[str] = (),
        outputs: int,
        classes: bool = False,
    ) -> nn.Module:
        """Return the primary's half."""
        return AverageTop(num_features, settings.hidden, outputs)
