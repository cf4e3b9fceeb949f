"""Settings of a federation file that belong together under one name."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


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
