"""Bloom-filter codes of keys, and the exact K nearest of them by Hamming distance.

faiss finds candidates where it is installed, numpy otherwise; both give the same links. Memory
beside the codes and the links: :data:`_CHUNK_CELLS` distances (or one row of them) of two bytes, a
byte each for selection, strips of records, and 64 MiB for sorting; with faiss,
:data:`_FAISS_CELLS` candidates of 32 bytes.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any, ClassVar, Final, Literal

import numpy as np
from jaxtyping import Bool, Int64, UInt8, UInt16, UInt64

from securevfl.core import checks
from securevfl.core.errors import ConfigError, DataError
from securevfl.linkage.codes import Code, NumberCode, TextCode, encode_keys
from securevfl.linkage.links import LinkTable, empty_links
from securevfl.linkage.metrics.metric import (
    ComparedKeys,
    KeyKind,
    Keys,
    KeySpec,
    Metric,
    numbers_of,
)
from securevfl.linkage.point_codes import PointCode
from securevfl.linkage.quantised import KeyRange
from securevfl.linkage.secret import LinkageSecret
from securevfl.linkage.text import joined_texts, normalise_text
from securevfl.linkage.topk import eligible_ids, nearest_by_block

_CHUNK_CELLS: Final = 2**22
_FAISS_CELLS: Final = 2**21

# Records that are compared at a time: six times as fast as whole rows of 100,000 records.
_STRIP: Final = 8192
_WORD_BYTES: Final = 8
_MOST_BITS: Final = 65_535

Backend = Literal["auto", "faiss", "numpy"]

# The one field of codes of texts that are read as one.
_JOINED: Final = "all key columns"

# Codes that protect nobody: for metric = "bloom" without protection, where keys are shown anyway.
_PUBLIC_CODES: Final = LinkageSecret(hashlib.sha256(b"securevfl public codes").digest())


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class CodeKeys(ComparedKeys):
    """Bloom-filter codes, as a coordinator sees them."""

    primary: UInt8[np.ndarray, "rows code_bytes"]
    """The primary's codes."""

    records: UInt8[np.ndarray, "records other_bytes"]
    """The secondary's codes."""

    backend: Backend = "auto"
    """``auto`` takes faiss where it is installed."""

    def nearest(
        self,
        rows: Int64[np.ndarray, " chosen"] | None,
        k: int,
        *,
        eligible: Bool[np.ndarray, " records"] | None = None,
    ) -> LinkTable:
        """Link as :func:`nearest_codes` does."""
        codes = self.primary if rows is None else self.primary[rows]
        return nearest_codes(codes, self.records, k, eligible=eligible, backend=self.backend)

    def figures(self) -> Mapping[str, Any]:
        """Return what searches."""
        return {"codes_compared_by": "faiss" if _takes_faiss(self.backend) else "numpy"}


class Bloom(Metric):
    """The bits in which two codes differ."""

    name: ClassVar[str] = "bloom"
    unit: ClassVar[str] = "bits"
    whole: ClassVar[bool] = True
    reads: ClassVar[frozenset[str]] = frozenset({"fields", "spelling"})

    def kind(self, spec: KeySpec) -> KeyKind:
        """Return that keys are numbers where they have ranges, and else texts."""
        return "number" if spec.ranges else "text"

    def check(self, spec: KeySpec) -> None:
        """Ask for ranges of numbers."""
        require_coded_ranges(spec)

    def compare(
        self,
        spec: KeySpec,
        primary: Keys,
        records: Keys,
        *,
        neighbours: int,  # noqa: ARG002
    ) -> CodeKeys:
        """Encode both tables; without a protection, by codes that protect nobody."""
        return CodeKeys(
            primary=encode(spec, primary, _PUBLIC_CODES),
            records=encode(spec, records, _PUBLIC_CODES),
        )


def require_coded_ranges(spec: KeySpec) -> None:
    """Check that keys can be encoded.

    Raises:
        ConfigError: If their range is not agreed on.
    """
    if spec.ranges is None and "number" in spec.kinds.values():
        raise ConfigError(
            "linkage.ranges: codes of numbers need the agreed [low, high] of every numeric column"
        )


def encode(
    spec: KeySpec, keys: Keys, secret: LinkageSecret
) -> UInt8[np.ndarray, "rows code_bytes"]:
    """Return the Bloom-filter codes of a party's keys; that of a missing text is like no other.

    Raises:
        DataError: If a number is missing or leaves its agreed range, naming the row.
    """
    codes = key_codes(spec)
    values: dict[str, np.ndarray] = {}
    for name, code in codes.items():
        if isinstance(code, PointCode):
            values[name] = numbers_of(keys)
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


def key_codes(spec: KeySpec) -> dict[str, Code]:
    """Return how each field becomes bits; a weight makes a field's code longer."""
    kinds = spec.kinds
    if spec.fields is None and "text" in kinds.values():
        return {_JOINED: _text_code(spec.code_bits or 1024, spec.code_concentration)}
    if spec.fields is None:
        box = spec.key_range()
        return {"point": _point_code(box, spec.code_bits or 2048, spec.code_concentration)}
    weights = {field.name: field.weight for field in spec.fields}
    ranges = iter(spec.ranges or ())
    codes: dict[str, Code] = {}
    for name, kind in kinds.items():
        bits = max(8, 8 * round((spec.code_bits or 1024) * weights[name] / 8))
        if kind == "text":
            codes[name] = _text_code(bits, spec.code_concentration)
        else:
            codes[name] = _number_code(next(ranges), bits, spec.code_concentration)
    return codes


def _text_code(bits: int, share: float | None) -> TextCode:
    return TextCode(bits=bits) if share is None else TextCode(bits=bits, concentration=share)


def _point_code(box: KeyRange, bits: int, share: float | None) -> PointCode:
    if share is None:
        return PointCode(low=box.low, high=box.high, bits=bits)
    return PointCode(low=box.low, high=box.high, bits=bits, concentration=share)


def _number_code(pair: tuple[float, ...], bits: int, share: float | None) -> NumberCode:
    low, high = pair
    if share is None:
        return NumberCode(low=low, high=high, bits=bits)
    return NumberCode(low=low, high=high, bits=bits, concentration=share)


def code_bytes(spec: KeySpec) -> int:
    """Return the length of a row's code."""
    return sum(code.bits for code in key_codes(spec).values()) // 8


def nearest_codes(
    primary_codes: UInt8[np.ndarray, "rows code_bytes"],
    record_codes: UInt8[np.ndarray, "records other_bytes"],
    k: int,
    *,
    eligible: Bool[np.ndarray, " records"] | None = None,
    backend: Backend = "auto",
) -> LinkTable:
    """Link every primary row to the ``k`` records whose codes differ in the fewest bits.

    Args:
        primary_codes: Packed bits, one code a primary row.
        record_codes: Packed bits, one code a record, of the same length.
        k: Links a row, at most the number of records.
        eligible: Records that may be linked (a round's sample); None allows all.
        backend: ``auto`` takes faiss where it is installed.

    Returns:
        Exact links, distances in bits, ascending by (distance, record number).

    Raises:
        ConfigError: If faiss is asked for and not installed, or an argument is out of range.
        DataError: If a table is empty, the lengths differ, or ``k`` exceeds the records.
    """
    checks.one_of(("auto", "faiss", "numpy"), backend=backend)
    if 0 in primary_codes.shape or 0 in record_codes.shape:
        raise DataError("codes: a table is empty")
    if primary_codes.shape[1] != record_codes.shape[1]:
        raise DataError(
            f"codes: the primary's have {8 * primary_codes.shape[1]} bits, the secondary's "
            f"{8 * record_codes.shape[1]}; both must encode the same way"
        )
    if 8 * primary_codes.shape[1] > _MOST_BITS:
        raise DataError(f"codes: have more than {_MOST_BITS} bits")
    ids = eligible_ids(len(record_codes), k, eligible)
    if _takes_faiss(backend):
        return _by_faiss(primary_codes, record_codes, ids, k)
    mine, theirs = _words(primary_codes), np.ascontiguousarray(_words(record_codes[ids]).T)

    def block(start: int, end: int) -> UInt16[np.ndarray, "chunk records"]:
        return _distances(mine[start:end], theirs)

    return nearest_by_block(block, rows=len(primary_codes), ids=ids, k=k, chunk_cells=_CHUNK_CELLS)


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
    primary_codes: UInt8[np.ndarray, "rows code_bytes"],
    record_codes: UInt8[np.ndarray, "records code_bytes"],
    ids: Int64[np.ndarray, " chosen"],
    k: int,
) -> LinkTable:
    indices, distances = empty_links(len(primary_codes), k)
    if not len(ids):
        return LinkTable(indices=indices, distances=distances)
    index = _faiss().IndexBinaryFlat(8 * record_codes.shape[1])
    index.add(np.ascontiguousarray(record_codes[ids]))
    wanted = min(k, len(ids))
    # Whole-number distances tie often, so a first look goes well beyond the k-th.
    width = min(2 * wanted + 1, len(ids))
    pending = np.arange(len(primary_codes))
    while len(pending):
        undecided = []
        step = max(1, _FAISS_CELLS // width)
        for start in range(0, len(pending), step):
            rows = pending[start : start + step]
            found, position = index.search(np.ascontiguousarray(primary_codes[rows]), width)
            # faiss keeps any of equally far records, so all of them must be inside.
            decided = (found[:, -1] > found[:, wanted - 1]) | (width == len(ids))
            undecided.append(rows[~decided])
            rows, found, position = rows[decided], found[decided], position[decided]
            order = np.lexsort((position, found), axis=1)[:, :wanted]
            indices[rows, :wanted] = ids[np.take_along_axis(position, order, axis=1)]
            distances[rows, :wanted] = np.take_along_axis(found, order, axis=1)
        pending = np.concatenate(undecided)
        width = min(2 * width, len(ids))
    return LinkTable(indices=indices, distances=distances)


def _takes_faiss(backend: Backend) -> bool:
    return backend == "faiss" or (backend == "auto" and find_spec("faiss") is not None)


def _faiss() -> Any:
    try:
        return import_module("faiss")
    except ImportError:
        raise ConfigError(
            "backend: faiss is not installed; pip install 'securevfl[faiss]'"
        ) from None
