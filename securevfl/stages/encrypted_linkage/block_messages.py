"""Messages that compare quantised keys block by block, and the sizes of these blocks."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from jaxtyping import Int64, UInt64

from securevfl.core.errors import ProtocolError
from securevfl.transport.message import DeclaredMessage, Message, MessageKind, TypedMessage, wire


class BlockKind(MessageKind):
    """Kinds of message of linkage block by block."""

    LINK_TURN = 22
    """Whose turn in a protected linkage: numbers of rows and records. Reveals nothing else."""

    LINK_DEALING = 23
    """Dealer to a data party: uniformly random masks for one block."""

    LINK_MASKED = 24
    """Data party to data party: its keys under a mask that the other does not know."""

    LINK_SHARE = 25
    """Data party to coordinator: its share of one block's squared distances."""

    LINK_CIPHERS = 26
    """Primary to a secondary: its keys, encrypted; back: masked distances, encrypted."""

    LINK_CELLS = 29
    """Primary to a secondary: a random shift of the grid. Data party to coordinator: the grid cell
    of each of its keys, shifted. Only where ``linkage.cell`` says so."""

    LINK_BLOCK = 30
    """Coordinator to primary: numbers of its rows to compare next, with how many records. To a
    secondary: numbers of its records to compare next, with how many rows. Without
    ``linkage.cell`` it reveals nothing but sizes."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Shapes:
    """Rows and records of each block."""

    rows: Int64[np.ndarray, " blocks"]
    """Primary rows of each block."""

    records: Int64[np.ndarray, " blocks"]
    """The secondary's records of each block."""

    @classmethod
    def of(
        cls,
        sizes: Int64[np.ndarray, "blocks 2"],
        *,
        most_pairs: int,
        sender: str,
        none_ends: bool = False,
    ) -> "Shapes":
        """Return received sizes, checked.

        Args:
            sizes: Rows and records of each block.
            most_pairs: How many pairs an exchange may have.
            sender: The party that named them.
            none_ends: Whether there may be no block, which ends a secondary's turn.

        Raises:
            ProtocolError: If there is no block, one is empty, or all have more pairs than that.
        """
        # Each size is checked before any is multiplied: products of 64 bits would wrap.
        fits = 1 <= sizes.min() <= sizes.max() <= most_pairs if sizes.size else none_ends
        if not fits or sum(rows * records for rows, records in sizes.tolist()) > most_pairs:
            raise ProtocolError(
                f"{sender}: named no blocks, empty ones, or more than {most_pairs} pairs"
            )
        return cls(rows=sizes[:, 0], records=sizes[:, 1])

    @property
    def sizes(self) -> Int64[np.ndarray, "blocks 2"]:
        """Rows and records of each block, as they are sent."""
        return np.column_stack([self.rows, self.records])

    @property
    def pairs(self) -> int:
        """Pairs of all blocks."""
        return int(self.rows @ self.records)

    def __len__(self) -> int:
        return len(self.rows)

    def by_pairs(self, values: np.ndarray) -> list[np.ndarray]:
        """Cut what has one entry for each pair of each block, into (rows, records)."""
        parts = cut(values, self.rows * self.records)
        sizes = self.sizes.tolist()
        return [part.reshape(size) for part, size in zip(parts, sizes, strict=True)]


def flat(parts: Sequence[np.ndarray]) -> np.ndarray:
    """Return the numbers of all blocks in one row."""
    return parts[0].ravel() if len(parts) == 1 else np.concatenate([part.ravel() for part in parts])


def cut(values: np.ndarray, counts: Int64[np.ndarray, " blocks"]) -> list[np.ndarray]:
    """Cut what has one entry for each row, record or pair of each block.

    Raises:
        ProtocolError: If it has more or fewer.
    """
    if len(values) != counts.sum():
        raise ProtocolError(
            f"blocks: have {counts.sum()} rows or records in all, but {len(values)} came"
        )
    return np.split(values, np.cumsum(counts)[:-1]) if len(counts) else []


ShareWords = UInt64[np.ndarray, "_ _"]
"""One party's share of a block's squared distances, (rows, records), mod 2^64."""


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class Shift(DeclaredMessage):
    """A random shift of the grid that ``linkage.cell`` asks for, unknown to the coordinator."""

    KIND = BlockKind.LINK_CELLS
    WAY = "primary to every secondary"
    COVERS: ClassVar = {"no record": "shift lengths"}

    shift: Int64[np.ndarray, " key_dim"]
    """Shift in units of quantised keys."""


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class Cells(DeclaredMessage):
    """The grid cell of each of a party's keys, shifted, where ``linkage.cell`` asks for cells."""

    KIND = BlockKind.LINK_CELLS
    WAY = "data party to coordinator"
    COVERS: ClassVar = {"linkage": "cells", "record counts": "lengths"}

    cells: Int64[np.ndarray, "count key_dim"]
    """A cell for each row or record."""


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class Offer(DeclaredMessage):
    """How many records a secondary has, and a tag by which its table is known again."""

    KIND = BlockKind.LINK_TURN
    WAY = "secondary to primary and coordinator"
    COVERS: ClassVar = {"record counts": "records", "kept links": "tag", "no record": "lengths"}

    records: int
    tag: str
    """Name of the keys, equal in every run where links are kept."""


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class Turn(TypedMessage):
    """How many records a secondary has, and tags by which both tables are known again."""

    KIND = BlockKind.LINK_TURN
    WAY = "primary to coordinator"
    COVERS: ClassVar = {"record counts": "records", "kept links": "tags", "no record": "lengths"}

    records: int
    tags: tuple[str, str]
    """The primary's and the secondary's."""

    def to_message(self) -> Message:
        """Return it as it is sent."""
        return Message(kind=self.KIND, meta={"records": self.records, "tags": list(self.tags)})

    @classmethod
    def from_message(cls, message: Message, *, name: str, neighbours: int) -> "Turn":
        """Check a received one.

        Args:
            message: The received message.
            name: The secondary whose turn it is.
            neighbours: K, the fewest records that it must have.

        Raises:
            ProtocolError: If it has fewer, or a figure is invalid.
        """
        message.require_only("records", "tags")
        records = message.figure("records", int)
        if records < neighbours:
            raise ProtocolError(f"{name}: has {records} records, fewer than model.neighbours")
        tags = [str(tag) for tag in message.figure("tags", list)]
        if len(tags) != 2:
            raise ProtocolError(f"{message.sender}: sent {len(tags)} tags of two tables")
        return cls(records=records, tags=(tags[0], tags[1]))

    def require_offered(self, offer: Offer, *, name: str, by: str) -> None:
        """Check the primary's statement about a secondary's table against that party's own.

        Kept links and their noise are found by the tag, and numbered for the table of that tag.

        Args:
            offer: The secondary's own statement, sealed.
            name: The secondary.
            by: The primary.

        Raises:
            ProtocolError: If they differ.
        """
        if self.records != offer.records:
            raise ProtocolError(
                f"{by}: reports {self.records} records of {name}, but {name} reports "
                f"{offer.records}; nothing was compared"
            )
        if self.tags[1] != offer.tag:
            raise ProtocolError(
                f"{by}: sent another tag of the table of {name} than {name} did; nothing was "
                f"compared"
            )


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class RowBlocks(DeclaredMessage):
    """Numbers of the primary's rows to compare next, block by block, and with how many records."""

    KIND = BlockKind.LINK_BLOCK
    WAY = "coordinator to primary"
    COVERS: ClassVar = {
        "record counts": "sizes done of lengths",
        "records near rows": "rows sizes done of lengths",
    }

    rows: Int64[np.ndarray, " _all_rows"] = wire(below="num_rows")
    """Rows of the first block, then those of the second; a row may be in several."""

    sizes: Int64[np.ndarray, "_blocks 2"]
    """Rows and records of each block (:class:`Shapes`); no block ends the secondary's turn."""

    done: int
    """Number of rows (records, where those seek) in blocks before these."""

    of: int
    """Number of them in any block, as far as is known."""


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class RecordBlocks(DeclaredMessage):
    """Numbers of a secondary's records to compare next, block by block, and with how many rows."""

    KIND = BlockKind.LINK_BLOCK
    WAY = "coordinator to a secondary"
    COVERS: ClassVar = {"linkage": "records sizes due", "sizes and times": "lengths"}

    records: Int64[np.ndarray, " _all_records"] = wire(below="num_records")
    """Records of the first block, then those of the second; a record may be in several."""

    sizes: Int64[np.ndarray, "_blocks 2"]
    """Rows and records of each block (:class:`Shapes`)."""

    due: int
    """Ciphertexts of these blocks and those after them, as far as is known; 0 without any."""


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class DistanceShare(DeclaredMessage):
    """A party's share of the squared distances of all blocks of an exchange."""

    KIND = BlockKind.LINK_SHARE
    WAY = "data party to coordinator"
    COVERS: ClassVar = {"linkage": "share", "record counts": "lengths"}

    share: UInt64[np.ndarray, " pairs"]
    """Row by row of each block, block after block, mod 2^64."""
