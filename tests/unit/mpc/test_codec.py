import math

import pytest
import torch

from securevfl.core.errors import EncodingRangeError, ProtocolError
from securevfl.mpc.codec import (
    RingFormat,
    decode_sum,
    encode,
    quantise,
    require_row_norms,
    to_float,
)

PLAIN = RingFormat.choose(clip_norm=1.0, noise_share_std=0.0, parties=3)
TWO = RingFormat.choose(clip_norm=1.0, noise_share_std=0.0, parties=50)
FOUR = RingFormat.choose(clip_norm=1.0, noise_share_std=0.2, parties=3)
FORMATS = pytest.mark.parametrize(
    "fmt", [TWO, PLAIN, FOUR], ids=["two lanes", "three lanes", "four lanes"]
)


def test_there_is_a_format_of_each() -> None:
    """Tests of this file mean what they say."""
    assert [fmt.lanes for fmt in (TWO, PLAIN, FOUR)] == [2, 3, 4]


def test_quantising_rounds_towards_zero() -> None:
    """Neither sign can grow."""
    step = PLAIN.granularity
    x = torch.tensor([1.9, -1.9, 0.99, -0.99, 2.0, -2.0]) * step

    assert quantise(x, PLAIN).tolist() == [1, -1, 0, 0, 2, -2]


def test_the_value_that_crypten_decodes_wrongly_is_right() -> None:
    """CrypTen 0.4.1 is off by -1.0 just above negative integers of at most -2."""
    fmt = RingFormat.choose(clip_norm=8.0, noise_share_std=0.0, parties=1)
    x = torch.tensor([-2.0 + fmt.granularity, -3.0 + fmt.granularity, -7.0])

    units = decode_sum(encode(quantise(x, fmt), fmt), fmt, elements=3, parties_active=1)

    assert torch.equal(to_float(units, fmt, divisor=1), x)


@FORMATS
@pytest.mark.parametrize("elements", [0, 1, 2, 3, 4, 5, 1001])
def test_extreme_sums_decode_exactly(fmt: RingFormat, elements: int) -> None:
    """All parties at the positive or the negative end never carry into a neighbour."""
    for end in (fmt.bound_units, -fmt.bound_units):
        units = torch.full((elements,), end, dtype=torch.int32)
        units[::2] *= -1

        total = sum(encode(units, fmt) for _ in range(fmt.parties))

        decoded = decode_sum(total, fmt, elements=elements, parties_active=fmt.parties)
        assert torch.equal(decoded.long(), units.long() * fmt.parties)


def test_one_party_alone_at_the_end_of_the_range() -> None:
    """The largest bound of one party is where signed and unsigned lanes differ."""
    for lanes in (2, 3, 4):
        bound = RingFormat.largest_bound(lanes=lanes, parties=1)
        fmt = RingFormat(precision_bits=0, lanes=lanes, parties=1, bound_units=bound)
        units = torch.tensor([bound, -bound, 0], dtype=torch.int32)

        decoded = decode_sum(encode(units, fmt), fmt, elements=3, parties_active=1)

        assert torch.equal(decoded, units)


def test_thirds_of_more_than_a_piece() -> None:
    """Three lanes are packed and unpacked in pieces that end anywhere."""
    generator = torch.Generator().manual_seed(2)
    for elements in (200_000, 200_001, 200_003):
        bounds = (-PLAIN.bound_units, PLAIN.bound_units + 1)
        units = torch.randint(*bounds, (elements,), generator=generator).to(torch.int32)
        words = encode(units, PLAIN)
        assert torch.equal(decode_sum(words, PLAIN, elements=elements, parties_active=1), units)


@FORMATS
def test_one_unit_over_the_bound_is_refused(fmt: RingFormat) -> None:
    """The message names the bound; nothing is returned."""
    units = torch.zeros(5, dtype=torch.int32)
    units[3] = -fmt.bound_units - 1

    with pytest.raises(EncodingRangeError, match=r"outside the bound .* nothing was sent"):
        encode(units, fmt)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e30])
def test_what_is_not_a_number_in_range_is_refused(bad: float) -> None:
    """NaN and infinity do not become garbage silently, wherever they stand."""
    for place in (0, 1, 2):
        x = torch.zeros(3)
        x[place] = bad
        with pytest.raises(EncodingRangeError, match="outside the bound"):
            quantise(x, PLAIN)


def test_the_bound_in_reals_is_refused_a_step_above() -> None:
    """Quantising checks the format's bound too, before noise is added."""
    just_over = (PLAIN.bound_units + 1) * PLAIN.granularity
    with pytest.raises(EncodingRangeError, match="a value to encode"):
        quantise(torch.tensor([just_over], dtype=torch.float64), PLAIN)


def test_row_norms_are_checked_exactly() -> None:
    """A row at the limit passes, and one unit more does not."""
    fmt = RingFormat(precision_bits=4, lanes=2, parties=2, bound_units=1000)
    at_limit = torch.tensor([[[9, 12]], [[0, 15]]], dtype=torch.int32)

    require_row_norms(at_limit, fmt, clip_norm=15 / 16)
    with pytest.raises(EncodingRangeError, match=r"over clip_norm 0\.9375; clip before encoding"):
        require_row_norms(at_limit + torch.tensor([[[0, 1]]]).int(), fmt, clip_norm=15 / 16)


def test_a_sum_that_parties_cannot_make_is_refused() -> None:
    """A mask that did not cancel leaves uniform words, and those are out of range."""
    words = encode(torch.zeros(64, dtype=torch.int32), PLAIN)
    words += torch.randint(-(2**62), 2**62, words.shape, generator=torch.Generator().manual_seed(1))

    with pytest.raises(ProtocolError, match="masks did not cancel"):
        decode_sum(words, PLAIN, elements=64, parties_active=1)


def test_a_contribution_too_many_is_noticed() -> None:
    """Two contributions decoded as one are off by the offset."""
    words = encode(torch.full((4,), PLAIN.bound_units, dtype=torch.int32), PLAIN)

    with pytest.raises(ProtocolError, match="masks did not cancel"):
        decode_sum(words + words, PLAIN, elements=4, parties_active=1)


def test_wrong_sizes_and_counts_are_refused() -> None:
    """Wanted and got are both named."""
    words = torch.zeros(3, dtype=torch.int64)

    with pytest.raises(ProtocolError, match="needs 2 words, got 3"):
        decode_sum(words, PLAIN, elements=4, parties_active=1)
    for parties in (0, 4):
        with pytest.raises(ProtocolError, match="in a format for 1 to 3"):
            decode_sum(words, PLAIN, elements=9, parties_active=parties)


def test_the_mean_is_within_one_step_of_the_real_one() -> None:
    """Truncation loses less than a step a party, so less than a step of the mean."""
    generator = torch.Generator().manual_seed(7)
    parties = [torch.rand(1000, generator=generator) * 2 - 1 for _ in range(3)]

    total = sum(encode(quantise(x, PLAIN), PLAIN) for x in parties)
    mean = to_float(decode_sum(total, PLAIN, elements=1000, parties_active=3), PLAIN, divisor=3)

    exact = sum(x.double() for x in parties) / 3
    assert float((mean.double() - exact).abs().max()) < PLAIN.granularity
