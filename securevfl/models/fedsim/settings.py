"""Settings of FedSim."""

from dataclasses import dataclass
from typing import Final, Literal

from securevfl.core import checks
from securevfl.core.errors import ConfigError
from securevfl.models.layers import STEEPEST
from securevfl.models.pairs import ManyLinksSettings

_KERNEL: Final = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class FedSimConfig(ManyLinksSettings):
    """The ``[model]`` table of a federation with ``family = "fedsim"``; all parties share it.

    References:
        [FedSim] section 4.2 and appendix E.
    """

    weight: Literal["per-output", "learned", "similarity", "none"] = "per-output"
    """Weight gate: the similarity model's weights, one for each output of a pair, or one for all of
    them as in the paper (``learned``); similarities themselves; or none."""

    similarity_width: int = 10
    """Units of the similarity model's hidden layer."""

    sort: Literal["similarity", "weight", "none"] = "similarity"
    """Sort gate: most similar first, heaviest first, or an arbitrary order, drawn afresh.

    Links arrive nearest first; without the gate a merge gate must not see that order.
    """

    merge: Literal["residual", "convolution", "perceptron", "average"] = "residual"
    """Merge gate: a mean over places of the sorted links with the paper's convolution as its
    correction; the paper's convolution over neighbouring links alone; a perceptron of as many
    weights over all of them; or their mean."""

    rank_decay: float = 1.0
    """How far near links start ahead in ``residual``'s mean: place j of the sorted links starts
    with a weight in proportion to j^-rank_decay. From 0, where all start alike, to 16."""

    pair_outputs: int = 5
    """l_m, outputs of the split network for one pair; ``residual`` adds the task's own number to
    it, and ``average`` takes that number alone."""

    kernel: int | None = None
    """k_conv, links that one step of the convolution sees; default: 5, or K where that is less."""

    channels: int = 4
    """Channels of the convolution."""

    merge_width: int = 100
    """Units of the merge gate's hidden layer."""

    dropout: float | None = None
    """Share of units dropped in training, inside the merge gate; default: 0.3 for a regression, 0.7
    where the label is a class."""

    def __post_init__(self) -> None:
        ManyLinksSettings.__post_init__(self)
        sizes = {
            name: getattr(self, name)
            for name in ("similarity_width", "pair_outputs", "channels", "merge_width")
        }
        checks.within(1, checks.MOST_WIDTH, **sizes)
        if self.kernel is not None:
            checks.within(1, checks.MOST_LINKS, kernel=self.kernel)
        checks.at_least(0, rank_decay=self.rank_decay)
        checks.at_most(STEEPEST, rank_decay=self.rank_decay)
        if self.dropout is not None:
            checks.fraction(dropout=self.dropout)
        checks.one_of(("per-output", "learned", "similarity", "none"), weight=self.weight)
        checks.one_of(("similarity", "weight", "none"), sort=self.sort)
        checks.one_of(("residual", "convolution", "perceptron", "average"), merge=self.merge)
        if self.merge in ("residual", "convolution") and self.step > self.neighbours:
            raise ConfigError(
                f"kernel must be at most neighbours={self.neighbours}, got {self.kernel}"
            )
        if self.sort == "weight" and self.weight == "none":
            raise ConfigError('sort: "weight" needs weights, and weight = "none" makes none')

    @property
    def step(self) -> int:
        """Links that one step of the convolution sees."""
        return min(_KERNEL, self.neighbours) if self.kernel is None else self.kernel

    def dropped(self, *, classes: bool) -> float:
        """Return the share of units dropped for a task whose labels are classes, or are not.

        The paper tunes it for each table; its code has 0.2 and 0.3 on regressions, 0.7 and 0.8 on
        classes, and over-fitting to noised keys is what it prevents there.
        """
        if self.dropout is not None:
            return self.dropout
        return 0.7 if classes else 0.3
