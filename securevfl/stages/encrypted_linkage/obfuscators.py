"""Encryptions of zero for Paillier, prepared ahead: on all cores, and faster than one by one.

r^n mod n^2 takes 2,400 multiplications. A pool computes a few such *generators* and the powers
g_i^0 ... g_i^255 of each; every further obfuscator is the product of one power of each generator,
with exponents d_i from the operating system:

    prod_i g_i^(d_i) mod n^2,   0 <= d_i < 2^8,   i = 1 ... (bits of n + 128) / 8

which takes 272 multiplications at 2,048 bits. It is as good as r^n: the n-th powers form a group G
of fewer than 2^bits elements, and by the leftover hash lemma, over random generators, a product is
within ``sqrt(|G| P - 1) / 2`` of uniform over G, where P is the probability that two products of
independent exponents d, d' are equal. Given e = d - d', a product of the e_i-th powers is uniform
over the gcd(e)-th powers, and at most gcd(e)^2 elements of G have one and the same (G has rank 2),
so |G| P - 1 <= 2^(bits - 8 m) + 255^2 Pr[gcd(e) > 1] < 2^-127 for m = (bits + 128) / 8 generators:
each obfuscator is within 2^-64 of uniform, even to a party that knows the generators, and 2^20 of
one pool are within 2^-44 together. Exponents are never used twice.

References:
    [HILL99], Lemma 4.8: the leftover hash lemma.
"""

import math
import secrets
from collections import deque
from collections.abc import Callable, Iterator
from functools import lru_cache
from importlib import import_module
from typing import Any, Final

from securevfl.core import checks
from securevfl.core.progress import Pace
from securevfl.linkage.cores import Apply
from securevfl.stages.encrypted_linkage.homomorphic import obfuscators

# Obfuscators that are made together: their generators then cost a fifteenth of them.
_BATCH: Final = 2**15
_DIGIT_BITS: Final = 8

# 2^-64 of uniform takes twice 64 bits more than the group has.
_SPARE_BITS: Final = 128

# Obfuscators that are made between two reports, about 0.2 s, and generators that take as long.
_CHUNK: Final = 64
_GENERATOR_CHUNK: Final = 8


def prepared_obfuscators(
    modulus: int,
    count: int,
    *,
    apply: Apply = map,
    progress: Callable[[int], None] = lambda _made: None,
) -> list[int]:
    """Make obfuscators before they are needed; they depend on no data.

    Args:
        modulus: n, the public key.
        count: How many, >= 1: one for each ciphertext that will be sent.
        apply: Does the work, perhaps on several cores.
        progress: Called a few times a second with how many are made: none of many, while their
            generators are.

    Returns:
        Fresh random encryptions of zero; each may be used once.

    Raises:
        ConfigError: If phe is not installed or an argument is out of range.
    """
    checks.at_least(1, count=count)
    # A product takes an eighth of the time of a generator, and no fewer generators will do.
    pooled, fresh = count > generators(modulus), list[int]()
    wanted = generators(modulus) if pooled else count
    for chunk in apply(_direct, [(modulus, size) for size in _sizes(wanted, _GENERATOR_CHUNK)]):
        fresh += chunk
        progress(0 if pooled else len(fresh))
    if not pooled:
        return fresh
    bases, made = tuple(fresh), list[int]()
    for chunk in apply(_products, [(modulus, bases, size) for size in _sizes(count, _CHUNK)]):
        made += chunk
        progress(len(made))
    return made


def generators(modulus: int) -> int:
    """Return how many generators a pool has, which makes its obfuscators uniform."""
    return math.ceil((modulus.bit_length() + _SPARE_BITS) / _DIGIT_BITS)


def _sizes(count: int, most: int) -> list[int]:
    return [min(most, count - done) for done in range(0, count, most)]


def _direct(task: tuple[int, int]) -> list[int]:
    return list(obfuscators(*task))


def _products(task: tuple[int, tuple[int, ...], int]) -> list[int]:
    modulus, bases, size = task
    tables = _tables(modulus, bases)
    square, made = _number()(modulus) ** 2, []
    for _ in range(size):
        product = tables[0][0]
        for digit, powers in zip(secrets.token_bytes(len(tables)), tables, strict=True):
            product = product * powers[digit] % square
        made.append(int(product))
    return made


@lru_cache(maxsize=1)
def _tables(modulus: int, bases: tuple[int, ...]) -> list[list[Any]]:
    """Return base^0 to base^255 of every base."""
    number = _number()
    square, tables = number(modulus) ** 2, []
    for base in map(number, bases):
        powers = [number(1)]
        while len(powers) < 2**_DIGIT_BITS:
            powers.append(powers[-1] * base % square)
        tables.append(powers)
    return tables


def _number() -> Any:
    """Return GMP's whole numbers where they are installed, which multiply faster."""
    try:
        return import_module("gmpy2").mpz
    except ImportError:
        return int


class FreshObfuscators:
    """Paillier's randomness of one key as it is used up, made a batch at a time.

    Args:
        modulus: n, the public key.
        apply: Does the work, perhaps on several cores.
        pace: Reports while a batch is made.
    """

    def __init__(self, modulus: int, apply: Apply, pace: Pace) -> None:
        self.modulus = modulus
        """n, the public key."""
        self._apply = apply
        self._pace = pace
        self._stock: deque[int] = deque()
        self._made = 0

    def take(self, count: int, *, due: int) -> Iterator[int]:
        """Yield fresh obfuscators; none is used twice.

        Args:
            count: How many.
            due: How many will be wanted from now on, as far as is known.
        """
        if len(self._stock) < count:
            # A large batch costs less each: its generators cost as much as 2,000 of them.
            missing = max(count, due) - len(self._stock)
            size = max(count - len(self._stock), min(missing, _BATCH))
            before, self._made = self._made, self._made + size
            self._stock += prepared_obfuscators(
                self.modulus,
                size,
                apply=self._apply,
                progress=lambda made: self._pace(before + made, before + missing),
            )
        return (self._stock.popleft() for _ in range(count))
