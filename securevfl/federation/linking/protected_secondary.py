"""A secondary's part of a protected linkage."""

from collections.abc import Iterator

import numpy as np

from securevfl.core.errors import ProtocolError
from securevfl.data.tables import KeyTable
from securevfl.federation.config import FederationConfig
from securevfl.federation.linking.blocks import row_blocks
from securevfl.federation.linking.cache import LinkCache, table_tag
from securevfl.federation.linking.ciphertexts import (
    cipher_bytes,
    fresh_obfuscators,
    pack_numbers,
    unpack_numbers,
)
from securevfl.federation.linking.desks import Desk
from securevfl.federation.linking.keys import key_scaler
from securevfl.federation.linking.link_secondary import link_from_candidates
from securevfl.federation.linking.linked import LinkedSecondary
from securevfl.federation.linking.metrics import quantised
from securevfl.federation.linking.read import read_candidates
from securevfl.federation.linking.third_parties import send_codes, third_parties
from securevfl.federation.primary import Observer
from securevfl.federation.wire import Message, MessageKind
from securevfl.linkage.paillier_distances import Lanes, PackedRows, masked_distances
from securevfl.linkage.secret import LinkageSecret
from securevfl.linkage.shared_distances import Dealing, masked_keys, secondary_share


class ProtectedSecondary:
    """A secondary's part: its keys leave it as codes, shares or under encryption only.

    Args:
        config: The federation file.
        keys: Its keys.
        rows: How many rows the primary has.
        desk: Its lines to everybody.
        cache: Where this party keeps what names its table to the coordinator.
        observe: Hears of progress.
    """

    def __init__(
        self,
        config: FederationConfig,
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
        self._fresh: Iterator[int] = iter(())
        self._config = config
        self._keys = keys
        self._rows = rows
        self._desk = desk
        self._coordinator, self._dealer = third_parties(config)

    def link(self, secret: LinkageSecret | None, session: bytes) -> LinkedSecondary:
        """Take part until the coordinator has sent this party's lists.

        Raises:
            DataError: If a key leaves its agreed range.
            ProtocolError: If a party leaves the protocol or fails.

        Reveals:
            To the coordinator: codes, or shares of squared distances. To the primary: how many
            records there are, masked keys or masked distances, and that linkage is done.
        """
        if secret is not None:
            send_codes(self._config, self._keys, secret, session, self._desk)
        else:
            self._share_distances()
        lists = self._desk.receive(self._coordinator, MessageKind.LINK_LISTS)
        candidates = read_candidates(
            self._config, lists, rows=self._rows, records=self._keys.num_rows
        )
        linked = link_from_candidates(
            self._config,
            self._keys,
            candidates,
            key_scaler(self._config, None),
            rows=self._rows,
        )
        self._desk.send(self._config.primary.name, Message(kind=MessageKind.LINKED))
        return linked

    def _share_distances(self) -> None:
        units = quantised(self._config, self._keys)
        primary, records = self._config.primary.name, len(units)
        self._desk.send(
            primary,
            Message(
                kind=MessageKind.LINK_TURN,
                meta={"records": records, "tag": table_tag(self._cache.folder, units)},
            ),
        )
        paillier = self._config.linkage.protection == "paillier"
        for start, end in row_blocks(self._config, rows=self._rows, records=records):
            step = self._by_ciphers if paillier else self._by_shares
            share = step(units, end - start)
            self._desk.send(
                self._coordinator,
                Message(kind=MessageKind.LINK_SHARE, tensors={"share": share.view(np.int64)}),
            )

    def _by_shares(self, units: np.ndarray, rows: int) -> np.ndarray:
        primary = self._config.primary.name
        dealt = self._desk.receive(self._dealer, MessageKind.LINK_DEALING)
        dealing = Dealing(
            mask=dealt.tensor("mask", dtype=np.int64, shape=units.shape).view(np.uint64),
            product=dealt.tensor("product", dtype=np.int64, shape=(rows, len(units))).view(
                np.uint64
            ),
        )
        masked = masked_keys(units, dealing).view(np.int64)
        self._desk.send(primary, Message(kind=MessageKind.LINK_MASKED, tensors={"keys": masked}))
        theirs = self._desk.receive(primary, MessageKind.LINK_MASKED).tensor(
            "keys", dtype=np.int64, shape=(rows, units.shape[1])
        )
        return secondary_share(units, dealing, theirs.view(np.uint64))

    def _by_ciphers(self, units: np.ndarray, rows: int) -> np.ndarray:
        primary, bits = self._config.primary.name, self._config.linkage.key_bits
        message = self._desk.receive(primary, MessageKind.LINK_CIPHERS)
        raw = message.tensor("modulus", dtype=np.uint8, shape=(bits // 8,))
        modulus = int.from_bytes(raw.tobytes(), "big")
        if modulus.bit_length() != bits or modulus % 2 == 0:
            raise ProtocolError(f"the primary's key has not the agreed {bits} bits")
        if not self._modulus:
            # All blocks share one preparation: its generators cost as much as 2,000 ciphertexts.
            self._modulus = modulus
            self._fresh = fresh_obfuscators(modulus, self._answers_due(units), self._tell)
        if modulus != self._modulus:
            raise ProtocolError("the primary's key changed while linking")
        packs = message.tensor(
            "packs", dtype=np.uint8, shape=(None, units.shape[1], cipher_bytes(modulus))
        )
        numbers = unpack_numbers(packs, modulus)
        packed = PackedRows(modulus=modulus, rows=rows, packs=tuple(map(tuple, numbers)))
        if len(packed.packs) != -(-rows // packed.lanes.count):
            raise ProtocolError("the primary's ciphertexts do not hold the rows that are due")
        answers, share = masked_distances(packed, units, self._fresh)
        self._desk.send(
            primary,
            Message(
                kind=MessageKind.LINK_CIPHERS, tensors={"answers": pack_numbers(answers, modulus)}
            ),
        )
        return share

    def _answers_due(self, units: np.ndarray) -> int:
        """Return how many ciphertexts this party will send: one a record for each pack of rows."""
        lanes = Lanes(key_dim=units.shape[1], key_bits=self._config.linkage.key_bits)
        blocks = row_blocks(self._config, rows=self._rows, records=len(units))
        return len(units) * sum(-(-(end - start) // lanes.count) for start, end in blocks)

    def _tell(self, done: int, of: int, left: float) -> None:
        self._observe({"event": "ciphertexts", "done": done, "of": of, "seconds_left": left})
