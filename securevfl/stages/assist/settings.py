"""Settings of assisted boosting."""

from dataclasses import dataclass
from functools import partial
from typing import Annotated, ClassVar, Literal

from securevfl.core import checks


@dataclass(frozen=True, kw_only=True, slots=True)
class AssistConfig:
    """The ``[model]`` table of ``family = "assist"``."""

    outputs: checks.Width = 1
    """Width of a score: the classes of a multiclass task, otherwise 1. A width that does not fit
    the labels is refused."""

    rounds: checks.Times = 4
    """T, most rounds of residuals and fits. Replaces ``training.epochs``."""

    neighbours: checks.Links = 1
    """K, links of a row at every secondary."""

    estimator: Literal["boosting", "forest", "linear"] = "boosting"
    """A secondary's model: boosted trees for each output, a random forest for all outputs (faster
    with many classes), or ridge regression."""

    trees: checks.Times = 50
    """Trees of a round's model; boosted ones for each output."""

    leaves: Annotated[int, partial(checks.within, 2, checks.MOST_TIMES)] = 15
    """Leaves of a tree, at most."""

    label_epsilon: checks.Positive | None = None
    """Label-DP epsilon of one training row against all secondaries together, over all rounds:
    labels are randomised once. Not set: residuals show labels."""

    label_lower: float | None = None
    """Least label that counts under ``label_epsilon``; lower ones are raised to it. Not to be taken
    from the labels."""

    label_upper: float | None = None
    """Largest label that counts under ``label_epsilon``; higher ones are lowered to it."""

    keys_as_features: bool = False
    """Keys, which must be numbers, are inputs too."""

    party_dropout: ClassVar[float] = 0.0
    """All secondaries take part in every round."""

    average_positions_every: ClassVar[int] = 0
    """There are no positional encodings to average."""

    @property
    def cut_shape(self) -> tuple[int, int]:
        """One score a row."""
        return 1, self.outputs

    def __post_init__(self) -> None:
        checks.require_limits(self)
