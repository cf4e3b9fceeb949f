"""A small autoencoder whose code crosses the noise that releases will have."""

from typing import Final

from jaxtyping import Float
from torch import Tensor, nn

from securevfl.models.layers import MLP

_WIDTH: Final = 32
_SHORTEST: Final = 1e-12


def small_encoder(*, num_features: int, components: int) -> MLP:
    """Return a perceptron from a record's features to a code."""
    return MLP(num_features, (_WIDTH,), components)


class ChannelAutoencoder(nn.Module):
    """Reconstruct a record from the direction of its code and noise upon it.

    No label has a part in it. What survives the noise of a release in few numbers is what the
    encoder learns to say.

    References:
        [VLBM08] section 2.3: denoising autoencoders; there the noise is on the record, here on the
        code, where releases have theirs.
    """

    def __init__(self, encoder: nn.Module, *, num_features: int, components: int) -> None:
        """Wrap an encoder, which learns with the decoder that is made here."""
        super().__init__()
        self.components = components
        self.encoder = encoder
        self.decoder = MLP(components, (_WIDTH,), num_features)

    def forward(
        self,
        records: Float[Tensor, "*rows features"],
        noise: Float[Tensor, "points components"],
    ) -> Float[Tensor, "*rows"]:
        """Return each record's squared error, its mean over features and points of noise.

        Args:
            records: Scaled features.
            noise: What releases might add, in units of the code's length: the same points for
                every record, so that an error is a function of its own record alone.
        """
        scores = self.encoder(records)
        # Not the norm itself, which has no gradient at zero.
        norm = (scores.square().sum(dim=-1, keepdim=True) + _SHORTEST).sqrt()
        error: Tensor = self.decoder((scores / norm).unsqueeze(-2) + noise) - records.unsqueeze(-2)
        return error.square().mean(dim=(-2, -1))
