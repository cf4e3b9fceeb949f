"""Bloom-filter codes of keys, and the exact K nearest of them by Hamming distance.

faiss finds candidates where it is installed, numpy otherwise; both give the same links. Memory
besides the codes and the links: :data:`_CHUNK_CELLS` distances (or one row of them) of two bytes, a
byte each for selection, strips of records, and 64 MiB for sorting; with faiss,
:data:`_FAISS_CELLS` candidates of 32 bytes.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, ClassVar, Final, Literal, get_args

import numpy as np
from jaxtyping import UInt8, UInt16, UInt64

from securevfl.core import checks
from securevfl.core.errors import ConfigError, DataError, of_an_extra
from securevfl.linkage.links import Chosen, LinkTable, nearest_by_block, write_nearest
from securevfl.linkage.metrics import metric
from securevfl.linkage.spec import LinkageSecret
from securevfl.linkage.text import joined_texts, normalise_text
from securevfl.stages.bloom.codes import Code, NumberCode, PointCode, TextCode, encode_keys

_WORD_BYTES: Final = 8
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
        """Return that keys are numbers where they have ranges, and else texts."""
        return "number" if spec.ranges else "text"

    def check(self, spec: metric.KeySpec) -> None:
        """Ask for ranges of numbers."""
        require_coded_ranges(spec)

    def compare(
        self, spec: metric.KeySpec, primary: metric.Keys, records: metric.Keys, *, neighbours: int
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
    spec: metric.KeySpec, keys: metric.Keys, secret: LinkageSecret
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
