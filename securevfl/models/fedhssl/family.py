"""FedHSSL and its parts as families: what the registry asks of them."""

from collections.abc import Sequence

from torch import nn

from securevfl.models.family import Family
from securevfl.models.fedhssl.config import (
    FedCSSLConfig,
    FedGSSLConfig,
    FedHSSLConfig,
    FedLocalSSLConfig,
    FedSplitNNConfig,
)
from securevfl.models.fedhssl.split import FedHSSLBottom, FedHSSLTop


def _build_bottom(
    config: FedHSSLConfig,
    *,
    num_features: int,
    key_dim: int,  # noqa: ARG001 - a BuildBottom
    feature_names: Sequence[str] = (),
    frozen: bool = False,  # noqa: ARG001
) -> nn.Module:
    columns = config.columns(feature_names)
    return FedHSSLBottom(config, num_features=num_features, columns=columns)


def _build_top(
    config: FedHSSLConfig,
    *,
    num_features: int,
    key_dim: int,  # noqa: ARG001 - a BuildTop
    feature_names: Sequence[str] = (),
    outputs: int,
    classes: bool = False,  # noqa: ARG001
) -> nn.Module:
    columns = config.columns(feature_names)
    return FedHSSLTop(config, num_features=num_features, columns=columns, outputs=outputs)


def _cut_shape(config: FedHSSLConfig) -> tuple[int, int]:
    return config.cut_shape


def _pooled(config: FedHSSLConfig, *, frozen: bool) -> bool:  # noqa: ARG001 - a Pooled
    return False


def _needs_similarities(config: FedHSSLConfig) -> bool:  # noqa: ARG001 - a NeedsSimilarities
    return False


def _family(name: str, config_class: type[FedHSSLConfig]) -> Family:
    return Family(
        name=name,
        config_class=config_class,
        build_bottom=_build_bottom,
        build_top=_build_top,
        cut_shape=_cut_shape,
        pooled=_pooled,
        needs_similarities=_needs_similarities,
        pretraining=config_class.STEPS,
    )


FEDHSSL_FAMILIES = (
    _family("fedhssl", FedHSSLConfig),
    _family("fedgssl", FedGSSLConfig),
    _family("fedcssl", FedCSSLConfig),
    _family("fedlocalssl", FedLocalSSLConfig),
    _family("fedsplitnn", FedSplitNNConfig),
)
"""FedHSSL, then FedHSSL with fewer steps each, down to none ([FedHSSL] V-C and Table IV)."""
