"""What parties tell one another to compare quantised keys block by block."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Int64, UInt64

from securevfl.core.errors import ProtocolError
from securevfl.linking.messages import LinkingKind, require_numbers
from securevfl.linking.protections.block_shapes import Shapes, flat
from securevfl.transport.message import Message, TypedMessage

ShareWords = UInt64[np.ndarray, "_ _"]
"""One party's share of a block's squared distances, (rows, records), mod 2^64."""


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class Shift(TypedMessage):
    """A random shift of the grid that ``linkage.cell`` asks for, unknown to the coordinator."""

    KIND = LinkingKind.LINK_CELLS
    WAY = "primary to every secondary"

    shift: Int64[np.ndarray, " key_dim"]
    """In units of quantised keys."""

    def to_message(self) -> Message:
        """Return it as it is sent."""
        return Message(kind=self.KIND, tensors={"shift": self.shift})

    @classmethod
    def from_message(cls, message: Message, *, key_dim: int) -> "Shift":
        """Check a received one.

        Raises:
            ProtocolError: If it has another dimension.
        """
        return cls(shift=message.tensor("shift", dtype=np.int64, shape=(key_dim,)))


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class Cells(TypedMessage):
    """The grid cell of each of a party's keys, shifted, where ``linkage.cell`` asks for cells."""

    KIND = LinkingKind.LINK_CELLS
    WAY = "data party to coordinator"

    cells: Int64[np.ndarray, "own key_dim"]
    """One a row or record."""

    def to_message(self) -> Message:
        """Return it as it is sent."""
        return Message(kind=self.KIND, tensors={"cells": self.cells})

    @classmethod
    def from_message(cls, message: Message, *, count: int, key_dim: int) -> "Cells":
        """Check received cells.

        Raises:
            ProtocolError: If they are not as many as rows or records.
        """
        return cls(cells=message.tensor("cells", dtype=np.int64, shape=(count, key_dim)))


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class Offer(TypedMessage):
    """How many records a secondary has, and a tag by which its table is known again."""

    KIND = LinkingKind.LINK_TURN
    WAY = "secondary to primary"

    records: int
    tag: str
    """The same in every run for the same keys, where links are kept."""

    def to_message(self) -> Message:
        """Return it as it is sent."""
        return Message(kind=self.KIND, meta={"records": self.records, "tag": self.tag})

    @classmethod
    def from_message(cls, message: Message) -> "Offer":
        """Check a received one.

        Raises:
            ProtocolError: If a figure is none.
        """
        return cls(records=message.figure("records", int), tag=message.figure("tag", str))


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class Turn(TypedMessage):
    """How many records a secondary has, and tags by which both tables are known again."""

    KIND = LinkingKind.LINK_TURN
    WAY = "primary to coordinator"

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
            message: What came.
            name: The secondary whose turn it is.
            neighbours: K, the fewest records that it must have.

        Raises:
            ProtocolError: If it has fewer, or a figure is none.
        """
        records = message.figure("records", int)
        if records < neighbours:
            raise ProtocolError(f"{name}: has {records} records, fewer than model.neighbours")
        tags = [str(tag) for tag in message.figure("tags", list)]
        if len(tags) != 2:
            raise ProtocolError(f"{message.sender}: sent {len(tags)} tags of two tables")
        return cls(records=records, tags=(tags[0], tags[1]))


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class RowBlocks(TypedMessage):
    """Numbers of the primary's rows to compare next, block by block, and with how many records.

    Without ``linkage.cell`` that is nothing but sizes.
    """

    KIND = LinkingKind.LINK_BLOCK
    WAY = "coordinator to primary"

    rows: Int64[np.ndarray, " all_rows"]
    """Those of the first block, then those of the second; a row may be in several."""

    shapes: Shapes
    """No block: the secondary's turn is over."""

    done: int = 0
    """How many of those who seek were in blocks before these."""

    of: int = 0
    """How many will be in any block, as far as is known."""

    def to_message(self) -> Message:
        """Return it as it is sent."""
        tensors = {"rows": self.rows, "sizes": self.shapes.tensor}
        return Message(kind=self.KIND, meta={"done": self.done, "of": self.of}, tensors=tensors)

    @classmethod
    def from_message(cls, message: Message, *, rows: int, most_pairs: int) -> "RowBlocks":
        """Check a received one.

        Args:
            message: What came.
            rows: How many rows the primary has.
            most_pairs: How many pairs may be compared at once.

        Raises:
            ProtocolError: If it names a row that there is not, blocks are empty or too large, or a
                figure is none.
        """
        shapes = Shapes.read(message, most_pairs=most_pairs, none_ends=True)
        chosen = message.tensor("rows", dtype=np.int64, shape=(int(shapes.rows.sum()),))
        require_numbers(message, chosen, below=rows)
        done, of = (message.figure(name, int) for name in ("done", "of"))
        return cls(rows=chosen, shapes=shapes, done=done, of=of)

    @property
    def blocks(self) -> list[np.ndarray]:
        """The rows of each block."""
        return self.shapes.by_rows(self.rows)


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class RecordBlocks(TypedMessage):
    """Numbers of a secondary's records to compare next, block by block, and with how many rows.

    Without ``linkage.cell`` that is nothing but sizes.
    """

    KIND = LinkingKind.LINK_BLOCK
    WAY = "coordinator to a secondary"

    records: Int64[np.ndarray, " all_records"]
    """Those of the first block, then those of the second; a record may be in several."""

    shapes: Shapes

    due: int
    """Ciphertexts of these blocks and those after them, as far as is known; 0 without any."""

    def to_message(self) -> Message:
        """Return it as it is sent."""
        tensors = {"records": self.records, "sizes": self.shapes.tensor}
        return Message(kind=self.KIND, meta={"due": self.due}, tensors=tensors)

    @classmethod
    def from_message(cls, message: Message, *, records: int, most_pairs: int) -> "RecordBlocks":
        """Check a received one.

        Args:
            message: What came.
            records: How many records the secondary has.
            most_pairs: How many pairs may be compared at once.

        Raises:
            ProtocolError: If it names a record that there is not, blocks are empty or too large,
                or a figure is none.
        """
        shapes = Shapes.read(message, most_pairs=most_pairs)
        chosen = message.tensor("records", dtype=np.int64, shape=(int(shapes.records.sum()),))
        require_numbers(message, chosen, below=records)
        return cls(records=chosen, shapes=shapes, due=message.figure("due", int))

    @property
    def blocks(self) -> list[np.ndarray]:
        """The records of each block."""
        return self.shapes.by_records(self.records)


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class Share(TypedMessage):
    """A party's share of the squared distances of all blocks of an exchange."""

    KIND = LinkingKind.LINK_SHARE
    WAY = "data party to coordinator"

    words: list[ShareWords]
    """One a block."""

    def to_message(self) -> Message:
        """Return it as it is sent."""
        return Message(kind=self.KIND, tensors={"share": flat(self.words).view(np.int64)})

    @classmethod
    def from_message(cls, message: Message, *, shapes: Shapes) -> "Share":
        """Check a received share.

        Raises:
            ProtocolError: If it is not of the blocks' size.
        """
        words = message.tensor("share", dtype=np.int64, shape=(shapes.pairs,))
        return cls(words=shapes.by_pairs(words.view(np.uint64)))
