"""The Federated Transformer as a family."""

from collections.abc import Sequence
from types import MappingProxyType

from torch import nn

from securevfl.models.family import Family, Preset
from securevfl.models.fet.fet_bottom import FeTBottom
from securevfl.models.fet.fet_top import AdditiveTop, FeTTop
from securevfl.models.fet.settings import FeTConfig
from securevfl.models.frozen import FrozenBottom


class FeTFamily(Family[FeTConfig]):
    """``family = "fet"``."""

    name = "fet"
    settings_class = FeTConfig
    presets = MappingProxyType(
        {
            "paper": Preset(
                base="none",
                model={
                    "norm": "post",
                    "activation": "relu",
                    "mask_reads": "keys",
                    "ranked": False,
                    "memory_norm": False,
                    "fourier_octaves": 0,
                    "positions_start": "separate",
                    "average_positions_every": 1,
                    "neighbours": 100,
                    "hidden": 100,
                    "heads": 4,
                    "encoder_blocks": 3,
                    "decoder_blocks": 3,
                    "dropout": 0.3,
                },
                training={
                    "optimizer": "lamb",
                    "learning_rate": 1e-3,
                    "weight_decay": 1e-5,
                    "batch_size": 128,
                    "epochs": 100,
                    "patience": 100,
                },
            )
        }
    )
    """[FeT] section 5.1 for the network; sizes and training, which the paper leaves to appendices
    and scripts, as its authors' scripts have them for tables of houses. Under noise,
    ``own_clip_norm`` is line 11 of its Algorithm 1."""

    def build_bottom(
        self,
        settings: FeTConfig,
        *,
        num_features: int,
        key_dim: int,
        feature_names: Sequence[str] = (),  # noqa: ARG002
        frozen: bool = False,
    ) -> nn.Module:
        """Return the encoder of linked records; a frozen one is random features."""
        kind = FrozenBottom if frozen else FeTBottom
        return kind(settings, num_features=num_features, key_dim=key_dim)

    def build_top(
        self,
        settings: FeTConfig,
        *,
        num_features: int,
        key_dim: int,
        feature_names: Sequence[str] = (),  # noqa: ARG002
        outputs: int,
        classes: bool = False,  # noqa: ARG002
    ) -> nn.Module:
        """Return the paper's decoder, or the additive one."""
        kind = AdditiveTop if settings.top == "additive" else FeTTop
        return kind(settings, num_features=num_features, key_dim=key_dim, outputs=outputs)

    def reads_keys(self, settings: FeTConfig, *, frozen: bool) -> bool:
        """Return False where nothing attends: frozen encoders below an additive top model."""
        attends = not frozen or settings.top == "attention"
        return attends or settings.keys_as_features

    def pooled(self, settings: FeTConfig, *, frozen: bool) -> bool:
        """Return whether frozen encoders are pooled."""
        # FeTBottom pools by itself, after attention has mixed its records.
        return frozen and settings.release == "pooled"

    def shares_positions(self, settings: FeTConfig) -> bool:
        """Return what ``positions_start`` says."""
        return settings.positions_start == "shared"
