"""From a record to a vector: its features and the place of its key, added."""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from securevfl.models.fet.fet_config import FeTConfig
from securevfl.models.fet.positions import FourierPositions


class RecordEmbedding(nn.Module):
    """Embed features linearly and add the positional encoding of the key.

    References:
        [FeT] section 5.1, figure 2: positional encodings join the features before the encoder.
    """

    def __init__(self, config: FeTConfig, *, num_features: int, key_dim: int) -> None:
        super().__init__()
        self.keys_as_features = config.keys_as_features
        inputs = num_features + (key_dim if config.keys_as_features else 0)
        self.linear = nn.Linear(inputs, config.hidden)
        self.positions = fourier_positions(config, key_dim)

    def forward(
        self,
        features: Float[Tensor, "*rows features"],
        keys: Float[Tensor, "*rows dimension"],
    ) -> Float[Tensor, "*rows width"]:
        """Return one vector for each record."""
        inputs = torch.cat([features, keys], dim=-1) if self.keys_as_features else features
        embedded: Tensor = self.linear(inputs) + self.positions(keys)
        return embedded


def fourier_positions(config: FeTConfig, key_dim: int) -> FourierPositions:
    """Return the positional encoding that the settings ask for, of keys with so many columns."""
    return FourierPositions(
        key_dim,
        num_features=config.fourier_features,
        hidden=config.fourier_width,
        width=config.hidden,
        scale=config.fourier_scale,
        octaves=config.octaves(key_dim),
    )
