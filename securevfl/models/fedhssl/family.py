"""FedHSSL and its ablations as model families: pretrained encoders and a head."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Final

import torch
from jaxtyping import Float
from torch import Tensor, nn

from securevfl.core.errors import PrivacyError
from securevfl.core.stages import load_parts
from securevfl.models import family
from securevfl.models.family import PretrainingSettings
from securevfl.models.fedhssl import encoders
from securevfl.models.fedhssl.encoders import CategoricalColumn, FedHSSLConfig, build_encoder
from securevfl.models.layers import MLP, ByteDropout, LayerNorm

# A clipped aggregate may be tiny; the usual 1e-5 would swallow it.
_EPSILON: Final = 1e-10


class Encoders(nn.Module):
    """The encoders that a party fine-tunes, with their outputs concatenated."""

    def __init__(
        self,
        config: FedHSSLConfig,
        *,
        num_features: int,
        columns: Sequence[CategoricalColumn] = (),
    ) -> None:
        super().__init__()
        self.parts = nn.ModuleDict(
            {
                name: build_encoder(config, num_features=num_features, columns=columns)
                for name in config.used_encoders
            }
        )

    def forward(self, features: Float[Tensor, "rows features"]) -> Float[Tensor, "rows width"]:
        """Return one vector for each row."""
        return torch.cat([part(features) for part in self.parts.values()], dim=1)

    def load_pretrained(self, weights: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Start from pretrained weights."""
        for name, part in self.parts.items():
            part.load_state_dict(dict(weights[name]))


class FedHSSLBottom(nn.Module):
    """Bottom model: a secondary's encoders of the one record that is linked to a row."""

    recordwise = True

    def __init__(
        self,
        config: FedHSSLConfig,
        *,
        num_features: int,
        columns: Sequence[CategoricalColumn] = (),
    ) -> None:
        super().__init__()
        self.encoders = Encoders(config, num_features=num_features, columns=columns)
        self.positions = nn.Identity()

    def forward(
        self, features: family.RecordFeatures, keys: family.RecordKeys, present: family.Present
    ) -> Float[Tensor, "batch one width"]:
        """Return the record's representation, zero where a row has no record."""
        hidden = self.encoders(features[:, 0]).unsqueeze(1)
        return hidden * present.unsqueeze(-1)


class FedHSSLTop(nn.Module):
    """Top model: the primary's encoders, and a head on their outputs and the aggregate.

    With two parties this is the paper's concatenation; with more, the secondaries are averaged
    first. ``normalise`` normalises each half separately, which the paper does not do.

    References:
        [FedHSSL] Equation 1.
    """

    def __init__(
        self,
        config: FedHSSLConfig,
        *,
        num_features: int,
        outputs: int,
        columns: Sequence[CategoricalColumn] = (),
    ) -> None:
        super().__init__()
        self.encoders = Encoders(config, num_features=num_features, columns=columns)
        self.positions = nn.Identity()
        _, width = config.cut_shape
        self.own_norm: nn.Module = nn.Identity()
        self.aggregate_norm: nn.Module = nn.Identity()
        if config.normalise:
            # Secondaries' vectors are clipped, so both halves are brought to one scale.
            self.own_norm = LayerNorm(width, elementwise_affine=False)
            self.aggregate_norm = LayerNorm(width, elementwise_affine=False, eps=_EPSILON)
        self.dropout = ByteDropout(config.dropout)
        self.head = MLP(2 * width, config.head, outputs, dropout=config.dropout)

    def forward(
        self,
        features: family.RowFeatures,
        keys: family.RowKeys,
        aggregate: family.Aggregate,
        similarities: family.Similarities,
    ) -> Float[Tensor, "batch outputs"]:
        """Return the outputs of a batch."""
        own = self.own_norm(self.encoders(features))
        others = self.aggregate_norm(aggregate.squeeze(1))
        out: Tensor = self.head(self.dropout(torch.cat([own, others], dim=1)))
        return out


class FedHSSLFamily(family.Family[FedHSSLConfig]):
    """``family = "fedhssl"``: cross-party and local learning, and aggregation."""

    name = "fedhssl"
    links_to_one = True
    settings_class: type[FedHSSLConfig] = FedHSSLConfig
    pretraining = FedHSSLConfig.STEPS
    learning_rate = 1e-3
    presets = MappingProxyType(
        {
            "paper": family.Preset(
                base="none",
                model={
                    "encoder_hidden": 512,
                    "hidden": 512,
                    "embedding": 32,
                    "norm": "batch",
                    "encoders": "both",
                    "head": (),
                    "normalise": False,
                },
                training={
                    "optimizer": "sgd",
                    "learning_rate": 0.01,
                    "weight_decay": 3e-5,
                    "batch_size": 512,
                    "epochs": 20,
                    "rows": "aligned",
                },
                pretraining={
                    "iterations": 10,
                    "cross_epochs": 1,
                    "local_epochs": 1,
                    "local_updates": 1,
                    "batch_size": 512,
                    "guidance": 0.5,
                    "corruption": 0.3,
                    "views": "apart",
                    "exchange": "plain",
                    "optimizer": "sgd",
                    "learning_rate": 0.05,
                    "weight_decay": 3e-5,
                },
                algorithms={
                    "simsiam": {"projector": (512, 512, 512), "predictor": 128},
                    "byol": {"projector": (512, 512, 512), "predictor": 128, "momentum": 0.995},
                    "moco": {
                        "projector": (512, 512, 128),
                        "momentum": 0.99,
                        "temperature": 0.5,
                        "queue": 4096,
                    },
                },
            )
        }
    )
    """[FedHSSL] Algorithm 1, section V and appendix B-A; the published code's where they are silent
    (widths, optimizers, decay, the rate of pretraining)."""

    def build_bottom(
        self,
        settings: FedHSSLConfig,
        *,
        num_features: int,
        feature_names: Sequence[str] = (),
        **_: object,
    ) -> nn.Module:
        """Return the encoders of the one linked record."""
        columns = settings.columns(feature_names)
        return FedHSSLBottom(settings, num_features=num_features, columns=columns)

    def build_top(
        self,
        settings: FedHSSLConfig,
        *,
        num_features: int,
        feature_names: Sequence[str] = (),
        outputs: int,
        **_: object,
    ) -> nn.Module:
        """Return the primary's encoders with a head."""
        columns = settings.columns(feature_names)
        return FedHSSLTop(settings, num_features=num_features, columns=columns, outputs=outputs)

    def require_separate_rows(self, settings: FedHSSLConfig) -> None:
        """Refuse batch normalisation.

        Raises:
            PrivacyError: For ``norm = "batch"``.
        """
        if settings.norm == "batch":
            raise PrivacyError(
                'model.norm: "batch" lets one record move the representations of a whole batch, so '
                'epsilon would not hold; use norm = "layer"'
            )

    def build_learner(
        self,
        settings: FedHSSLConfig,
        pretraining: PretrainingSettings,
        *,
        features: Float[Tensor, "records features"],
        feature_names: Sequence[str],
        party: str,
        seed: int,
    ) -> family.Learner:
        """Return a party's learner; arguments as in :meth:`Family.build_learner`.

        Raises:
            ConfigError: If the encoder does not fit the features.
        """
        build = load_parts("learners")[FedHSSLFamily.name]
        learner: family.Learner = build(
            settings,
            pretraining,
            features=features,
            feature_names=feature_names,
            party=party,
            seed=seed,
        )
        return learner

    def load_pretrained(
        self, model: nn.Module, encoders: Mapping[str, Mapping[str, Tensor]]
    ) -> None:
        """Load pretrained encoders into a bottom or top model."""
        own = model.get_submodule("encoders")
        assert isinstance(own, Encoders), "both models of these families have encoders"
        own.load_pretrained(encoders)

    def pretraining_warning(
        self, settings: FedHSSLConfig, feature_names: Sequence[str]
    ) -> str | None:
        """Return a warning if no feature column can be embedded, else None."""
        if settings.encoder != "embedding" or settings.columns(feature_names):
            return None
        return (
            'no feature column holds words, so that encoder = "embedding" embeds nothing there; '
            "list the values of a column of codes as party.categories"
        )


class FedGSSLFamily(FedHSSLFamily):
    """``family = "fedgssl"``: without aggregation of models ([FedHSSL] V-C, figure 6, Table V)."""

    name = "fedgssl"
    settings_class = encoders.FedGSSLConfig
    pretraining = encoders.FedGSSLConfig.STEPS


class FedCSSLFamily(FedHSSLFamily):
    """``family = "fedcssl"``: cross-party learning only ([FedHSSL] V-C, figure 6, Table IX)."""

    name = "fedcssl"
    settings_class = encoders.FedCSSLConfig
    pretraining = encoders.FedCSSLConfig.STEPS


class FedLocalSSLFamily(FedHSSLFamily):
    """``family = "fedlocalssl"``: local pretraining only ([FedHSSL] V-A, Table IV)."""

    name = "fedlocalssl"
    settings_class = encoders.FedLocalSSLConfig
    pretraining = encoders.FedLocalSSLConfig.STEPS


class FedSplitNNFamily(FedHSSLFamily):
    """``family = "fedsplitnn"``: no pretraining ([FedHSSL] V-A, Table IV)."""

    name = "fedsplitnn"
    settings_class = encoders.FedSplitNNConfig
    pretraining = encoders.FedSplitNNConfig.STEPS
