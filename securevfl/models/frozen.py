"""Frozen encoders: class means, scores and random features of a record.

A release is a sum over secondaries. If all of them use the same coordinates, one for each class,
signals that agree add up, and the noise is added once.

The information in a release is bounded by the ratio of clip norm and noise, not by its width. So
every record's vector has the full length C and carries information by its direction only.
Secondaries may also have separate coordinates: the sum then concatenates their vectors.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal, Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float, Float64, Int64
from torch import Tensor, nn

from securevfl.models.family import Present, RecordFeatures, RecordKeys

MOST_FEATURES: Final = 4096
"""Most features of a record with class means: class sums have a number for each of them."""

_MOST_LENGTH: Final = 6
_SMALLEST: Final = 1e-12


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RecordShape:
    """Which features of a record are words of one column: at most one of those is there."""

    features: int
    """d, features of a record."""
    words: Sequence[Sequence[int]] = ()
    """Places of the features of each column of words."""

    @property
    def word_places(self) -> Int64[np.ndarray, " words"]:
        """Places of all words, column by column."""
        return np.array([place for places in self.words for place in places], dtype=np.int64)

    @property
    def word_counts(self) -> Int64[np.ndarray, " words"]:
        """Number of words in the column of each word."""
        return np.array([len(column) for column in self.words for _ in column], dtype=np.int64)

    @property
    def word_lengths(self) -> Float64[np.ndarray, " words"]:
        """Length that each word has in class sums, of a column of L words ``0.8 sqrt(min(L, 6))``.

        So no column of words takes more of a record's length than L numbers do, or six: longer
        ones would add to the noise in numbers more than they take off the noise in words.
        """
        return 0.8 * np.sqrt(np.minimum(self.word_counts, _MOST_LENGTH))

    @property
    def plain_places(self) -> Int64[np.ndarray, " plain"]:
        """Places of all other features."""
        return np.setdiff1d(np.arange(self.features), self.word_places)

    def arrange(
        self, features: Float[np.ndarray, "records features"]
    ) -> Float64[np.ndarray, "records features"]:
        """Return records as class sums take them: numbers, then words, 0 or of their lengths.

        Args:
            features: Within [-1, 1], words at either end.
        """
        words = (features[:, self.word_places] + 1) / 2 * self.word_lengths
        return np.concatenate([features[:, self.plain_places], words], axis=1, dtype=np.float64)

    def restore(self, directions: "Directions") -> "Directions":
        """Return a map of arranged records as the same map of features."""
        plain, words = self.plain_places, self.word_places
        centre, weights = np.empty(self.features), np.empty_like(directions.weights)
        centre[plain], centre[words] = np.split(directions.centre, [len(plain)])
        weights[plain], weights[words] = np.split(directions.weights, [len(plain)])
        centre[words] = 2 * centre[words] / self.word_lengths - 1
        weights[words] *= self.word_lengths[:, None] / 2
        return Directions(centre=centre, weights=weights)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Directions:
    """Affine map of a record ``x`` to one score for each class: ``(x - centre) weights``."""

    centre: Float64[np.ndarray, " features"]
    weights: Float64[np.ndarray, "features classes"]


def class_directions(
    counts: Float64[np.ndarray, " bins"],
    means: Float64[np.ndarray, "bins features"],
) -> Directions:
    """Return the directions from the mean of all rows to the mean of each class.

    Args:
        counts: Number of rows of each class, then of rows without a class; at least 1 each.
        means: Mean of each class; any values for a class without rows.
    """
    centre = counts @ means / counts.sum()
    return Directions(centre=centre, weights=(means[:-1] - centre).T)


COLUMN_EDGES: Final = np.unique(
    np.concatenate(
        [np.linspace(-1, 1, 33), *(sign * (1 - 2.0 ** -np.arange(5, 15)) for sign in (-1, 1))]
    )
)
"""Edges of the cells in which a column's records are counted, in [-1, 1]: finer at both ends, where
skewed amounts are dense."""

SCORE_EDGES: Final = np.linspace(-1, 1, 65)
"""Edges of the cells in which records are counted by score."""

_LEAST_RANK: Final = 0.01
LARGEST_SCORE: Final = statistics.NormalDist().inv_cdf(1 - _LEAST_RANK)
"""Normal score of the largest rank: a value of the full length stands for it."""


class PiecewiseLinear(nn.Module):
    """Piecewise linear map of each column through heights at the centres of cells."""

    def __init__(self, edges: Float64[np.ndarray, " edges"], *, columns: int) -> None:
        super().__init__()
        self.centres: Tensor
        self.heights: Tensor
        self.register_buffer("centres", torch.from_numpy((edges[:-1] + edges[1:]) / 2))
        self.register_buffer("heights", torch.zeros(columns, len(edges) - 1, dtype=torch.float64))

    def forward(
        self, values: Float64[Tensor, "*records columns"]
    ) -> Float64[Tensor, "*records columns"]:
        """Return the heights at the values; constant beyond the outermost centres."""
        # A sum over cells instead of a search, since that can be exported.
        widths = self.centres[1:] - self.centres[:-1]
        slopes = (self.heights[:, 1:] - self.heights[:, :-1]) / widths
        along = (values.unsqueeze(-1) - self.centres[:-1]).clamp_min(0).minimum(widths)
        return self.heights[:, 0] + (along * slopes).sum(dim=-1)


class ScoreBottom(nn.Module):
    """Encoder of a record as one number, the normal score of its rank.

    An addition to the papers, for two classes. A record's score is the log odds of naive Bayes:
    numbers are mapped to normal quantiles through noised distribution functions, so that a skewed
    amount counts by its rank, and weigh by the difference of the two class means; a word adds the
    log odds of the records that have it. The score's noised rank r, from 0.01 to 0.99, becomes
    ``length Phi^-1(r) / Phi^-1(0.99)``. Under a promise that number's cell is released
    (:mod:`securevfl.dp.symbols`), else the number.
    """

    recordwise = True

    def __init__(
        self, shape: RecordShape, *, length: float, limit: float = 1.0, above: float = 0.0
    ) -> None:
        """Build an encoder that gives every record the number 0 until it is fitted.

        Args:
            shape: Shape of a record.
            length: Largest absolute number of a record.
            limit: Largest absolute feature that counts.
            above: Value above which a word's feature says that the word is there.
        """
        super().__init__()
        self.shape = shape
        self.length = length
        self.limit = limit
        self.above = above
        plain, words = shape.plain_places, shape.word_places
        self.plain: Tensor
        self.words: Tensor
        self.weights: Tensor
        self.radius: Tensor
        self.reach: Tensor
        self.register_buffer("plain", torch.from_numpy(plain))
        self.register_buffer("words", torch.from_numpy(words))
        self.lengths: Tensor
        self.register_buffer("lengths", torch.from_numpy(shape.word_lengths))
        self.register_buffer("weights", torch.zeros(shape.features, dtype=torch.float64))
        self.register_buffer("radius", torch.ones((), dtype=torch.float64))
        self.register_buffer("reach", torch.ones((), dtype=torch.float64))
        self.columns = PiecewiseLinear(COLUMN_EDGES, columns=len(plain))
        self.ranks = PiecewiseLinear(SCORE_EDGES, columns=1)
        self.positions = nn.Identity()

    def numbers(
        self, features: Float[Tensor, "*records features"]
    ) -> Float64[Tensor, "*records plain"]:
        """Return the features that are no words; most are in [-1, 1]."""
        return features.index_select(-1, self.plain).double() / self.limit

    def fit_columns(self, ranks: Float64[np.ndarray, "plain cells"]) -> None:
        """Set the noised ranks of the columns' cells, between :data:`COLUMN_EDGES`."""
        self.columns.heights.copy_(_normal_scores(ranks))

    def records(
        self, features: Float[Tensor, "*records features"]
    ) -> Float64[Tensor, "*records features"]:
        """Return the records: normal quantiles of numbers, then lengths of words that are there."""
        mapped: Tensor = self.columns(self.numbers(features))
        there = (features.index_select(-1, self.words) > self.above).double() * self.lengths
        return torch.cat([mapped, there], dim=-1)

    def fit_weights(
        self,
        counts: Float64[np.ndarray, "classes"],
        means: Float64[np.ndarray, "classes features"],
        *,
        radius: float,
        noise_std: float,
    ) -> None:
        """Set each number's weight in the score, from noised statistics of two classes.

        A difference w of means, of variance s^2 by sampling and noise where it should be 0, is
        multiplied by ``w^2 / (w^2 + s^2)``, as Wiener's filter has it. A word's log odds are drawn
        towards none by 2 more rows of all classes' odds, and by as many as make noise's variance in
        them at most 1, that of log odds which are worth a word: ``s^2 / n (1/r^2 + 1/(1 - r)^2)``
        with noise s in a count, n rows a word, and r the share of the second class.

        Args:
            counts: Rows of each class, at least 1.
            means: Mean record of each class; see :meth:`records`.
            radius: Largest length of a record's numbers.
            noise_std: Deviation of the noise in each class's sum of a number.
        """
        plain = len(self.plain)
        weights = means[1] - means[0]
        lengths = self.shape.word_lengths
        numbers, sums = weights[:plain], means[:, plain:] * counts[:, None] / lengths
        variance = (1 / counts).sum() + np.square(noise_std / counts).sum()
        numbers *= np.square(numbers) / (np.square(numbers) + variance)
        share = counts[1] / counts.sum()
        noise = np.square(noise_std / lengths) * (1 / share**2 + 1 / (1 - share) ** 2)
        drawn = 2 + noise * self.shape.word_counts / counts.sum()
        first, second = np.maximum(sums, 0)
        odds = (second + drawn * share) / (first + drawn * (1 - share))
        weights[plain:] = np.log(odds * (1 - share) / share) / lengths
        self.weights.copy_(torch.from_numpy(weights))
        self.radius.fill_(radius)
        ends = np.cumsum([len(column) for column in self.shape.words])[:-1]
        by_column = np.split(np.abs(weights[plain:] * lengths), ends)
        largest = sum(float(column.max(initial=0.0)) for column in by_column)
        self.reach.fill_(max(radius * float(np.linalg.norm(numbers)) + largest, _SMALLEST))

    def scores(
        self, features: Float[Tensor, "*records features"]
    ) -> Float64[Tensor, "*records one"]:
        """Return each record's score, relative to the largest possible score."""
        records = self.records(features)
        plain = len(self.plain)
        numbers, words = records[..., :plain], records[..., plain:]
        norm = torch.linalg.vector_norm(numbers, dim=-1, keepdim=True)
        cut = numbers * (self.radius / torch.maximum(norm, self.radius))
        scores = cut @ self.weights[:plain] + words @ self.weights[plain:]
        return (scores / self.reach).unsqueeze(-1)

    def fit_ranks(self, ranks: Float64[np.ndarray, "one cells"]) -> None:
        """Set the noised ranks of the scores' cells, between :data:`SCORE_EDGES`."""
        self.ranks.heights.copy_(_normal_scores(ranks))

    @torch.no_grad()
    def forward(
        self, features: RecordFeatures, keys: RecordKeys, present: Present
    ) -> Float[Tensor, "batch links 1"]:
        """Return one number for each link, zero for absent links."""
        scores: Tensor = self.ranks(self.scores(features))
        numbers = (scores * (self.length / LARGEST_SCORE)).to(features.dtype)
        return numbers * present.unsqueeze(-1)


def _normal_scores(
    ranks: Float64[np.ndarray, "columns cells"],
) -> Float64[Tensor, "columns cells"]:
    inner = np.clip(ranks, _LEAST_RANK, 1 - _LEAST_RANK)
    return torch.special.ndtri(torch.from_numpy(inner))


# A record at the centre has no direction and becomes zero.
_SHORTEST: Final = 1e-12


class Projection(nn.Module):
    """Affine map ``(x - centre) projection``; random and independent of data until :meth:`fit`."""

    def __init__(self, *, num_features: int, components: int) -> None:
        super().__init__()
        self.centre: Tensor
        self.projection: Tensor
        self.register_buffer("centre", torch.zeros(num_features))
        self.register_buffer("projection", torch.zeros(num_features, components))
        self.draw(torch.Generator().manual_seed(0))

    def draw(self, generator: torch.Generator) -> None:
        """Draw a random projection, which is public."""
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
    """Encoder ``length * v / |v|`` in a block of coordinates; ``v`` is a function of the record."""

    recordwise = True

    def __init__(
        self,
        encode: Projection,
        shape: RecordShape,
        *,
        components: int,
        width: int,
        offset: int,
        length: float,
    ) -> None:
        """Build an encoder.

        Args:
            encode: Maps features of a record to ``v``.
            shape: Shape of a record.
            components: Width of ``v``, >= 1.
            width: H, width of the representation; zero outside the block.
            offset: Start of the block, at most ``width - components``.
            length: Norm of every record's vector.
        """
        super().__init__()
        self.encode = encode
        self.shape = shape
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
    """Return the leading eigenvectors, each divided by the root of its eigenvalue.

    Eigenvalues below the noise's are raised to it, so that directions of noise are not amplified.
    Signs make each vector's largest entry positive.

    Args:
        covariance: Symmetric; may be indefinite, with much noise.
        components: Number of eigenvectors, at most the number of features.
        spread: Approximate largest eigenvalue of the noise in ``covariance``, >= 0.
    """
    values, vectors = np.linalg.eigh(covariance)
    values, vectors = values[::-1][:components], vectors[:, ::-1][:, :components]
    largest = np.take_along_axis(vectors, np.abs(vectors).argmax(axis=0)[None], axis=0)
    floor = max(spread, 1e-6 * float(np.abs(values).max(initial=0.0)), _SHORTEST)
    return vectors * np.sign(largest) / np.sqrt(np.maximum(values, floor))


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

    Position j depends on link j's record only: no attention among links, no normalisation across
    rows or records, no training, as per-row sensitivities require (docs/privacy.md, section 4).

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
        """Draw the projection and the phases, which are public."""
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
