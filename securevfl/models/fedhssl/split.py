"""The split network that is fine-tuned: pretrained encoders below, a head on top."""

from collections.abc import Mapping, Sequence
from typing import Final

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from securevfl.core.errors import ConfigError
from securevfl.models.dropout import ByteDropout
from securevfl.models.fedhssl.columns import CategoricalColumn
from securevfl.models.fedhssl.encoders import build_encoder
from securevfl.models.fedhssl.fedhssl_config import FedHSSLConfig
from securevfl.models.mlp import MLP

# A clipped aggregate may be tiny; the usual 1e-5 would swallow it.
_EPSILON: Final = 1e-10


class Encoders(nn.Module):
    """The encoders that a party fine-tunes, their outputs side by side."""

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
                name: build_encoder(
                    config.encoder_config, num_features=num_features, columns=columns
                )
                for name in config.used_encoders
            }
        )

    def forward(self, features: Float[Tensor, "rows features"]) -> Float[Tensor, "rows width"]:
        """Return one vector a row."""
        return torch.cat([part(features) for part in self.parts.values()], dim=1)

    def load_pretrained(self, weights: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Start from pretrained weights.

        Raises:
            ConfigError: If they are not those of such encoders.
        """
        for name, part in self.parts.items():
            if name not in weights:
                raise ConfigError(f"pretraining: made no {name} encoder; it has {sorted(weights)}")
            try:
                part.load_state_dict(dict(weights[name]))
            except RuntimeError:
                raise ConfigError(
                    f"pretraining: its {name} encoder has other layers or other features than "
                    f"[model] asks for; pretrain again with these settings"
                ) from None


class FedHSSLBottom(nn.Module):
    """A secondary's encoders on the one record that is linked to a row."""

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
        self,
        features: Float[Tensor, "batch one features"],
        keys: Float[Tensor, "batch one dimension"],  # noqa: ARG002 - a Bottom
        present: Bool[Tensor, "batch one"],
    ) -> Float[Tensor, "batch one width"]:
        """Return the record's representation, zero where a row has no record."""
        hidden = self.encoders(features[:, 0]).unsqueeze(1)
        return hidden * present.unsqueeze(-1)


class FedHSSLTop(nn.Module):
    """The primary's encoders and a head on them and on the aggregate.

    Of two parties this is the paper's concatenation; of more, the secondaries are averaged first.
    With ``normalise`` each half is normalised by itself, which the paper does not do.

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
            # Secondaries' vectors are clipped; both halves come to the head at one scale.
            self.own_norm = nn.LayerNorm(width, elementwise_affine=False)
            self.aggregate_norm = nn.LayerNorm(width, elementwise_affine=False, eps=_EPSILON)
        self.dropout = ByteDropout(config.dropout)
        self.head = MLP(2 * width, config.head, outputs, dropout=config.dropout)

    def forward(
        self,
        features: Float[Tensor, "batch features"],
        keys: Float[Tensor, "batch dimension"],  # noqa: ARG002 - a Top
        aggregate: Float[Tensor, "batch one width"],
        similarities: Float[Tensor, "batch secondaries links"] | None,  # noqa: ARG002
    ) -> Float[Tensor, "batch outputs"]:
        """Return the outputs of a batch."""
        own = self.own_norm(self.encoders(features))
        others = self.aggregate_norm(aggregate.squeeze(1))
        out: Tensor = self.head(self.dropout(torch.cat([own, others], dim=1)))
        return out
