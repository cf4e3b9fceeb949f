"""Exact K nearest bit vectors by Hamming distance.

faiss finds candidates where it is installed, numpy otherwise; both give the same links. Memory
beside the codes and the links: :data:`_CHUNK_CELLS` distances (or one row of them) of two bytes, a
byte each for selection, strips of records, and 64 MiB for sorting; with faiss,
:data:`_FAISS_CELLS` candidates of 32 bytes.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import Any, Final, Literal

import numpy as np
from jaxtyping import Bool, Int64, UInt8, UInt16, UInt64

from securevfl.core import checks
from securevfl.core.errors import ConfigError, DataError
from securevfl.linkage.links import LinkTable, empty_links
from securevfl.linkage.topk import eligible_ids, nearest_by_block

_CHUNK_CELLS: Final = 2**22
_FAISS_CELLS: Final = 2**21

# Records that are compared at a time: six times as fast as whole rows of 100,000 records.
_STRIP: Final = 8192
_WORD_BYTES: Final = 8
_MOST_BITS: Final = 65_535

Backend = Literal["auto", "faiss", "numpy"]


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
    if backend == "faiss" or (backend == "auto" and find_spec("faiss") is not None):
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


def _faiss() -> Any:
    try:
        return import_module("faiss")
    except ImportError:
        raise ConfigError("backend: faiss is not installed; pip install faiss-cpu") from None
