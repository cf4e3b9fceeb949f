"""Blockwise comparison of 16-bit keys: the coordinator adds two shares of each distance."""

import secrets
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Final

import numpy as np
from jaxtyping import Int64, UInt64

from securevfl.core.errors import ConfigError, ProtocolError
from securevfl.core.progress import LinksMade, Pace
from securevfl.data.tables import KeyTable
from securevfl.linkage.links import Chosen, LinkTable
from securevfl.linkage.metrics.metric import KeySpec, Metric, numbers_of
from securevfl.linkage.metrics.points import EuclideanKeys
from securevfl.linkage.protections.protection import (
    BothTables,
    Coordinated,
    DataParty,
    LinkageHelper,
    Take,
)
from securevfl.linkage.spec import LinkageSecret, LinkSpec
from securevfl.linkage.stage.link_cache import coordinate, links_key, table_tag
from securevfl.linkage.stage.messages import Linked, LinkingKind, Lists, MadeSimilarities
from securevfl.linkage.stage.noised_similarities import SimilarLinks
from securevfl.stages.encrypted_linkage.block_search import (
    BlockExchange,
    Search,
    Shapes,
    SquaredShares,
    cell_units,
    cells_of,
    comparing_cost,
    cut,
    flat,
    most_pairs,
    search_in_clear,
)
from securevfl.transport.message import (
    Cover,
    DeclaredMessage,
    Message,
    MessageKind,
    TypedMessage,
    wire,
)


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


class Comparisons:
    """Counts with how many of another party's keys each of one's own was compared.

    A search compares every pair at most once, with grid cells or without. A request for more goes
    beyond what the federation file has agreed to.
    """

    def __init__(self, own: int, others: int) -> None:
        """Make it.

        Args:
            own: How many keys this party has.
            others: How many the other one has.
        """
        self._others = others
        self._compared = np.zeros(own, dtype=np.int64)

    def admit(
        self, blocks: Sequence[np.ndarray], others: Int64[np.ndarray, " blocks"], *, sender: str
    ) -> None:
        """Take the blocks of an exchange into account, or refuse them.

        Args:
            blocks: Numbers of this party's keys, those of each block.
            others: For each block, with how many of the other's they are compared.
            sender: The party that asks.

        Raises:
            ProtocolError: If a key is named twice in a block, or a pair would be compared again.
        """
        for chosen, count in zip(blocks, others.tolist(), strict=True):
            again = not 1 <= count <= self._others or len(np.unique(chosen)) != len(chosen)
            if again or (self._compared[chosen] + count > self._others).any():
                raise ProtocolError(
                    f"{sender}: asks to compare {len(chosen)} keys with {count} others, and every "
                    f"pair of the {len(self._compared)} and {self._others} is compared once"
                )
            self._compared[chosen] += count


Units = Int64[np.ndarray, "own key_dim"]
"""A party's keys as whole numbers."""

Progress = Callable[[int, int], None]
"""Gets how much is done, and of how much."""

PrimaryShare = Callable[[str, Shapes, list[np.ndarray], Progress], list[ShareWords]]
"""Makes the primary's share of each block of an exchange: the secondary, the sizes of the blocks,
their row numbers, progress."""

SecondaryShare = Callable[[Shapes, list[np.ndarray], int], list[ShareWords]]
"""Makes a secondary's share of each block of an exchange: the sizes of the blocks, their record
numbers, and how many ciphertexts are due from now on."""

BLOCK_MESSAGES: Final[tuple[type[TypedMessage], ...]] = (
    *(Shift, Cells, Offer, Turn, RowBlocks, RecordBlocks, DistanceShare),
    *(Lists, MadeSimilarities, Linked),
)
"""Messages that parties send, whichever way shares are made."""

COORDINATOR_LEARNS: Final = (
    "the distance of every primary row to every record (with linkage.cell: to those it is compared "
    "with), rounded to 16 bits: both tables' shape up to rotation and shift, and with a few known "
    "rows all keys"
)
"""Information that adding both shares reveals."""

_CELLS: Final = {
    "primary": "for the rows of each grid cell, how many of a secondary's records they are "
    "compared with, first in the nearest cells, then within reach: how dense records are there, "
    "and roughly how far the K-th is",
    "secondary": "which of its records are near to cells that hold rows, and how many rows",
    "coordinator": "the grid cell of every row and record under a shift that it does not know: a "
    "map of both tables, to within a cell's width",
    "dealer": "how many rows and records each block of neighbouring cells has",
}
_CELLS_CAPPED: Final = {
    **_CELLS,
    "primary": "for each grid cell that holds a secondary's records, how many these are and which "
    "of its own rows are near: roughly where the records lie",
    "secondary": "how many rows are near to the records of each of its cells",
}

# Exchanges that a coordinator has asked for: parties begin one while it adds another's shares.
_UNDER_WAY: Final = 2

# A shift hides where a key lies within 2^16 units: the coordinator sees positions that a shift of
# any other key could give, but with probability 2^-24.
_SHIFT_BELOW: Final = 2**40


@dataclass(frozen=True, kw_only=True, eq=False)
class QuantisedKeys(EuclideanKeys):
    """Numeric keys as whole numbers, in float64: the distances that shares and Paillier give."""

    step: float
    """Width of a unit, in the keys' unit."""

    def nearest_of(self, keys: np.ndarray, ids: Chosen, k: int) -> LinkTable:
        """Link the chosen rows (None: all) to their ``k`` nearest eligible records, exactly."""
        links = super().nearest_of(keys, ids, k)
        return LinkTable(indices=links.indices, distances=links.distances * self.step)


class Blockwise(Coordinated):
    """Two data parties each make a share of a block's squared distances, for the coordinator."""

    reads: ClassVar[frozenset[str]] = frozenset({"cell"})

    @abstractmethod
    def primary_shares(
        self, party: DataParty, units: Units
    ) -> AbstractContextManager[PrimaryShare]:
        """Return how the primary makes its shares of blocks."""

    @abstractmethod
    def secondary_shares(
        self, party: DataParty, units: Units
    ) -> AbstractContextManager[SecondaryShare]:
        """Return how a secondary makes its shares of blocks."""

    def lanes(self, spec: LinkSpec) -> int:
        """Return how many rows share one ciphertext; 0 without any."""
        return 0

    def objection_to(self, metric: Metric) -> str | None:
        """Return that distances are Euclidean."""
        return None if metric.quantised else "computes Euclidean distances of numbers"

    def closed_channels(self, settings: Mapping[str, Any]) -> frozenset[Cover]:
        """Return that without grid cells every row is compared with all records."""
        return frozenset({"records near rows"}) if settings["cell"] is None else frozenset()

    def check(self, keys: KeySpec) -> None:
        """Ask for agreed ranges."""
        if keys.ranges is None:
            raise ConfigError(
                f"linkage.ranges: protection = {self.name!r} needs the agreed [low, high] of every "
                f"key column; values are rounded to 16 bits within it"
            )

    def learns(self, spec: LinkSpec, role: str) -> list[str]:
        """Return what a party of that role learns, with grid cells a sentence more."""
        if not cell_units(spec):
            return super().learns(spec, role)
        # Under a cap the records seek rows, and blocks follow the cells of the records.
        capped = spec.choice.links_per_record is not None
        return [*super().learns(spec, role), (_CELLS_CAPPED if capped else _CELLS)[role]]

    def figures(self, spec: LinkSpec, primary: KeyTable, records: KeyTable) -> dict[str, Any]:
        """Return how many pairs are compared, and how many ciphertexts that takes."""
        mine, theirs = quantise_keys(spec.keys, primary), quantise_keys(spec.keys, records)
        return {"comparing": comparing_cost(spec, mine, theirs, lanes=self.lanes(spec))}

    def compare(
        self, spec: LinkSpec, primary: KeyTable, records: KeyTable, secret: LinkageSecret
    ) -> QuantisedKeys:
        """Compare keys as whole numbers of 16 bits."""
        mine, theirs = quantise_keys(spec.keys, primary), quantise_keys(spec.keys, records)
        return QuantisedKeys(
            primary=mine.astype(np.float64),
            records=theirs.astype(np.float64),
            step=spec.keys.key_range().step,
        )

    def record_received(self, tables: BothTables, take: Take) -> None:
        """Record grid cells, if any, and squared distances."""
        spec, own = tables.spec, tables.own
        mine, theirs = (quantise_keys(spec.keys, keys) for keys in (tables.primary, own))
        if width := cell_units(spec):
            shift = fresh_shift(mine.shape[1])
            mine, theirs = mine + shift, theirs + shift
            cells = {"rows": cells_of(mine, width), "records": cells_of(theirs, width)}
            take(Cells.KIND.name, of=own.name, **cells)
        compared = partial(_record_distances, take, own.name)
        search_in_clear(spec, mine, theirs, lanes=self.lanes(spec), compared=compared)

    @contextmanager
    def at_primary(self, party: DataParty) -> Iterator[Callable[[str], None]]:
        """Send the primary's cells, if any; then compare block after block in a secondary's turn.

        Reveals:
            To the coordinator: shares of squared distances and, with ``linkage.cell``, grid cells.
            To each secondary: the shift of the grid.
        """
        spec, channels = party.spec, party.channels
        units = quantise_keys(spec.keys, party.keys)
        tag = table_tag(party.cache.folder, units)
        if cell_units(spec):
            shift = fresh_shift(units.shape[1])
            channels.send(Shift(shift=shift).to_message(), *spec.roles.present)
            self._send_cells(party, units, shift)
        with self.primary_shares(party, units) as share:

            def compare(name: str) -> None:
                offer = Offer.from_message(channels.receive(name, BlockKind.LINK_TURN))
                turn = Turn(records=offer.records, tags=(tag, offer.tag))
                channels.send(turn.to_message(), spec.roles.helpers["coordinator"])
                self._share_rows(party, name, share, offer.records)

            yield compare

    def at_secondary(self, party: DataParty) -> Message:
        """Compare block by block until the coordinator has the lists, which come last.

        Reveals:
            To the coordinator: shares of squared distances and, with ``linkage.cell``, grid cells.
            To the primary and the coordinator: how many records there are, and their tag.
        """
        spec, channels = party.spec, party.channels
        units = quantise_keys(spec.keys, party.keys)
        primary, coordinator = spec.roles.primary, spec.roles.helpers["coordinator"]
        offer = Offer(records=len(units), tag=table_tag(party.cache.folder, units))
        channels.send(offer.to_message(), primary, coordinator)
        if cell_units(spec):
            message = channels.receive(primary, BlockKind.LINK_CELLS)
            shift = Shift.from_message(message, key_dim=units.shape[1]).shift
            self._send_cells(party, units, shift)
        asked = Comparisons(len(units), party.rows)
        most = most_pairs(party.rows, len(units), lanes=self.lanes(spec))
        with self.secondary_shares(party, units) as share:
            while True:
                message = channels.receive(
                    coordinator, BlockKind.LINK_BLOCK, LinkingKind.LINK_LISTS
                )
                if message.kind is LinkingKind.LINK_LISTS:
                    return message
                blocks = RecordBlocks.from_message(message, num_records=len(units))
                shapes = Shapes.of(blocks.sizes, most_pairs=most, sender=coordinator)
                records = cut(blocks.records, shapes.records)
                asked.admit(records, shapes.rows, sender=coordinator)
                words = share(shapes, records, blocks.due)
                channels.send(DistanceShare(share=flat(words)).to_message(), coordinator)

    def receive_primary(self, helper: LinkageHelper) -> np.ndarray | None:
        """Return the primary's cells, if there are any."""
        return self._receive_cells(helper, helper.spec.roles.primary, helper.rows)

    def find(
        self, helper: LinkageHelper, name: str, received: np.ndarray | None
    ) -> tuple[Lists, SimilarLinks | None]:
        """Have the data parties compare blocks, unless links of the same tables are kept.

        Raises:
            ProtocolError: If the primary and the secondary disagree about the secondary's table.

        Reveals:
            To the primary and the secondary: numbers of rows and records to compare.
        """
        spec, primary = helper.spec, helper.spec.roles.primary
        turn = Turn.from_message(
            helper.channels.receive(primary, BlockKind.LINK_TURN),
            name=name,
            neighbours=spec.choice.neighbours,
        )
        offer = Offer.from_message(helper.channels.receive(name, BlockKind.LINK_TURN))
        turn.require_offered(offer, name=name, by=primary)
        record_cells = self._receive_cells(helper, name, turn.records)
        cells = None if received is None or record_cells is None else (received, record_cells)
        if cells is not None:
            helper.take(Cells.KIND.name, of=name, rows=cells[0], records=cells[1])
        search = Search(
            spec,
            rows=helper.rows,
            records=turn.records,
            lanes=self.lanes(spec),
            ask=partial(self._ask, helper, name),
        )
        lists = coordinate(
            spec,
            lambda: search.run(cells),
            records=turn.records,
            cache=helper.cache,
            key=links_key(spec, secret=" ".join(turn.tags)),
        )
        nothing = np.empty((0, 2), dtype=np.int64)
        over = RowBlocks(rows=nothing[:, 0], sizes=nothing, done=0, of=0)
        helper.channels.send(over.to_message(), primary)
        return lists

    def _share_rows(self, party: DataParty, name: str, share: PrimaryShare, records: int) -> None:
        """Make the primary's shares of blocks until the secondary's turn is over."""
        spec, coordinator = party.spec, party.spec.roles.helpers["coordinator"]
        asked = Comparisons(party.rows, records)
        most = most_pairs(party.rows, records, lanes=self.lanes(spec))
        pace = Pace(party.observe, LinksMade, name=name)
        while True:
            message = party.channels.receive(coordinator, BlockKind.LINK_BLOCK)
            blocks = RowBlocks.from_message(message, num_rows=party.rows)
            shapes = Shapes.of(blocks.sizes, most_pairs=most, sender=coordinator, none_ends=True)
            if not len(shapes):
                return
            rows = cut(blocks.rows, shapes.rows)
            asked.admit(rows, shapes.records, sender=coordinator)
            capped = spec.choice.links_per_record is not None
            seeking = int((shapes.records if capped else shapes.rows).sum())
            words = share(name, shapes, rows, partial(_tell, pace, blocks, seeking))
            party.channels.send(DistanceShare(share=flat(words)).to_message(), coordinator)

    def _ask(
        self, helper: LinkageHelper, name: str, exchanges: Iterator[BlockExchange]
    ) -> Iterator[list[SquaredShares]]:
        """Have data parties compare blocks; the next ones are named before the last are done."""
        under_way: deque[BlockExchange] = deque()
        for exchange in exchanges:
            self._announce(helper, name, exchange)
            under_way.append(exchange)
            if len(under_way) == _UNDER_WAY:
                yield self._shares(helper, name, under_way.popleft())
        while under_way:
            yield self._shares(helper, name, under_way.popleft())

    def _announce(self, helper: LinkageHelper, name: str, exchange: BlockExchange) -> None:
        sizes = exchange.shapes.sizes
        mine = RowBlocks(rows=exchange.rows, sizes=sizes, done=exchange.done, of=exchange.of)
        theirs = RecordBlocks(records=exchange.records, sizes=sizes, due=exchange.due)
        helper.channels.send(mine.to_message(), helper.spec.roles.primary)
        helper.channels.send(theirs.to_message(), name)

    def _shares(
        self, helper: LinkageHelper, name: str, exchange: BlockExchange
    ) -> list[SquaredShares]:
        shapes = exchange.shapes
        primary_share, other = (
            DistanceShare.from_message(
                helper.channels.receive(sender, BlockKind.LINK_SHARE), pairs=shapes.pairs
            ).share
            for sender in (helper.spec.roles.primary, name)
        )
        _record_distances(helper.take, name, exchange, primary_share + other)
        return list(zip(shapes.by_pairs(primary_share), shapes.by_pairs(other), strict=True))

    def _send_cells(
        self, party: DataParty, units: Units, shift: Int64[np.ndarray, " key_dim"]
    ) -> None:
        spec = party.spec
        cells = Cells(cells=cells_of(units + shift, cell_units(spec)))
        party.channels.send(cells.to_message(), spec.roles.helpers["coordinator"])

    def _receive_cells(self, helper: LinkageHelper, name: str, count: int) -> np.ndarray | None:
        spec = helper.spec
        if not cell_units(spec):
            return None
        message = helper.channels.receive(name, BlockKind.LINK_CELLS)
        return Cells.from_message(message, count=count, key_dim=len(spec.keys.columns)).cells


def _record_distances(
    take: Take, name: str, exchange: BlockExchange, squared: UInt64[np.ndarray, " pairs"]
) -> None:
    """Record the squared distances of an exchange's pairs, block after block."""
    take(
        DistanceShare.KIND.name,
        of=name,
        rows=exchange.rows,
        records=exchange.records,
        sizes=exchange.shapes.sizes,
        squared=squared.astype(np.int64),
    )


def quantise_keys(spec: KeySpec, keys: KeyTable) -> Int64[np.ndarray, "rows key_dim"]:
    """Return numeric keys as whole numbers of 16 bits within the agreed ranges.

    Raises:
        DataError: If a value leaves its range, naming the row.
    """
    return spec.key_range().quantise(numbers_of(keys), whose=keys.name)


def fresh_shift(key_dim: int) -> Int64[np.ndarray, " key_dim"]:
    """Draw by how much the data parties shift the grid in this session.

    Reveals:
        Nothing yet; the data parties share it, the coordinator must not have it.
    """
    return np.array([secrets.randbelow(_SHIFT_BELOW) for _ in range(key_dim)], dtype=np.int64)


def _tell(pace: Pace, blocks: RowBlocks, seeking: int, part: int, parts: int) -> None:
    """Tell the part of a block that is done as rows of all (as records, where those seek)."""
    pace(blocks.done + seeking * part // parts, blocks.of)
