"""Settings of FeT."""

from dataclasses import dataclass
from functools import partial
from typing import Annotated, Final, Literal

from securevfl.core import checks
from securevfl.core.errors import ConfigError
from securevfl.models.layers import RankPrior

_HEADS: Final = 4
_OCTAVES: Final = 5
# 32 frequencies cover a line or a plane in detail, but not more dimensions.
_MOST_SPREAD_KEYS: Final = 2
# Angles of 2^16 deviations have few digits left in 32 bits.
_MOST_OCTAVES: Final = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class FeTConfig:
    """The ``[model]`` table of a federation with ``family = "fet"``; all parties share it."""

    neighbours: checks.Links = 50
    """K, links of a row at every secondary."""

    hidden: checks.Width = 64
    """H, width of every representation."""

    heads: checks.Width | None = None
    """Attention heads, which share H. Default: 4, or the most below that divide H."""

    encoder_blocks: checks.Layers = 1
    """Self-attention blocks of a secondary, and of the primary's own encoder."""

    decoder_blocks: checks.Layers = 1
    """Blocks of the primary's decoder, which attends to the aggregate."""

    norm: Literal["pre", "post"] = "pre"
    """Norms before a block's layers, or after them, as in the paper."""

    activation: Literal["gelu", "relu"] = "gelu"
    """Activation of the blocks' perceptrons; the paper's is ``relu``."""

    dropout: checks.Fraction = 0.1
    """Share of units dropped inside blocks; rounded to 1/256."""

    party_dropout: checks.Fraction = 0.0
    """r_d, share of the secondaries left out of a training round."""

    release: Literal["sequence", "pooled"] = "sequence"
    """Released vectors of a row: K (``sequence``), as in the paper, or one (``pooled``)."""

    dynamic_masking: bool = True
    """Attention weighs links by a mask made from their keys."""

    mask_reads: Literal["offsets", "keys"] = "offsets"
    """The mask reads each key in relation to its row's centre, or all K keys joined, as in the
    paper."""

    ranked: bool = True
    """The model may learn weights of links' ranks; not in the paper."""

    rank_prior: RankPrior = 1.0
    """Head start of near links: the j-th nearest starts with a share in proportion to
    j^-rank_prior."""

    memory_norm: bool = True
    """The primary norms the aggregate before its decoder; not in the paper."""

    own_clip_norm: checks.Positive | None = None
    """Largest norm of the primary's own representation, the paper's C; default: none."""

    keys_as_features: bool = True
    """Keys are inputs too, as in the paper. Encodings and masks always read them."""

    top: Literal["attention", "additive"] = "attention"
    """Top model: the paper's decoder, or a sum of the primary's own and the aggregate's evidence,
    which learns more from noisy releases."""

    fourier_features: Annotated[int, partial(checks.within, 2, checks.MOST_WIDTH)] = 64
    """Sines and cosines of the positional encoding together; even."""

    fourier_width: checks.Width = 64
    """Hidden width of the encoding's perceptron."""

    fourier_scale: checks.Positive = 1.0
    """gamma: frequencies start as N(0, gamma^-2), in radians per unit of scaled keys."""

    fourier_octaves: Annotated[int, partial(checks.within, 0, _MOST_OCTAVES)] | None = None
    """Octaves of the frequencies, whose deviations go from 1/gamma to 2^octaves/gamma; 0, as in the
    paper: all 1/gamma, and features divided by sqrt(``fourier_features``). Default: 5 for one or
    two key columns, else 0."""

    average_positions_every: checks.FromZero = 0
    """T_pe, epochs between averagings of positional encodings; 0: never."""

    positions_start: Literal["shared", "separate"] = "shared"
    """Initial positional encodings: equal at all parties, or separate, as in the paper."""

    frozen_map: Literal["fourier", "linear"] = "fourier"
    """Random features of a frozen encoder: cosines, or a projection."""

    frozen_bandwidth: checks.Positive = 1.0
    """Length scale of the cosine features, relative to sqrt(inputs); larger is smoother."""

    def __post_init__(self) -> None:
        checks.require_limits(self)
        if self.hidden % self.attention_heads:
            raise ConfigError(f"heads must divide hidden={self.hidden}, got {self.heads}")
        if self.fourier_features % 2:
            raise ConfigError(
                f"fourier_features must be even (sines and cosines), got {self.fourier_features}"
            )

    @property
    def attention_heads(self) -> int:
        """Attention heads, which divide H."""
        if self.heads is not None:
            return self.heads
        return max(heads for heads in range(1, _HEADS + 1) if self.hidden % heads == 0)

    def octaves(self, key_dim: int) -> int:
        """Return the octaves of the frequencies for keys with ``key_dim`` columns."""
        if self.fourier_octaves is not None:
            return self.fourier_octaves
        return _OCTAVES if key_dim <= _MOST_SPREAD_KEYS else 0

    @property
    def cut_shape(self) -> tuple[int, int]:
        """(L, H) of the aggregate."""
        return (self.neighbours if self.release == "sequence" else 1, self.hidden)
