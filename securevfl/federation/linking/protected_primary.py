"""The primary's part of a protected linkage."""

from functools import partial

import numpy as np
from jaxtyping import Float32

from securevfl.data.tables import KeyTable
from securevfl.federation.config import FederationConfig
from securevfl.federation.linking.blocks import row_blocks
from securevfl.federation.linking.cache import LinkCache, table_tag
from securevfl.federation.linking.ciphertexts import (
    cipher_bytes,
    pack_numbers,
    part_of,
    unpack_numbers,
    workers_for,
)
from securevfl.federation.linking.desks import Desk
from securevfl.federation.linking.in_process import stacked
from securevfl.federation.linking.keys import key_scaler, model_keys
from securevfl.federation.linking.link_secondary import wants_similarities
from securevfl.federation.linking.linked import LinkedPrimary
from securevfl.federation.linking.metrics import quantised
from securevfl.federation.linking.pace import Pace
from securevfl.federation.linking.read import read_similarities
from securevfl.federation.linking.third_parties import send_codes, third_parties
from securevfl.federation.primary import Observer
from securevfl.federation.wire import Message, MessageKind
from securevfl.linkage.paillier_distances import Keyholder, PackedRows
from securevfl.linkage.secret import LinkageSecret
from securevfl.linkage.shared_distances import Dealing, masked_keys, primary_share


class ProtectedPrimary:
    """The primary's part: its keys leave it as codes, shares or ciphertexts only.

    Args:
        config: The federation file.
        keys: The primary's keys.
        desk: Its lines to everybody.
        cache: Where this party keeps what names its table to the coordinator.
        observe: Hears of progress.
    """

    def __init__(
        self,
        config: FederationConfig,
        keys: KeyTable,
        desk: Desk,
        cache: LinkCache,
        observe: Observer,
    ) -> None:
        self._cache = cache
        self._parts: list[Float32[np.ndarray, "rows links"] | None] = []
        self._config = config
        self._keys = keys
        self._desk = desk
        self._observe = observe
        self._coordinator, self._dealer = third_parties(config)

    def link(self, secret: LinkageSecret | None, session: bytes) -> LinkedPrimary:
        """Take part until all secondaries have linked.

        Raises:
            DataError: If a key leaves its agreed range.
            ProtocolError: If a party leaves the protocol or fails.

        Reveals:
            To the coordinator: codes, or shares of squared distances. To each secondary: masked
            keys or ciphertexts. To the dealer: numbers of rows and records.
        """
        if secret is not None:
            send_codes(self._config, self._keys, secret, session, self._desk)
            for party in self._config.secondaries:
                self._finish(party.name)
        else:
            self._share_distances()
        for party in self._config.callers:
            if party.is_helper:
                self._desk.send(party.name, Message(kind=MessageKind.DONE))
        scaler = key_scaler(self._config, None)
        return LinkedPrimary(keys=model_keys(scaler, self._keys), similarities=stacked(self._parts))

    def _finish(self, name: str) -> None:
        """Wait until a secondary has its lists; its similarities come before its neighbour's."""
        if wants_similarities(self._config):
            message = self._desk.receive(self._coordinator, MessageKind.SIMILARITIES)
            self._parts.append(read_similarities(self._config, message, rows=self._keys.num_rows))
        self._desk.receive(name, MessageKind.LINKED)

    def _share_distances(self) -> None:
        units = quantised(self._config, self._keys)
        tag = table_tag(self._cache.folder, units)
        holder, packed = None, None
        if self._config.linkage.protection == "paillier":
            holder = Keyholder(bits=self._config.linkage.key_bits)
            packed = holder.encrypt(units)
        for party in self._config.secondaries:
            turn = self._desk.receive(party.name, MessageKind.LINK_TURN)
            records = turn.figure("records", int)
            self._desk.send(
                self._coordinator,
                Message(
                    kind=MessageKind.LINK_TURN,
                    meta={"records": records, "tags": [tag, turn.figure("tag", str)]},
                ),
            )
            pace = Pace(self._observe, of=len(units), event="links", name=party.name)
            for start, end in row_blocks(self._config, rows=len(units), records=records):
                if holder is None or packed is None:
                    share = self._by_shares(party.name, units[start:end], records)
                else:
                    part = part_of(packed, start, end)
                    answers = self._answers(party.name, part, records)
                    share = holder.share(
                        units[start:end],
                        answers,
                        workers=workers_for(len(answers) * records),
                        progress=partial(_rows_done, pace, start, end),
                    )
                # The coordinator's answer ends the block, so that nothing piles up on the way.
                self._desk.send(
                    self._coordinator,
                    Message(kind=MessageKind.LINK_SHARE, tensors={"share": share.view(np.int64)}),
                )
                self._desk.receive(self._coordinator, MessageKind.LINK_TURN)
                pace(end)
            self._finish(party.name)

    def _by_shares(self, name: str, units: np.ndarray, records: int) -> np.ndarray:
        rank, shape = self._config.ranks[name], (len(units), units.shape[1])
        self._desk.send(
            self._dealer,
            Message(
                kind=MessageKind.LINK_TURN,
                meta={"secondary": rank, "rows": len(units), "records": records},
            ),
        )
        dealt = self._desk.receive(self._dealer, MessageKind.LINK_DEALING)
        dealing = Dealing(
            mask=dealt.tensor("mask", dtype=np.int64, shape=shape).view(np.uint64),
            product=dealt.tensor("product", dtype=np.int64, shape=(len(units), records)).view(
                np.uint64
            ),
        )
        masked = masked_keys(units, dealing).view(np.int64)
        self._desk.send(name, Message(kind=MessageKind.LINK_MASKED, tensors={"keys": masked}))
        theirs = self._desk.receive(name, MessageKind.LINK_MASKED).tensor(
            "keys", dtype=np.int64, shape=(records, units.shape[1])
        )
        return primary_share(units, dealing, theirs.view(np.uint64))

    def _answers(self, name: str, packed: PackedRows, records: int) -> list[list[int]]:
        modulus = packed.modulus
        self._desk.send(
            name,
            Message(
                kind=MessageKind.LINK_CIPHERS,
                tensors={
                    "modulus": np.frombuffer(
                        modulus.to_bytes(self._config.linkage.key_bits // 8, "big"), dtype=np.uint8
                    ),
                    "packs": pack_numbers(packed.packs, modulus),
                },
            ),
        )
        answer = self._desk.receive(name, MessageKind.LINK_CIPHERS).tensor(
            "answers", dtype=np.uint8, shape=(len(packed.packs), records, cipher_bytes(modulus))
        )
        return unpack_numbers(answer, modulus)


def _rows_done(pace: Pace, start: int, end: int, done: int, of: int, _left: float) -> None:
    """Tell the share of a block's answers that is decrypted as rows of all."""
    pace(start + (end - start) * done // of)
