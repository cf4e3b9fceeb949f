"""FedSim as a family: what the registry asks of it."""

from collections.abc import Sequence

from torch import nn

from securevfl.models.family import Family
from securevfl.models.fedsim.config import FedSimConfig
from securevfl.models.fedsim.top import FedSimTop
from securevfl.models.pairs import build_record_bottom


def _build_top(
    config: FedSimConfig,
    *,
    num_features: int,
    key_dim: int,
    feature_names: Sequence[str] = (),  # noqa: ARG001 - a BuildTop
    outputs: int,
    classes: bool = False,
) -> nn.Module:
    return FedSimTop(
        config, num_features=num_features, key_dim=key_dim, outputs=outputs, classes=classes
    )


def _cut_shape(config: FedSimConfig) -> tuple[int, int]:
    return config.cut_shape


def _pooled(config: FedSimConfig, *, frozen: bool) -> bool:  # noqa: ARG001
    # The gates need every link's own vector.
    return False


def _needs_similarities(config: FedSimConfig) -> bool:  # noqa: ARG001
    return True


FEDSIM = Family(
    name="fedsim",
    config_class=FedSimConfig,
    build_bottom=build_record_bottom,
    build_top=_build_top,
    cut_shape=_cut_shape,
    pooled=_pooled,
    needs_similarities=_needs_similarities,
)
"""The similarity-based family."""
