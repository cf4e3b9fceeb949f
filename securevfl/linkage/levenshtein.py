"""Exact K nearest texts by Levenshtein distance: insertions, deletions and substitutions.

Distances come from rapidfuzz, in blocks of rows. Memory: a block has at most :data:`_CHUNK_CELLS`
distances (or one row of them) of one or two bytes, a byte each for selection, and 64 MiB for
sorting what was selected: 112 MiB in all, beside the texts and the links.
"""

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from jaxtyping import Bool, UInt

from securevfl.core.errors import ConfigError
from securevfl.linkage.links import LinkTable
from securevfl.linkage.text import checked_texts
from securevfl.linkage.topk import eligible_ids, nearest_by_block

_CHUNK_CELLS: Final = 2**24
_LONGEST_FOR_ONE_BYTE: Final = 255


def nearest_texts(
    primary_texts: Sequence[str],
    record_texts: Sequence[str],
    k: int,
    *,
    eligible: Bool[np.ndarray, " records"] | None = None,
    workers: int = 1,
) -> LinkTable:
    """Link every primary row to the ``k`` records whose texts need the fewest edits.

    Texts are compared as :func:`~securevfl.linkage.text.normalise_text` gives them.

    Args:
        primary_texts: One text a primary row; empty ones are allowed.
        record_texts: One text a record.
        k: Links a row, at most the number of records.
        eligible: Records that may be linked (a round's sample); None allows all.
        workers: Threads; -1 takes every core.

    Returns:
        Exact links, ascending by (distance, record number).

    Raises:
        ConfigError: If rapidfuzz is not installed, or an argument is out of range.
        DataError: If a table is empty, a value is no text or too long, or ``k`` is too large.
    """
    return nearest_normal_texts(
        checked_texts(primary_texts, whose="the primary"),
        checked_texts(record_texts, whose="the secondary"),
        k,
        eligible=eligible,
        workers=workers,
    )


def nearest_normal_texts(
    rows: Sequence[str],
    records: Sequence[str],
    k: int,
    *,
    eligible: Bool[np.ndarray, " records"] | None = None,
    workers: int = 1,
) -> LinkTable:
    """Link texts that are in normal form already; see :func:`nearest_texts`."""
    ids = eligible_ids(len(records), k, eligible)
    # Rows with one text have one answer, so each text is compared once.
    different = sorted(set(rows))
    position = {text: number for number, text in enumerate(different)}
    chosen = [records[record] for record in ids]

    def block(start: int, end: int) -> UInt[np.ndarray, "chunk records"]:
        return edit_distances(different[start:end], chosen, workers=workers)

    links = nearest_by_block(block, rows=len(different), ids=ids, k=k, chunk_cells=_CHUNK_CELLS)
    return links.take(np.array([position[text] for text in rows], dtype=np.int64))


def edit_distances(
    rows: Sequence[str], records: Sequence[str], *, workers: int = 1
) -> UInt[np.ndarray, "rows records"]:
    """Return the Levenshtein distance of every pair, in the fewest bytes that hold it.

    Raises:
        ConfigError: If rapidfuzz is not installed.
    """
    process, distance = _rapidfuzz()
    longest = max(max(map(len, rows), default=0), max(map(len, records), default=0))
    dtype = np.uint8 if longest <= _LONGEST_FOR_ONE_BYTE else np.uint16
    found: np.ndarray = process.cdist(
        rows, records, scorer=distance.Levenshtein.distance, dtype=dtype, workers=workers
    )
    return found


def pair_edits(
    rows: Sequence[str], records: Sequence[str], *, workers: int = 1
) -> UInt[np.ndarray, " pairs"]:
    """Return the Levenshtein distance of each row to the record at its place.

    Raises:
        ConfigError: If rapidfuzz is not installed.
    """
    process, distance = _rapidfuzz()
    found: np.ndarray = process.cpdist(
        rows, records, scorer=distance.Levenshtein.distance, dtype=np.uint16, workers=workers
    )
    return found


def _rapidfuzz() -> tuple[Any, Any]:
    try:
        from rapidfuzz import distance, process
    except ImportError:
        raise ConfigError(
            "linkage.metric: levenshtein needs the package rapidfuzz; pip install rapidfuzz"
        ) from None
    return process, distance
