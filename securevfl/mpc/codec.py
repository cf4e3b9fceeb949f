"""Fixed-point encoding of reals in ring units and 64-bit words; CPU and CUDA.

A word is one int64 ring element. It holds several lanes, each a fixed-point number in offset
binary: ``lane = units + bound_units``, in ``[0, 2 * bound_units]``. While ``parties * 2 *
bound_units < 2^(lane bits)``, no sum of lanes carries into the next lane, so adding words adds all
lanes exactly.
"""

from typing import Final

import numpy as np
import torch
from jaxtyping import Float, Float32, Float64, Int32, Int64
from torch import Tensor
from torch.nn.functional import pad

from securevfl.core.devices import reads
from securevfl.core.errors import EncodingRangeError, ProtocolError
from securevfl.mpc.ring_format import RingFormat

# The narrow integer type of one lane, by lanes in a word; signed, since torch's arithmetic on
# unsigned 16 and 32 bits is incomplete and wraps alike. Lanes of 21 bits have none.
_LANE_DTYPE: Final = {2: torch.int32, 4: torch.int16}

# Numbers that fit one core's cache with a float64 copy.
_PIECE: Final = 1 << 16


def quantise(x: Float[Tensor, "*shape"], fmt: RingFormat) -> Int32[Tensor, "*shape"]:
    """Return ``x`` in ring units, rounded towards zero so that no norm grows.

    ``units = trunc(x * 2^p)``; both steps are exact, hence ``|units| <= |x| * 2^p`` elementwise.

    Raises:
        EncodingRangeError: If ``x`` is not float32 or float64, not finite, or outside the format's
            range.
    """
    if x.dtype not in (torch.float32, torch.float64):
        raise EncodingRangeError(f"values to encode must be float32 or float64, got {x.dtype}")
    _require_range(x, fmt, scale=2.0**fmt.precision_bits, what="a value to encode")
    scale = 2.0**fmt.precision_bits
    # The conversion truncates towards zero.
    if x.is_cuda:
        return (x * scale).to(torch.int32)
    units = np.empty(x.shape, np.int32)
    # A single pass: numpy converts the products in a small buffer.
    np.multiply(x.detach().numpy(), scale, out=units, casting="unsafe")
    return torch.from_numpy(units)


def require_row_norms(
    units: Int32[Tensor, "rows *positions"], fmt: RingFormat, *, clip_norm: float
) -> None:
    """Check, in exact integers, that every row's L2 norm is at most ``clip_norm``.

    Every guarantee depends on this bound. It holds after the clipping of
    :mod:`securevfl.dp.clipping`; the check is for code that omits the clipping.

    Raises:
        EncodingRangeError: Naming the largest norm.
    """
    if units.numel() == 0:
        return
    limit = clip_norm * 2.0**fmt.precision_bits

    def check(square: Tensor) -> None:
        largest = float(square)
        if not largest <= limit**2:
            raise EncodingRangeError(
                f"a row has norm {largest**0.5 * fmt.granularity:g}, over clip_norm "
                f"{clip_norm:g}; clip before encoding"
            )

    reads().add(largest_square(units.reshape(units.shape[0], -1)), check)


def encode(
    units: Int32[Tensor, "*shape"], fmt: RingFormat, *, reuse: bool = False
) -> Int64[Tensor, "words"]:
    """Pack ring units into words; the last words are filled up with codes of zero.

    Words of two and four lanes hold neighbouring numbers, the first in the lowest lane. With three
    lanes, the lowest lanes hold the first third of all numbers, the middle lanes the second third,
    so that whole thirds are shifted and added.

    Args:
        units: Quantised values with their noise.
        fmt: The format that all parties share.
        reuse: Whether the words may overwrite ``units``, to save a copy; the caller must not use
            ``units`` again.

    Raises:
        EncodingRangeError: If a number is outside the format's range. The whole tensor is checked
            before anything is sent, so a lane never overflows into its neighbour.
    """
    _require_range(units, fmt, scale=1, what="a noised value")
    flat = units.reshape(-1)
    if fmt.lanes == 3:
        return _three_lanes(flat, fmt)
    missing = fmt.words(flat.numel()) * fmt.lanes - flat.numel()
    if missing:
        flat = torch.cat([flat, flat.new_zeros(missing)])
    # A wrapping int32 addition has the same bits as the intended unsigned one.
    biased = flat.add_(fmt.bound_units) if reuse else flat + fmt.bound_units
    return biased.to(_LANE_DTYPE[fmt.lanes]).view(torch.int64)


def decode_sum(
    words: Int64[Tensor, "words"], fmt: RingFormat, *, elements: int, parties_active: int
) -> Int32[Tensor, "elements"]:
    """Unpack the sum of ``parties_active`` contributions into ring units.

    Raises:
        ProtocolError: If the number of words is wrong, or a lane is outside the range of such a
            sum: a mask did not cancel, or a party sent other words.
    """
    if words.numel() != fmt.words(elements):
        raise ProtocolError(
            f"a sum of {elements} elements needs {fmt.words(elements)} words, got {words.numel()}"
        )
    if not 1 <= parties_active <= fmt.parties:
        raise ProtocolError(
            f"a sum of {parties_active} contributions, in a format for 1 to {fmt.parties}"
        )
    lanes = _lanes_of(words, fmt)[:elements]
    bound = parties_active * fmt.bound_units
    # The unsigned difference is in int32's range, so the wrapping difference of 32-bit lanes is
    # right.
    units = lanes - bound

    def check(ends: Tensor) -> None:
        low, high = ends.tolist()
        if low < -bound or high > bound:
            raise ProtocolError(
                f"the sum decodes to {max(-low, high)} units, over the {bound} that "
                f"{parties_active} contributions can make: masks did not cancel, "
                f"and which party sent other words than its own no sum tells"
            )

    if elements:
        reads().add(torch.stack(torch.aminmax(units)), check)
    return units


def to_float(
    units: Int32[Tensor, "*shape"], fmt: RingFormat, *, divisor: int
) -> Float32[Tensor, "*shape"]:
    """Return ``units * 2^-p / divisor`` in float32; the divisor turns a sum into an average."""
    return units.to(torch.float32).mul_(fmt.granularity / divisor)


def _three_lanes(flat: Int32[Tensor, "elements"], fmt: RingFormat) -> Int64[Tensor, "words"]:
    count, bits = fmt.words(flat.numel()), fmt.lane_bits
    bias = fmt.bound_units * (1 + (1 << bits) + (1 << 2 * bits))
    if flat.is_cuda:
        whole = pad(flat, (0, 3 * count - len(flat))).to(torch.int64).view(3, count)
        low, middle, high = whole.unbind()
        return low.add(middle, alpha=1 << bits).add_(high, alpha=1 << 2 * bits).add_(bias)
    low, middle, high = (flat[lane * count : (lane + 1) * count] for lane in range(3))
    words = torch.zeros(count, dtype=torch.int64)
    # Numpy widens operands in a small buffer; torch would copy them first.
    numbers, thirds = words.numpy(), (middle.numpy(), low.numpy())
    numbers[: len(high)] = high.numpy()
    for start in range(0, count, _PIECE):
        piece = numbers[start : start + _PIECE]
        for third in thirds:
            np.left_shift(piece, bits, out=piece)
            own = third[start : start + _PIECE]
            piece[: len(own)] += own
        np.add(piece, bias, out=piece)
    return words


def _lanes_of(words: Int64[Tensor, "words"], fmt: RingFormat) -> Int32[Tensor, "numbers"]:
    """Return the number in every lane; with two lanes as int32, which wraps in the upper half."""
    if fmt.lanes != 3:
        lanes = words.view(_LANE_DTYPE[fmt.lanes]).to(torch.int32)
        return lanes & 0xFFFF if fmt.lanes == 4 else lanes
    bits, mask = fmt.lane_bits, (1 << fmt.lane_bits) - 1
    # The highest lane keeps the bit above it, which no valid sum has: another check.
    if words.is_cuda:
        lanes = torch.cat([words & mask, words >> bits & mask, words >> 2 * bits])
        return lanes.to(torch.int32)
    thirds = torch.empty((3, words.numel()), dtype=torch.int32)
    numbers, (low, middle, high) = words.numpy(), thirds.numpy()
    for start in range(0, len(numbers), _PIECE):
        piece = numbers[start : start + _PIECE]
        own = slice(start, start + len(piece))
        np.bitwise_and(piece, mask, out=low[own], casting="unsafe")
        rest = piece >> bits
        np.bitwise_and(rest, mask, out=middle[own], casting="unsafe")
        np.right_shift(rest, bits, out=high[own], casting="unsafe")
    return thirds.view(-1)


def largest_square(rows: Int32[Tensor, "rows width"]) -> Float64[Tensor, ""]:
    """Return the largest squared L2 norm of a row, on the rows' device; 0 without rows."""
    # Squares of numbers up to C * 2^p, and their sums up to its square, are exact in float64.
    if rows.is_cuda:
        wide = rows.to(torch.float64)
        return torch.linalg.vecdot(wide, wide).max()
    numbers = rows.numpy()
    at_a_time = max(1, _PIECE // max(1, rows.shape[1]))
    # Numpy converts and multiplies pieces of this size twice as fast as torch.
    scratch = np.empty((min(at_a_time, len(numbers)), rows.shape[1]))
    largest = 0.0
    for start in range(0, len(numbers), at_a_time):
        piece = numbers[start : start + at_a_time]
        exact = scratch[: len(piece)]
        exact[:] = piece
        largest = max(largest, float(np.vecdot(exact, exact).max()))
    return torch.tensor(largest, dtype=torch.float64)


def _require_range(values: Tensor, fmt: RingFormat, *, scale: float, what: str) -> None:
    if values.numel() == 0:
        return

    def check(ends: Tensor) -> None:
        # A scale that is a power of two makes the products exact.
        low, high = (end * scale for end in ends.tolist())
        # NaN, which aminmax returns, fails this comparison.
        if not (-fmt.bound_units <= low and high <= fmt.bound_units):
            worst = max(low, high, key=abs) if low == low else low
            raise EncodingRangeError(
                f"{what} is {worst * fmt.granularity:g}, outside the bound "
                f"{fmt.bound_units * fmt.granularity:g} of the fixed-point ring; nothing was sent"
            )

    reads().add(torch.stack(torch.aminmax(values.detach())), check)
