"""A frozen encoder: random features of one record, drawn without any data."""

import math
from typing import Literal, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn


@runtime_checkable
class FrozenSettings(Protocol):
    """What a frozen encoder needs to know, of any family."""

    @property
    def hidden(self) -> int:
        """H, width of a representation."""
        ...

    @property
    def keys_as_features(self) -> bool:
        """Whether keys are inputs beside the features."""
        ...

    @property
    def frozen_map(self) -> Literal["fourier", "linear"]:
        """Cosines, or a projection."""
        ...

    @property
    def frozen_bandwidth(self) -> float:
        """Length scale of the cosines, relative to sqrt(inputs)."""
        ...


class FrozenBottom(nn.Module):
    """Map each linked record alone, by weights that no data ever touched.

    Position j is a function of link j's record and of nothing else: no attention among links, no
    normalisation across rows or records, no learning. That is what per-row sensitivities need
    (docs/privacy.md, section 4); what remains to be promised rests on the clip and the noise.

    With x the record's F inputs and G a matrix of standard normals,

        fourier:  sqrt(2/H) cos(G x / (bandwidth sqrt(F)) + b),   b uniform in [0, 2 pi)
        linear:   G x / sqrt(F)

    References:
        [RR07] Rahimi and Recht, Random Features for Large-Scale Kernel Machines, Algorithm 1.
    """

    recordwise = True

    def __init__(self, config: FrozenSettings, *, num_features: int, key_dim: int) -> None:
        super().__init__()
        self.kind = config.frozen_map
        self.bandwidth = config.frozen_bandwidth
        self.keys_as_features = config.keys_as_features
        inputs = num_features + (key_dim if config.keys_as_features else 0)
        self.projection: Tensor
        self.phase: Tensor
        self.register_buffer("projection", torch.zeros(inputs, config.hidden))
        self.register_buffer("phase", torch.zeros(config.hidden))
        self.positions = nn.Identity()
        self.draw(torch.Generator().manual_seed(0))

    def draw(self, generator: torch.Generator) -> None:
        """Draw the projection and the phases; public randomness, no secret."""
        inputs, _ = self.projection.shape
        scale = self.bandwidth if self.kind == "fourier" else 1.0
        self.projection.normal_(0.0, 1 / (scale * math.sqrt(inputs)), generator=generator)
        self.phase.uniform_(0.0, 2 * math.pi, generator=generator)

    @torch.no_grad()
    def forward(
        self,
        features: Float[Tensor, "batch links features"],
        keys: Float[Tensor, "batch links dimension"],
        present: Bool[Tensor, "batch links"],
    ) -> Float[Tensor, "batch links width"]:
        """Return one vector for each link, zero where there is none."""
        inputs = torch.cat([features, keys], dim=-1) if self.keys_as_features else features
        mapped = inputs @ self.projection
        if self.kind == "fourier":
            mapped = (mapped + self.phase).cos_() * math.sqrt(2 / mapped.shape[-1])
        return mapped * present.unsqueeze(-1)
