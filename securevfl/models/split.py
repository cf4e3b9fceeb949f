"""The two halves of a split network, as every model family must offer them.

B = rows of a batch, K = links of a row, S = secondaries, F = features, D = key dimension,
L = positions and H = width of a representation, O = outputs.
"""

from typing import Any, Literal, Protocol, runtime_checkable

from jaxtyping import Bool, Float, Int64
from torch import Tensor, nn


@runtime_checkable
class Bottom(Protocol):
    """A secondary's half: a row's linked records in, the row's representation out."""

    positions: nn.Module
    """Its positional encoding, whose parameters parties may average; it may have none."""

    recordwise: bool
    """Whether position j depends on link j's record alone. Then L = K, and absent links are zero.

    Only such a model may be pooled behind a clip of each record, which is what makes one record's
    influence on a row 2C/K instead of 2C.
    """

    def __call__(
        self,
        features: Float[Tensor, "batch links features"],
        keys: Float[Tensor, "batch links dimension"],
        present: Bool[Tensor, "batch links"],
    ) -> Float[Tensor, "batch positions width"]:
        """Return the representation of a batch.

        Args:
            features: The linked records' features; rows of absent links hold anything finite.
            keys: The linked records' keys, likewise.
            present: Which links there are.
        """
        ...


@runtime_checkable
class DistinctBottom(Protocol):
    """A bottom model that can take each record of a batch once, however many rows link to it."""

    def of_distinct(
        self,
        features: Float[Tensor, "records features"],
        keys: Float[Tensor, "records dimension"],
        place: Int64[Tensor, "batch links"],
        present: Bool[Tensor, "batch links"],
    ) -> Float[Tensor, "batch positions width"]:
        """Return what the model makes of ``features[place]``, ``keys[place]`` and ``present``.

        Args:
            features: Features of the batch's records, each once.
            keys: Their keys.
            place: Which of them stands at each link; absent links have one of zeros.
            present: Which links there are.
        """
        ...


@runtime_checkable
class StackableBottom(Protocol):
    """A bottom model that ``torch.func.vmap`` can compute for many secondaries at once.

    It has no buffers, asks for no value (``if x.sum() > 0``), and draws by
    :class:`securevfl.models.layers.ByteDropout` alone.
    """

    stackable: Literal[True]


@runtime_checkable
class Top(Protocol):
    """The primary's half: its own rows and the aggregate in, the task's outputs out."""

    positions: nn.Module
    """Its positional encoding, whose parameters parties may average; it may have none."""

    def __call__(
        self,
        features: Float[Tensor, "batch features"],
        keys: Float[Tensor, "batch dimension"],
        aggregate: Float[Tensor, "batch positions width"],
        similarities: Float[Tensor, "batch secondaries links"] | None,
    ) -> Float[Tensor, "batch outputs"]:
        """Return the outputs: logits for classes, standardised values for a regression.

        Args:
            features: The rows' own features.
            keys: The rows' keys.
            aggregate: What SplitAvg gave for them.
            similarities: How near each of their links is, at every active secondary; NaN where a
                slot holds no record. None where the family does not need them.
        """
        ...


@runtime_checkable
class Explained(Protocol):
    """A top model that can tell what it makes of a batch."""

    def explain(
        self,
        features: Float[Tensor, "batch features"],
        keys: Float[Tensor, "batch dimension"],
        aggregate: Float[Tensor, "batch positions width"],
        similarities: Float[Tensor, "batch secondaries links"] | None,
    ) -> dict[str, Any]:
        """Return lists of numbers by name, for the report's plots; arguments as of :class:`Top`."""
        ...


@runtime_checkable
class ExplainedBottom(Protocol):
    """A bottom model that can tell its own party what it makes of links."""

    def explain(
        self,
        features: Float[Tensor, "batch links features"],
        keys: Float[Tensor, "batch links dimension"],
        present: Bool[Tensor, "batch links"],
    ) -> dict[str, Any]:
        """Return lists of numbers by name; arguments as of :class:`Bottom`.

        They are the party's own, and stay in its folder: nothing protects them.
        """
        ...
