"""Fixed-point words of reals, and secure sums and weighted means of words; CPU and CUDA.

A word is one int64 ring element. It holds several lanes, each a fixed-point number in offset
binary: ``lane = units + bound_units``, in ``[0, 2 * bound_units]``. While ``parties * 2 *
bound_units < 2^(lane bits)``, no sum of lanes carries into the next lane, so adding words adds all
lanes exactly.

The primary alone learns a sum. For a weighted mean, each party multiplies its tensors by its weight
(a number of samples, for example) and appends the weight; the sums of both are revealed, and their
ratio is the mean. Each number of a mean has its own ring element, in steps of 2^-32, or larger ones
for large numbers: parameters are few, and need more precision than representations.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float, Float32, Float64, Int32, Int64
from torch import Tensor
from torch.nn.functional import pad

from securevfl.core import checks
from securevfl.core.devices import reads
from securevfl.core.errors import ConfigError, EncodingRangeError, ProtocolError

# Bits of one lane, by the number of lanes in a 64-bit word.
_LANE_BITS: Final = {2: 32, 3: 21, 4: 16}
# [KLS21] Theorem 1 (arXiv:2102.06387): sums of discrete Gaussians are as good as discrete
# Gaussian from here on (docs/privacy.md, section 3).
MIN_NOISE_STD_UNITS: Final = 64.0
# Noise beyond 12 standard deviations has probability at most 2 exp(-72) = 1.1e-31 an element; with
# 1e11 elements over all parties and rounds, a run is refused by chance once in 1e20.
NOISE_TAIL: Final = 12.0
# Two and three lanes start at 16 bits. More are tried only for noise too small for 64 units at 16,
# fewer only for noise too large for the lane.
_BITS: Final = (16, *range(15, 9, -1), *range(17, 21))
_FOUR_LANE_BITS: Final = 10
# Where noise dwarfs a coarser step it is taken only if C is at least so many units, so that
# rounding towards zero costs no more than it does at the unit clip norm.
_MIN_CLIP_UNITS: Final = 1024
COARSEST_STEP: Final = 2.0 ** -min(*_BITS, _FOUR_LANE_BITS)
"""The largest granularity that any format has."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RingFormat:
    """The fixed-point format that all parties of a federation share."""

    precision_bits: int
    """p: one unit is 2^-p."""

    lanes: int
    """Numbers in one 64-bit word: 2 of 32 bits, 3 of 21 or 4 of 16."""

    parties: int
    """k: most contributions that one sum may have."""

    bound_units: int
    """Largest absolute value, in units, of one party's number with its noise."""

    def __post_init__(self) -> None:
        for name in ("precision_bits", "lanes", "parties", "bound_units"):
            checks.whole(**{name: getattr(self, name)})
        checks.at_least(1, parties=self.parties, bound_units=self.bound_units)
        if not 0 <= self.precision_bits <= 20:
            raise ConfigError(f"precision_bits must lie in [0, 20], got {self.precision_bits}")
        if self.lanes not in _LANE_BITS:
            raise ConfigError(f"lanes must be 2, 3 or 4, got {self.lanes}")
        if self.bound_units > self.largest_bound(lanes=self.lanes, parties=self.parties):
            raise EncodingRangeError(
                f"bound_units {self.bound_units} of {self.parties} parties overflows a lane of "
                f"{self.lane_bits} bits; at most "
                f"{self.largest_bound(lanes=self.lanes, parties=self.parties)} fits"
            )

    @staticmethod
    def largest_bound(*, lanes: int, parties: int) -> int:
        """Return the largest ``bound_units`` with ``parties * 2 * bound < 2^(lane bits)``."""
        return ((1 << _LANE_BITS[lanes]) - 1) // (2 * parties)

    @classmethod
    def choose(
        cls,
        *,
        clip_norm: float,
        noise_share_std: float,
        parties: int,
        tail: float = NOISE_TAIL,
    ) -> "RingFormat":
        """Return the smallest format that holds every party's clipped and noised numbers.

        With noise that dwarfs a coarser step (at least 64 units of it, and C at least 1024 units),
        four lanes, or three at the finest step that fits, else two. Without noise the step is the
        whole error: p=16, in three lanes where the sums fit, else in two.

        Args:
            clip_norm: C, the largest absolute value before noise, > 0.
            noise_share_std: Standard deviation of one party's noise, in the units of the
                representation; 0 for none.
            parties: Most contributions to one sum.
            tail: Standard deviations of noise that must fit; see ``NOISE_TAIL``.

        Raises:
            EncodingRangeError: If no format fits, naming the bound.
        """
        checks.positive(clip_norm=clip_norm, tail=tail)
        checks.non_negative(noise_share_std=noise_share_std)
        checks.whole(parties=parties)
        checks.at_least(1, parties=parties)
        resolving = [
            bits
            for bits in _BITS
            if noise_share_std == 0 or noise_share_std * 2**bits >= MIN_NOISE_STD_UNITS
        ]
        if not resolving:
            finest = MIN_NOISE_STD_UNITS * 2.0 ** -max(_BITS)
            raise EncodingRangeError(
                f"noise of standard deviation {noise_share_std:g} a party is below {finest:g}, the "
                f"least that the fixed-point ring can carry; raise the noise or switch it off"
            )
        narrow = [(4, _FOUR_LANE_BITS), *((3, bits) for bits in _BITS)]
        candidates = [
            (lanes, bits)
            for lanes, bits in narrow
            if bits in resolving and clip_norm * 2**bits >= _MIN_CLIP_UNITS
        ]
        if noise_share_std == 0:
            candidates = [(3, _BITS[0])]
        candidates += [(2, bits) for bits in resolving]
        for lanes, bits in candidates:
            bound = _bound_units(clip_norm, noise_share_std * tail, bits)
            if bound <= cls.largest_bound(lanes=lanes, parties=parties):
                return cls(precision_bits=bits, lanes=lanes, parties=parties, bound_units=bound)
        largest = cls.largest_bound(lanes=2, parties=parties) * 2.0 ** -min(resolving)
        raise EncodingRangeError(
            f"clip_norm {clip_norm:g} with {tail:g} standard deviations of {noise_share_std:g} "
            f"noise is over the bound {largest:g} that {parties} parties leave in a 32-bit lane "
            f"at 2^-{min(resolving)}; lower privacy.clip_norm or change the noise"
        )

    @classmethod
    def of_steps(cls, *, step: float, most: int, parties: int) -> "RingFormat":
        """Return the smallest format that holds whole steps.

        Args:
            step: Value of one step, a power of two.
            most: Largest absolute number of steps of one party.
            parties: Most contributions to one sum.

        Raises:
            EncodingRangeError: If no format fits.
        """
        bits = max(0, -round(math.log2(step)))
        bound = round(most * step * 2**bits)
        for lanes in sorted(_LANE_BITS, reverse=True):
            if bound <= cls.largest_bound(lanes=lanes, parties=parties):
                return cls(precision_bits=bits, lanes=lanes, parties=parties, bound_units=bound)
        raise EncodingRangeError(
            f"{most} steps of {step:g} of each of {parties} parties overflow a 32-bit lane"
        )

    @property
    def granularity(self) -> float:
        """Real value of one unit, gamma = 2^-p."""
        return 2.0**-self.precision_bits

    @property
    def lane_bits(self) -> int:
        """Bits of one lane."""
        return _LANE_BITS[self.lanes]

    def words(self, elements: int) -> int:
        """Return how many 64-bit words carry ``elements`` numbers."""
        return -(-elements // self.lanes)


def _bound_units(clip_norm: float, noise: float, precision_bits: int) -> int:
    # One unit more, because a bound computed in floats may itself be rounded down.
    return math.ceil((clip_norm + noise) * 2.0**precision_bits) + 1


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
            diverged = "" if low == low else ": training has diverged, lower training.learning_rate"
            raise EncodingRangeError(
                f"{what} is {worst * fmt.granularity:g}, outside the bound "
                f"{fmt.bound_units * fmt.granularity:g} of the fixed-point ring; nothing was sent"
                f"{diverged}"
            )

    reads().add(torch.stack(torch.aminmax(values)), check)


Words = Int64[Tensor, "words"]
"""Elements of the ring, 64 bits each."""


@runtime_checkable
class SumTo(Protocol):
    """Adds all parties' words modulo 2^64, element by element, for the primary."""

    def __call__(self, words: Words, *, round_number: int, active: Sequence[int]) -> Words | None:
        """Contribute ``words``; return the total at the primary and None elsewhere.

        Args:
            words: This party's contribution; the primary's own or zeros. A secondary's words are
                masked in place, the primary's become the total; neither may be used again.
            round_number: The round, never used before in this session.
            active: Ranks of the secondaries that contribute.

        Reveals:
            To the primary: the total. The primary together with some of the active secondaries
            learns the sum of the other active ones, and nothing else; under sparse masks only while
            the colluding ones are fewer than :func:`securevfl.mpc.masks.connectivity`. If active
            secondaries got different messages (:meth:`bind`), it learns nothing. To any other
            party: nothing.
        """
        ...

    def bind(self, message_digest: bytes, ranks: Sequence[int]) -> None:
        """Make later sums valid only if these ranks have received this message of the primary too.

        A secondary binds every message that the primary sends to others too, on receipt; see
        :meth:`securevfl.mpc.masks.PairwiseMasks.bind`. The primary binds nothing.

        Reveals:
            Nothing.
        """
        ...

    def prepare(self, count: int, *, round_number: int, active: Sequence[int]) -> None:
        """Start the work that does not depend on the words, while the model computes.

        The round counts as used from now on, even without words.

        Args:
            count: Number of words that this party will contribute.
            round_number: The round, never used before in this session.
            active: Ranks of the secondaries that will contribute.

        Reveals:
            Nothing.
        """
        ...


@runtime_checkable
class WordWire(Protocol):
    """Transport of words: an authenticated, ordered star around the primary."""

    @property
    def masked(self) -> bool:
        """True at a secondary, whose words go in under masks; False at the primary."""
        ...

    def carry(self, round_number: int, words: Words, ranks: Sequence[int]) -> None:
        """Send a secondary's words, or add to the primary's as many from each of ``ranks``.

        Reveals:
            To the primary: a secondary's words as they are.
        """
        ...


class InProcessSum:
    """The sum for the simulator, where all parties are in one process: without masks."""

    def __call__(self, contributions: Sequence[Words]) -> Words:
        """Return the sum of all contributions modulo 2^64, as int64 wraps.

        Raises:
            ProtocolError: If there are none, or their sizes differ.

        Reveals:
            Nothing leaves the process.
        """
        if not contributions or len({len(words) for words in contributions}) != 1:
            raise ProtocolError(
                f"cannot add contributions of {[len(words) for words in contributions]} words"
            )
        total = contributions[0].clone()
        for words in contributions[1:]:
            total += words
        return total


_PRECISION_BITS: Final = 32


def fraction_bits(last_mean: Mapping[str, Tensor]) -> dict[str, int]:
    """Return the number of binary places of each tensor in the next mean, equal at all parties.

    It is 32, or 39 - e if the tensor's largest number in the last mean is in [2^e, 2^(e+1)) with e
    >= 7. A step is then at most 2^-39 of that number, and a party's number may grow by 2^24 /
    (parties x its weight) in the next mean. Weights with ISO noise do grow ([FedHSSL] Equation 7),
    since each mean's noise is as large as the longest row before it.

    Args:
        last_mean: The last mean, equal at all parties.
    """
    return {
        name: min(_PRECISION_BITS, _PRECISION_BITS + 8 - math.frexp(float(value.abs().max()))[1])
        for name, value in last_mean.items()
    }


def words_needed(shapes: Mapping[str, Sequence[int]]) -> int:
    """Return the number of words for tensors of these shapes and the weight."""
    return sum(torch.Size(shape).numel() for shape in shapes.values()) + 1


def encode_weighted(
    tensors: Mapping[str, Tensor],
    *,
    weight: float,
    parties: int,
    bits: Mapping[str, int] = MappingProxyType({}),
) -> Words:
    """Return one party's weighted tensors and its weight as words, sorted by name.

    Args:
        tensors: Named float tensors; every party has the same names and shapes.
        weight: The party's weight in the mean, >= 0; 0 leaves the party out, without showing it.
        parties: Largest number of contributions to the sum.
        bits: Result of :func:`fraction_bits`, equal at every party; 32 for a missing tensor.

    Raises:
        EncodingRangeError: If a value is not finite or not float, or a sum of ``parties`` such
            values could overflow.

    Reveals:
        Nothing alone. Summed by :class:`securevfl.mpc.codec.SumTo`: to the primary, the weighted
        mean and the sum of the weights.
    """
    checks.non_negative(weight=weight)
    checks.at_least(1, parties=parties)
    for name, tensor in tensors.items():
        if not tensor.is_floating_point():
            raise EncodingRangeError(f"{name} is {tensor.dtype}; only float tensors are averaged")
    parts = [
        (tensors[name].detach().reshape(-1).double(), 2.0 ** bits.get(name, _PRECISION_BITS))
        for name in sorted(tensors)
    ]
    device = parts[0][0].device if parts else torch.device("cpu")
    parts.append((torch.ones(1, dtype=torch.float64, device=device), 2.0**_PRECISION_BITS))
    flat = torch.cat([value * steps for value, steps in parts]) * weight
    limit = 2.0**63 / parties
    if not float(flat.abs().max()) < limit:
        maxima = [(float(value.abs().max()) * weight, limit / steps) for value, steps in parts]
        largest, bound = next((size, most) for size, most in maxima if not size < most)
        raise EncodingRangeError(
            f"a weighted parameter is {largest:g}, outside the bound {bound:g} that {parties} "
            f"parties leave in the ring; nothing was sent"
        )
    return torch.round(flat).to(torch.int64)


def decode_mean(
    total_words: Words,
    shapes: Mapping[str, Sequence[int]],
    *,
    bits: Mapping[str, int] = MappingProxyType({}),
) -> dict[str, Tensor]:
    """Return the weighted mean of every tensor, in float32.

    Before rounding to float32, each is within ``parties * 2^-(bits + 1) / (sum of weights)`` of the
    exact mean.

    Args:
        total_words: The sum of all parties' words.
        shapes: Shape of every tensor by name, the same at every party.
        bits: The ``bits`` of :func:`encode_weighted`.

    Raises:
        ProtocolError: If the number of words does not fit ``shapes``, or no weight is positive.
    """
    needed = words_needed(shapes)
    if total_words.numel() != needed:
        raise ProtocolError(f"a mean needs {needed} words, got {total_words.numel()}")
    total = total_words.to(torch.float64)
    if not float(total[-1]) > 0:
        raise ProtocolError("the parties' weights do not sum to more than zero: no mean exists")
    mean = total[:-1] / total[-1]
    parts = mean.split([torch.Size(shapes[name]).numel() for name in sorted(shapes)])
    coarser = {name: 2.0 ** (_PRECISION_BITS - bits.get(name, _PRECISION_BITS)) for name in shapes}
    return {
        name: (part * coarser[name]).to(torch.float32).view(tuple(shapes[name]))
        for name, part in zip(sorted(shapes), parts, strict=True)
    }
