"""Model families: plain PyTorch, without transport, cryptography or accounting.

A family's settings are public under the family's name: ``models.FeT(neighbours=50)``. A custom
family subclasses :class:`Family`. Names are loaded on first use.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from securevfl.models.assist import AssistConfig as Assist
    from securevfl.models.family import Bottom, Family, FamilySettings, Top
    from securevfl.models.fedhssl.encoders import FedCSSLConfig as FedCSSL
    from securevfl.models.fedhssl.encoders import FedGSSLConfig as FedGSSL
    from securevfl.models.fedhssl.encoders import FedHSSLConfig as FedHSSL
    from securevfl.models.fedhssl.encoders import FedLocalSSLConfig as FedLocalSSL
    from securevfl.models.fedhssl.encoders import FedSplitNNConfig as FedSplitNN
    from securevfl.models.fedsim import FedSimConfig as FedSim
    from securevfl.models.fet.settings import FeTConfig as FeT
    from securevfl.models.pairs import AvgSimConfig as AvgSim
    from securevfl.models.pairs import ExactConfig as Exact
    from securevfl.models.pairs import FeatureSimConfig as FeatureSim
    from securevfl.models.pairs import Top1SimConfig as Top1Sim
    from securevfl.models.registry import register

__all__ = [
    "Assist",
    "AvgSim",
    "Bottom",
    "Exact",
    "Family",
    "FamilySettings",
    "FeT",
    "FeatureSim",
    "FedCSSL",
    "FedGSSL",
    "FedHSSL",
    "FedLocalSSL",
    "FedSim",
    "FedSplitNN",
    "Top",
    "Top1Sim",
    "register",
]

_HOMES = {
    "Assist": ("securevfl.models.assist", "AssistConfig"),
    "AvgSim": ("securevfl.models.pairs", "AvgSimConfig"),
    "Bottom": ("securevfl.models.family", "Bottom"),
    "Exact": ("securevfl.models.pairs", "ExactConfig"),
    "Family": ("securevfl.models.family", "Family"),
    "FamilySettings": ("securevfl.models.family", "FamilySettings"),
    "FeT": ("securevfl.models.fet.settings", "FeTConfig"),
    "FeatureSim": ("securevfl.models.pairs", "FeatureSimConfig"),
    "FedCSSL": ("securevfl.models.fedhssl.encoders", "FedCSSLConfig"),
    "FedGSSL": ("securevfl.models.fedhssl.encoders", "FedGSSLConfig"),
    "FedHSSL": ("securevfl.models.fedhssl.encoders", "FedHSSLConfig"),
    "FedLocalSSL": ("securevfl.models.fedhssl.encoders", "FedLocalSSLConfig"),
    "FedSim": ("securevfl.models.fedsim", "FedSimConfig"),
    "FedSplitNN": ("securevfl.models.fedhssl.encoders", "FedSplitNNConfig"),
    "Top": ("securevfl.models.family", "Top"),
    "Top1Sim": ("securevfl.models.pairs", "Top1SimConfig"),
    "register": ("securevfl.models.registry", "register"),
}


def __getattr__(name: str) -> object:
    """Import a public name from its home module on first use."""
    if name not in _HOMES:
        raise AttributeError(f"module 'securevfl.models' has no attribute {name!r}")
    module, attribute = _HOMES[name]
    return getattr(importlib.import_module(module), attribute)


def __dir__() -> list[str]:
    """Return all public names, loaded or not."""
    return __all__
