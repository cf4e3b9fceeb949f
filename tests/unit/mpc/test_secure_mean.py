import math

import pytest
import torch

from securevfl.core.errors import ConfigError, EncodingRangeError, ProtocolError
from securevfl.mpc.codec import (
    InProcessSum,
    decode_mean,
    encode_weighted,
    fraction_bits,
    words_needed,
)

SHAPES = {"scale": (), "bias": (3,), "matrix": (2, 4)}


def tensors_of(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) * 10 for name, shape in SHAPES.items()}


@pytest.mark.parametrize("weights", [(1, 1, 1), (14_000, 3, 250), (0.5, 0.0, 2.25)])
def test_the_mean_is_the_weighted_one(weights: tuple[float, ...]) -> None:
    """Every tensor is within float32's own rounding of the mean in float64."""
    parties = [tensors_of(seed) for seed in range(3)]

    words = [encode_weighted(t, weight=w, parties=3) for t, w in zip(parties, weights, strict=True)]
    mean = decode_mean(InProcessSum()(words), SHAPES)

    assert set(mean) == set(SHAPES)
    for name, shape in SHAPES.items():
        exact = sum(t[name].double() * w for t, w in zip(parties, weights, strict=True)) / sum(
            weights
        )
        assert mean[name].shape == torch.Size(shape)
        assert mean[name].dtype == torch.float32
        step = 3 * 2.0**-33 / sum(weights)
        error = (mean[name].double() - exact).abs()
        assert bool((error <= exact.abs() * 2.0**-24 + step).all())


def test_the_order_of_names_does_not_matter() -> None:
    """Parties that build their dicts in another order still add like to like."""
    one = tensors_of(1)
    two = dict(reversed(tensors_of(2).items()))

    words = [encode_weighted(t, weight=1, parties=2) for t in (one, two)]
    mean = decode_mean(words[0] + words[1], SHAPES)

    assert torch.allclose(mean["bias"], (one["bias"] + two["bias"]) / 2)


def test_weight_zero_counts_a_party_out() -> None:
    """Its words are zeros, whatever its tensors are."""
    words = encode_weighted(tensors_of(1), weight=0, parties=2)

    assert not words.any()


@pytest.mark.parametrize("bad", [math.nan, math.inf, 2.0**31])
def test_values_that_leave_the_ring_are_refused(bad: float) -> None:
    """The bound is named, nothing is encoded."""
    with pytest.raises(EncodingRangeError, match=r"outside the bound 1\.07374e\+09 that 2 parties"):
        encode_weighted({"x": torch.tensor([0.0, bad])}, weight=1, parties=2)


def test_a_weight_that_would_overflow_is_refused() -> None:
    """The weight itself is an element of the sum."""
    with pytest.raises(EncodingRangeError, match="outside the bound"):
        encode_weighted({"x": torch.zeros(1)}, weight=2.0**31, parties=1)


def test_whole_numbers_are_not_averaged() -> None:
    """Counters of a model are not parameters; the tensor is named."""
    with pytest.raises(EncodingRangeError, match=r"steps is torch\.int64"):
        encode_weighted({"steps": torch.tensor([3])}, weight=1, parties=2)


@pytest.mark.parametrize("weight", [-1.0, math.nan])
def test_an_impossible_weight_is_refused(weight: float) -> None:
    """NaN fails too."""
    with pytest.raises(ConfigError, match="weight"):
        encode_weighted(tensors_of(1), weight=weight, parties=2)


def test_a_mean_of_nothing_or_of_another_size_is_refused() -> None:
    """All weights zero, or words of other shapes."""
    with pytest.raises(ProtocolError, match="no mean exists"):
        decode_mean(torch.zeros(words_needed(SHAPES), dtype=torch.int64), SHAPES)
    for words in (5, 12, 14):
        with pytest.raises(ProtocolError, match=f"a mean needs 13 words, got {words}"):
            decode_mean(torch.ones(words, dtype=torch.int64), SHAPES)


@pytest.mark.parametrize("parties", [2, 10])
def test_steps_follow_the_last_mean(parties: int) -> None:
    """Numbers far outside the usual range are averaged as finely, and may grow as far."""
    size = {"scale": 1.0, "bias": 3e9, "matrix": 1e21}
    last = {name: value * size[name] for name, value in tensors_of(0).items()}
    bits = fraction_bits(last)
    now = [
        {name: value * size[name] * 1000 for name, value in tensors_of(seed).items()}
        for seed in range(1, parties + 1)
    ]
    words = [encode_weighted(t, weight=1, parties=parties, bits=bits) for t in now]
    mean = decode_mean(InProcessSum()(words), SHAPES, bits=bits)
    for name in SHAPES:
        exact = sum(t[name].double() for t in now) / parties
        assert bool(((mean[name].double() - exact).abs() <= exact.abs() * 2.0**-23).all())
    with pytest.raises(EncodingRangeError, match="a weighted parameter is"):
        encode_weighted(now[0], weight=1, parties=parties)


def test_the_step_is_2_to_minus_32_until_a_number_reaches_128() -> None:
    at = {"a": torch.tensor([0.0]), "b": torch.tensor([1.0, -127.9]), "c": torch.tensor([128.0])}
    assert fraction_bits({**at, "d": torch.tensor([2.0**40])}) == {
        "a": 32,
        "b": 32,
        "c": 32,
        "d": -1,
    }
