"""Interface of a model family: its bottom and top model, settings and presets.

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

from securevfl.core import checks
from securevfl.core.errors import ConfigError
from securevfl.core.settings import read_settings
from securevfl.models.pretraining import Learner, PretrainingSettings, Step

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


@runtime_checkable
class Explained(Protocol):
    """A top model that explains its outputs for a batch."""

    def explain(
        self, features: RowFeatures, keys: RowKeys, aggregate: Aggregate, similarities: Similarities
    ) -> dict[str, Any]:
        """Return lists of numbers by name, for the report's plots; arguments as in :class:`Top`."""
        ...


@runtime_checkable
class ExplainedBottom(Protocol):
    """A bottom model that explains its treatment of links, to its own party."""

    def explain(
        self, features: RecordFeatures, keys: RecordKeys, present: Present
    ) -> dict[str, Any]:
        """Return lists of numbers by name; arguments as in :class:`Bottom`.

        The lists are not protected, and stay in the party's folder.
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

    learns_by_gradients: ClassVar[bool] = True
    """False if secondaries fit models of their own, one round an epoch, instead of learning from
    gradients: a stage then makes both halves of a round."""

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

    def epochs(self, settings: S, *, asked: int) -> int:
        """Return the maximum number of epochs of a run; ``asked`` is ``training.epochs``."""
        return asked

    def label_epsilon(self, settings: S) -> float | None:
        """Return the epsilon of a training row's label against secondaries; None if unbounded."""
        return None

    def require_outputs(self, settings: S, outputs: int) -> None:
        """Refuse settings that do not fit the number of outputs of the task.

        Args:
            settings: The family's settings.
            outputs: Classes of a multiclass task, otherwise 1.

        Raises:
            ConfigError: With the setting and its correct value.
        """

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
