"""Squared distances block by block: what a coordinator ranks, and how blocks are cut."""

from collections.abc import Iterator
from typing import Final

import numpy as np
from jaxtyping import UInt64

from securevfl.federation.config import FederationConfig
from securevfl.federation.linking.candidates import Candidates, ranked_length
from securevfl.linkage.capped import pairs_of_picks
from securevfl.linkage.links import LinkTable
from securevfl.linkage.paillier_distances import Lanes
from securevfl.linkage.shared_distances import links_from_shares

# A block of shares has 16 MiB, one of Paillier's answers 8 MiB; each party holds a few of them.
_BLOCK_PAIRS: Final = 2**21
_BLOCK_ANSWERS: Final = 2**14


def row_blocks(config: FederationConfig, *, rows: int, records: int) -> Iterator[tuple[int, int]]:
    """Cut the primary's rows into the blocks that all parties expect, one after the other."""
    step = max(1, _BLOCK_PAIRS // records)
    if config.linkage.protection == "paillier":
        lanes = Lanes(key_dim=len(config.primary.key), key_bits=config.linkage.key_bits)
        step = lanes.count * max(1, _BLOCK_ANSWERS // records)
    for start in range(0, rows, step):
        yield start, min(start + step, rows)


class BlockRanker:
    """Turns shares of squared distances into candidates, as only the coordinator can."""

    def __init__(self, config: FederationConfig, *, rows: int, records: int) -> None:
        self._step = config.linkage.key_range().step
        self._key_dim = len(config.primary.key)
        self._rows = rows
        self._cap = config.privacy.links_per_record
        self._length = ranked_length(config, records)
        self._parts: list[LinkTable] = []
        self._picked: LinkTable | None = None

    def add(
        self,
        start: int,
        primary: UInt64[np.ndarray, "chunk records"],
        secondary: UInt64[np.ndarray, "chunk records"],
    ) -> None:
        """Take in both shares of the block that begins at a row.

        Raises:
            DataError: If a sum is no squared distance.
        """
        if self._cap is None:
            self._parts.append(self._links(primary, secondary, self._length))
            return
        picked = self._links(primary.T, secondary.T, min(self._cap, len(primary)))
        shifted = np.where(picked.present, picked.indices + start, picked.indices)
        picked = LinkTable(indices=shifted, distances=picked.distances)
        self._picked = picked if self._picked is None else _nearer(self._picked, picked, self._cap)

    def candidates(self) -> Candidates:
        """Return what all blocks together give."""
        if self._cap is None:
            return Candidates(
                ranked=LinkTable(
                    indices=np.concatenate([part.indices for part in self._parts]),
                    distances=np.concatenate([part.distances for part in self._parts]),
                )
            )
        assert self._picked is not None, "there is at least one row"
        return Candidates(pairs=pairs_of_picks(self._picked, num_rows=self._rows))

    def _links(self, one: np.ndarray, other: np.ndarray, k: int) -> LinkTable:
        return links_from_shares(one, other, k, key_dim=self._key_dim, step=self._step)


def _nearer(one: LinkTable, other: LinkTable, k: int) -> LinkTable:
    indices = np.concatenate([one.indices, other.indices], axis=1)
    distances = np.concatenate([one.distances, other.distances], axis=1)
    order = np.lexsort((indices, distances), axis=1)[:, :k]
    return LinkTable(
        indices=np.take_along_axis(indices, order, axis=1),
        distances=np.take_along_axis(distances, order, axis=1),
    )
