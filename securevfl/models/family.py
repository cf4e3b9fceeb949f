"""What a model family is to the rest of the package."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from torch import nn

from securevfl.core.settings import read_settings


@runtime_checkable
class BuildBottom(Protocol):
    """Build a secondary's bottom model."""

    def __call__(
        self,
        config: Any,
        *,
        num_features: int,
        key_dim: int,
        feature_names: Sequence[str] = (),
        frozen: bool = False,
    ) -> nn.Module:
        """Return a :class:`securevfl.models.split.Bottom`, ready to be initialised.

        Args:
            config: The family's settings.
            num_features: Feature columns of the secondary's table.
            key_dim: Key columns.
            feature_names: What the feature columns are called; ``column=value`` marks words.
            frozen: Whether to build one that is made without data.
        """
        ...


@runtime_checkable
class BuildTop(Protocol):
    """Build the primary's top model."""

    def __call__(
        self,
        config: Any,
        *,
        num_features: int,
        key_dim: int,
        feature_names: Sequence[str] = (),
        outputs: int,
        classes: bool = False,
    ) -> nn.Module:
        """Return a :class:`securevfl.models.split.Top`, ready to be initialised.

        Args:
            config: The family's settings.
            num_features: Feature columns of the primary's table.
            key_dim: Key columns.
            feature_names: What the feature columns are called; ``column=value`` marks words.
            outputs: Numbers that the task asks for.
            classes: Whether they are logits of classes, rather than a regression's number.
        """
        ...


@runtime_checkable
class CutShape(Protocol):
    """Tell the shape of the aggregate."""

    def __call__(self, config: Any) -> tuple[int, int]:
        """Return (L, H) of one row."""
        ...


@runtime_checkable
class Pooled(Protocol):
    """Tell who pools the links of a row."""

    def __call__(self, config: Any, *, frozen: bool) -> bool:
        """Return whether the release code averages K record-wise vectors behind their clip."""
        ...


@runtime_checkable
class NeedsSimilarities(Protocol):
    """Tell whether the top model reads similarities."""

    def __call__(self, config: Any) -> bool:
        """Return whether every secondary must send its links' similarities to the primary."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """One model family: its settings and its builders."""

    name: str
    """What a federation file calls it."""

    config_class: type[Any]
    """A frozen dataclass of settings, with ``neighbours``, ``party_dropout`` and
    ``average_positions_every`` among them."""

    build_bottom: BuildBottom
    """Builds a secondary's half; ``frozen`` asks for one made without data."""

    build_top: BuildTop
    """Builds the primary's half."""

    cut_shape: CutShape
    """(L, H) of the aggregate."""

    pooled: Pooled
    """Whether the bottom gives K vectors that the release code clips and averages to one."""

    needs_similarities: NeedsSimilarities
    """Whether the primary's half reads how near its links are."""

    reads_keys: bool = False
    """Whether models take the keys' positions as inputs, so that keys must be numbers."""

    pretraining: tuple[str, ...] = ()
    """Steps of self-supervised pretraining before training, of ``cross``, ``local``,
    ``aggregate``; none for most families."""

    max_distance: float = math.inf
    """Links longer than this are none; 0 leaves those of equal keys."""

    def config_from(self, table: Mapping[str, Any]) -> Any:
        """Read the family's settings from a parsed ``[model]`` table, without ``family``.

        Raises:
            ConfigError: For an unknown field (allowed ones are listed) or an impossible value.
        """
        return read_settings(self.config_class, table, where="model")
