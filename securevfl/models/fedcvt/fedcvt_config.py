"""Settings of FedCVT."""

from dataclasses import dataclass

from securevfl.core import checks


@dataclass(frozen=True, kw_only=True, slots=True)
class FedCVTConfig:
    """How the two parties and their three classifiers are trained."""

    hidden: int = 128
    """Width of an encoder's first layer, in a comparison."""

    width: int = 128
    """Width of a representation, in a comparison."""

    epochs: int = 40
    """Passes over the labelled rows, at least."""

    least_steps: int = 200
    """Optimizer steps, at least."""

    batch_size: int = 128
    """Rows of a step from each of: labelled, aligned, the primary's own, the secondary's own."""

    learning_rate: float = 1e-3
    """Step size of AdamW."""

    weight_decay: float = 1e-4
    """Decoupled weight decay."""

    sharpening: float = 0.1
    """Temperature of the attention that estimates a missing representation."""

    confidence: float = 0.5
    """Least probability at each of the three classifiers for a row to get a label from them."""

    common: float = 0.1
    """Weight of: common representations of one row are equal at both parties."""

    distinct: float = 0.1
    """Weight of: a party's common and unique representations are orthogonal."""

    estimation: float = 0.1
    """Weight of: aligned rows' estimated representations are their real ones."""

    def __post_init__(self) -> None:
        checks.within(1, checks.MOST_WIDTH, hidden=self.hidden, width=self.width)
        checks.within(1, checks.MOST_TIMES, epochs=self.epochs, least_steps=self.least_steps)
        checks.within(2, checks.MOST_TIMES, batch_size=self.batch_size)
        checks.positive(learning_rate=self.learning_rate, sharpening=self.sharpening)
        checks.fraction(confidence=self.confidence)
        checks.non_negative(
            weight_decay=self.weight_decay,
            common=self.common,
            distinct=self.distinct,
            estimation=self.estimation,
        )

    def passes(self, labelled: int) -> int:
        """Return how often so many labelled rows are passed over."""
        batches = -(-labelled // self.batch_size)
        return max(self.epochs, -(-self.least_steps // batches))
