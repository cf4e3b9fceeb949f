"""The primary's part of a protected linkage."""

from functools import partial

import numpy as np
from jaxtyping import Float32

from securevfl.core.progress import Observer, Pace
from securevfl.data.tables import KeyTable
from securevfl.linkage.linked import LinkedPrimary
from securevfl.linkage.on_cores import Apply, Progress, on_cores
from securevfl.linkage.paillier_distances import Keyholder, PackedRows
from securevfl.linkage.secret import LinkageSecret
from securevfl.linkage.shared_distances import Dealing, masked_keys, primary_share
from securevfl.linkage.spec import LinkSpec
from securevfl.linking.cells import fresh_shift, send_cells
from securevfl.linking.in_process import stacked
from securevfl.linking.kept_links import LinkCache, table_tag
from securevfl.linking.key_metric import quantised
from securevfl.linking.keys import key_scaler, model_keys
from securevfl.linking.lines import Desk
from securevfl.linking.list_messages import read_similarities, require_numbers
from securevfl.linking.messages import LinkingKind
from securevfl.linking.paillier_numbers import (
    IN_PLACE_TASKS,
    cipher_bytes,
    pack_numbers,
    unpack_numbers,
)
from securevfl.linking.third_parties import send_codes, third_parties
from securevfl.transport.message import Message, StarKind


class ProtectedPrimary:
    """The primary's part: its keys leave it as codes, shares or ciphertexts only.

    Args:
        spec: What linking needs.
        keys: The primary's keys.
        desk: Its lines to everybody.
        cache: Where this party keeps what names its table to the coordinator.
        observe: Hears of progress.
    """

    def __init__(
        self,
        spec: LinkSpec,
        keys: KeyTable,
        desk: Desk,
        cache: LinkCache,
        observe: Observer,
    ) -> None:
        self._cache = cache
        self._parts: list[Float32[np.ndarray, "rows links"] | None] = []
        self._spec = spec
        self._keys = keys
        self._desk = desk
        self._observe = observe
        self._coordinator, self._dealer = third_parties(spec)

    def link(self, secret: LinkageSecret | None, session: bytes) -> LinkedPrimary:
        """Take part until all secondaries have linked.

        Raises:
            DataError: If a key leaves its agreed range.
            ProtocolError: If a party leaves the protocol or fails.

        Reveals:
            To the coordinator: codes, or shares of squared distances and, with ``linkage.cell``,
            grid cells. To each secondary: masked keys or ciphertexts. To the dealer: numbers of
            rows and records.
        """
        if secret is not None:
            send_codes(self._spec, self._keys, secret, session, self._desk)
            for name in self._spec.roles.secondaries:
                self._finish(name)
        else:
            self._share_distances()
        for name in self._spec.roles.helpers.values():
            self._desk.send(name, Message(kind=StarKind.DONE))
        scaler = key_scaler(self._spec.keys, None)
        return LinkedPrimary(keys=model_keys(scaler, self._keys), similarities=stacked(self._parts))

    def _finish(self, name: str) -> None:
        """Wait until a secondary has its lists; its similarities come before its neighbour's."""
        if self._spec.similarities is not None:
            message = self._desk.receive(self._coordinator, LinkingKind.SIMILARITIES)
            self._parts.append(read_similarities(self._spec, message, rows=self._keys.num_rows))
        self._desk.receive(name, LinkingKind.LINKED)

    def _share_distances(self) -> None:
        units = quantised(self._spec.keys, self._keys)
        tag = table_tag(self._cache.folder, units)
        if self._spec.hiding.cell is not None:
            self._send_cells(units)
        paillier = self._spec.hiding.protection == "paillier"
        with on_cores(-1 if paillier else 1, after=IN_PLACE_TASKS) as apply:
            cipher = _CipherRows(self._spec, units, apply) if paillier else None
            for name in self._spec.roles.secondaries:
                turn = self._desk.receive(name, LinkingKind.LINK_TURN)
                records = turn.figure("records", int)
                self._desk.send(
                    self._coordinator,
                    Message(
                        kind=LinkingKind.LINK_TURN,
                        meta={"records": records, "tags": [tag, turn.figure("tag", str)]},
                    ),
                )
                self._compare_blocks(name, units, cipher)
                self._finish(name)

    def _send_cells(self, units: np.ndarray) -> None:
        """Send the coordinator this party's cells, under a shift that it does not get."""
        shift = fresh_shift(units.shape[1])
        for name in self._spec.roles.secondaries:
            message = Message(kind=LinkingKind.LINK_CELLS, tensors={"shift": shift})
            self._desk.send(name, message)
        send_cells(self._spec, units, shift, self._desk)

    def _compare_blocks(self, name: str, units: np.ndarray, cipher: "_CipherRows | None") -> None:
        pace = Pace(self._observe, event="links", name=name)
        while True:
            block = self._desk.receive(self._coordinator, LinkingKind.LINK_BLOCK)
            rows = block.tensor("rows", dtype=np.int64, shape=(None,))
            if not len(rows):
                return
            require_numbers(block, rows, below=len(units))
            records = block.figure("records", int)
            seeking = len(rows) if self._spec.choice.links_per_record is None else records
            tell = partial(_tell, pace, block.figure("done", int), seeking, block.figure("of", int))
            if cipher is None:
                share = self._by_shares(name, units[rows], records)
                tell(1, 1, 0)
            else:
                answers = self._answers(name, cipher.packed(rows), records)
                share = cipher.share(rows, answers, tell)
            self._desk.send(
                self._coordinator,
                Message(kind=LinkingKind.LINK_SHARE, tensors={"share": share.view(np.int64)}),
            )

    def _by_shares(self, name: str, units: np.ndarray, records: int) -> np.ndarray:
        rank, shape = self._spec.roles.ranks[name], (len(units), units.shape[1])
        self._desk.send(
            self._dealer,
            Message(
                kind=LinkingKind.LINK_TURN,
                meta={"secondary": rank, "rows": len(units), "records": records},
            ),
        )
        dealt = self._desk.receive(self._dealer, LinkingKind.LINK_DEALING)
        dealing = Dealing(
            mask=dealt.tensor("mask", dtype=np.int64, shape=shape).view(np.uint64),
            product=dealt.tensor("product", dtype=np.int64, shape=(len(units), records)).view(
                np.uint64
            ),
        )
        masked = masked_keys(units, dealing).view(np.int64)
        self._desk.send(name, Message(kind=LinkingKind.LINK_MASKED, tensors={"keys": masked}))
        theirs = self._desk.receive(name, LinkingKind.LINK_MASKED).tensor(
            "keys", dtype=np.int64, shape=(records, units.shape[1])
        )
        return primary_share(units, dealing, theirs.view(np.uint64))

    def _answers(self, name: str, packed: PackedRows, records: int) -> list[list[int]]:
        modulus = packed.modulus
        self._desk.send(
            name,
            Message(
                kind=LinkingKind.LINK_CIPHERS,
                tensors={
                    "modulus": np.frombuffer(
                        modulus.to_bytes(self._spec.hiding.key_bits // 8, "big"), dtype=np.uint8
                    ),
                    "packs": pack_numbers(packed.packs, modulus),
                },
            ),
        )
        answer = self._desk.receive(name, LinkingKind.LINK_CIPHERS).tensor(
            "answers", dtype=np.uint8, shape=(len(packed.packs), records, cipher_bytes(modulus))
        )
        return unpack_numbers(answer, modulus)


def _tell(
    pace: Pace, before: int, seeking: int, of: int, part: int, parts: int, _left: float
) -> None:
    """Tell the part of a block that is done as rows of all (as records, where those seek)."""
    pace(before + seeking * part // parts, of)


class _CipherRows:
    """The primary's rows under its Paillier key."""

    def __init__(self, spec: LinkSpec, units: np.ndarray, apply: Apply) -> None:
        self._holder = Keyholder(bits=spec.hiding.key_bits)
        self._units = units
        self._apply = apply
        self._packed: dict[bytes, PackedRows] = {}

    def packed(self, rows: np.ndarray) -> PackedRows:
        """Encrypt a block's rows, unless an earlier block had the same ones."""
        name = rows.tobytes()
        if name not in self._packed:
            self._packed[name] = self._holder.encrypt(self._units[rows], apply=self._apply)
        return self._packed[name]

    def share(self, rows: np.ndarray, answers: list[list[int]], progress: Progress) -> np.ndarray:
        """Decrypt a block's answers into the primary's share."""
        return self._holder.share(self._units[rows], answers, apply=self._apply, progress=progress)
