"""Squared distances under Paillier encryption: the primary holds the key, a secondary computes.

The primary packs one coordinate of many rows into one plaintext, a lane of bits each. For a record
y, the secondary raises the ciphertexts of -2 x to its coordinates, multiplies them, and adds to
every lane |y|^2 and a mask of its own. The primary decrypts masked lanes, adds |x|^2, and holds one
share of |x - y|^2; the secondary's masks are the other. A third party without the key adds them
(:func:`~securevfl.stages.encrypted_linkage.block_search.links_from_shares`).

Keys are quantised whole numbers: phe's encoding of other numbers leaves their exponents in clear.
Every ciphertext that goes back is made fresh by an obfuscator that is used once: without it, the
key holder, who knows the randomness of its own ciphertexts, finds a coordinate by trying all.

``phe`` is GPLv3 and imported nowhere else.
"""

import itertools
import math
import secrets
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from typing import Any, Final

import numpy as np
from jaxtyping import Int64, UInt64

from securevfl.core import checks
from securevfl.core.errors import DataError, of_an_extra
from securevfl.core.progress import Pace
from securevfl.linkage.cores import Apply, parts_of
from securevfl.linkage.metrics.metric import LARGEST_UNIT
from securevfl.stages.encrypted_linkage import blockwise

FEWEST_KEY_BITS: Final = 2048
"""Fewest bits of a modulus that is not factored in practice."""

# A lane's mask is uniform over 2^40 times the values it hides: their distributions differ by at
# most 2^-40.
_HIDING_BITS: Final = 40
_WORD: Final = 2**64

# Ciphertexts of one task, about 0.2 s: encrypting takes three times as long as the other steps.
_CIPHERTEXTS_A_TASK: Final = 32
_ENCRYPTIONS_A_TASK: Final = 12


@dataclass(frozen=True, kw_only=True, slots=True)
class Lanes:
    """How many rows share one plaintext, and what a lane holds."""

    key_dim: int
    """Dimensions of the keys."""

    key_bits: int
    """Bits of the modulus."""

    @property
    def offset(self) -> int:
        """What is added to |y|^2 - 2 x.y so that it is never negative."""
        return self.key_dim * LARGEST_UNIT**2

    @property
    def mask_bits(self) -> int:
        """Bits of the uniform mask of a lane."""
        return (2 * self.offset).bit_length() + _HIDING_BITS

    @property
    def width(self) -> int:
        """Bits of a lane: a masked value has one bit more than its mask at most."""
        return self.mask_bits + 1

    @property
    def count(self) -> int:
        """Lanes of one plaintext; they stay below the modulus, so nothing wraps."""
        return (self.key_bits - 1) // self.width


@dataclass(frozen=True, kw_only=True, slots=True, eq=False, repr=False)
class PackedRows:
    """The primary's encrypted keys: for each pack of rows, one ciphertext a dimension."""

    modulus: int
    """n, the public key."""

    rows: int
    """Primary rows; the last pack may hold fewer than the others."""

    packs: tuple[tuple[int, ...], ...]
    """Ciphertexts of -2 x, packed."""

    @property
    def lanes(self) -> Lanes:
        """How rows are packed."""
        return Lanes(key_dim=len(self.packs[0]), key_bits=self.modulus.bit_length())

    def __repr__(self) -> str:
        return f"PackedRows({self.rows} rows in {len(self.packs)} packs)"


class Keyholder:
    """The primary's side: it alone can decrypt."""

    def __init__(self, *, bits: int = FEWEST_KEY_BITS, insecure_short_key: bool = False) -> None:
        """Make a fresh key.

        Args:
            bits: Bits of the modulus, at least 2048.
            insecure_short_key: Allows fewer, which can be factored: tests only.

        Raises:
            ConfigError: If phe is not installed or the key is too short.
        """
        checks.at_least(256 if insecure_short_key else FEWEST_KEY_BITS, bits=bits)
        self._public, self._private = _phe().generate_paillier_keypair(n_length=bits)

    @property
    def modulus(self) -> int:
        """n, the public key."""
        return int(self._public.n)

    def encrypt(
        self, blocks: Sequence[Int64[np.ndarray, "_ key_dim"]], *, apply: Apply = map
    ) -> list[PackedRows]:
        """Pack and encrypt quantised keys, those of each block by themselves.

        Args:
            blocks: The keys, (rows, key_dim) a block.
            apply: Does the work, perhaps on several cores.

        Raises:
            DataError: If keys are not quantised.

        Reveals:
            To the secondary: the number of rows, and the public key.
        """
        plain: list[int] = []
        for units in blocks:
            _require_units(units)
            lanes = self._lanes(units)
            plain += (
                -2 * _pack(axis, lanes.width) % self.modulus
                for start in range(0, len(units), lanes.count)
                for axis in units[start : start + lanes.count].T.tolist()
            )
        tasks = [(self._public, part) for part in parts_of(plain, _ENCRYPTIONS_A_TASK)]
        made = (ciphertext for part in apply(_encrypt_values, tasks) for ciphertext in part)
        packed = []
        for units in blocks:
            packs = tuple(
                tuple(itertools.islice(made, units.shape[1]))
                for _ in range(0, len(units), self._lanes(units).count)
            )
            packed.append(PackedRows(modulus=self.modulus, rows=len(units), packs=packs))
        return packed

    def share(
        self,
        blocks: Sequence[tuple[Int64[np.ndarray, "_ key_dim"], list[list[int]]]],
        *,
        apply: Apply = map,
        progress: blockwise.Progress | None = None,
    ) -> list[UInt64[np.ndarray, "_ _"]]:
        """Decrypt the secondary's answers into the primary's share of all squared distances.

        Args:
            blocks: The keys of each block that were encrypted, and the answers to them from
                :func:`masked_distances`: for each pack, a ciphertext a record.
            apply: Does the work, perhaps on several cores.
            progress: Called every few ciphertexts.

        Returns:
            The share of each block, (rows, records).

        Reveals:
            To the primary: values that are masked to within 2^-40 of uniform. To the third party,
            with the other share: all squared distances of quantised keys.
        """
        shares = [
            np.empty((len(units), len(answers[0])), dtype=np.uint64) for units, answers in blocks
        ]
        tasks, targets = [], []
        for share, (units, answers) in zip(shares, blocks, strict=True):
            lanes = self._lanes(units)
            for pack, first in _places(len(answers), len(answers[0])):
                part = answers[pack][first : first + _CIPHERTEXTS_A_TASK]
                tasks.append((self._private, part, lanes.width))
                start = pack * lanes.count
                targets.append(share[start : start + lanes.count, first : first + len(part)])
        answered = zip(targets, apply(_decrypt_lanes, tasks), strict=True)
        for done, (target, plain) in enumerate(answered, 1):
            for record, lane_values in enumerate(plain):
                target[:, record] = lane_values[: len(target)]
            if progress is not None:
                progress(done, len(targets))
        for share, (units, _) in zip(shares, blocks, strict=True):
            norms = (units.astype(np.uint64) ** 2).sum(axis=1)
            share += norms[:, None] - np.uint64(self._lanes(units).offset)
        return shares

    def _lanes(self, units: Int64[np.ndarray, "_ key_dim"]) -> Lanes:
        return Lanes(key_dim=units.shape[1], key_bits=self.modulus.bit_length())

    def __repr__(self) -> str:
        return f"Keyholder({self.modulus.bit_length()} bits)"


def obfuscators(modulus: int, count: int) -> Iterator[int]:
    """Yield fresh random encryptions of zero, r^n mod n^2; each may be used once.

    They take most of the time and depend on no data, so they can be made ahead.
    """
    powmod = _powmod()
    for _ in range(count):
        yield int(powmod(secrets.randbelow(modulus - 1) + 1, modulus, modulus**2))


def masked_distances(
    blocks: Sequence[tuple[PackedRows, Int64[np.ndarray, "_ key_dim"]]],
    fresh: Iterator[int],
    *,
    apply: Apply = map,
) -> list[tuple[list[list[int]], UInt64[np.ndarray, "_ _"]]]:
    """Compute on the primary's ciphertexts, as the secondary does.

    Args:
        blocks: The primary's encrypted keys of each block, and the secondary's quantised keys,
            (records, key_dim).
        fresh: From :func:`obfuscators`: one for each pack and record.
        apply: Does the work, perhaps on several cores.

    Returns:
        For each block the answers for the primary, and the secondary's share of all squared
        distances, (rows, records).

    Raises:
        ConfigError: If phe is not installed.
        DataError: If keys are not quantised, or obfuscators run out.

    Reveals:
        To the primary: fresh ciphertexts of masked lanes. To the third party: see
        :meth:`Keyholder.share`.
    """
    _phe()
    masked_blocks = []
    tasks, targets = [], []
    for packed, units in blocks:
        _require_units(units)
        lanes = packed.lanes
        share = np.empty((packed.rows, len(units)), dtype=np.uint64)
        answers: list[list[int]] = [[] for _ in packed.packs]
        masked_blocks.append((answers, share))
        for pack, first in _places(len(packed.packs), len(units)):
            keys = units[first : first + _CIPHERTEXTS_A_TASK].tolist()
            own = list(itertools.islice(fresh, len(keys)))
            if len(own) < len(keys):
                raise DataError("obfuscators ran out; every ciphertext needs one of its own")
            start = pack * lanes.count
            target = share[start : start + lanes.count, first : first + len(keys)]
            targets.append((answers[pack], target))
            tasks.append((packed.modulus, packed.packs[pack], keys, own, len(target)))
    for (into, target), (part, masks) in zip(targets, apply(_mask_answers, tasks), strict=True):
        into += part
        target[:] = masks
    return masked_blocks


def _places(packs: int, records: int) -> list[tuple[int, int]]:
    """Return the pack and the first record of every task."""
    return [
        (pack, first) for pack in range(packs) for first in range(0, records, _CIPHERTEXTS_A_TASK)
    ]


def _encrypt_values(task: tuple[Any, list[int]]) -> list[int]:
    public, values = task
    return [int(public.raw_encrypt(value)) for value in values]


def _mask_answers(
    task: tuple[int, tuple[int, ...], list[list[int]], list[int], int],
) -> tuple[list[int], UInt64[np.ndarray, "filled records"]]:
    """Return the answers of a few records to one pack, and the secondary's shares of them."""
    n, ciphertexts, keys, fresh, filled = task
    lanes = Lanes(key_dim=len(ciphertexts), key_bits=n.bit_length())
    powmod, square = _powmod(), n**2
    share = np.empty((filled, len(keys)), dtype=np.uint64)
    answers = []
    for record, (key, obfuscator) in enumerate(zip(keys, fresh, strict=True)):
        norm = sum(coordinate**2 for coordinate in key)
        masks = [secrets.randbits(lanes.mask_bits) for _ in range(filled)]
        added = _pack([mask + lanes.offset + norm for mask in masks], lanes.width)
        answer = (1 + n * added) % square
        for ciphertext, coordinate in zip(ciphertexts, key, strict=True):
            answer = answer * int(powmod(ciphertext, coordinate, square)) % square
        answers.append(answer * obfuscator % square)
        share[:, record] = [-mask % _WORD for mask in masks]
    return answers, share


def _decrypt_lanes(task: tuple[Any, list[int], int]) -> list[list[int]]:
    """Return the lanes of each ciphertext mod 2^64."""
    private, ciphertexts, width = task
    lanes = (private.public_key.n.bit_length() - 1) // width
    return [
        _unpack(int(private.raw_decrypt(ciphertext)), width, lanes) for ciphertext in ciphertexts
    ]


def _require_units(units: Int64[np.ndarray, "own key_dim"]) -> None:
    if 0 in units.shape or not 0 <= units.min() <= units.max() <= LARGEST_UNIT:
        raise DataError(f"keys must be whole numbers of 0 to {LARGEST_UNIT}, at least one")


def _pack(values: list[int], width: int) -> int:
    """Put values side by side; none may need more than ``width`` bits."""
    return sum(value << (lane * width) for lane, value in enumerate(values))


def _unpack(packed: int, width: int, count: int) -> list[int]:
    """Return the first ``count`` lanes mod 2^64, which is all that a share needs."""
    lane_bits = (1 << width) - 1
    return [(packed >> (lane * width) & lane_bits) % _WORD for lane in range(count)]


def _phe() -> Any:
    return of_an_extra("phe.paillier", use="linkage.protection: paillier (GPLv3)")


def _powmod() -> Any:
    _phe()
    from phe.util import powmod

    return powmod


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
