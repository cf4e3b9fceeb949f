"""Self-supervised pretraining: its settings, and the learner of one party's encoders."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

from jaxtyping import Float
from torch import Tensor

from securevfl.core import checks, devices
from securevfl.core.errors import ConfigError

Algorithm = Literal["simsiam", "byol", "moco"]

# [FedHSSL] appendix B-A.
_MOMENTUM = {"simsiam": 0.0, "byol": 0.995, "moco": 0.99}
_PROJECTOR = {"simsiam": (512, 512, 512), "byol": (512, 512, 512), "moco": (512, 512, 128)}


@dataclass(frozen=True, kw_only=True, slots=True)
class PretrainingSettings:
    """The ``[pretraining]`` table; defaults are the paper's where it gives them."""

    algorithm: Algorithm = "simsiam"
    """Self-supervised loss, target and predictor ([FedHSSL] Table II)."""

    iterations: checks.Times = 10
    """Number of iterations of cross-party epochs, local epochs and one aggregation."""

    cross_epochs: checks.Times = 1
    """Passes over aligned rows in an iteration."""

    local_epochs: checks.Times = 1
    """Passes over a party's own records in an iteration."""

    local_updates: checks.Times = 1
    """e, updates from one exchange ([FedHSSL] V-D)."""

    guidance: checks.NonNegative = 0.5
    """gamma, weight of the cross-party encoder in local learning."""

    aligned: checks.Rate = 1.0
    """Share of the aligned rows that is used, for experiments."""

    batch_size: checks.Times = 512
    """Rows of a step."""

    learning_rate: checks.Positive = 1e-3
    """First step size, which falls to 0 by a half cosine, except the predictor's."""

    optimizer: Literal["adamw", "adam", "lamb", "sgd"] = "adamw"
    """Every party's optimizer."""

    precision: devices.Precision = "float32"
    """Precision of pretraining, as in ``[training]``."""

    weight_decay: checks.NonNegative = 1e-4
    """Decoupled weight decay."""

    momentum: checks.Fraction | None = None
    """Momentum of the target's moving average; default 0.995 for byol, 0.99 for moco."""

    temperature: checks.Positive = 0.5
    """Temperature of moco's InfoNCE loss."""

    queue: checks.Times | None = None
    """Negatives in each moco queue; default 4096, or half of a party's records."""

    projector: tuple[checks.Width, ...] | None = None
    """Widths of its layers; default 512, 512, 512, for moco 512, 512, 128."""

    predictor: checks.Width = 128
    """Width of its hidden layer; moco has none."""

    corruption: checks.Fraction = 0.3
    """Share of a view's features that other records' values replace."""

    views: Literal["together", "apart"] = "together"
    """Both views in one pass (``together``), or in two with separate batch statistics."""

    augment_aligned: bool = False
    """Aligned rows are augmented too; not in the paper."""

    sends: Literal["online", "target"] = "online"
    """Byol and moco exchange projections of the online encoder, or of its moving average."""

    start: Literal["separate", "shared"] = "separate"
    """Tops, projectors and predictors start apart at each party, or equal."""

    weights: Literal["parties", "records"] = "parties"
    """Weights of parties in the average of local tops: equal, or by their numbers of records."""

    exchange: Literal["average", "plain"] = "average"
    """The primary receives the average of secondaries' projections, or each. SimSiam and BYOL learn
    the same."""

    primary_sends: Literal["plain", "gaussian"] = "plain"
    """The primary's projections go out with ``iso_projections`` alone, or with Gaussian noise that
    its ledger counts."""

    iso_projections: checks.NonNegative = 0.0
    """lambda of the ISO noise on the primary's projections ([FedHSSL] Equation 7). A
    heuristic."""

    iso_weights: checks.NonNegative = 0.0
    """lambda of the ISO noise on the primary's weights before averaging. Above 1 means grow with
    every iteration. A heuristic."""

    epsilon: checks.Positive | None = None
    """With ``gaussian``: epsilon of all of pretraining for the primary's rows."""

    delta: checks.OpenUnit = 1e-5
    """With ``gaussian``: failure probability of that guarantee."""

    checkpoint: str | None = None
    """Run folder of an earlier pretraining, whose encoders are used: a path below each party's own
    ``--data-root``."""

    def __post_init__(self) -> None:
        checks.require_limits(self)
        if self.checkpoint is not None:
            checks.below_root(checkpoint=self.checkpoint)
        # Even batches of at most 3 have 2 rows or more; one row has no batch statistics.
        checks.at_least(3 if self.views == "apart" else 2, batch_size=self.batch_size)
        if self.projector is not None:
            checks.within(1, checks.MOST_LAYERS, layers_of_projector=len(self.projector))
        if (self.primary_sends == "gaussian") != (self.epsilon is not None):
            raise ConfigError('epsilon: goes with primary_sends = "gaussian", and only with it')
        if self.primary_sends == "gaussian" and self.iso_projections:
            raise ConfigError(
                'iso_projections: primary_sends = "gaussian" has noise that is accounted for; '
                "leave one of them out"
            )

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
        """P, width of the exchanged projections."""
        return self.projector_widths[-1]


Step = Literal["cross", "local", "aggregate"]
"""A step of pretraining: learning from other parties' projections, learning from own records, or
averaging of weights."""


@runtime_checkable
class Learner(Protocol):
    """Pretrains one party's encoders; other parties' messages arrive as plain tensors."""

    @property
    def settings(self) -> PretrainingSettings:
        """The ``[pretraining]`` table."""
        ...

    def begin_iteration(self, iteration: int) -> None:
        """Start an iteration, counted from 0."""
        ...

    def project(self, features: Float[Tensor, "rows features"]) -> Float[Tensor, "rows width"]:
        """Return projections of aligned records for other parties; step ``cross``.

        Other parties use the vectors' directions only. The width is ``settings.projection_width``.
        """
        ...

    def learn_cross(self, targets: list[Float[Tensor, "rows width"]]) -> Float[Tensor, ""]:
        """Learn from others' unit vectors for the rows of the last :meth:`project`.

        Returns:
            The loss before the first update.
        """
        ...

    def learn_local(
        self, features: Float[Tensor, "rows features"]
    ) -> tuple[Float[Tensor, ""], Float[Tensor, "views width"]]:
        """Learn from the party's own records; step ``local``.

        Returns:
            The loss, and the targets, whose spread shows collapse.
        """
        ...

    def shared_weights(self) -> dict[str, Tensor]:
        """Return the weights that parties average; step ``aggregate``."""
        ...

    def load_shared(self, weights: Mapping[str, Tensor]) -> None:
        """Load averaged weights."""
        ...

    def encoders(self) -> dict[str, dict[str, Tensor]]:
        """Return a copy of the encoders' weights by name, for fine-tuning."""
        ...

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint: tensors, numbers, text, lists and dicts."""
        ...

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore a checkpoint's state."""
        ...
