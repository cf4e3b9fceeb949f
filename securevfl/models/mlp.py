"""A multi-layer perceptron, used by every family."""

from collections.abc import Sequence

from jaxtyping import Float
from torch import Tensor, nn

from securevfl.core import checks
from securevfl.models.dropout import ByteDropout


class MLP(nn.Module):
    """Linear layers with GELU and dropout between them; the last one stays linear."""

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
