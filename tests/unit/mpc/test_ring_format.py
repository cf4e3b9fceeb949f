import math

import pytest

from securevfl.core.errors import ConfigError, EncodingRangeError
from securevfl.mpc.codec import MIN_NOISE_STD_UNITS, NOISE_TAIL, RingFormat


def fits(fmt: RingFormat) -> bool:
    """Sums of all parties stay within a lane: the condition of the format, typed again."""
    return fmt.parties * 2 * fmt.bound_units < 2 ** {2: 32, 3: 21, 4: 16}[fmt.lanes]


@pytest.mark.parametrize(("parties", "lanes", "size"), [(15, 3, 1_706_672), (16, 2, 2_560_000)])
def test_without_noise_sixteen_bits(parties: int, lanes: int, size: int) -> None:
    """The step is the whole error, so the fine one is taken, in lanes that hold the sum."""
    fmt = RingFormat.choose(clip_norm=1.0, noise_share_std=0.0, parties=parties)

    assert (fmt.lanes, fmt.precision_bits, fmt.granularity) == (lanes, 16, 2.0**-16)
    assert fmt.words(640_000) * 8 == size


def test_with_noise_far_over_the_coarse_step_four_lanes() -> None:
    """Noise of 0.2 dwarfs 2^-10: two bytes an element."""
    fmt = RingFormat.choose(clip_norm=1.0, noise_share_std=0.2, parties=5)

    assert (fmt.lanes, fmt.precision_bits) == (4, 10)
    assert fmt.words(640_000) * 8 == 1_280_000


@pytest.mark.parametrize(
    ("noise", "lanes", "bits"), [(0.4, 4, 10), (1.0, 3, 13), (5.0, 3, 11), (20.0, 2, 16)]
)
def test_larger_noise_takes_fewer_lanes(noise: float, lanes: int, bits: int) -> None:
    """Its tail overflows 16 bits first, then 21 at any step that leaves C its 1024 units."""
    fmt = RingFormat.choose(clip_norm=1.0, noise_share_std=noise, parties=5)

    assert (fmt.lanes, fmt.precision_bits) == (lanes, bits)


def test_very_large_noise_lowers_the_precision() -> None:
    """A thousand parties and a noise of 20 fit at a coarser step only."""
    fmt = RingFormat.choose(clip_norm=1.0, noise_share_std=20.0, parties=1000)

    assert fmt.lanes == 2
    assert 10 <= fmt.precision_bits < 16


def test_small_noise_raises_the_precision() -> None:
    """Noise of 2^-11 would be 32 units at p=16; 64 are required."""
    fmt = RingFormat.choose(clip_norm=1.0, noise_share_std=2.0**-11, parties=5)

    assert fmt.precision_bits == 17


def test_a_small_clip_norm_keeps_the_fine_step() -> None:
    """Four lanes would leave C = 0.1 only 102 steps, and three at 2^-12 only 409."""
    fine, finer = (
        RingFormat.choose(clip_norm=0.1, noise_share_std=noise, parties=5) for noise in (0.2, 3.0)
    )

    assert (fine.lanes, fine.precision_bits) == (3, 16)
    assert (finer.lanes, finer.precision_bits) == (2, 16)


@pytest.mark.parametrize("parties", [1, 2, 3, 5, 10, 50, 1000])
@pytest.mark.parametrize("clip_norm", [0.01, 0.5, 1.0, 4.0, 20.0])
@pytest.mark.parametrize("noise", [0.0, 0.001, 0.05, 0.3, 1.0, 4.0, 16.0])
def test_whatever_is_chosen_fits_and_holds_the_tail(
    parties: int, clip_norm: float, noise: float
) -> None:
    """No sum of parties can carry out of a lane, and the noise has its 64 units and its tail."""
    fmt = RingFormat.choose(clip_norm=clip_norm, noise_share_std=noise, parties=parties)

    assert fits(fmt)
    assert fmt.bound_units * fmt.granularity >= clip_norm + NOISE_TAIL * noise
    assert noise == 0 or noise / fmt.granularity >= MIN_NOISE_STD_UNITS


def test_the_tail_is_as_rare_as_the_comment_says() -> None:
    """2 exp(-t^2/2) at 12 standard deviations, times 1e11 elements, is below 1e-19."""
    assert 2 * math.exp(-(NOISE_TAIL**2) / 2) * 1e11 < 1.2e-20


def test_nothing_fits_names_the_bound() -> None:
    """The way out is in the message."""
    with pytest.raises(EncodingRangeError, match=r"over the bound .* that 10 parties leave"):
        RingFormat.choose(clip_norm=1.0, noise_share_std=1e6, parties=10)


def test_a_clip_norm_too_large_for_its_little_noise_is_refused() -> None:
    """Noise of 0.001 needs 2^-16, where a thousand parties leave 32 for C."""
    with pytest.raises(EncodingRangeError, match=r"bound 32\.\d+ that 1000 .* at 2\^-16"):
        RingFormat.choose(clip_norm=100.0, noise_share_std=0.001, parties=1000)


def test_noise_below_the_ring_is_refused() -> None:
    """Noise that no supported precision resolves into 64 units is not silently coarser."""
    with pytest.raises(EncodingRangeError, match="raise the noise or switch it off"):
        RingFormat.choose(clip_norm=1.0, noise_share_std=1e-6, parties=2)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -1.0])
def test_an_impossible_noise_is_refused(bad: float) -> None:
    """NaN fails too."""
    with pytest.raises(ConfigError, match="noise_share_std"):
        RingFormat.choose(clip_norm=1.0, noise_share_std=bad, parties=2)


def test_a_format_that_overflows_cannot_exist() -> None:
    """The condition is checked where the object is made, and is tight."""
    largest = RingFormat.largest_bound(lanes=4, parties=5)
    RingFormat(precision_bits=10, lanes=4, parties=5, bound_units=largest)

    assert 5 * 2 * largest < 2**16 <= 5 * 2 * (largest + 1)
    with pytest.raises(EncodingRangeError, match="overflows a lane of 16 bits"):
        RingFormat(precision_bits=10, lanes=4, parties=5, bound_units=largest + 1)


@pytest.mark.parametrize(
    ("field", "value"),
    [("lanes", 1), ("lanes", 5), ("precision_bits", 21), ("parties", 0), ("parties", True)],
)
def test_impossible_fields_are_refused_by_name(field: str, value: object) -> None:
    """The message names the field."""
    good = {"precision_bits": 10, "lanes": 2, "parties": 2, "bound_units": 10}
    with pytest.raises(ConfigError, match=field):
        RingFormat(**{**good, field: value})
