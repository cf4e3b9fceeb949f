"""A top model without attention, for releases that are mostly noise."""

from typing import Any, Final

import torch
from jaxtyping import Float
from torch import Tensor, nn

from securevfl.models.dropout import ByteDropout
from securevfl.models.fet.fet_config import FeTConfig
from securevfl.models.mlp import MLP

_OWN_WIDTHS: Final = (128, 64)
_JOINT_WIDTHS: Final = (128,)
_DROPPED_AGGREGATE: Final = 0.3


class RunningScale(nn.Module):
    """Bring every coordinate to mean 0 and deviation 1 by the training rows seen so far."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.count: Tensor
        self.total: Tensor
        self.squares: Tensor
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))
        self.register_buffer("total", torch.zeros(width, dtype=torch.float64))
        self.register_buffer("squares", torch.zeros(width, dtype=torch.float64))

    def forward(self, inputs: Float[Tensor, "batch width"]) -> Float[Tensor, "batch width"]:
        """Return the scaled inputs; in training they count for later ones too."""
        if self.training:
            with torch.no_grad():
                exact = inputs.detach().double()
                self.count += len(exact)
                self.total += exact.sum(dim=0)
                self.squares += exact.square().sum(dim=0)
        mean = self.total / self.count.clamp_min(1)
        variance = (self.squares / self.count.clamp_min(1) - mean.square()).clamp_min(0)
        # A constant coordinate, such as that of a party without links, stays at 0.
        deviation = torch.where(variance > 0, variance.sqrt(), torch.ones_like(variance))
        return ((inputs - mean) / deviation).to(inputs.dtype)


class AdditiveTop(nn.Module):
    """Own evidence, plus linear evidence of the aggregate, plus what both say together.

    If secondaries' vectors are independent given the label and their noise is large and Gaussian,
    the label's log-odds are those of the primary's own row plus a linear function of the aggregate.
    That part is a term of its own here; a perceptron over both adds what is not linear.

    An addition to the paper. One position without attention is all that a pooled release has.
    """

    def __init__(self, config: FeTConfig, *, num_features: int, key_dim: int, outputs: int) -> None:
        super().__init__()
        self.keys_as_features = config.keys_as_features
        inputs = num_features + (key_dim if config.keys_as_features else 0)
        positions, width = config.cut_shape
        aggregate = positions * width
        self.positions = nn.Identity()
        self.scale = RunningScale(aggregate)
        self.own = MLP(inputs, _OWN_WIDTHS[:-1], _OWN_WIDTHS[-1], dropout=config.dropout)
        self.own_output = nn.Linear(_OWN_WIDTHS[-1], outputs)
        self.linear = nn.Linear(aggregate, outputs)
        self.drop = ByteDropout(_DROPPED_AGGREGATE)
        self.joint = MLP(
            _OWN_WIDTHS[-1] + aggregate, _JOINT_WIDTHS, outputs, dropout=_DROPPED_AGGREGATE
        )

    def forward(
        self,
        features: Float[Tensor, "batch features"],
        keys: Float[Tensor, "batch dimension"],
        aggregate: Float[Tensor, "batch positions width"],
        similarities: Float[Tensor, "batch secondaries links"] | None = None,  # noqa: ARG002
    ) -> Float[Tensor, "batch outputs"]:
        """Return the outputs of a batch."""
        inputs = torch.cat([features, keys], dim=1) if self.keys_as_features else features
        own = nn.functional.gelu(self.own(inputs))
        released = self.drop(self.scale(aggregate.flatten(1)))
        out: Tensor = self.own_output(own) + self.linear(released)
        return out + self.joint(torch.cat([own, released], dim=1))

    def explain(
        self,
        features: Float[Tensor, "batch features"],  # noqa: ARG002
        keys: Float[Tensor, "batch dimension"],  # noqa: ARG002
        aggregate: Float[Tensor, "batch positions width"],  # noqa: ARG002
        similarities: Float[Tensor, "batch secondaries links"] | None,  # noqa: ARG002
    ) -> dict[str, Any]:
        """Return why there is no picture."""
        return {"notes": ["an additive top model attends to no link"]}
