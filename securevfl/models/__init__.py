"""Model families: plain PyTorch, without transport, cryptography or accounting.

A family's settings are public under the family's own name: ``models.FeT(neighbours=50)``. Whoever
writes a family of their own starts from :class:`Family`. Names are loaded on first use: reading
settings does not wait for torch.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from securevfl.models.assist.settings import AssistConfig as Assist
    from securevfl.models.baselines.settings import AvgSimConfig as AvgSim
    from securevfl.models.baselines.settings import ExactConfig as Exact
    from securevfl.models.baselines.settings import FeatureSimConfig as FeatureSim
    from securevfl.models.baselines.settings import Top1SimConfig as Top1Sim
    from securevfl.models.family import Family, FamilySettings
    from securevfl.models.fedhssl.model_settings import FedCSSLConfig as FedCSSL
    from securevfl.models.fedhssl.model_settings import FedGSSLConfig as FedGSSL
    from securevfl.models.fedhssl.model_settings import FedHSSLConfig as FedHSSL
    from securevfl.models.fedhssl.model_settings import FedLocalSSLConfig as FedLocalSSL
    from securevfl.models.fedhssl.model_settings import FedSplitNNConfig as FedSplitNN
    from securevfl.models.fedsim.settings import FedSimConfig as FedSim
    from securevfl.models.fet.settings import FeTConfig as FeT
    from securevfl.models.registry import register
    from securevfl.models.split import Bottom, Top

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
    "Assist": ("securevfl.models.assist.settings", "AssistConfig"),
    "AvgSim": ("securevfl.models.baselines.settings", "AvgSimConfig"),
    "Bottom": ("securevfl.models.split", "Bottom"),
    "Exact": ("securevfl.models.baselines.settings", "ExactConfig"),
    "Family": ("securevfl.models.family", "Family"),
    "FamilySettings": ("securevfl.models.family", "FamilySettings"),
    "FeT": ("securevfl.models.fet.settings", "FeTConfig"),
    "FeatureSim": ("securevfl.models.baselines.settings", "FeatureSimConfig"),
    "FedCSSL": ("securevfl.models.fedhssl.model_settings", "FedCSSLConfig"),
    "FedGSSL": ("securevfl.models.fedhssl.model_settings", "FedGSSLConfig"),
    "FedHSSL": ("securevfl.models.fedhssl.model_settings", "FedHSSLConfig"),
    "FedLocalSSL": ("securevfl.models.fedhssl.model_settings", "FedLocalSSLConfig"),
    "FedSim": ("securevfl.models.fedsim.settings", "FedSimConfig"),
    "FedSplitNN": ("securevfl.models.fedhssl.model_settings", "FedSplitNNConfig"),
    "Top": ("securevfl.models.split", "Top"),
    "Top1Sim": ("securevfl.models.baselines.settings", "Top1SimConfig"),
    "register": ("securevfl.models.registry", "register"),
}


def __getattr__(name: str) -> object:
    """Import a public name from its home module on first use."""
    if name not in _HOMES:
        raise AttributeError(f"module 'securevfl.models' has no attribute {name!r}")
    module, attribute = _HOMES[name]
    return getattr(importlib.import_module(module), attribute)


def __dir__() -> list[str]:
    """Name everything public, loaded yet or not."""
    return __all__
