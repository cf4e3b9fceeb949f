"""Bloom-filter codes: distances survive, and counts of ones tell little."""

import numpy as np
import pytest
from helpers.nearest import nearest_codes

from securevfl.core.errors import ConfigError, DataError
from securevfl.linkage.spec import LinkageSecret
from securevfl.stages.bloom.codes import NumberCode, TextCode, encode_keys

SECRET = LinkageSecret(b"s" * 32)


def hamming(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    return np.bitwise_count(one ^ other).sum(axis=-1)


def numbers(values: np.ndarray, code: NumberCode, secret: LinkageSecret = SECRET) -> np.ndarray:
    return encode_keys({"x": values}, {"x": code}, secret)


def texts(values: list[str], code: TextCode, secret: LinkageSecret = SECRET) -> np.ndarray:
    return encode_keys({"x": values}, {"x": code}, secret)


@pytest.mark.parametrize("concentration", [0.1, 0.5, 0.9])
def test_every_number_has_equally_many_ones(concentration: float) -> None:
    """At the edges of the range as in the middle, which random pivots would not give."""
    code = NumberCode(low=-3.0, high=7.0, bits=512, concentration=concentration)
    ones = np.bitwise_count(numbers(np.linspace(-3, 7, 2001), code)).sum(axis=1)

    assert set(ones.tolist()) == {code.ones}


@pytest.mark.parametrize("secret_byte", [b"a", b"b", b"c"])
def test_hamming_distance_of_numbers_is_their_distance_in_steps(secret_byte: bytes) -> None:
    """Twice the steps between them, one step more or less, until nothing is in common."""
    code = NumberCode(low=0.0, high=100.0, bits=1024, concentration=0.25)
    values = np.random.default_rng(0).uniform(0, 100, 500)
    encoded = numbers(values, code, LinkageSecret(secret_byte * 32))
    steps = np.minimum(np.abs(values - values[0]) / code.step, code.ones)

    assert np.abs(hamming(encoded, encoded[0]) / 2 - steps).max() <= 1


def test_numbers_out_of_reach_have_nothing_in_common() -> None:
    """Beyond twice the threshold, no bit is shared."""
    code = NumberCode(low=0.0, high=10.0, bits=256, concentration=0.2)
    encoded = numbers(np.array([0.0, 2.01 * code.threshold, 1.9 * code.threshold]), code)

    assert hamming(encoded[0], encoded[1]) == 2 * code.ones
    assert hamming(encoded[0], encoded[2]) < 2 * code.ones


@pytest.mark.parametrize("value", [-0.001, 10.001, np.nan, np.inf])
def test_a_number_outside_the_agreed_range_is_refused(value: float) -> None:
    """The row and the range are named; a missing value is outside too."""
    code = NumberCode(low=0.0, high=10.0, bits=256)

    with pytest.raises(DataError, match=r"row 2 is .*outside the agreed range \[0.0, 10.0\]"):
        numbers(np.array([5.0, value]), code)


def test_like_texts_have_like_codes() -> None:
    """A typing error changes few bits, another name most."""
    encoded = texts(["margaret miller", "margret miller", "hans huber"], TextCode())
    near, far = hamming(encoded[0], encoded[1:])

    assert near < far / 2


def test_the_count_of_ones_does_not_tell_a_text_s_length() -> None:
    """From 3 to 3,000 letters the mean count changes by less than collisions scatter it."""
    rng = np.random.default_rng(3)
    letters = np.array(list("abcdefghijklmnopqrstuvwxyz"))
    counts = []
    for length in (3, 30, 300, 3000):
        words = ["".join(rng.choice(letters, length)) for _ in range(60)]
        counts.append(np.bitwise_count(texts(words, TextCode())).sum(axis=1))
    means = [count.mean() for count in counts]

    assert max(means) - min(means) < 3 * max(count.std() for count in counts) / 2
    assert np.concatenate(counts).max() <= TextCode().insertions


def test_codes_follow_the_secret_and_the_field() -> None:
    """Another secret, or the same value in another field, shares bits by chance only."""
    code = TextCode()
    one = texts(["margaret"], code)
    other_secret = texts(["margaret"], code, LinkageSecret(b"t" * 32))
    other_field = encode_keys({"y": ["margaret"]}, {"y": code}, SECRET)

    for other in (other_secret, other_field):
        assert hamming(one[0], other[0]) > 300
    assert np.array_equal(one, texts(["  MARGARET "], code))


def test_fields_follow_one_another() -> None:
    """The distance of several fields is the sum of theirs."""
    codes = {"name": TextCode(bits=256), "born": NumberCode(low=1900.0, high=2030.0, bits=128)}
    columns = {"name": ["anna", "anne"], "born": np.array([1980.0, 1990.0])}
    together = encode_keys(columns, codes, SECRET)
    alone = [encode_keys(columns, {field: code}, SECRET) for field, code in codes.items()]

    assert together.shape == (2, 48)
    assert hamming(together[0], together[1]) == sum(hamming(part[0], part[1]) for part in alone)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"bits": 12}, "multiple of 8"),
        ({"bits": 0}, "bits must be at least 8"),
        ({"concentration": 1.0}, r"concentration must lie in \(0, 1\)"),
        ({"concentration": float("nan")}, r"concentration must lie in \(0, 1\)"),
        ({"low": 2.0, "high": 1.0}, "must be finite and ascend"),
        ({"high": float("inf")}, "must be finite and ascend"),
        ({"bits": 8, "concentration": 0.99}, "leaves no zeros"),
    ],
)
def test_impossible_codes_are_refused(settings: dict[str, float], message: str) -> None:
    """A code that exists can encode every value of its range."""
    with pytest.raises(ConfigError, match=message):
        NumberCode(**{"low": 0.0, "high": 1.0, **settings})


def test_codes_of_different_length_are_refused() -> None:
    """Two parties that encode differently are told so."""
    with pytest.raises(DataError, match="primary's have 64 bits, the secondary's 128"):
        nearest_codes(np.zeros((2, 8), dtype=np.uint8), np.zeros((2, 16), dtype=np.uint8), 1)
    with pytest.raises(DataError, match="a table is empty"):
        nearest_codes(np.zeros((0, 8), dtype=np.uint8), np.zeros((2, 8), dtype=np.uint8), 1)


def test_the_places_of_ones_do_not_tell_a_number() -> None:
    """Bits are in a secret order: ones are no run, and two secrets share them by chance only."""
    code = NumberCode(low=0.0, high=1.0, bits=1024, concentration=0.25)
    one, other = (
        np.unpackbits(numbers(np.array([0.3]), code, LinkageSecret(byte * 32))[0])
        for byte in (b"a", b"b")
    )
    runs = int((np.diff(one) == 1).sum())

    # 256 ones at random among 1024 form about 192 runs, with a deviation of about 6.
    assert 150 < runs < 240
    assert 20 < int((one & other).sum()) < 110


def test_where_codes_change_is_secret() -> None:
    """The offset of the pivots decides whether two values in one step look equal."""
    code = NumberCode(low=0.0, high=1.0, bits=256)
    values = 0.5 + code.step * np.array([0.0, 0.5])
    equal = {
        bool(hamming(*numbers(values, code, LinkageSecret(bytes([byte]) * 32))) == 0)
        for byte in range(20)
    }

    assert equal == {True, False}
