"""Interface of a model family: its models and settings, presets, and how it may pretrain.

B = rows of a batch, K = links of a row, S = secondaries, F = features, D = key dimension,
L = positions and H = width of a representation, O = outputs.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, ClassVar, Final, Generic, Literal, Protocol, TypeVar, runtime_checkable

from jaxtyping import Bool, Float, Int64
from torch import Tensor, nn

from securevfl.core import checks, devices
from securevfl.core.errors import ConfigError
from securevfl.core.settings import read_settings

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

    exchange: Literal["average", "plain"] = "average"
    """The primary receives the average of secondaries' projections, or each. SimSiam and BYOL learn
    the same."""

    def __post_init__(self) -> None:
        checks.require_limits(self)
        # Even batches of at most 3 have 2 rows or more; one row has no batch statistics.
        checks.at_least(3 if self.views == "apart" else 2, batch_size=self.batch_size)
        if self.projector is not None:
            checks.within(1, checks.MOST_LAYERS, layers_of_projector=len(self.projector))

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


RecordFeatures = Float[Tensor, "batch links features"]
RecordKeys = Float[Tensor, "batch links dimension"]
Present = Bool[Tensor, "batch links"]
RowFeatures = Float[Tensor, "batch features"]
RowKeys = Float[Tensor, "batch dimension"]
Aggregate = Float[Tensor, "batch positions width"]
Similarities = Float[Tensor, "batch secondaries links"] | None


class Bottom(Protocol):
    """Bottom model of a secondary: from a row's linked records to the row's representation."""

    positions: nn.Module
    """Positional encoding; parties may average its parameters, if there are any."""

    recordwise: bool
    """True if position j depends only on link j's record. Then L = K, and absent links are zero.

    Only such a model may be pooled after clipping each record, which bounds one record's influence
    on a row by 2C/K instead of 2C.
    """

    def __call__(
        self, features: RecordFeatures, keys: RecordKeys, present: Present
    ) -> Float[Tensor, "batch positions width"]:
        """Return the representation of a batch.

        Args:
            features: The linked records' features; any finite values at absent links.
            keys: The linked records' keys, likewise.
            present: Mask of the links that exist.
        """
        ...


@runtime_checkable
class DistinctBottom(Protocol):
    """A bottom model that can process each distinct record of a batch once."""

    def of_distinct(
        self,
        features: Float[Tensor, "records features"],
        keys: Float[Tensor, "records dimension"],
        place: Int64[Tensor, "batch links"],
        present: Present,
    ) -> Float[Tensor, "batch positions width"]:
        """Return the representation for ``features[place]``, ``keys[place]`` and ``present``.

        Args:
            features: Features of the batch's distinct records.
            keys: Their keys.
            place: Index of each link's record; absent links point to a record of zeros.
            present: Mask of the links that exist.
        """
        ...


@runtime_checkable
class Stackable(Protocol):
    """A network that ``torch.func.vmap`` can compute for many weights and a CUDA graph can capture.

    It has no buffers, does not branch on values (``if x.sum() > 0``), creates no tensor on the host
    in training, and draws at random only by :class:`securevfl.models.layers.ByteDropout`. A top
    model may also draw from torch's global generator of its inputs' device.
    """

    stackable: Literal[True]


@runtime_checkable
class StackableBottom(Stackable, Protocol):
    """A bottom model that can be computed for many secondaries at once."""

    features_weight: str
    """Name of the one parameter whose size depends on the number of features: (outputs, inputs),
    features first among its inputs."""


def share_of_base(top: nn.Module) -> float:
    """Return the weight of the base's margin in the joint margin, in [0, 1].

    The top's outputs are added to it. It is the attribute ``of_base`` of a top model that corrects
    the base, and 0 for a top model without it.
    """
    return float(getattr(top, "of_base", 0.0))


class Top(Protocol):
    """Top model of the primary: from its rows and the aggregate to the task's outputs."""

    positions: nn.Module
    """Positional encoding; parties may average its parameters, if there are any."""

    def __call__(
        self, features: RowFeatures, keys: RowKeys, aggregate: Aggregate, similarities: Similarities
    ) -> Float[Tensor, "batch outputs"]:
        """Return the outputs: logits for classes, standardised values for a regression.

        Args:
            features: The rows' own features.
            keys: The rows' keys.
            aggregate: The rows' aggregate from SplitAvg.
            similarities: Similarity of each of their links at every active secondary; NaN for an
                empty slot. None if the family does not need them.
        """
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Preset:
    """Settings of ``preset = "NAME"`` in ``[model]``; settings in the file take precedence.

    Where a paper tunes a setting for each table, a preset has one of the paper's values.
    """

    model: Mapping[str, Any]
    """Fields of ``[model]`` and their values."""

    training: Mapping[str, Any]
    """Fields of ``[training]`` and their values."""

    pretraining: Mapping[str, Any] = field(default_factory=dict)
    """Fields of ``[pretraining]`` and their values."""

    algorithms: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Further fields of ``[pretraining]`` for each value of its ``algorithm``."""

    base: str = "best"
    """``base.estimator``; papers have no base."""

    clip_norm: float = 1000.0
    """``privacy.clip_norm`` if ``privacy.mechanism`` is ``none``: the papers do not clip, and a
    norm of 1000 clips no row."""


@runtime_checkable
class FamilySettings(Protocol):
    """Fields that the settings of every family must have.

    Settings are a frozen dataclass, whose fields are the ``[model]`` table of a federation file. A
    setting without a choice may be a ``ClassVar``.
    """

    @property
    def neighbours(self) -> int:
        """K, links of a row at every secondary."""
        ...

    @property
    def cut_shape(self) -> tuple[int, int]:
        """(L, H), positions and width of the aggregate of one row."""
        ...

    @property
    def party_dropout(self) -> float:
        """Share of the secondaries dropped in a training round, in [0, 1)."""
        ...

    @property
    def average_positions_every(self) -> int:
        """Epochs between averagings of the positional encodings; 0 never averages."""
        ...

    @property
    def keys_as_features(self) -> bool:
        """Whether keys are model inputs in addition to the features; they must be numbers then."""
        ...


S = TypeVar("S", bound=FamilySettings)

_MOST_OF_A_ROW: Final = 2**20
"""Numbers that a secondary may release for one row: 4 MiB."""


class Family(ABC, Generic[S]):
    """A model family: its settings and its two models.

    A family is stateless: all methods take ``settings``.
    """

    name: ClassVar[str]
    """Name in a federation file."""

    settings_class: type[S]
    """A frozen dataclass, see :class:`FamilySettings`."""

    links_to_one: ClassVar[bool] = False
    """True if a row has exactly one link, so that K is fixed."""

    max_distance: ClassVar[float] = math.inf
    """Largest distance of a link, in the units of the linkage's metric; 0 links equal keys only."""

    presets: ClassVar[Mapping[str, Preset]] = MappingProxyType({})
    """Presets by name; ``paper`` has the settings of the family's paper."""

    pretraining: ClassVar[tuple[Step, ...]] = ()
    """Steps of self-supervised pretraining before training; empty for most families. A family with
    steps implements :meth:`build_learner` and :meth:`load_pretrained`."""

    learning_rate: ClassVar[float] = 3e-3
    """Default of ``training.learning_rate``, for every party's optimizer."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    def settings_from(self, table: Mapping[str, Any]) -> S:
        """Read the family's settings from a parsed ``[model]`` table, without ``family``.

        Fields of :class:`FamilySettings` are checked here for every family.

        Raises:
            ConfigError: For an unknown field (allowed ones are listed) or an impossible value.
        """
        try:
            settings = read_settings(self.settings_class, table, where="model")
        except ConfigError:
            raise
        except ValueError as error:
            raise ConfigError(f"model: {error}") from None
        _check_common(settings)
        return settings

    @abstractmethod
    def build_bottom(
        self,
        settings: S,
        *,
        num_features: int,
        key_dim: int,
        feature_names: Sequence[str] = (),
        frozen: bool = False,
    ) -> nn.Module:
        """Return a secondary's :class:`securevfl.models.family.Bottom`, ready to be initialised.

        Args:
            settings: The family's settings.
            num_features: Feature columns of the secondary's table.
            key_dim: Key columns.
            feature_names: Names of the feature columns; ``column=value`` marks words.
            frozen: Whether to build an encoder with random weights that are not trained.
        """

    @abstractmethod
    def build_top(
        self,
        settings: S,
        *,
        num_features: int,
        key_dim: int,
        feature_names: Sequence[str] = (),
        outputs: int,
        classes: bool = False,
    ) -> nn.Module:
        """Return the primary's :class:`securevfl.models.family.Top`, ready to be initialised.

        Args:
            settings: The family's settings.
            num_features: Feature columns of the primary's table.
            key_dim: Key columns.
            feature_names: Names of the feature columns; ``column=value`` marks words.
            outputs: Outputs of the task.
            classes: Whether they are logits of classes instead of a regression's value.
        """

    def cut_shape(self, settings: S) -> tuple[int, int]:
        """Return (L, H) of the aggregate of one row."""
        return settings.cut_shape

    def pools_records(self, settings: S, *, frozen: bool) -> bool:
        """Return whether releases clip K record-wise vectors and average them to one.

        L is then 1, and the bottom model is recordwise. Otherwise each row is clipped as a whole.
        """
        return False

    def aggregation(self, settings: S, *, frozen: bool) -> str:
        """Return the name of the aggregation at the cut.

        It is one of :data:`securevfl.federation.rounds.cut.AGGREGATIONS`, and must pool a
        row's records if :meth:`pools_records` is True.
        """
        return "pooled" if self.pools_records(settings, frozen=frozen) else "rows"

    def reads_keys(self, settings: S, *, frozen: bool) -> bool:
        """Return whether a model reads the keys' positions, so that keys must be numbers.

        Args:
            settings: The family's settings.
            frozen: Whether bottom models are frozen encoders.
        """
        return settings.keys_as_features

    def needs_similarities(self, settings: S) -> bool:
        """Return whether the top model reads the similarities of a row's links.

        Every secondary then sends its links' similarities to the primary.
        """
        return False

    def shares_positions(self, settings: S) -> bool:
        """Return whether all parties' positional encodings start with equal weights.

        Otherwise each party draws its own.
        """
        return True

    def require_separate_rows(self, settings: S) -> None:
        """Refuse settings with which one record changes the representations of other rows.

        A privacy budget covers each row separately. Settings are refused before a run starts;
        BatchNorm in a bottom model is always refused.

        Raises:
            PrivacyError: Naming the setting as ``model.FIELD``.
        """

    def build_learner(
        self,
        settings: S,
        pretraining: PretrainingSettings,
        *,
        features: Float[Tensor, "records features"],
        feature_names: Sequence[str],
        party: str,
        seed: int,
    ) -> Learner:
        """Return the learner that pretrains one party's encoders.

        Args:
            settings: The family's settings.
            pretraining: The ``[pretraining]`` table.
            features: The records that the party may learn from, scaled, on its device.
            feature_names: Names of their columns; ``column=value`` marks words.
            party: The party's name, for separate random streams.
            seed: The run seed.

        Raises:
            ConfigError: If the settings do not fit the features.
        """
        raise NotImplementedError(f"{self.name!r} names steps of pretraining but has no learner")

    def load_pretrained(
        self, model: nn.Module, encoders: Mapping[str, Mapping[str, Tensor]]
    ) -> None:
        """Load a learner's encoders into a bottom or top model.

        Raises:
            ConfigError: If the encoders do not fit the model.
        """
        raise NotImplementedError(f"{self.name!r} pretrains but loads no encoders")

    def pretraining_warning(self, settings: S, feature_names: Sequence[str]) -> str | None:
        """Return a warning for a party with these feature columns; None if there is none."""
        return None


def _check_common(settings: FamilySettings) -> None:
    sizes = {f"model.cut_shape[{axis}]": size for axis, size in enumerate(settings.cut_shape)}
    averaging = {"model.average_positions_every": settings.average_positions_every}
    checks.within(1, checks.MOST_LINKS, **{"model.neighbours": settings.neighbours})
    checks.within(1, _MOST_OF_A_ROW, **sizes)
    checks.whole(**averaging)
    checks.at_least(0, **averaging)
    checks.fraction(**{"model.party_dropout": settings.party_dropout})
    if len(sizes) != 2:
        raise ConfigError(f"model.cut_shape must be two sizes, got {settings.cut_shape!r}")
    if math.prod(settings.cut_shape) > _MOST_OF_A_ROW:
        positions, width = settings.cut_shape
        raise ConfigError(
            f"model: a row's release would have {positions} x {width} numbers, and "
            f"{_MOST_OF_A_ROW} are the most; lower model.neighbours or model.hidden"
        )


AnyFamily = Family[Any]
"""A family with unknown type of settings."""
