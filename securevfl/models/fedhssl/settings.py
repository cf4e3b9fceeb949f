"""Settings of self-supervised pretraining."""

from dataclasses import dataclass
from typing import Literal

from securevfl.core import checks
from securevfl.core.errors import ConfigError

Algorithm = Literal["simsiam", "byol", "moco"]

# [FedHSSL] appendix B-A.
_MOMENTUM = {"simsiam": 0.0, "byol": 0.995, "moco": 0.99}
_PROJECTOR = {"simsiam": (512, 512, 512), "byol": (512, 512, 512), "moco": (512, 512, 128)}


@dataclass(frozen=True, kw_only=True, slots=True)
class PretrainingSettings:
    """The ``[pretraining]`` table; defaults are the paper's where it gives them."""

    algorithm: Algorithm = "simsiam"
    """Which self-supervised loss, target and predictor ([FedHSSL] Table II)."""

    iterations: int = 10
    """Global iterations: cross-party epochs, local epochs, one aggregation."""

    cross_epochs: int = 1
    """Passes over the aligned rows in an iteration."""

    local_epochs: int = 1
    """Passes over a party's own records in an iteration."""

    local_updates: int = 1
    """e, updates that every party makes from one exchange ([FedHSSL] V-D)."""

    guidance: float = 0.5
    """gamma, weight of the cross-party encoder's guidance in local learning; 0 switches it off."""

    aligned: float = 1.0
    """Share of the aligned training rows that parties use; below 1 for experiments."""

    batch_size: int = 512
    """Rows of a step."""

    learning_rate: float = 1e-3
    """Step size at the first iteration; a half cosine brings it to 0, except the predictor's."""

    optimizer: Literal["adamw", "adam", "lamb", "sgd"] = "adamw"
    """Every party's optimizer."""

    weight_decay: float = 1e-4
    """Decoupled weight decay."""

    momentum: float | None = None
    """Of the target encoder's moving average; default: 0.995 for byol, 0.99 for moco."""

    temperature: float = 0.5
    """Of moco's InfoNCE loss."""

    queue: int | None = None
    """Negatives that moco keeps, in each of its queues; default: 4096, or half of a party's records
    where that is less."""

    projector: tuple[int, ...] | None = None
    """Widths of the projector's layers; default: 512, 512, 512, and 512, 512, 128 for moco."""

    predictor: int = 128
    """Width of the predictor's hidden layer; moco has none."""

    corruption: float = 0.3
    """Share of features that an augmented view replaces by values of other records."""

    views: Literal["together", "apart"] = "together"
    """Whether a network sees both views of a batch in one pass, or each in one of its own, with
    batch statistics of its own."""

    augment_aligned: bool = False
    """Whether aligned rows are augmented too; the paper exchanges them as they are."""

    sends: Literal["online", "target"] = "online"
    """Whose projections byol and moco exchange: the online encoder's or its moving average's."""

    start: Literal["separate", "shared"] = "separate"
    """Whether every party's tops, projectors and predictors start with weights of their own, or
    equal at all parties."""

    weights: Literal["parties", "records"] = "parties"
    """Whether every party counts as much in the average of local tops, or as it has records."""

    exchange: Literal["average", "plain"] = "average"
    """What the primary gets of the secondaries' projections: their average alone, or each of
    them. SimSiam and BYOL learn the same from both."""

    primary_sends: Literal["plain", "gaussian"] = "plain"
    """How the primary's own projections reach the secondaries: as they are, but for
    ``iso_projections``, or with Gaussian noise that a ledger accounts for."""

    iso_projections: float = 0.0
    """lambda of the ISO noise on the primary's projections ([FedHSSL] Equation 7), of which the
    longest in the batch sets the size; 0 adds none. A heuristic: it promises nothing."""

    iso_weights: float = 0.0
    """lambda of the ISO noise on the primary's weights before they are averaged; 0 adds none. Above
    1 the means grow with every iteration, until one leaves the ring and the run stops. A heuristic:
    it promises nothing. ``training.iso_gradients`` is the third place."""

    epsilon: float | None = None
    """For ``primary_sends = "gaussian"``: what all of pretraining may cost the primary's rows."""

    delta: float = 1e-5
    """For ``primary_sends = "gaussian"``: failure probability of that promise."""

    checkpoint: str | None = None
    """Run folder of an earlier pretraining, whose encoders are taken instead of pretraining."""

    def __post_init__(self) -> None:
        counts = {
            "iterations": self.iterations,
            "cross_epochs": self.cross_epochs,
            "local_epochs": self.local_epochs,
            "local_updates": self.local_updates,
        }
        if self.queue is not None:
            counts["queue"] = self.queue
        checks.within(1, checks.MOST_TIMES, **counts)
        checks.within(1, checks.MOST_WIDTH, predictor=self.predictor)
        # Even batches of at most 3 have 2 rows or more; one row has no batch statistics.
        checks.within(2, checks.MOST_TIMES, batch_size=self.batch_size)
        checks.at_least(3 if self.views == "apart" else 2, batch_size=self.batch_size)
        checks.rate(aligned=self.aligned)
        checks.positive(learning_rate=self.learning_rate, temperature=self.temperature)
        checks.non_negative(
            weight_decay=self.weight_decay,
            guidance=self.guidance,
            iso_projections=self.iso_projections,
            iso_weights=self.iso_weights,
        )
        checks.fraction(corruption=self.corruption)
        if self.momentum is not None:
            checks.fraction(momentum=self.momentum)
        if self.projector is not None:
            checks.within(1, checks.MOST_LAYERS, layers_of_projector=len(self.projector))
            widths = {f"projector[{i}]": width for i, width in enumerate(self.projector)}
            checks.within(1, checks.MOST_WIDTH, **widths)
        checks.open_unit(delta=self.delta)
        if (self.primary_sends == "gaussian") != (self.epsilon is not None):
            raise ConfigError('epsilon: goes with primary_sends = "gaussian", and only with it')
        if self.primary_sends == "gaussian" and self.iso_projections:
            raise ConfigError(
                'iso_projections: primary_sends = "gaussian" has noise that is accounted for; '
                "leave one of them out"
            )
        if self.epsilon is not None:
            checks.positive(epsilon=self.epsilon)

    @property
    def target_momentum(self) -> float:
        """Momentum of the target encoder; 0 if the target is the online encoder itself."""
        default = _MOMENTUM[self.algorithm]
        if self.algorithm == "simsiam" or self.momentum is None:
            return default
        return self.momentum

    @property
    def projector_widths(self) -> tuple[int, ...]:
        """Widths of the projector's layers."""
        return self.projector or _PROJECTOR[self.algorithm]

    @property
    def projection_width(self) -> int:
        """P, width of what parties exchange."""
        return self.projector_widths[-1]
