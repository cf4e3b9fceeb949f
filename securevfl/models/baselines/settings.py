"""Settings of baselines: one-table models, linked models, FedCVT."""

from dataclasses import dataclass

from securevfl.core import checks
from securevfl.models.pairs import ManyLinksSettings, OneLinkSettings

# Settings of the one-table baselines.


@dataclass(frozen=True, kw_only=True, slots=True)
class BaselineConfig:
    """A perceptron on one table, and how it is trained."""

    hidden: tuple[int, ...] = (128, 64)
    """Widths of the hidden layers."""

    dropout: float = 0.1
    """Share of hidden units dropped in training."""

    epochs: int = 200
    """Passes over the training rows, at most."""

    batch_size: int = 128
    """Rows an optimizer step."""

    learning_rate: float = 3e-3
    """Step size of AdamW."""

    weight_decay: float = 1e-4
    """Decoupled weight decay."""

    patience: int = 40
    """Epochs without a better validation metric before training stops."""

    def __post_init__(self) -> None:
        widths = {f"hidden[{i}]": width for i, width in enumerate(self.hidden)}
        checks.within(1, checks.MOST_WIDTH, **widths)
        checks.within(0, checks.MOST_LAYERS, layers_of_hidden=len(self.hidden))
        checks.fraction(dropout=self.dropout)
        times = {"epochs": self.epochs, "batch_size": self.batch_size, "patience": self.patience}
        checks.within(1, checks.MOST_TIMES, **times)
        checks.positive(learning_rate=self.learning_rate)
        checks.non_negative(weight_decay=self.weight_decay)


@dataclass(frozen=True, kw_only=True, slots=True)
class BoostingConfig:
    """Trees and how they are grown."""

    iterations: int = 5000
    """Rounds of boosting, at most; one tree a class each. Validation rows end them earlier."""

    learning_rate: float = 0.1
    """Weight of a tree."""

    leaves: tuple[int, ...] = (31, 63)
    """Leaves of a tree, at most; the validation rows choose one of these."""

    patience: int = 20
    """Rounds without a better loss of the validation rows before boosting ends."""

    smallest_leaf: int = 5
    """Rows of a leaf, at least; scikit-learn's own 20 can't split twenty labelled rows."""

    def __post_init__(self) -> None:
        checks.within(1, checks.MOST_TIMES, iterations=self.iterations, patience=self.patience)
        checks.at_least(1, smallest_leaf=self.smallest_leaf)
        checks.within(1, checks.MOST_LAYERS, numbers_of_leaves=len(self.leaves))
        checks.within(
            2, checks.MOST_TIMES, **{f"leaves[{i}]": number for i, number in enumerate(self.leaves)}
        )
        checks.positive(learning_rate=self.learning_rate)


# Settings of the baselines that link.


@dataclass(frozen=True, kw_only=True, slots=True)
class Top1SimConfig(OneLinkSettings):
    """Each row with its most similar record: ``family = "top1sim"``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExactConfig(OneLinkSettings):
    """Each row with the record of the very same key, if there is one: ``family = "exact"``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AvgSimConfig(ManyLinksSettings):
    """The mean of the predictions with each of K records: ``family = "avgsim"``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FeatureSimConfig(ManyLinksSettings):
    """Like ``avgsim``, with the similarity as one more input: ``family = "featuresim"``."""


# Settings of FedCVT.


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
