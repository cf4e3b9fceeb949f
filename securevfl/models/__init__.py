"""Model families: plain PyTorch, without transport, cryptography or accounting.

A family's settings are public under the family's own name: ``models.FeT(neighbours=50)``. They are
loaded on first use, and reading settings does not wait for torch.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from securevfl.models.baselines.linked_config import AvgSimConfig as AvgSim
    from securevfl.models.baselines.linked_config import ExactConfig as Exact
    from securevfl.models.baselines.linked_config import FeatureSimConfig as FeatureSim
    from securevfl.models.baselines.linked_config import Top1SimConfig as Top1Sim
    from securevfl.models.fedhssl.config import FedCSSLConfig as FedCSSL
    from securevfl.models.fedhssl.config import FedGSSLConfig as FedGSSL
    from securevfl.models.fedhssl.config import FedHSSLConfig as FedHSSL
    from securevfl.models.fedhssl.config import FedLocalSSLConfig as FedLocalSSL
    from securevfl.models.fedhssl.config import FedSplitNNConfig as FedSplitNN
    from securevfl.models.fedsim.config import FedSimConfig as FedSim
    from securevfl.models.fet.config import FeTConfig as FeT

__all__ = [
    "AvgSim",
    "Exact",
    "FeT",
    "FeatureSim",
    "FedCSSL",
    "FedGSSL",
    "FedHSSL",
    "FedLocalSSL",
    "FedSim",
    "FedSplitNN",
    "Top1Sim",
]

_HOMES = {
    "AvgSim": "securevfl.models.baselines.linked_config",
    "Exact": "securevfl.models.baselines.linked_config",
    "FeT": "securevfl.models.fet.config",
    "FeatureSim": "securevfl.models.baselines.linked_config",
    "FedCSSL": "securevfl.models.fedhssl.config",
    "FedGSSL": "securevfl.models.fedhssl.config",
    "FedHSSL": "securevfl.models.fedhssl.config",
    "FedLocalSSL": "securevfl.models.fedhssl.config",
    "FedSplitNN": "securevfl.models.fedhssl.config",
    "FedSim": "securevfl.models.fedsim.config",
    "Top1Sim": "securevfl.models.baselines.linked_config",
}


def __getattr__(name: str) -> object:
    """Import a public name from its home module on first use."""
    if name not in _HOMES:
        raise AttributeError(f"module 'securevfl.models' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), f"{name}Config")


def __dir__() -> list[str]:
    """Name everything public, loaded yet or not."""
    return __all__
