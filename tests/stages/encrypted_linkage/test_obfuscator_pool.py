"""Obfuscators that are made ahead encrypt zero, are used once, and hide what they are put on."""

import math

import numpy as np
import pytest
from scipy.stats import chisquare

pytest.importorskip("phe", reason="phe is an optional dependency")

from securevfl.core.errors import ConfigError
from securevfl.linkage.cores import on_cores
from securevfl.linkage.metrics.metric import LARGEST_UNIT
from securevfl.stages.encrypted_linkage.homomorphic import (
    Keyholder,
    generators,
    masked_distances,
    prepared_obfuscators,
)


@pytest.fixture(scope="module")
def keyholder() -> Keyholder:
    return Keyholder(bits=512, insecure_short_key=True)


@pytest.mark.parametrize(("count", "workers"), [(20, 1), (200, 1), (200, 2)])
def test_pools_encrypt_zero_and_never_repeat(
    keyholder: Keyholder, count: int, workers: int
) -> None:
    """One by one where few are wanted, from generators where many are, here and elsewhere."""
    assert (count > generators(keyholder.modulus)) == (count == 200)
    with on_cores(workers) as apply:
        fresh = prepared_obfuscators(keyholder.modulus, count, apply=apply)
    units = np.array([[7]])

    assert len(set(fresh)) == count
    for obfuscator in fresh[:20]:
        packed = keyholder.encrypt([units])[0]
        ((answers, theirs),) = masked_distances([(packed, np.array([[3]]))], iter([obfuscator]))
        assert keyholder.share([(units, answers)])[0] + theirs == (7 - 3) ** 2


def test_progress_ends_with_nothing_left(keyholder: Keyholder) -> None:
    """It is told while generators are made, too."""
    for count in (30, 200):
        told: list[int] = []
        prepared_obfuscators(keyholder.modulus, count, progress=told.append)

        assert len(told) > 2
        assert told == sorted(told)
        assert told[-1] == count


@pytest.mark.statistical
def test_obfuscators_of_a_pool_are_uniform() -> None:
    """Over n-th powers: no character tells one from another.

    64 classes: quadratic characters mod two primes, and 16 intervals of the residue. 100 numbers a
    class meet chi-square's own tail to a factor of three. Of small primes one of the generators is
    a multiple once in a hundred runs, and all are squares once in 500,000: no number of a pool is
    then a unit, or another character. Of 80 bits, with 36 generators, both come less than once in
    3e10, so a false alarm less than once in 1e9. Obfuscators that were squares only would give
    1e-300.
    """
    p, q = 2**80 - 65, 2**79 - 67
    fresh = [one % (p * q) for one in prepared_obfuscators(p * q, 6400)]
    squares = [[pow(one, (r - 1) // 2, r) == 1 for one in fresh] for r in (p, q)]
    parts = [16 * one // (p * q) for one in fresh]
    classes = 32 * np.array(squares[0]) + 16 * np.array(squares[1]) + np.array(parts)

    assert chisquare(np.bincount(classes, minlength=64)).pvalue > 1e-10


def test_a_key_holder_finds_nothing_under_pooled_obfuscators(keyholder: Keyholder) -> None:
    """The attack that recovers a coordinate from stale ciphertexts meets randomness."""
    packed = keyholder.encrypt([np.array([[1234]])])[0]
    fresh = prepared_obfuscators(keyholder.modulus, 200)
    n, own = keyholder.modulus, packed.packs[0][0] % keyholder.modulus
    powers, power = set(), 1
    for _ in range(LARGEST_UNIT + 1):
        powers.add(power)
        power = power * own % n
    ((answers, _),) = masked_distances([(packed, np.full((200, 1), 54321))], iter(fresh))

    assert not any(answer % n in powers for answer in answers[0])


def test_a_pool_is_as_large_as_its_argument_needs() -> None:
    """(bits + 128) / 8 generators."""
    assert generators(2**2047 + 1) == 272
    assert generators(2**3071 + 1) == math.ceil((3072 + 128) / 8)


def test_impossible_pools_are_refused() -> None:
    """By the argument's name."""
    with pytest.raises(ConfigError, match="count must be at least 1"):
        prepared_obfuscators(4007 * 5011, 0)
    with pytest.raises(ConfigError, match="workers must be at least 1"), on_cores(0):
        pass
