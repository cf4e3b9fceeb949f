"""A family of your own: a plain torch module as every secondary's bottom model.

Where something is promised, a bottom model must treat each row alone: BatchNorm is refused.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

import securevfl as sv


@dataclass(frozen=True, kw_only=True)
class PlainSettings:
    """The ``[model]`` table."""

    neighbours: int = 2
    width: int = 8
    normalise: bool = False
    party_dropout: float = 0.0
    keys_as_features: ClassVar[bool] = False
    average_positions_every: ClassVar[int] = 0

    @property
    def cut_shape(self) -> tuple[int, int]:
        """Every row becomes one vector."""
        return 1, self.width


class PlainBottom(nn.Module):
    """A secondary's half: any module from all linked records of a row to one vector."""

    recordwise = False  # the vector depends on all linked records together

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.positions = nn.Identity()  # no positional encoding

    def forward(self, features: Tensor, keys: Tensor, present: Tensor) -> Tensor:
        """Take (rows, K, features), zeros for absent links; return (rows, 1, width)."""
        linked = (features * present.unsqueeze(-1)).flatten(1)
        return self.module(linked).unsqueeze(1)


class PlainTop(nn.Module):
    """The primary's half: a linear layer on its own features and the average."""

    def __init__(self, num_features: int, width: int, outputs: int) -> None:
        super().__init__()
        self.module = nn.Linear(num_features + width, outputs)
        self.positions = nn.Identity()

    def forward(self, features: Tensor, keys: Tensor, aggregate: Tensor, links: Any) -> Tensor:
        """Return (rows, outputs)."""
        return self.module(torch.cat([features, aggregate.flatten(1)], dim=1))


@sv.models.register
class Plain(sv.models.Family[PlainSettings]):
    """``family = "plain"``."""

    name = "plain"
    settings_class = PlainSettings

    def build_bottom(self, settings: PlainSettings, *, num_features: int, **_: Any) -> nn.Module:
        """Return your module, wrapped."""
        norm = nn.BatchNorm1d(32) if settings.normalise else nn.LayerNorm(32)
        inputs = settings.neighbours * num_features
        own = nn.Sequential(nn.Linear(inputs, 32), norm, nn.ReLU(), nn.Linear(32, settings.width))
        return PlainBottom(own)

    def build_top(self, settings: PlainSettings, **sizes: Any) -> nn.Module:
        """Return the primary's half."""
        return PlainTop(sizes["num_features"], settings.width, sizes["outputs"])


def main(rows: int = 600, epochs: int = 20) -> dict[str, Any]:
    """Train it without a promise, and show what a promise refuses; return the run's figures."""
    digits = sv.datasets.load_builtin("digits")
    table = digits.X[:rows], digits.y[:rows]
    parties = sv.datasets.split_table(*table, parties=2, key_dim=4, key_noise=0.05, seed=0)
    free = sv.dp.Privacy(mechanism="none", encoder="trained")
    training = sv.TrainingSettings(epochs=epochs)
    run = sv.simulate(parties, PlainSettings(), privacy=free, training=training)
    print(f"test accuracy {run.metrics['test']:.3f}; alone {run.metrics['alone_test']:.3f}")
    promise = sv.dp.Privacy(epsilon=8.0, delta=1e-5, encoder="dp-trained", links_per_record=1)
    try:
        sv.simulate(parties, PlainSettings(normalise=True), privacy=promise, bounds=[0.0, 16.0])
    except sv.SecureVflError as refused:
        print(f"refused: {refused}")
    return run.metrics


if __name__ == "__main__":
    main()
