"""A frozen encoder of few numbers: the direction of a record's projection, in a block of its own.

What a release can carry is bounded by the clip norm over the noise, not by its width. So every
record is given the full length, C, and only its direction speaks; and every secondary may have
coordinates of the sum to itself, which then reads as one vector after the other.
"""

from typing import Final

import numpy as np
import torch
from jaxtyping import Bool, Float, Float64
from torch import Tensor, nn

# A record at the centre has no direction; this keeps it at zero.
_SHORTEST: Final = 1e-12


class Projection(nn.Module):
    """``(x - centre) projection``; random, drawn without any data, until :meth:`fit` is called."""

    def __init__(self, *, num_features: int, components: int) -> None:
        super().__init__()
        self.centre: Tensor
        self.projection: Tensor
        self.register_buffer("centre", torch.zeros(num_features))
        self.register_buffer("projection", torch.zeros(num_features, components))
        self.draw(torch.Generator().manual_seed(0))

    def draw(self, generator: torch.Generator) -> None:
        """Draw a random projection; public randomness, no secret."""
        self.projection.normal_(generator=generator)

    def fit(
        self,
        *,
        centre: Float64[np.ndarray, " features"],
        projection: Float64[np.ndarray, "features components"],
    ) -> None:
        """Take a projection that was fitted, in place of the random one."""
        self.centre.copy_(torch.from_numpy(centre))
        self.projection.copy_(torch.from_numpy(projection))

    def forward(
        self, features: Float[Tensor, "*records features"]
    ) -> Float[Tensor, "*records components"]:
        """Return each record's projection."""
        projected: Tensor = (features - self.centre) @ self.projection
        return projected


class DirectionBottom(nn.Module):
    """``length * v / |v|`` with ``v`` a function of the record, in one block; zero elsewhere."""

    recordwise = True

    def __init__(
        self, encode: nn.Module, *, components: int, width: int, offset: int, length: float
    ) -> None:
        """Make an encoder.

        Args:
            encode: Features of a record to ``v``; :class:`Projection` or a network.
            components: Numbers of ``v``, >= 1.
            width: H, of the representation; what is not written is zero.
            offset: Where the block starts, at most ``width - components``.
            length: Norm of every record's vector.
        """
        super().__init__()
        self.encode = encode
        self.components = components
        self.width = width
        self.offset = offset
        self.length = length
        self.positions = nn.Identity()

    @torch.no_grad()
    def forward(
        self,
        features: Float[Tensor, "batch links features"],
        keys: Float[Tensor, "batch links dimension"],  # noqa: ARG002
        present: Bool[Tensor, "batch links"],
    ) -> Float[Tensor, "batch links width"]:
        """Return one vector for each link, zero where there is none."""
        vectors: Tensor = self.encode(features)
        norm = torch.linalg.vector_norm(vectors, dim=-1, keepdim=True)
        vectors = vectors * (self.length / norm.clamp_min(_SHORTEST) * present.unsqueeze(-1))
        out = vectors.new_zeros(*vectors.shape[:-1], self.width)
        out[..., self.offset : self.offset + self.components] = vectors
        return out


def principal_projection(
    covariance: Float64[np.ndarray, "features features"], components: int, *, spread: float
) -> Float64[np.ndarray, "features components"]:
    """Return the leading eigenvectors over the root of their eigenvalues.

    Eigenvalues count as no less than what noise alone would give, so that directions of noise are
    not blown up. Signs are fixed by each vector's largest entry.

    Args:
        covariance: Symmetric; noise may have made it indefinite.
        components: How many, at most the number of features.
        spread: About the largest eigenvalue of the noise in ``covariance``, >= 0.
    """
    values, vectors = np.linalg.eigh(covariance)
    values, vectors = values[::-1][:components], vectors[:, ::-1][:, :components]
    largest = np.take_along_axis(vectors, np.abs(vectors).argmax(axis=0)[None], axis=0)
    floor = max(spread, 1e-6 * float(np.abs(values).max(initial=0.0)), _SHORTEST)
    return vectors * np.sign(largest) / np.sqrt(np.maximum(values, floor))
