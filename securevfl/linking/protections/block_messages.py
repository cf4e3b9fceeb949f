"""What parties tell one another to compare quantised keys block by block."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Int64, UInt64

from securevfl.core.errors import ProtocolError
from securevfl.linking.messages import LinkingKind, require_numbers
from securevfl.transport.message import Message, TypedMessage

ShareWords = UInt64[np.ndarray, "rows records"]
"""One party's share of a block's squared distances, mod 2^64."""


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
class RowsBlock(TypedMessage):
    """Numbers of the primary's rows to compare next, and with how many records.

    Without ``linkage.cell`` that is nothing but sizes.
    """

    KIND = LinkingKind.LINK_BLOCK
    WAY = "coordinator to primary"

    rows: Int64[np.ndarray, " block_rows"]
    """None of them: the secondary's turn is over."""

    records: int = 0
    done: int = 0
    """How many of those who seek were in blocks before it."""

    of: int = 0
    """How many will be in any block, as far as is known."""

    def to_message(self) -> Message:
        """Return it as it is sent."""
        meta = {"records": self.records, "done": self.done, "of": self.of}
        return Message(kind=self.KIND, meta=meta, tensors={"rows": self.rows})

    @classmethod
    def from_message(cls, message: Message, *, rows: int) -> "RowsBlock":
        """Check a received one.

        Raises:
            ProtocolError: If it names a row that there is not, or a figure is none.
        """
        chosen = message.tensor("rows", dtype=np.int64, shape=(None,))
        require_numbers(message, chosen, below=rows)
        records, done, of = (message.figure(name, int) for name in ("records", "done", "of"))
        return cls(rows=chosen, records=records, done=done, of=of)


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class RecordsBlock(TypedMessage):
    """Numbers of a secondary's records to compare next, and with how many rows.

    Without ``linkage.cell`` that is nothing but sizes.
    """

    KIND = LinkingKind.LINK_BLOCK
    WAY = "coordinator to a secondary"

    records: Int64[np.ndarray, " block_records"]
    rows: int
    due: int
    """Ciphertexts of this block and those after it, as far as is known; 0 without any."""

    def to_message(self) -> Message:
        """Return it as it is sent."""
        meta = {"rows": self.rows, "due": self.due}
        return Message(kind=self.KIND, meta=meta, tensors={"records": self.records})

    @classmethod
    def from_message(cls, message: Message, *, records: int) -> "RecordsBlock":
        """Check a received one.

        Raises:
            ProtocolError: If it names a record that there is not, or a figure is none.
        """
        chosen = message.tensor("records", dtype=np.int64, shape=(None,))
        require_numbers(message, chosen, below=records)
        return cls(records=chosen, rows=message.figure("rows", int), due=message.figure("due", int))


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class Share(TypedMessage):
    """A party's share of one block's squared distances."""

    KIND = LinkingKind.LINK_SHARE
    WAY = "data party to coordinator"

    share: ShareWords

    def to_message(self) -> Message:
        """Return it as it is sent."""
        return Message(kind=self.KIND, tensors={"share": self.share.view(np.int64)})

    @classmethod
    def from_message(cls, message: Message, *, rows: int, records: int) -> "Share":
        """Check a received share.

        Raises:
            ProtocolError: If it is not of the block's size.
        """
        words = message.tensor("share", dtype=np.int64, shape=(rows, records))
        return cls(share=words.view(np.uint64))
