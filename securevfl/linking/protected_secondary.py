"""A secondary's part of a protected linkage."""

import numpy as np

from securevfl.core.errors import ProtocolError
from securevfl.core.progress import Observer
from securevfl.data.tables import KeyTable
from securevfl.linkage.linked import LinkedSecondary
from securevfl.linkage.on_cores import Apply, on_cores
from securevfl.linkage.paillier_distances import PackedRows, masked_distances
from securevfl.linkage.secret import LinkageSecret
from securevfl.linkage.shared_distances import Dealing, masked_keys, secondary_share
from securevfl.linkage.spec import LinkSpec
from securevfl.linking.cells import send_cells
from securevfl.linking.kept_links import LinkCache, table_tag
from securevfl.linking.key_metric import quantised
from securevfl.linking.keys import key_scaler
from securevfl.linking.lines import Desk
from securevfl.linking.links_of_party import link_from_candidates
from securevfl.linking.list_messages import read_candidates, require_numbers
from securevfl.linking.messages import LinkingKind
from securevfl.linking.paillier_numbers import (
    IN_PLACE_TASKS,
    FreshObfuscators,
    cipher_bytes,
    pack_numbers,
    unpack_numbers,
)
from securevfl.linking.third_parties import send_codes, third_parties
from securevfl.transport.message import Message


class ProtectedSecondary:
    """A secondary's part: its keys leave it as codes, shares or under encryption only.

    Args:
        spec: What linking needs.
        keys: Its keys.
        rows: How many rows the primary has.
        desk: Its lines to everybody.
        cache: Where this party keeps what names its table to the coordinator.
        observe: Hears of progress.
    """

    def __init__(
        self,
        spec: LinkSpec,
        keys: KeyTable,
        *,
        rows: int,
        desk: Desk,
        cache: LinkCache,
        observe: Observer,
    ) -> None:
        self._cache = cache
        self._observe = observe
        self._modulus = 0
        self._fresh: FreshObfuscators | None = None
        self._apply: Apply = map
        self._spec = spec
        self._keys = keys
        self._rows = rows
        self._desk = desk
        self._coordinator, self._dealer = third_parties(spec)

    def link(self, secret: LinkageSecret | None, session: bytes) -> LinkedSecondary:
        """Take part until the coordinator has sent this party's lists.

        Raises:
            DataError: If a key leaves its agreed range.
            ProtocolError: If a party leaves the protocol or fails.

        Reveals:
            To the coordinator: codes, or shares of squared distances and, with ``linkage.cell``,
            grid cells. To the primary: how many records there are, masked keys or masked
            distances, and that linkage is done.
        """
        if secret is not None:
            send_codes(self._spec, self._keys, secret, session, self._desk)
            lists = self._desk.receive(self._coordinator, LinkingKind.LINK_LISTS)
        else:
            lists = self._share_distances()
        candidates = read_candidates(
            self._spec, lists, rows=self._rows, records=self._keys.num_rows
        )
        linked = link_from_candidates(
            self._spec,
            self._keys,
            candidates,
            key_scaler(self._spec.keys, None),
            rows=self._rows,
        )
        self._desk.send(self._spec.roles.primary, Message(kind=LinkingKind.LINKED))
        return linked

    def _share_distances(self) -> Message:
        """Compare block by block until the coordinator has the lists, which come last."""
        units = quantised(self._spec.keys, self._keys)
        primary = self._spec.roles.primary
        if self._spec.hiding.cell is not None:
            message = self._desk.receive(primary, LinkingKind.LINK_CELLS)
            shift = message.tensor("shift", dtype=np.int64, shape=(units.shape[1],))
            send_cells(self._spec, units, shift, self._desk)
        self._desk.send(
            primary,
            Message(
                kind=LinkingKind.LINK_TURN,
                meta={"records": len(units), "tag": table_tag(self._cache.folder, units)},
            ),
        )
        paillier = self._spec.hiding.protection == "paillier"
        with on_cores(-1 if paillier else 1, after=IN_PLACE_TASKS) as self._apply:
            while True:
                block = self._desk.receive(
                    self._coordinator, LinkingKind.LINK_BLOCK, LinkingKind.LINK_LISTS
                )
                if block.kind is LinkingKind.LINK_LISTS:
                    return block
                records = block.tensor("records", dtype=np.int64, shape=(None,))
                require_numbers(block, records, below=len(units))
                rows = block.figure("rows", int)
                if paillier:
                    share = self._by_ciphers(units[records], rows, due=block.figure("due", int))
                else:
                    share = self._by_shares(units[records], rows)
                self._desk.send(
                    self._coordinator,
                    Message(kind=LinkingKind.LINK_SHARE, tensors={"share": share.view(np.int64)}),
                )

    def _by_shares(self, units: np.ndarray, rows: int) -> np.ndarray:
        primary = self._spec.roles.primary
        dealt = self._desk.receive(self._dealer, LinkingKind.LINK_DEALING)
        dealing = Dealing(
            mask=dealt.tensor("mask", dtype=np.int64, shape=units.shape).view(np.uint64),
            product=dealt.tensor("product", dtype=np.int64, shape=(rows, len(units))).view(
                np.uint64
            ),
        )
        masked = masked_keys(units, dealing).view(np.int64)
        self._desk.send(primary, Message(kind=LinkingKind.LINK_MASKED, tensors={"keys": masked}))
        theirs = self._desk.receive(primary, LinkingKind.LINK_MASKED).tensor(
            "keys", dtype=np.int64, shape=(rows, units.shape[1])
        )
        return secondary_share(units, dealing, theirs.view(np.uint64))

    def _by_ciphers(self, units: np.ndarray, rows: int, *, due: int) -> np.ndarray:
        primary, bits = self._spec.roles.primary, self._spec.hiding.key_bits
        message = self._desk.receive(primary, LinkingKind.LINK_CIPHERS)
        raw = message.tensor("modulus", dtype=np.uint8, shape=(bits // 8,))
        modulus = int.from_bytes(raw.tobytes(), "big")
        if modulus.bit_length() != bits or modulus % 2 == 0:
            raise ProtocolError(f"the primary's key has not the agreed {bits} bits")
        if self._fresh is None:
            self._modulus = modulus
            self._fresh = FreshObfuscators(modulus, self._apply, self._tell)
        if modulus != self._modulus:
            raise ProtocolError("the primary's key changed while linking")
        packs = message.tensor(
            "packs", dtype=np.uint8, shape=(None, units.shape[1], cipher_bytes(modulus))
        )
        numbers = unpack_numbers(packs, modulus)
        packed = PackedRows(modulus=modulus, rows=rows, packs=tuple(map(tuple, numbers)))
        if len(packed.packs) != -(-rows // packed.lanes.count):
            raise ProtocolError("the primary's ciphertexts do not hold the rows that are due")
        fresh = self._fresh.take(len(packed.packs) * len(units), due=due)
        answers, share = masked_distances(packed, units, fresh, apply=self._apply)
        self._desk.send(
            primary,
            Message(
                kind=LinkingKind.LINK_CIPHERS, tensors={"answers": pack_numbers(answers, modulus)}
            ),
        )
        return share

    def _tell(self, done: int, of: int, left: float) -> None:
        name = self._keys.name
        event = {"event": "ciphertexts", "name": name, "done": done, "of": of}
        self._observe({**event, "seconds_left": left})
