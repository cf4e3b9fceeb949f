"""Settings of FeT."""

from dataclasses import dataclass
from typing import Literal

from securevfl.core import checks
from securevfl.core.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class FeTConfig:
    """The ``[model]`` table of a federation with ``family = "fet"``; all parties share it."""

    neighbours: int = 50
    """K, links of a row at every secondary."""

    hidden: int = 64
    """H, width of every representation."""

    heads: int = 4
    """Attention heads; they share H."""

    encoder_blocks: int = 1
    """Self-attention blocks of a secondary, and of the primary's own encoder."""

    decoder_blocks: int = 1
    """Blocks of the primary's decoder, which attends to the aggregate."""

    dropout: float = 0.1
    """Share of units dropped in training, inside blocks."""

    party_dropout: float = 0.0
    """r_d, share of the secondaries left out of a training round."""

    release: Literal["sequence", "pooled"] = "sequence"
    """What a secondary releases for a row: K vectors, as in the paper, or one."""

    dynamic_masking: bool = True
    """Whether attention weighs links by a mask made from their keys."""

    ranked: bool = True
    """Whether the model may learn what a link's rank is worth; links are listed nearest first.

    An addition to the paper: a mask made from keys alone does not know the primary's key, so it
    cannot tell the nearest link from the others.
    """

    keys_as_features: bool = True
    """Whether keys are model inputs beside the features, as in the published code.

    Positional encoding and masking read keys in any case.
    """

    top: Literal["attention", "additive"] = "attention"
    """The primary's part after the cut: the paper's decoder, or own evidence plus that of the
    aggregate, which learns more from releases that are mostly noise."""

    fourier_features: int = 64
    """Sines and cosines of the positional encoding together; an even number."""

    fourier_width: int = 64
    """Hidden width of the positional encoding's perceptron."""

    fourier_scale: float = 1.0
    """gamma: frequencies start as N(0, gamma^-2), in radians per unit of the (scaled) keys."""

    average_positions_every: int = 1
    """T_pe, epochs between averagings of the positional encodings; 0 never averages."""

    frozen_map: Literal["fourier", "linear"] = "fourier"
    """Random features of a frozen encoder: cosines, or a projection."""

    frozen_bandwidth: float = 1.0
    """Length scale of the cosine features, relative to sqrt(inputs); larger is smoother."""

    def __post_init__(self) -> None:
        checks.whole(
            neighbours=self.neighbours,
            hidden=self.hidden,
            heads=self.heads,
            encoder_blocks=self.encoder_blocks,
            decoder_blocks=self.decoder_blocks,
            fourier_features=self.fourier_features,
            fourier_width=self.fourier_width,
            average_positions_every=self.average_positions_every,
        )
        checks.at_least(
            1,
            neighbours=self.neighbours,
            hidden=self.hidden,
            heads=self.heads,
            encoder_blocks=self.encoder_blocks,
            decoder_blocks=self.decoder_blocks,
            fourier_width=self.fourier_width,
        )
        checks.at_least(2, fourier_features=self.fourier_features)
        checks.at_least(0, average_positions_every=self.average_positions_every)
        checks.fraction(dropout=self.dropout, party_dropout=self.party_dropout)
        checks.positive(fourier_scale=self.fourier_scale, frozen_bandwidth=self.frozen_bandwidth)
        checks.one_of(("sequence", "pooled"), release=self.release)
        checks.one_of(("fourier", "linear"), frozen_map=self.frozen_map)
        checks.one_of(("attention", "additive"), top=self.top)
        if self.hidden % self.heads:
            raise ConfigError(f"heads must divide hidden={self.hidden}, got {self.heads}")
        if self.fourier_features % 2:
            raise ConfigError(
                f"fourier_features must be even (sines and cosines), got {self.fourier_features}"
            )

    @property
    def cut_shape(self) -> tuple[int, int]:
        """(L, H) of the aggregate."""
        return (self.neighbours if self.release == "sequence" else 1, self.hidden)
