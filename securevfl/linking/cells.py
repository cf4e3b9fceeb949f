"""Grid cells of keys as a coordinator gets them, and how much comparing they save."""

import secrets
from typing import Any, Final

import numpy as np
from jaxtyping import Int64, UInt64

from securevfl.data.tables import KeyTable
from securevfl.linkage.grid_cells import cells_of
from securevfl.linkage.spec import LinkSpec
from securevfl.linking.blocks import Block, Search
from securevfl.linking.key_metric import quantised
from securevfl.linking.lines import Desk
from securevfl.linking.messages import LinkingKind
from securevfl.linking.third_parties import third_parties
from securevfl.transport.message import Message

# A shift hides where a key lies within 2^16 units: the coordinator sees positions that a shift of
# any other key could give, but with probability 2^-24.
_SHIFT_BELOW: Final = 2**40


def fresh_shift(key_dim: int) -> Int64[np.ndarray, " key_dim"]:
    """Draw by how much the data parties shift the grid in this session.

    Reveals:
        Nothing yet; the data parties share it, the coordinator must not have it.
    """
    return np.array([secrets.randbelow(_SHIFT_BELOW) for _ in range(key_dim)], dtype=np.int64)


def send_cells(
    spec: LinkSpec,
    units: Int64[np.ndarray, "own key_dim"],
    shift: Int64[np.ndarray, " key_dim"],
    desk: Desk,
) -> None:
    """Send a data party's cells to the coordinator.

    Raises:
        ProtocolError: If a party leaves the protocol or fails.

    Reveals:
        To the coordinator: which cell each key is in, and so the map of all keys up to a cell's
        width, but not where on earth it lies.
    """
    coordinator, _ = third_parties(spec)
    cells = cells_of(units + shift, spec.cell_units)
    desk.send(coordinator, Message(kind=LinkingKind.LINK_CELLS, tensors={"cells": cells}))


def comparing_cost(spec: LinkSpec, primary: KeyTable, records: KeyTable) -> dict[str, Any]:
    """Return how many pairs a protected linkage compares; with cells, found by doing so in clear.

    The parties' grid has a random place, so theirs may be a little more or less.

    Raises:
        DataError: If a value leaves its agreed range.
    """
    mine, theirs = quantised(spec.keys, primary), quantised(spec.keys, records)

    def ask(block: Block) -> tuple[UInt64[np.ndarray, "..."], UInt64[np.ndarray, "..."]]:
        own, other = mine[block.rows, None], theirs[None, block.records]
        squared = ((own - other) ** 2).sum(axis=2).astype(np.uint64)
        return squared, np.zeros_like(squared)

    search = Search(spec, rows=len(mine), records=len(theirs), ask=ask)
    width, pairs = spec.cell_units, len(mine) * len(theirs)
    if not width:
        everything = search.ciphertexts(len(mine), len(theirs))
        return {"pairs": pairs, "share_of_pairs": 1.0, "ciphertexts": everything}
    found = search.run((cells_of(mine, width), cells_of(theirs, width)))
    return {
        "pairs": found.pairs,
        "share_of_pairs": found.pairs / pairs,
        "ciphertexts": found.ciphertexts,
    }
