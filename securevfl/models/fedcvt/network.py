"""FedCVT's networks: two encoders a party, and three classifiers."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn

from securevfl.models.fedhssl.columns import CategoricalColumn
from securevfl.models.fedhssl.encoders import EncoderConfig, build_encoder


@dataclass(frozen=True, slots=True)
class Views:
    """One party's representations of some rows."""

    unique: Float[Tensor, "rows width"]
    """What this party alone may know of a row."""

    common: Float[Tensor, "rows width"]
    """What both parties know of it."""

    @property
    def joined(self) -> Float[Tensor, "rows both"]:
        """Both side by side."""
        return torch.cat([self.unique, self.common], dim=1)

    def __getitem__(self, rows: slice) -> "Views":
        return Views(self.unique[rows], self.common[rows])


class Party(nn.Module):
    """One party's encoders."""

    def __init__(
        self, encoder: EncoderConfig, *, num_features: int, columns: Sequence[CategoricalColumn]
    ) -> None:
        super().__init__()
        self.unique = build_encoder(encoder, num_features=num_features, columns=columns)
        self.common = build_encoder(encoder, num_features=num_features, columns=columns)

    def forward(self, features: Float[Tensor, "rows features"]) -> Views:
        """Return the representations of rows."""
        return Views(self.unique(features), self.common(features))


class FedCVTNetwork(nn.Module):
    """Both parties and the classifiers, which are the primary's.

    References:
        [FedCVT] section 4.1.
    """

    def __init__(
        self,
        encoder: EncoderConfig,
        *,
        primary_features: int,
        other_features: int,
        columns: tuple[Sequence[CategoricalColumn], ...],
        classes: int,
    ) -> None:
        super().__init__()
        self.primary = Party(encoder, num_features=primary_features, columns=columns[0])
        self.other = Party(encoder, num_features=other_features, columns=columns[1])
        self.joint_head = nn.Linear(4 * encoder.width, classes)
        self.primary_head = nn.Linear(2 * encoder.width, classes)
        self.other_head = nn.Linear(2 * encoder.width, classes)

    def forward(
        self,
        primary: Float[Tensor, "rows primary_features"],
        other: Float[Tensor, "rows other_features"],
    ) -> Float[Tensor, "rows classes"]:
        """Return the joint classifier's logits of aligned rows."""
        return self.joint(self.primary(primary), self.other(other))

    def joint(self, primary: Views, other: Views) -> Float[Tensor, "rows classes"]:
        """Return the joint classifier's logits of representations, real or estimated."""
        logits: Tensor = self.joint_head(torch.cat([primary.joined, other.joined], dim=1))
        return logits
