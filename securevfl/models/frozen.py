"""Frozen encoders: normalised projections of a record, and random features.

A release is a sum. If every secondary writes into the same coordinates, one for each class, signals
that agree add up, and the noise is added once.

The information in a release is bounded by the clip norm over the noise, not by its width. So every
record's vector has the full length C and carries information by its direction only. Secondaries may
also have separate coordinates of the sum, which then concatenates their vectors.
"""

import math
from dataclasses import dataclass
from typing import Final, Literal, Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float, Float64
from torch import Tensor, nn

from securevfl.models.family import Present, RecordFeatures, RecordKeys

# Class-mean encoder: directions between classes, fitted to noised class means.

MOST_NUMBERS: Final = 60
"""Most features of a record without projection; noised means get worse with more features."""
PROJECTED: Final = 24
"""Width of a projected record."""

_SMALLEST: Final = 1e-12


def public_projection(features: int, *, seed: int) -> Float64[np.ndarray, "features numbers"]:
    """Return orthonormal directions for projecting a record; drawn without data.

    Args:
        features: Features of a record; up to :data:`MOST_NUMBERS` the identity is returned.
        seed: A public seed.
    """
    if features <= MOST_NUMBERS:
        return np.eye(features)
    drawn = np.random.default_rng(seed).normal(size=(features, PROJECTED))
    return np.linalg.qr(drawn)[0]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Directions:
    """Affine map of a record ``x`` to one score for each class: ``(x - centre) weights``."""

    centre: Float64[np.ndarray, " features"]
    weights: Float64[np.ndarray, "features classes"]


def class_directions(
    counts: Float64[np.ndarray, " bins"],
    means: Float64[np.ndarray, "bins features"],
    *,
    covariance: Float64[np.ndarray, "features features"] | None = None,
    spread: float = 0.0,
) -> Directions:
    """Return the directions from the mean of all rows to the mean of each class.

    Args:
        counts: Rows of each class, and last of those without a class; at least 1 each.
        means: Mean of each class; any values for a class without rows.
        covariance: Covariance of the records for whitening, as in linear discriminant analysis.
            None: differences of means.
        spread: Approximate largest eigenvalue of the noise in ``covariance``, >= 0.

    References:
        [HTF09] Hastie, Tibshirani and Friedman, The Elements of Statistical Learning, section
        4.3: between classes of one covariance, the linear discriminant's direction is the
        difference of means times its inverse.
    """
    centre = counts @ means / counts.sum()
    weights = (means[:-1] - centre).T
    if covariance is not None:
        values, vectors = np.linalg.eigh(covariance)
        floor = max(spread, 1e-3 * float(values.max(initial=0.0)), _SMALLEST)
        weights = vectors @ ((vectors.T @ weights) / np.maximum(values, floor)[:, None])
    return Directions(centre=centre, weights=weights)


# Direction of a record's projection, in a separate block of coordinates.

# A record at the centre has no direction, and stays zero.
_SHORTEST: Final = 1e-12


class Projection(nn.Module):
    """``(x - centre) projection``; random and independent of data until :meth:`fit` is called."""

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
        """Replace the random projection by a fitted one."""
        self.centre.copy_(torch.from_numpy(centre))
        self.projection.copy_(torch.from_numpy(projection))

    def forward(
        self, features: Float[Tensor, "*records features"]
    ) -> Float[Tensor, "*records components"]:
        """Return each record's projection."""
        projected: Tensor = (features - self.centre) @ self.projection
        return projected


class DirectionBottom(nn.Module):
    """Encoder ``length * v / |v|``, with ``v`` a function of the record; zero outside its block."""

    recordwise = True

    def __init__(
        self, encode: Projection, *, components: int, width: int, offset: int, length: float
    ) -> None:
        """Make an encoder.

        Args:
            encode: Maps features of a record to ``v``.
            components: Width of ``v``, >= 1.
            width: H, width of the representation; zero outside the block.
            offset: Start of the block, at most ``width - components``.
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
        self, features: RecordFeatures, keys: RecordKeys, present: Present
    ) -> Float[Tensor, "batch links width"]:
        """Return one vector for each link, zero for absent links."""
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

    Eigenvalues are raised to those of the noise, so that directions of noise are not amplified.
    Signs are fixed by each vector's largest entry.

    Args:
        covariance: Symmetric; indefinite under much noise.
        components: Number of eigenvectors, at most the number of features.
        spread: Approximate largest eigenvalue of the noise in ``covariance``, >= 0.
    """
    values, vectors = np.linalg.eigh(covariance)
    values, vectors = values[::-1][:components], vectors[:, ::-1][:, :components]
    largest = np.take_along_axis(vectors, np.abs(vectors).argmax(axis=0)[None], axis=0)
    floor = max(spread, 1e-6 * float(np.abs(values).max(initial=0.0)), _SHORTEST)
    return vectors * np.sign(largest) / np.sqrt(np.maximum(values, floor))


# Random features of one record, drawn without any data.


@runtime_checkable
class FrozenSettings(Protocol):
    """Settings of a frozen encoder, in any family."""

    @property
    def hidden(self) -> int:
        """H, width of a representation."""
        ...

    @property
    def keys_as_features(self) -> bool:
        """Whether keys are inputs in addition to the features."""
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
    """Random features of each linked record, with weights that do not depend on data.

    Position j is a function of link j's record only: no attention among links, no normalisation
    across rows or records, no training, as per-row sensitivities require (docs/privacy.md,
    section 4).

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
        self, features: RecordFeatures, keys: RecordKeys, present: Present
    ) -> Float[Tensor, "batch links width"]:
        """Return one vector for each link, zero for absent links."""
        inputs = torch.cat([features, keys], dim=-1) if self.keys_as_features else features
        mapped = inputs @ self.projection
        if self.kind == "fourier":
            mapped = (mapped + self.phase).cos_() * math.sqrt(2 / mapped.shape[-1])
        return mapped * present.unsqueeze(-1)
