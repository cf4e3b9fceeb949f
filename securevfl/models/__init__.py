"""Model families: plain PyTorch, without transport, cryptography or accounting.

A family's settings are public under the family's name: ``models.FeT(neighbours=50)``. A custom
family subclasses :class:`Family`. Names are loaded on first use.
"""

from typing import TYPE_CHECKING, Any

from securevfl.core.stages import load_parts, on_first_use, part_names

if TYPE_CHECKING:
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
    from securevfl.models.registry import register, split_model

__all__ = [
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
    "split_model",
]

_own_name, __dir__ = on_first_use(__name__, __file__, __all__)


def __getattr__(name: str) -> Any:
    """Return a public name; of a stage's family the settings, which are called as it is."""
    if name in __all__ and name.lower() in part_names("families"):
        return load_parts("families")[name.lower()].settings_class
    return _own_name(name)
