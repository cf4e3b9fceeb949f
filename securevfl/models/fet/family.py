"""FeT as a family: what the registry asks of it."""

from collections.abc import Sequence

from torch import nn

from securevfl.models.family import Family
from securevfl.models.fet.additive import AdditiveTop
from securevfl.models.fet.bottom import FeTBottom
from securevfl.models.fet.config import FeTConfig
from securevfl.models.fet.frozen import FrozenBottom
from securevfl.models.fet.top import FeTTop


def _build_bottom(
    config: FeTConfig,
    *,
    num_features: int,
    key_dim: int,
    feature_names: Sequence[str] = (),  # noqa: ARG001 - a BuildBottom
    frozen: bool = False,
) -> nn.Module:
    kind = FrozenBottom if frozen else FeTBottom
    return kind(config, num_features=num_features, key_dim=key_dim)


def _build_top(
    config: FeTConfig,
    *,
    num_features: int,
    key_dim: int,
    feature_names: Sequence[str] = (),  # noqa: ARG001 - a BuildTop
    outputs: int,
    classes: bool = False,  # noqa: ARG001
) -> nn.Module:
    kind = AdditiveTop if config.top == "additive" else FeTTop
    return kind(config, num_features=num_features, key_dim=key_dim, outputs=outputs)


def _cut_shape(config: FeTConfig) -> tuple[int, int]:
    return config.cut_shape


def _pooled(config: FeTConfig, *, frozen: bool) -> bool:
    # FeTBottom pools by itself, after attention has mixed its records.
    return frozen and config.release == "pooled"


def _needs_similarities(config: FeTConfig) -> bool:  # noqa: ARG001
    return False


FET = Family(
    name="fet",
    config_class=FeTConfig,
    build_bottom=_build_bottom,
    build_top=_build_top,
    cut_shape=_cut_shape,
    pooled=_pooled,
    needs_similarities=_needs_similarities,
    reads_keys=True,
)
"""The Federated Transformer."""
