"""Reals to ring units, units to words, and the sum of words back to reals; CPU and CUDA."""

from typing import Final

import numpy as np
import torch
from jaxtyping import Float, Float32, Int32, Int64
from torch import Tensor

from securevfl.core.errors import EncodingRangeError, ProtocolError
from securevfl.mpc.ring_format import RingFormat

# The narrow integer type of one lane, by lanes in a word; signed, since torch's arithmetic on
# unsigned 16 and 32 bits is incomplete and wraps alike.
_LANE_DTYPE: Final = {2: torch.int32, 4: torch.int16}

# Numbers that one core's cache holds with a copy of them in float64.
_PIECE: Final = 1 << 16


def quantise(x: Float[Tensor, "*shape"], fmt: RingFormat) -> Int32[Tensor, "*shape"]:
    """Return ``x`` in ring units, rounded towards zero so that no norm can grow.

    ``units = trunc(x * 2^p)``; both steps are exact, hence ``|units| <= |x| * 2^p`` elementwise.

    Raises:
        EncodingRangeError: If ``x`` is not float32 or float64, is not finite, or leaves the
            format's range; nothing was encoded.
    """
    if x.dtype not in (torch.float32, torch.float64):
        raise EncodingRangeError(f"values to encode must be float32 or float64, got {x.dtype}")
    _require_range(x, fmt, scale=2.0**fmt.precision_bits, what="a value to encode")
    scale = 2.0**fmt.precision_bits
    # The conversion itself truncates towards zero.
    if x.is_cuda:
        return (x * scale).to(torch.int32)
    units = np.empty(x.shape, np.int32)
    # One pass: numpy keeps the products in a small buffer until they are converted.
    np.multiply(x.detach().numpy(), scale, out=units, casting="unsafe")
    return torch.from_numpy(units)


def require_row_norms(
    units: Int32[Tensor, "rows *positions"], fmt: RingFormat, *, clip_norm: float
) -> None:
    """Check, in exact integers, that every row's L2 norm is at most ``clip_norm``.

    Every guarantee rests on this bound. It cannot fail after the clipping of
    :mod:`securevfl.dp.clipping`; it is there for whoever forgets that.

    Raises:
        EncodingRangeError: Naming the largest norm.
    """
    if units.numel() == 0:
        return
    largest = _largest_square(units.reshape(units.shape[0], -1))
    limit = clip_norm * 2.0**fmt.precision_bits
    if not largest <= limit**2:
        raise EncodingRangeError(
            f"a row has norm {largest**0.5 * fmt.granularity:g}, over clip_norm {clip_norm:g}; "
            f"clip before encoding"
        )


def encode(
    units: Int32[Tensor, "*shape"], fmt: RingFormat, *, reuse: bool = False
) -> Int64[Tensor, "words"]:
    """Pack ring units into words; the last word is filled up with zeros' code.

    Args:
        units: Quantised values with their noise.
        fmt: The format that all parties share.
        reuse: Whether the words may take the place of ``units`` in memory, to save a copy; the
            caller must not read ``units`` again.

    Raises:
        EncodingRangeError: If a number leaves the format's range. The whole tensor is checked
            before anything is returned, so a lane can never wrap into its neighbour.
    """
    _require_range(units, fmt, scale=1, what="a noised value")
    flat = units.reshape(-1)
    missing = fmt.words(flat.numel()) * fmt.lanes - flat.numel()
    if missing:
        flat = torch.cat([flat, flat.new_zeros(missing)])
    # An int32 addition that wraps has the same bits as the unsigned one that is meant.
    biased = flat.add_(fmt.bound_units) if reuse else flat + fmt.bound_units
    return biased.to(_LANE_DTYPE[fmt.lanes]).view(torch.int64)


def decode_sum(
    words: Int64[Tensor, "words"], fmt: RingFormat, *, elements: int, parties_active: int
) -> Int32[Tensor, "elements"]:
    """Unpack the sum of ``parties_active`` contributions into ring units.

    Raises:
        ProtocolError: If the number of words is wrong, or a lane lies outside what that many
            contributions can sum to: a mask did not cancel, or a party sent something else.
    """
    if words.numel() != fmt.words(elements):
        raise ProtocolError(
            f"a sum of {elements} elements needs {fmt.words(elements)} words, got {words.numel()}"
        )
    if not 1 <= parties_active <= fmt.parties:
        raise ProtocolError(
            f"a sum of {parties_active} contributions, in a format for 1 to {fmt.parties}"
        )
    lanes = words.view(_LANE_DTYPE[fmt.lanes])[:elements].to(torch.int32)
    if fmt.lanes == 4:
        lanes &= 0xFFFF
    bound = parties_active * fmt.bound_units
    # The unsigned difference lies in int32's range, so the wrapping one of 32-bit lanes is right.
    units = lanes - bound
    if elements:
        low, high = (int(end) for end in torch.aminmax(units))
        if low < -bound or high > bound:
            raise ProtocolError(
                f"the sum decodes to {max(-low, high)} units, over the {bound} that "
                f"{parties_active} contributions can make: masks did not cancel, "
                f"and which party sent other words than its own no sum tells"
            )
    return units


def to_float(
    units: Int32[Tensor, "*shape"], fmt: RingFormat, *, divisor: int
) -> Float32[Tensor, "*shape"]:
    """Return ``units * 2^-p / divisor`` in float32; the divisor makes a sum an average."""
    return units.to(torch.float32).mul_(fmt.granularity / divisor)


def _largest_square(rows: Int32[Tensor, "rows width"]) -> float:
    # Squares of numbers up to C * 2^p, and their sums up to its square, are exact in float64.
    if rows.is_cuda:
        wide = rows.to(torch.float64)
        return float(torch.linalg.vecdot(wide, wide).max())
    numbers = rows.numpy()
    at_a_time = max(1, _PIECE // max(1, rows.shape[1]))
    # Numpy converts, and multiplies in pieces of this size, twice as fast as torch.
    scratch = np.empty((min(at_a_time, len(numbers)), rows.shape[1]))
    largest = 0.0
    for start in range(0, len(numbers), at_a_time):
        piece = numbers[start : start + at_a_time]
        exact = scratch[: len(piece)]
        exact[:] = piece
        largest = max(largest, float(np.vecdot(exact, exact).max()))
    return largest


def _require_range(values: Tensor, fmt: RingFormat, *, scale: float, what: str) -> None:
    if values.numel() == 0:
        return
    # A power of two as scale makes the products exact.
    low, high = (end.item() * scale for end in torch.aminmax(values))
    # Written so that NaN, which aminmax passes on, fails.
    if not (-fmt.bound_units <= low and high <= fmt.bound_units):
        worst = max(low, high, key=abs) if low == low else low
        raise EncodingRangeError(
            f"{what} is {worst * fmt.granularity:g}, outside the bound "
            f"{fmt.bound_units * fmt.granularity:g} of the fixed-point ring; nothing was sent"
        )
