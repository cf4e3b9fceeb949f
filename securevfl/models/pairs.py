"""The split network of one pair of linked records, which FedSim and its baselines stand on.

B = rows of a batch, K = links of a row, H = width at the cut, A = hidden width, O = outputs.
"""

from collections.abc import Sequence
from typing import Final, TypeVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from securevfl.models.family import Family
from securevfl.models.frozen import FrozenBottom
from securevfl.models.mlp import MLP
from securevfl.models.pair_settings import ManyLinksSettings, OneLinkSettings, PairSettings

_SMALLEST: Final = 1e-6


class RecordBottom(nn.Module):
    """A secondary's local model, applied to each linked record alone.

    References:
        [FedSim] Algorithm 1, line 5.
    """

    recordwise = True
    stackable = True

    def __init__(self, config: PairSettings, *, num_features: int, key_dim: int) -> None:
        super().__init__()
        self.keys_as_features = config.keys_as_features
        self.local = _local_model(config, num_features=num_features, key_dim=key_dim)
        self.positions = nn.Identity()

    def forward(
        self,
        features: Float[Tensor, "batch links features"],
        keys: Float[Tensor, "batch links dimension"],
        present: Bool[Tensor, "batch links"],
    ) -> Float[Tensor, "batch links width"]:
        """Return one vector for each link, zero where there is none."""
        inputs = torch.cat([features, keys], dim=-1) if self.keys_as_features else features
        out: Tensor = self.local(inputs)
        # Whichever links there are: gradients must be traceable row by row (torch.func).
        return out * present.unsqueeze(-1)


L = TypeVar("L", bound=OneLinkSettings | ManyLinksSettings)


class PairFamily(Family[L]):
    """A family on this split network; its aggregation model reads every link's own vector."""

    def build_bottom(
        self,
        settings: L,
        *,
        num_features: int,
        key_dim: int,
        feature_names: Sequence[str] = (),  # noqa: ARG002
        frozen: bool = False,
    ) -> nn.Module:
        """Return the local model of each linked record; a frozen one is random and stays so."""
        kind = FrozenBottom if frozen else RecordBottom
        return kind(settings, num_features=num_features, key_dim=key_dim)


class PairModel(nn.Module):
    """The primary's local model and the aggregation model: one output vector for each pair.

    The aggregation model reads a row's own representation beside that of each of its links. Its
    first layer is linear, so the own part is computed once a row, not once a pair.

    References:
        [FedSim] Algorithm 1, lines 6 and 7.
    """

    def __init__(
        self,
        config: PairSettings,
        *,
        num_features: int,
        key_dim: int,
        outputs: int,
        reads_similarity: bool = False,
    ) -> None:
        super().__init__()
        self.keys_as_features = config.keys_as_features
        self.scaled = config.pair_scale == "unit"
        self.local = _local_model(config, num_features=num_features, key_dim=key_dim)
        self.of_row = nn.Linear(config.hidden, config.layer_width)
        self.of_link = nn.Linear(config.hidden, config.layer_width, bias=False)
        self.of_similarity = (
            nn.Linear(1, config.layer_width, bias=False) if reads_similarity else None
        )
        self.out = nn.Linear(config.layer_width, outputs)

    def forward(
        self,
        features: Float[Tensor, "batch features"],
        keys: Float[Tensor, "batch dimension"],
        aggregate: Float[Tensor, "batch links width"],
        similarities: Float[Tensor, "batch links"] | None = None,
    ) -> Float[Tensor, "batch links outputs"]:
        """Return the outputs of each pair."""
        inputs = torch.cat([features, keys], dim=-1) if self.keys_as_features else features
        row = self.of_row(self.local(inputs)).unsqueeze(1)
        hidden = self.of_link(_at_unit_scale(aggregate) if self.scaled else aggregate).add_(row)
        if self.of_similarity is not None:
            assert similarities is not None, "the family asks for similarities"
            hidden.add_(self.of_similarity(similarities.unsqueeze(-1)))
        out: Tensor = self.out(hidden.relu_())
        return out


def _local_model(config: PairSettings, *, num_features: int, key_dim: int) -> MLP:
    inputs = num_features + (key_dim if config.keys_as_features else 0)
    return MLP(inputs, [config.layer_width], config.hidden)


def _at_unit_scale(
    aggregate: Float[Tensor, "batch links width"],
) -> Float[Tensor, "batch links width"]:
    """Bring each row of an aggregate to a root mean square of one; a row of zeros stays.

    Clipping leaves a row of K vectors with the norm C in all, whatever K is; its scale at the
    primary is post-processing of what was released. The scale is on the autograd graph: the
    gradient that secondaries get is the loss's own.
    """
    size = torch.linalg.vector_norm(aggregate, dim=(1, 2), keepdim=True)
    return aggregate * (aggregate[0].numel() ** 0.5 / size.clamp_min(_SMALLEST))
