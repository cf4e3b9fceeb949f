"""Interface of a model family: settings, presets, models and learners."""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import (
    Any,
    ClassVar,
    Final,
    Generic,
    Literal,
    Protocol,
    TypeAlias,
    TypeVar,
    runtime_checkable,
)

from jaxtyping import Float
from torch import Tensor, nn

from securevfl.core import checks
from securevfl.core.errors import ConfigError
from securevfl.core.settings import read_settings
from securevfl.models.fedhssl.settings import PretrainingSettings

# Settings of a federation file that belong together under one name.


@dataclass(frozen=True, kw_only=True, slots=True)
class Preset:
    """What ``preset = "NAME"`` in ``[model]`` stands for; settings that a file gives come first.

    Of what a paper tunes for each table, a preset has one value out of the paper's own choice.
    """

    model: Mapping[str, Any]
    """Fields of ``[model]``."""

    training: Mapping[str, Any]
    """Fields of ``[training]``."""

    pretraining: Mapping[str, Any] = field(default_factory=dict)
    """Fields of ``[pretraining]``."""

    algorithms: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """More fields of ``[pretraining]``, by its ``algorithm``."""

    base: str = "best"
    """``base.estimator``: papers have none."""

    clip_norm: float = 1000.0
    """``privacy.clip_norm`` where ``privacy.mechanism`` is ``none``: the papers clip nothing then,
    and so large a norm shortens no row."""


# What a family's learner does in self-supervised pretraining; every party has one of its own.

Step = Literal["cross", "local", "aggregate"]
"""A step of pretraining: parties learn from one another's projections, each learns from its own
records, weights are averaged."""


@runtime_checkable
class Learner(Protocol):
    """Pretrains one party's encoders; what other parties send comes in as plain tensors."""

    @property
    def settings(self) -> PretrainingSettings:
        """The ``[pretraining]`` table."""
        ...

    def begin_iteration(self, iteration: int) -> None:
        """Get ready for an iteration, counted from 0."""
        ...

    def project(self, features: Float[Tensor, "rows features"]) -> Float[Tensor, "rows width"]:
        """Return projections of aligned records, for others; step ``cross``.

        Others learn from their directions. The width is ``settings.projection_width``.
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
            The loss, and the targets, whose spread tells of collapse.
        """
        ...

    def shared_weights(self) -> dict[str, Tensor]:
        """Return what parties average; step ``aggregate``."""
        ...

    def load_shared(self, weights: Mapping[str, Tensor]) -> None:
        """Take what parties averaged."""
        ...

    def encoders(self) -> dict[str, dict[str, Tensor]]:
        """Return a copy of the encoders' weights by name: what fine-tuning starts from."""
        ...

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint needs: tensors, numbers, text, and lists and dicts of them."""
        ...

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go back to a checkpoint's state."""
        ...


# What a model family is to the rest of the package.


@runtime_checkable
class FamilySettings(Protocol):
    """What every family's settings tell the rest of the package.

    They are a frozen dataclass, whose fields are the ``[model]`` table of a federation file. What
    a family does not let its users choose may be a ``ClassVar`` instead of a field.
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
        """Share of the secondaries left out of a training round, in [0, 1)."""
        ...

    @property
    def average_positions_every(self) -> int:
        """Epochs between averagings of the positional encodings; 0 never averages."""
        ...

    @property
    def keys_as_features(self) -> bool:
        """Whether keys are model inputs beside the features; they must be numbers then."""
        ...


S = TypeVar("S", bound=FamilySettings)

_MOST_OF_A_ROW: Final = 2**20
"""Numbers that a secondary may release for one row: 4 MiB."""


class Family(ABC, Generic[S]):
    """One model family: its settings and its two models.

    A family holds no state: everything it needs comes in as ``settings``.
    """

    name: ClassVar[str]
    """What a federation file calls it."""

    settings_class: type[S]
    """A frozen dataclass, see :class:`FamilySettings`."""

    links_to_one: ClassVar[bool] = False
    """Whether a row has one link, so that K is no choice."""

    max_distance: ClassVar[float] = math.inf
    """Links longer than this are none, in the units of the linkage's metric; 0 leaves those of
    equal keys."""

    presets: ClassVar[Mapping[str, Preset]] = MappingProxyType({})
    """Settings that belong together, by the name that ``preset`` in ``[model]`` gives them;
    ``paper`` is what the family's paper writes."""

    pretraining: ClassVar[tuple[Step, ...]] = ()
    """Steps of self-supervised pretraining before training; none for most families. Whoever names
    some offers :meth:`build_learner` and :meth:`load_pretrained`."""

    learning_rate: ClassVar[float] = 3e-3
    """Step size of every party's optimizer where ``training.learning_rate`` says none."""

    assisted: ClassVar[bool] = False
    """Whether secondaries fit models of their own to residuals, a round an epoch, rather than learn
    from gradients. Only ``assist`` does."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    def settings_from(self, table: Mapping[str, Any]) -> S:
        """Read the family's settings from a parsed ``[model]`` table, without ``family``.

        What the rest of the package reads of them is checked here, whatever the family checks.

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
        """Return a secondary's :class:`securevfl.models.split.Bottom`, ready to be initialised.

        Args:
            settings: The family's settings.
            num_features: Feature columns of the secondary's table.
            key_dim: Key columns.
            feature_names: What the feature columns are called; ``column=value`` marks words.
            frozen: Whether to build one that stays as it was drawn, without data.
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
        """Return the primary's :class:`securevfl.models.split.Top`, ready to be initialised.

        Args:
            settings: The family's settings.
            num_features: Feature columns of the primary's table.
            key_dim: Key columns.
            feature_names: What the feature columns are called; ``column=value`` marks words.
            outputs: Numbers that the task asks for.
            classes: Whether they are logits of classes, rather than a regression's number.
        """

    def cut_shape(self, settings: S) -> tuple[int, int]:
        """Return (L, H) of the aggregate of one row."""
        return settings.cut_shape

    def epochs(self, settings: S, *, asked: int) -> int:  # noqa: ARG002
        """Return the most epochs of a run; ``asked`` is what ``training.epochs`` says."""
        return asked

    def label_epsilon(self, settings: S) -> float | None:  # noqa: ARG002
        """Return what secondaries may learn of one training row's label; None promises nothing."""
        return None

    def require_outputs(self, settings: S, outputs: int) -> None:
        """Refuse settings that do not fit the numbers that the task asks of a model.

        Args:
            settings: The family's settings.
            outputs: Classes of a multiclass task, otherwise 1.

        Raises:
            ConfigError: Naming the setting, and what to write.
        """

    def pooled(self, settings: S, *, frozen: bool) -> bool:  # noqa: ARG002
        """Return whether the release code clips K record-wise vectors and averages them to one.

        Then L is 1, and the bottom model is recordwise. Otherwise a row is clipped as a whole.
        """
        return False

    def aggregation(self, settings: S, *, frozen: bool) -> str:
        """Return the name of the aggregation that carries a row across the cut.

        It is one of :data:`securevfl.federation.rounds.cut.AGGREGATIONS`, and pools a row's
        records if :meth:`pooled` says so.
        """
        return "pooled" if self.pooled(settings, frozen=frozen) else "rows"

    def reads_keys(self, settings: S, *, frozen: bool) -> bool:  # noqa: ARG002
        """Return whether a model reads the keys' positions, so that keys must be numbers.

        Args:
            settings: The family's settings.
            frozen: Whether bottom models are frozen encoders.
        """
        return settings.keys_as_features

    def needs_similarities(self, settings: S) -> bool:  # noqa: ARG002
        """Return whether the top model reads how near a row's links are.

        Every secondary then sends its links' similarities to the primary.
        """
        return False

    def shares_positions(self, settings: S) -> bool:  # noqa: ARG002
        """Return whether all parties' positional encodings start with equal weights.

        Otherwise each party draws its own.
        """
        return True

    def require_separate_rows(self, settings: S) -> None:
        """Refuse settings by which one record moves the representations of other rows.

        A privacy budget covers each row alone. What is refused here is refused before anything
        runs; BatchNorm is found in a bottom model in any case.

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
        """Return what pretrains one party's encoders.

        Args:
            settings: The family's settings.
            pretraining: The ``[pretraining]`` table.
            features: The records that the party may learn from, scaled, on its device.
            feature_names: What their columns are called; ``column=value`` marks words.
            party: The party's name, for random streams of its own.
            seed: The run seed.

        Raises:
            ConfigError: If the settings do not fit the features.
        """
        raise NotImplementedError(f"{self.name!r} names steps of pretraining and has no learner")

    def load_pretrained(
        self, model: nn.Module, encoders: Mapping[str, Mapping[str, Tensor]]
    ) -> None:
        """Let a bottom or top model start from what a party's learner gave as its encoders.

        Raises:
            ConfigError: If they are not those of such a model.
        """
        raise NotImplementedError(f"{self.name!r} pretrains and takes no encoders")

    def pretraining_warning(self, settings: S, feature_names: Sequence[str]) -> str | None:  # noqa: ARG002
        """Return what to warn a party of whose feature columns are called so, if anything."""
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


AnyFamily: TypeAlias = Family[Any]
"""A family that is known by its name alone, so that the type of its settings is not."""
