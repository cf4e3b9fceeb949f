"""Bloom-filter codes after FEDERAL, and the exact nearest of them by Hamming distance.

Keys become bits whose Hamming distance follows their distance.

The codes of two coordinates add up like city blocks, so the nearest code need not be the nearest
point. Distances along many directions add up to the distance as the crow flies, nearly: with eight
directions in the plane, their sum varies by 2 % with the direction of a difference; with the two of
longitude and latitude by 41 %.

Texts: every q-gram sets bits at keyed pseudo-random places. Numbers: a value sets the bits of all
pivots within a threshold of it; pivots are evenly spaced with a secret offset, and bits are put in
a secret order. All codes of a number have equally many ones, and those of a text about equally many
independent of its length.

The distance of several numbers is the sum of theirs, each in steps of its own code. Dimensions of
one unit (longitude and latitude) are better encoded as points
(:class:`~securevfl.stages.bloom.codes.PointCode`), whose distance is close to the Euclidean one.

Differs from [FEDERAL17] in two ways. Pivots are evenly spaced over the *agreed* range, widened by
the threshold at both ends, where the paper draws them at random: then every value has equally many
ones, also at the edges of the range. Hashes are keyed BLAKE2b, where the paper leaves them open.

faiss finds candidates where it is installed, numpy otherwise; both give the same links. Memory
besides the codes and the links: :data:`_CHUNK_CELLS` distances (or one row of them) of two bytes, a
byte each for selection, strips of records, and 64 MiB for sorting; with faiss,
:data:`_FAISS_CELLS` candidates of 32 bytes.
"""

import hashlib
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Annotated, Any, ClassVar, Final, Literal, get_args

import numpy as np
from jaxtyping import Bool, Float64, Int64, UInt8, UInt16, UInt64

from securevfl.core import checks
from securevfl.core.errors import ConfigError, DataError, of_an_extra
from securevfl.data.tables import KeyTable
from securevfl.linkage.links import Chosen, LinkTable, nearest_by_block, write_nearest
from securevfl.linkage.metrics import metric
from securevfl.linkage.spec import LinkageSecret
from securevfl.linkage.text import checked_texts, joined_texts, normalise_text

_WORD_BYTES: Final = 8
_MOST_DIMENSIONS: Final = 64

CodeBits = Annotated[int, partial(checks.at_least, 8)]
"""Length of a code."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PointCode(metric.KeyRange):
    """How points of an agreed box, all dimensions in one unit, become bits."""

    bits: CodeBits = 2048
    """Length of the code, a multiple of 8 times ``directions``."""

    directions: checks.Count = 8
    """Directions that share the bits: more of them know distances better, each one coarser."""

    concentration: checks.OpenUnit = 0.25
    """Bits that are set, as a share of all: more give longer range, fewer finer resolution."""

    def __post_init__(self) -> None:
        checks.require_limits(self)
        if self.bits % (8 * self.directions):
            raise ConfigError(
                f"bits must be a multiple of 8 x {self.directions} directions, got {self.bits}"
            )
        if len(self.low) > _MOST_DIMENSIONS:
            raise ConfigError(f"low and high may have {_MOST_DIMENSIONS} dimensions at most")
        metric.KeyRange.__post_init__(self)

    @property
    def radius(self) -> float:
        """Half of the box's diagonal: no point is farther from the middle, in any direction."""
        return math.dist(self.low, self.high) / 2

    def along_directions(
        self, points: Float64[np.ndarray, "rows key_dim"], key: bytes
    ) -> Float64[np.ndarray, "rows directions"]:
        """Return how far points lie from the middle of the box in each secret direction."""
        middle = (np.array(self.low) + np.array(self.high)) / 2
        # Summed dimension by dimension: the same to the last bit on every machine.
        along = np.zeros((len(points), self.directions))
        for axis, parts in enumerate(secret_directions(len(self.low), self.directions, key)):
            along += (points[:, axis, None] - middle[axis]) * parts
        return along


def secret_directions(
    key_dim: int, count: int, key: bytes
) -> Float64[np.ndarray, "key_dim directions"]:
    """Return unit vectors that only the holders of a key know.

    In the plane they are evenly spread over half a turn from a secret angle on; in more dimensions
    they come in frames of ``key_dim`` at right angles to one another, each turned at random.
    """
    if key_dim == 1:
        return np.ones((1, count))
    if key_dim == 2:
        angles = math.pi * (np.arange(count) + _uniform(1, key)[0]) / count
        return np.stack([np.cos(angles), np.sin(angles)])
    frames = -(-count // key_dim)
    uniform = _uniform(2 * frames * key_dim**2, key).reshape(2, frames, key_dim, key_dim)
    # Box and Muller's normal numbers; 1 - u is never 0.
    normal = np.sqrt(-2 * np.log(1 - uniform[0])) * np.cos(2 * math.pi * uniform[1])
    turned = [np.linalg.qr(frame)[0] for frame in normal]
    return np.concatenate(turned, axis=1)[:, :count]


def _uniform(count: int, key: bytes) -> Float64[np.ndarray, " count"]:
    """Return pseudo-random numbers in [0, 1) of 53 bits."""
    return (_keyed_words(count, key) >> np.uint64(11)).astype(np.float64) / 2**53


def _keyed_words(count: int, key: bytes) -> UInt64[np.ndarray, " count"]:
    """Return pseudo-random 64-bit words that follow from a key."""
    blocks = [
        hashlib.blake2b(counter.to_bytes(_WORD_BYTES, "big"), key=key).digest()
        for counter in range(-(-count // _WORD_BYTES))
    ]
    return np.frombuffer(b"".join(blocks), dtype=">u8")[:count]


_CODE_CELLS: Final = 2**24
_DIGEST_WORDS: Final = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class TextCode:
    """How a text field becomes bits."""

    bits: CodeBits = 1024
    """Length of the code, a multiple of 8."""

    concentration: checks.OpenUnit = 0.35
    """Share of the code's bits that a text sets, counting those that coincide."""

    q: checks.Count = 2
    """Letters of a q-gram, >= 1."""

    def __post_init__(self) -> None:
        checks.require_limits(self)
        if self.bits % 8:
            raise ConfigError(f"bits must be a multiple of 8, got {self.bits}")

    @property
    def insertions(self) -> int:
        """Bits that each text sets, counting those set twice."""
        return max(1, round(self.bits * self.concentration))


@dataclass(frozen=True, kw_only=True, slots=True)
class NumberCode:
    """How a number of an agreed range becomes bits."""

    low: float
    """Smallest value, agreed between the parties."""

    high: float
    """Largest value, agreed between the parties, above ``low``."""

    bits: CodeBits = 1024
    """Length of the code, a multiple of 8."""

    concentration: checks.OpenUnit = 0.25
    """Bits that are set, as a share of all: more give longer range, fewer finer resolution."""

    def __post_init__(self) -> None:
        checks.require_limits(self)
        if self.bits % 8:
            raise ConfigError(f"bits must be a multiple of 8, got {self.bits}")
        _ = self.range
        if not self.ones < self.bits:
            raise ConfigError("concentration: leaves no zeros; use more bits or a lower one")

    @property
    def range(self) -> metric.KeyRange:
        """The agreed range."""
        return metric.KeyRange(low=(self.low,), high=(self.high,))

    @property
    def ones(self) -> int:
        """Bits that every value sets."""
        return max(1, round(self.bits * self.concentration))

    @property
    def step(self) -> float:
        """Distance of neighbouring pivots, in the number's unit: finer differences are lost."""
        return (self.high - self.low) / (self.bits - self.ones)

    @property
    def threshold(self) -> float:
        """t, half the width of what a value sets; values 2t apart have nothing in common."""
        return self.ones * self.step / 2


Code = TextCode | NumberCode | PointCode


def encode_keys(
    columns: Mapping[str, "Sequence[Any] | np.ndarray"],
    codes: Mapping[str, Code],
    secret: LinkageSecret,
    *,
    whose: str = "a party",
) -> UInt8[np.ndarray, "rows code_bytes"]:
    """Return packed codes of all fields, one after the other, in the order of ``codes``.

    Args:
        columns: Texts, float64 numbers or rows of float64 coordinates, one column of equal length
            a field.
        codes: How each field is encoded; both parties must use the same.
        secret: Both data parties' secret.
        whose: The party's name, for messages.

    Raises:
        DataError: If a column is empty, holds no texts, or a number lies outside its agreed range.

    Reveals:
        Nothing until sent. A coordinator that gets the codes of both parties learns all Hamming
        distances, and from them the order of numbers up to an affine map; equal keys have equal
        codes, so it sees how often each occurs. Without the secret it cannot encode guesses.
    """
    parts = []
    for field, code in codes.items():
        where = f"{whose}, field {field!r}"
        if isinstance(code, TextCode):
            texts = checked_texts(columns[field], whose=where)
            parts.append(_encode_texts(texts, code, secret.subkey("text", field)))
        elif isinstance(code, NumberCode):
            numbers = np.asarray(columns[field])
            code.range.require_inside(numbers[:, None], where=where)
            parts.append(_encode_numbers(numbers, code, secret, field))
        else:
            points = np.asarray(columns[field])
            code.require_inside(points, where=where)
            parts.append(_encode_points(points, code, secret, field))
    return np.concatenate(parts, axis=1)


def _encode_numbers(
    numbers: Float64[np.ndarray, " rows"], code: NumberCode, secret: LinkageSecret, field: str
) -> UInt8[np.ndarray, "rows code_bytes"]:
    order = _secret_order(code.bits, secret.subkey("order", field))
    # Row s of this table is the code of a value whose window starts at s.
    starts, value_of = np.unique(_first_bits(numbers, code, secret, field), return_inverse=True)
    return np.packbits(_windows(starts, code)[:, order], axis=1)[value_of]


def _encode_points(
    points: Float64[np.ndarray, "rows key_dim"], code: PointCode, secret: LinkageSecret, field: str
) -> UInt8[np.ndarray, "rows code_bytes"]:
    # A little wider than the points reach, for what rounding adds.
    reach = code.radius * (1 + 1e-9)
    part = NumberCode(
        low=-reach,
        high=reach,
        bits=code.bits // code.directions,
        concentration=code.concentration,
    )
    along = code.along_directions(points, secret.subkey("directions", field))
    # One order for all bits, so that it can't be seen which of them belong to one direction.
    order = _secret_order(code.bits, secret.subkey("order", field))
    names = [f"{field}\x1f{number}" for number in range(code.directions)]
    packed = np.empty((len(points), code.bits // 8), dtype=np.uint8)
    step = max(1, _CODE_CELLS // code.bits)
    for start in range(0, len(points), step):
        bits = [
            _windows(_first_bits(numbers, part, secret, name), part)
            for numbers, name in zip(along[start : start + step].T, names, strict=True)
        ]
        packed[start : start + step] = np.packbits(np.concatenate(bits, axis=1)[:, order], axis=1)
    return packed


def _first_bits(
    numbers: Float64[np.ndarray, " rows"], code: NumberCode, secret: LinkageSecret, name: str
) -> Int64[np.ndarray, " rows"]:
    """Return the bit at which the window of each value starts."""
    offset = int.from_bytes(secret.subkey("offset", name)[:8], "big") / 2**64
    # Pivot j lies at low - t + (j + 1 - offset) step, and a value sets the pivots within t of it:
    # a window of as many bits as there are ones, which starts at this bit.
    first = np.floor((numbers - code.low) / code.step + offset).astype(np.int64)
    # Rounding may bring the largest value one bit too far.
    return np.minimum(first, code.bits - code.ones)


def _windows(starts: Int64[np.ndarray, " rows"], code: NumberCode) -> Bool[np.ndarray, "rows bits"]:
    """Return the bits of values, in the order of pivots."""
    window = np.arange(code.bits) - starts[:, None]
    return (window >= 0) & (window < code.ones)


def _secret_order(bits: int, key: bytes) -> Int64[np.ndarray, " bits"]:
    """Return a keyed permutation: bits sorted by 64-bit pseudo-random numbers."""
    return np.argsort(_keyed_words(bits, key), kind="stable")


def _encode_texts(
    texts: Sequence[str], code: TextCode, key: bytes
) -> UInt8[np.ndarray, "rows code_bytes"]:
    different = sorted(set(texts))
    number = {text: position for position, text in enumerate(different)}
    places = _GramPlaces(key, code.bits)
    packed = np.empty((len(different), code.bits // 8), dtype=np.uint8)
    step = max(1, _CODE_CELLS // code.bits)
    for start in range(0, len(different), step):
        chunk = different[start : start + step]
        bits = np.zeros((len(chunk), code.bits), dtype=np.bool_)
        for row, text in enumerate(chunk):
            bits[row, places.of_text(text, code)] = True
        packed[start : start + step] = np.packbits(bits, axis=1)
    return packed[[number[text] for text in texts]]


class _GramPlaces:
    """The pseudo-random places of each q-gram, computed once and as far as needed."""

    def __init__(self, key: bytes, bits: int) -> None:
        self._key = key
        self._bits = bits
        self._ranks: dict[tuple[str, int], int] = {}
        self._places: dict[tuple[str, int], Int64[np.ndarray, " places"]] = {}

    def of_text(self, text: str, code: TextCode) -> Int64[np.ndarray, " insertions"]:
        """Return the places that a text sets: as many for every text, shared out over its grams."""
        grams = occurrences(q_grams(text, code.q))
        each, rest = divmod(code.insertions, len(grams))
        for gram in grams:
            if len(self._places.get(gram, ())) <= each:
                self._extend(gram, each + 1)
        # Grams that get one place more are chosen by their own hash, so like texts agree on them.
        # It is another one than that of their places: those would crowd together in long texts.
        grams.sort(key=lambda gram: self._ranks[gram])
        return np.concatenate(
            [self._places[gram][: each + (rank < rest)] for rank, gram in enumerate(grams)]
        )

    def _extend(self, gram: tuple[str, int], count: int) -> None:
        """Compute at least ``count`` places of a gram; more of them begin with the same."""
        data = f"{gram[1]}\x1f{gram[0]}".encode()
        blocks = [
            hashlib.blake2b(block.to_bytes(4, "big") + data, key=self._key).digest()
            for block in range(-(-(count + 1) // _DIGEST_WORDS))
        ]
        words = np.frombuffer(b"".join(blocks), dtype=">u4")
        self._ranks[gram] = int(words[0])
        # A 32-bit word modulo the length favours no place by more than bits / 2^32.
        self._places[gram] = words[1:].astype(np.int64) % self._bits


def q_grams(text: str, q: int) -> list[str]:
    """Return the overlapping runs of ``q`` letters, the text being padded at both ends.

    Examples:
        >>> q_grams("ann", 2)
        [' a', 'an', 'nn', 'n ']
    """
    padded = " " * (q - 1) + text + " " * (q - 1)
    return [padded[i : i + q] for i in range(max(1, len(padded) - q + 1))]


def occurrences(grams: Sequence[str]) -> list[tuple[str, int]]:
    """Number equal grams, so that "anan" and "an" differ.

    Examples:
        >>> occurrences(["an", "na", "an"])
        [('an', 0), ('na', 0), ('an', 1)]
    """
    seen: Counter[str] = Counter()
    numbered = []
    for gram in grams:
        numbered.append((gram, seen[gram]))
        seen[gram] += 1
    return numbered


_CHUNK_CELLS: Final = 2**22
_FAISS_CELLS: Final = 2**21

# Records that are compared at a time: six times as fast as whole rows of 100,000 records.
_STRIP: Final = 8192
_MOST_BITS: Final = 65_535
Backend = Literal["auto", "faiss", "numpy"]

# The one field of codes of texts that are read as one.
_JOINED: Final = "all key columns"

# Codes for metric = "bloom" without protection, where keys are plaintext anyway.
_PUBLIC_CODES: Final = LinkageSecret(hashlib.sha256(b"securevfl public codes").digest())


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class CodeKeys(metric.ComparedKeys):
    """Bloom-filter codes, as a coordinator sees them."""

    primary: UInt8[np.ndarray, "rows code_bytes"]
    """The primary's codes."""

    records: UInt8[np.ndarray, "records other_bytes"]
    """The secondary's codes."""

    backend: Backend = "auto"
    """``auto`` takes faiss where it is installed."""

    def __post_init__(self) -> None:
        checks.one_of(get_args(Backend), backend=self.backend)
        if 0 in self.primary.shape or 0 in self.records.shape:
            raise DataError("codes: a table is empty")
        if self.primary.shape[1] != self.records.shape[1]:
            raise DataError(
                f"codes: the primary's have {8 * self.primary.shape[1]} bits, the secondary's "
                f"{8 * self.records.shape[1]}; both must encode the same way"
            )
        if 8 * self.primary.shape[1] > _MOST_BITS:
            raise DataError(f"codes: have more than {_MOST_BITS} bits")

    def nearest_of(
        self, keys: UInt8[np.ndarray, "rows code_bytes"], ids: Chosen, k: int
    ) -> LinkTable:
        """Link each row to the ``k`` records whose codes differ in the fewest bits.

        Raises:
            ConfigError: If faiss is asked for and not installed.
        """
        if _takes_faiss(self.backend):
            return _by_faiss(keys, self.records[ids], ids, k)
        mine, theirs = _words(keys), np.ascontiguousarray(_words(self.records[ids]).T)

        def block(start: int, end: int) -> UInt16[np.ndarray, "chunk records"]:
            return _distances(mine[start:end], theirs)

        return nearest_by_block(block, rows=len(keys), ids=ids, k=k, chunk_cells=_CHUNK_CELLS)

    def figures(self) -> Mapping[str, Any]:
        """Return what searches."""
        return {"codes_compared_by": "faiss" if _takes_faiss(self.backend) else "numpy"}


class Bloom(metric.Metric):
    """The bits in which two codes differ."""

    name: ClassVar[str] = "bloom"
    unit: ClassVar[str] = "bits"
    whole: ClassVar[bool] = True
    reads: ClassVar[frozenset[str]] = frozenset({"fields", "spelling"})

    def kind(self, spec: metric.KeySpec) -> metric.KeyKind:
        """Return the kind of keys: numbers where the spec has ranges, else texts."""
        return "number" if spec.ranges else "text"

    def check(self, spec: metric.KeySpec) -> None:
        """Ask for ranges of numbers."""
        require_coded_ranges(spec)

    def compare(
        self, spec: metric.KeySpec, primary: KeyTable, records: KeyTable, *, neighbours: int
    ) -> CodeKeys:
        """Encode both tables; without a protection, by codes under a public key."""
        return CodeKeys(
            primary=encode(spec, primary, _PUBLIC_CODES),
            records=encode(spec, records, _PUBLIC_CODES),
        )


def require_coded_ranges(spec: metric.KeySpec) -> None:
    """Check that keys can be encoded.

    Raises:
        ConfigError: If their range is not agreed on.
    """
    if spec.ranges is None and "number" in spec.kinds.values():
        raise ConfigError(
            "linkage.ranges: codes of numbers need the agreed [low, high] of every numeric column"
        )


def encode(
    spec: metric.KeySpec, keys: KeyTable, secret: LinkageSecret
) -> UInt8[np.ndarray, "rows code_bytes"]:
    """Return the Bloom-filter codes of a party's keys; that of a missing text is like no other.

    Raises:
        DataError: If a number is missing or leaves its agreed range, naming the row.
    """
    codes = key_codes(spec)
    values: dict[str, np.ndarray] = {}
    for name, code in codes.items():
        if isinstance(code, PointCode):
            values[name] = metric.numbers_of(keys)
        elif name == _JOINED:
            texts = joined_texts(keys.columns)
            values[name] = _unlike_where_missing(texts, keys.name, name, secret)
        elif isinstance(code, TextCode):
            column = keys.columns[name]
            values[name] = _unlike_where_missing(column, keys.name, name, secret)
        else:
            values[name] = np.asarray(keys.columns[name])
    return encode_keys(values, codes, secret, whose=keys.name)


def _unlike_where_missing(
    texts: "Sequence[str | None] | np.ndarray", party: str, field: str, secret: LinkageSecret
) -> np.ndarray:
    """Return texts in which each missing or blank one is a long text of its own, equal to none."""
    return np.array(
        [
            text
            if text is not None and normalise_text(text)
            else secret.subkey("missing", party, field, str(row)).hex()
            for row, text in enumerate(texts)
        ],
        dtype=object,
    )


def key_codes(spec: metric.KeySpec) -> dict[str, Code]:
    """Return how each field becomes bits; a weight makes a field's code longer."""
    kinds, share = spec.kinds, spec.code_concentration
    given: dict[str, Any] = {} if share is None else {"concentration": share}
    if spec.fields is None and "text" in kinds.values():
        return {_JOINED: TextCode(bits=spec.code_bits or 1024, **given)}
    if spec.fields is None:
        box = spec.key_range()
        bits = spec.code_bits or 2048
        return {"point": PointCode(low=box.low, high=box.high, bits=bits, **given)}
    weights = {field.name: field.weight for field in spec.fields}
    ranges = iter(spec.ranges or ())
    codes: dict[str, Code] = {}
    for name, kind in kinds.items():
        bits = max(8, 8 * round((spec.code_bits or 1024) * weights[name] / 8))
        if kind == "text":
            codes[name] = TextCode(bits=bits, **given)
        else:
            low, high = next(ranges)
            codes[name] = NumberCode(low=low, high=high, bits=bits, **given)
    return codes


def code_bytes(spec: metric.KeySpec) -> int:
    """Return the length of a row's code."""
    return sum(code.bits for code in key_codes(spec).values()) // 8


def _distances(
    rows: UInt64[np.ndarray, "chunk words"], records: UInt64[np.ndarray, "words records"]
) -> UInt16[np.ndarray, "chunk records"]:
    """Return all distances, in strips of records that stay in a processor's cache."""
    distance = np.zeros((len(rows), records.shape[1]), dtype=np.uint16)
    differing = np.empty((len(rows), _STRIP), dtype=np.uint64)
    count = np.empty((len(rows), _STRIP), dtype=np.uint8)
    for start in range(0, records.shape[1], _STRIP):
        width = min(_STRIP, records.shape[1] - start)
        strip = slice(start, start + width)
        for word in range(records.shape[0]):
            np.bitwise_xor(rows[:, word, None], records[word, strip], out=differing[:, :width])
            np.bitwise_count(differing[:, :width], out=count[:, :width])
            distance[:, strip] += count[:, :width]
    return distance


def _words(codes: UInt8[np.ndarray, "rows code_bytes"]) -> UInt64[np.ndarray, "rows words"]:
    """Return codes as 64-bit words, the last one filled up with zeros."""
    missing = -codes.shape[1] % _WORD_BYTES
    return np.ascontiguousarray(np.pad(codes, ((0, 0), (0, missing)))).view(np.uint64)


def _by_faiss(
    rows: UInt8[np.ndarray, "rows code_bytes"],
    records: UInt8[np.ndarray, "chosen code_bytes"],
    ids: Chosen,
    k: int,
) -> LinkTable:
    links = LinkTable.empty(len(rows), k)
    if not len(ids):
        return links
    index = _faiss().IndexBinaryFlat(8 * records.shape[1])
    index.add(np.ascontiguousarray(records))
    write_nearest(
        links,
        np.arange(len(rows)),
        ids,
        lambda some, width: index.search(np.ascontiguousarray(rows[some]), width),
        lambda _some, _position, hits: hits,
        # Whole-number distances tie often, so a first look goes well beyond the k-th.
        width=2 * k + 1,
        chunk_cells=_FAISS_CELLS,
    )
    return links


def _takes_faiss(backend: Backend) -> bool:
    return backend == "faiss" or (backend == "auto" and find_spec("faiss") is not None)


def _faiss() -> Any:
    return of_an_extra("faiss", use="backend: faiss")
