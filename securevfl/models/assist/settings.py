"""Settings of assisted boosting."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from securevfl.core import checks


@dataclass(frozen=True, kw_only=True, slots=True)
class AssistConfig:
    """The ``[model]`` table of ``family = "assist"``."""

    outputs: int = 1
    """Numbers of a score: the classes of a multiclass task, otherwise 1. Every party plans by it,
    and the primary refuses one that its labels do not have."""

    rounds: int = 4
    """T, how often the primary sends residuals and every secondary fits a model to them, at most.
    It takes the place of ``training.epochs``."""

    neighbours: int = 1
    """K, links of a row at every secondary."""

    estimator: Literal["boosting", "forest", "linear"] = "boosting"
    """What a secondary fits: ``boosting``, histogram boosting, trees for each output by itself;
    ``forest``, a random forest of trees for all outputs together, much faster with many classes;
    ``linear``, ridge regression whose penalty is chosen by generalised cross-validation."""

    trees: int = 50
    """Trees of a round's model, for each output where they are boosted."""

    leaves: int = 15
    """Leaves of a tree, at most."""

    label_epsilon: float | None = None
    """What secondaries may learn of how any one training row is labelled, all of them together and
    over all rounds: labels are randomised once, and nothing that is sent is made of others. None:
    what is sent shows labels."""

    label_lower: float | None = None
    """Least label of a regression that counts under ``label_epsilon``, in the label's own unit:
    lower ones are raised to it. Not to be taken from the labels."""

    label_upper: float | None = None
    """Largest label that counts under ``label_epsilon``; higher ones are lowered to it."""

    keys_as_features: bool = False
    """Whether a record's keys are inputs beside its features; they must be numbers then."""

    party_dropout: ClassVar[float] = 0.0
    """All secondaries take part in every round."""

    average_positions_every: ClassVar[int] = 0
    """There are no positional encodings to average."""

    @property
    def cut_shape(self) -> tuple[int, int]:
        """One score a row."""
        return 1, self.outputs

    def __post_init__(self) -> None:
        checks.within(1, checks.MOST_WIDTH, outputs=self.outputs)
        checks.within(1, checks.MOST_LINKS, neighbours=self.neighbours)
        checks.within(1, checks.MOST_TIMES, rounds=self.rounds, trees=self.trees)
        checks.within(2, checks.MOST_TIMES, leaves=self.leaves)
        checks.one_of(("boosting", "forest", "linear"), estimator=self.estimator)
        if self.label_epsilon is not None:
            checks.positive(label_epsilon=self.label_epsilon)
