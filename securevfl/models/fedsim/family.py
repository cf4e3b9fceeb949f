"""FedSim as a family."""

from collections.abc import Sequence
from types import MappingProxyType

from torch import nn

from securevfl.models.family import Preset
from securevfl.models.fedsim.fedsim_top import FedSimTop
from securevfl.models.fedsim.settings import FedSimConfig
from securevfl.models.pairs import PAPER_TRAINING, PairFamily


class FedSimFamily(PairFamily[FedSimConfig]):
    """``family = "fedsim"``; its gates need every link's own vector, so nothing is pooled."""

    name = "fedsim"
    settings_class = FedSimConfig
    presets = MappingProxyType(
        {
            "paper": Preset(
                base="none",
                model={
                    "weight": "learned",
                    "merge": "convolution",
                    "pair_scale": "none",
                    "neighbours": 50,
                    "layer_width": 100,
                },
                training={**PAPER_TRAINING, "batch_size": 128},
            )
        }
    )
    """[FedSim] section 4.2, section 6.1 ("Training"), and appendix C of its first version for
    what it tunes."""

    def build_top(
        self,
        settings: FedSimConfig,
        *,
        num_features: int,
        key_dim: int,
        feature_names: Sequence[str] = (),  # noqa: ARG002
        outputs: int,
        classes: bool = False,
    ) -> nn.Module:
        """Return the split network with its gates."""
        return FedSimTop(
            settings, num_features=num_features, key_dim=key_dim, outputs=outputs, classes=classes
        )

    def needs_similarities(self, settings: FedSimConfig) -> bool:  # noqa: ARG002
        """Return that the gates do."""
        return True
