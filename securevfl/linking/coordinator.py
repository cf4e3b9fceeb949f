"""The third parties of a protected linkage: the coordinator that ranks, the dealer of masks."""

from functools import partial

import numpy as np

from securevfl.core.errors import ConfigError, ProtocolError
from securevfl.linkage.metrics.bloom import CodeKeys, code_bytes
from securevfl.linkage.shared_distances import deal
from securevfl.linkage.spec import LinkSpec
from securevfl.linking.blocks import Block, Search
from securevfl.linking.candidates import Candidates, find_candidates
from securevfl.linking.kept_links import LinkCache, links_key
from securevfl.linking.lines import Desk
from securevfl.linking.links_of_party import coordinate
from securevfl.linking.messages import LinkingKind
from securevfl.linking.similarities import SimilarLinks
from securevfl.transport.message import Message, StarKind


class Coordinator:
    """Ranks by distances that no data party sees; it holds neither a table nor a key.

    Args:
        spec: What linking needs.
        rows: How many rows the primary has.
        desk: Its lines to everybody.
        cache: Where links and their noise are kept.
    """

    def __init__(self, spec: LinkSpec, *, rows: int, desk: Desk, cache: LinkCache) -> None:
        self._spec = spec
        self._rows = rows
        self._desk = desk
        self._cache = cache
        self._primary = spec.roles.primary

    def serve(self) -> dict[str, dict[str, object]]:
        """Link every secondary, and return the figures of their similarities.

        Raises:
            ConfigError: If two parties' linkage secrets differ.
            DataError: If shares do not belong together, or similarities cannot be made.
            ProtocolError: If a party leaves the protocol or fails.

        Reveals:
            To each secondary: which of its records are nearest to each row, without distances. To
            the primary: noised similarities in falling order, if the family reads them.
        """
        coded = self._spec.hiding.protection == "bloom"
        mine = self._desk.receive(self._primary, LinkingKind.LINK_CODES) if coded else None
        rows = self._cells(self._primary, self._rows)
        figures: dict[str, dict[str, object]] = {}
        for name in self._spec.roles.secondaries:
            if mine is not None:
                candidates, similar = self._by_codes(name, mine)
            else:
                candidates, similar = self._by_shares(name, rows)
            self._desk.send(name, _lists(candidates))
            if similar is not None:
                figures[name] = similar.figures()
                self._desk.send(
                    self._primary,
                    Message(
                        kind=LinkingKind.SIMILARITIES, tensors={"similarities": similar.values}
                    ),
                )
        self._desk.receive(self._primary, StarKind.DONE)
        return figures

    def _by_codes(self, name: str, mine: Message) -> tuple[Candidates, SimilarLinks | None]:
        theirs = self._desk.receive(name, LinkingKind.LINK_CODES)
        if mine.figure("check", str) != theirs.figure("check", str):
            raise ConfigError(
                f"linkage.secret: that of {name!r} differs from that of {self._primary!r}; give "
                f"both the same file"
            )
        width = code_bytes(self._spec.keys)
        rows = mine.tensor("codes", dtype=np.uint8, shape=(self._rows, width))
        records = theirs.tensor("codes", dtype=np.uint8, shape=(None, width))
        metric = CodeKeys(primary=rows, records=records)
        return coordinate(
            self._spec,
            lambda: find_candidates(self._spec, metric),
            cache=self._cache,
            key=links_key(self._spec, rows, records),
        )

    def _by_shares(
        self, name: str, row_cells: np.ndarray | None
    ) -> tuple[Candidates, SimilarLinks | None]:
        turn = self._desk.receive(self._primary, LinkingKind.LINK_TURN)
        records = turn.figure("records", int)
        if records < self._spec.choice.neighbours:
            raise ProtocolError(f"{name}: has {records} records, fewer than model.neighbours")
        tags = turn.figure("tags", list)
        record_cells = self._cells(name, records)
        cells = None if row_cells is None or record_cells is None else (row_cells, record_cells)
        search = Search(self._spec, rows=self._rows, records=records, ask=partial(self._ask, name))
        found = coordinate(
            self._spec,
            lambda: search.run(cells).candidates,
            cache=self._cache,
            key=links_key(self._spec, secret=" ".join(map(str, tags))),
        )
        none = np.empty(0, dtype=np.int64)
        self._desk.send(self._primary, _block_message(none, records=0, done=0, of=0))
        return found

    def _ask(self, name: str, block: Block) -> tuple[np.ndarray, np.ndarray]:
        rows, records = block.rows, block.records
        self._desk.send(
            self._primary,
            _block_message(rows, records=len(records), done=block.done, of=block.of),
        )
        self._desk.send(
            name,
            Message(
                kind=LinkingKind.LINK_BLOCK,
                meta={"rows": len(rows), "due": block.due},
                tensors={"records": records},
            ),
        )
        one, other = (
            self._desk.receive(sender, LinkingKind.LINK_SHARE)
            .tensor("share", dtype=np.int64, shape=(len(rows), len(records)))
            .view(np.uint64)
            for sender in (self._primary, name)
        )
        return one, other

    def _cells(self, name: str, count: int) -> np.ndarray | None:
        """Return a data party's cells where the federation file has any."""
        if self._spec.hiding.cell is None:
            return None
        message = self._desk.receive(name, LinkingKind.LINK_CELLS)
        shape = (count, len(self._spec.keys.columns))
        return message.tensor("cells", dtype=np.int64, shape=shape)


def _block_message(rows: np.ndarray, *, records: int, done: int, of: int) -> Message:
    meta = {"records": records, "done": done, "of": of}
    return Message(kind=LinkingKind.LINK_BLOCK, meta=meta, tensors={"rows": rows})


def _lists(candidates: Candidates) -> Message:
    if candidates.pairs is not None:
        tensors = {"starts": candidates.pairs.starts, "records": candidates.pairs.records}
    else:
        assert candidates.ranked is not None, "one of the two forms is there"
        tensors = {"indices": candidates.ranked.indices}
    return Message(kind=LinkingKind.LINK_LISTS, tensors=tensors)


def serve_as_dealer(spec: LinkSpec, desk: Desk) -> int:
    """Deal masks until the primary says that linkage is done; return how many blocks there were.

    Raises:
        ProtocolError: If a party leaves the protocol or fails.

    Reveals:
        To the primary and each secondary: uniformly random numbers.
    """
    names = {rank: name for name, rank in spec.roles.ranks.items()}
    dimension, blocks = len(spec.keys.columns), 0
    while True:
        turn = desk.receive(spec.roles.primary, LinkingKind.LINK_TURN, StarKind.DONE)
        if turn.kind is StarKind.DONE:
            return blocks
        secondary = names.get(turn.figure("secondary", int))
        mine, theirs = deal(turn.figure("rows", int), turn.figure("records", int), dimension)
        if secondary not in spec.roles.secondaries:
            raise ProtocolError("the primary named a secondary that there is not")
        for name, dealing in ((spec.roles.primary, mine), (secondary, theirs)):
            desk.send(
                name,
                Message(
                    kind=LinkingKind.LINK_DEALING,
                    tensors={
                        "mask": dealing.mask.view(np.int64),
                        "product": dealing.product.view(np.int64),
                    },
                ),
            )
        blocks += 1
