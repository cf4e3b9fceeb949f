"""Paillier's encryption: the primary's keys, and masked distances, as nobody else can read them."""

import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import ClassVar, Final

import numpy as np
from jaxtyping import UInt8

from securevfl.core.errors import ProtocolError
from securevfl.core.progress import CiphertextsMade
from securevfl.linkage.obfuscator_pool import prepared_obfuscators
from securevfl.linkage.on_cores import Apply, Progress, on_cores
from securevfl.linkage.paillier_distances import Keyholder, Lanes, PackedRows, masked_distances
from securevfl.linkage.spec import LinkSpec
from securevfl.linking.messages import LinkingKind
from securevfl.linking.protections.block_messages import RecordBlocks, RowBlocks, ShareWords
from securevfl.linking.protections.blockwise import (
    BLOCK_MESSAGES,
    COORDINATOR_LEARNS,
    Blockwise,
    PrimaryShare,
    SecondaryShare,
    Units,
)
from securevfl.linking.protections.protection import DataParty
from securevfl.transport.message import Message, TypedMessage

# Obfuscators that are made together: their generators then cost a fifteenth of them.
_BATCH: Final = 2**15
# Tasks of about 0.2 s that take less time than it takes to start a process on every core.
_IN_PLACE_TASKS: Final = 32


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class EncryptedRows(TypedMessage):
    """The primary's keys of an exchange's blocks, encrypted, and its public key."""

    KIND = LinkingKind.LINK_CIPHERS
    WAY = "primary to a secondary"

    blocks: list[PackedRows]
    """Those of each block; at least one, all of one key."""

    def to_message(self) -> Message:
        """Return it as it is sent."""
        modulus = self.modulus
        raw = modulus.to_bytes(modulus.bit_length() // 8, "big")
        packs = [pack for packed in self.blocks for pack in packed.packs]
        tensors = {
            "modulus": np.frombuffer(raw, dtype=np.uint8),
            "packs": pack_numbers(packs, modulus),
        }
        return Message(kind=self.KIND, tensors=tensors)

    @classmethod
    def from_message(
        cls, message: Message, *, rows: Sequence[int], key_dim: int, key_bits: int
    ) -> "EncryptedRows":
        """Check received rows.

        Args:
            message: What came.
            rows: Primary rows of each block.
            key_dim: Dimensions of the keys.
            key_bits: Bits of the agreed modulus.

        Raises:
            ProtocolError: If the key or the ciphertexts are not what was agreed on.
        """
        raw = message.tensor("modulus", dtype=np.uint8, shape=(key_bits // 8,))
        modulus = int.from_bytes(raw.tobytes(), "big")
        if modulus.bit_length() != key_bits or modulus % 2 == 0:
            raise ProtocolError(f"the primary's key has not the agreed {key_bits} bits")
        lanes = Lanes(key_dim=key_dim, key_bits=key_bits).count
        counts = [-(-own // lanes) for own in rows]
        shape = (None, key_dim, cipher_bytes(modulus))
        sent = message.tensor("packs", dtype=np.uint8, shape=shape)
        if len(sent) != sum(counts):
            raise ProtocolError("the primary's ciphertexts do not hold the rows that are due")
        packs = iter(unpack_numbers(sent, modulus))
        return cls(
            blocks=[
                PackedRows(modulus=modulus, rows=own, packs=tuple(map(tuple, islice(packs, count))))
                for own, count in zip(rows, counts, strict=True)
            ]
        )

    @property
    def modulus(self) -> int:
        """n, the primary's public key."""
        return self.blocks[0].modulus


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class EncryptedDistances(TypedMessage):
    """Masked distances of an exchange's blocks, encrypted."""

    KIND = LinkingKind.LINK_CIPHERS
    WAY = "secondary to primary"

    blocks: list[list[list[int]]]
    """For each block and each of its packs of rows, a ciphertext a record."""

    modulus: int
    """n, the primary's public key."""

    def to_message(self) -> Message:
        """Return it as it is sent."""
        answers = [one for answers in self.blocks for pack in answers for one in pack]
        packed = pack_numbers([answers], self.modulus)[0]
        return Message(kind=self.KIND, tensors={"answers": packed})

    @classmethod
    def from_message(
        cls, message: Message, *, packs: Sequence[int], records: Sequence[int], modulus: int
    ) -> "EncryptedDistances":
        """Check received answers.

        Args:
            message: What came.
            packs: Packs of rows of each block.
            records: Records of each block.
            modulus: n, the primary's public key.

        Raises:
            ProtocolError: If they are no ciphertexts of that modulus, or not as many as are due.
        """
        due = sum(own * others for own, others in zip(packs, records, strict=True))
        raw = message.tensor("answers", dtype=np.uint8, shape=(due, cipher_bytes(modulus)))
        answers = iter(unpack_numbers(raw[None], modulus)[0])
        return cls(
            blocks=[
                [list(islice(answers, others)) for _ in range(own)]
                for own, others in zip(packs, records, strict=True)
            ],
            modulus=modulus,
        )


class Paillier(Blockwise):
    """The primary alone can decrypt; the secondary computes under encryption."""

    name: ClassVar[str] = "paillier"
    learned: ClassVar[Mapping[str, str]] = {
        "primary": "numbers masked to within 2^-40, and how many records each secondary has",
        "secondary": "ciphertexts; for each primary row, which of its own records are nearest, in "
        "order and without distances",
        "coordinator": COORDINATOR_LEARNS,
    }
    messages: ClassVar[tuple[type[TypedMessage], ...]] = (
        *BLOCK_MESSAGES,
        *(EncryptedRows, EncryptedDistances),
    )

    def lanes(self, spec: LinkSpec) -> int:
        """Return how many rows share one ciphertext."""
        return Lanes(key_dim=len(spec.keys.columns), key_bits=spec.hiding.key_bits).count

    @contextmanager
    def primary_shares(self, party: DataParty, units: Units) -> Iterator[PrimaryShare]:
        """Encrypt rows on all cores, and decrypt the secondary's answers into shares.

        Reveals:
            To the secondary: ciphertexts, and the public key.
        """
        lines, holder = party.lines, Keyholder(bits=party.spec.hiding.key_bits)
        encrypted: dict[bytes, PackedRows] = {}
        with on_cores(-1, after=_IN_PLACE_TASKS) as apply:

            def share(name: str, blocks: RowBlocks, tell: Progress) -> list[ShareWords]:
                # A later block may have the rows of an earlier one.
                rows = {chosen.tobytes(): chosen for chosen in blocks.blocks}
                new = {label: units[own] for label, own in rows.items() if label not in encrypted}
                made = holder.encrypt(list(new.values()), apply=apply)
                encrypted.update(zip(new, made, strict=True))
                packed = [encrypted[chosen.tobytes()] for chosen in blocks.blocks]
                lines.send(EncryptedRows(blocks=packed).to_message(), name)
                answers = EncryptedDistances.from_message(
                    lines.receive(name, LinkingKind.LINK_CIPHERS),
                    packs=[len(one.packs) for one in packed],
                    records=blocks.shapes.records.tolist(),
                    modulus=holder.modulus,
                ).blocks
                own = [units[chosen] for chosen in blocks.blocks]
                parts = list(zip(own, answers, strict=True))
                return holder.share(parts, apply=apply, progress=tell)

            yield share

    @contextmanager
    def secondary_shares(self, party: DataParty, units: Units) -> Iterator[SecondaryShare]:
        """Answer the primary's ciphertexts with masked distances, on all cores."""
        with on_cores(-1, after=_IN_PLACE_TASKS) as apply:
            yield _Answers(party, units, apply).share


class _Answers:
    """A secondary's masked distances under the primary's key, one key for all blocks."""

    def __init__(self, party: DataParty, units: Units, apply: Apply) -> None:
        self._party = party
        self._units = units
        self._apply = apply
        self._modulus = 0
        self._fresh: FreshObfuscators | None = None

    def share(self, blocks: RecordBlocks) -> list[ShareWords]:
        """Answer the primary's rows of an exchange and keep this party's shares of it.

        Raises:
            ProtocolError: If ciphertexts or keys are not what was agreed on.

        Reveals:
            To the primary: masked distances, encrypted under its key.
        """
        spec, lines = self._party.spec, self._party.lines
        primary = spec.roles.primary
        sent = EncryptedRows.from_message(
            lines.receive(primary, LinkingKind.LINK_CIPHERS),
            rows=blocks.shapes.rows.tolist(),
            key_dim=self._units.shape[1],
            key_bits=spec.hiding.key_bits,
        )
        if self._fresh is None:
            self._modulus = sent.modulus
            self._fresh = FreshObfuscators(sent.modulus, self._apply, self._tell)
        if sent.modulus != self._modulus:
            raise ProtocolError("the primary's key changed while linking")
        own = [self._units[records] for records in blocks.blocks]
        parts = list(zip(sent.blocks, own, strict=True))
        wanted = sum(len(packed.packs) * len(units) for packed, units in parts)
        fresh = self._fresh.take(wanted, due=blocks.due)
        found = masked_distances(parts, fresh, apply=self._apply)
        answer = EncryptedDistances(blocks=[one for one, _ in found], modulus=sent.modulus)
        lines.send(answer.to_message(), primary)
        return [words for _, words in found]

    def _tell(self, done: int, of: int, left: float) -> None:
        name = self._party.keys.name
        self._party.observe(CiphertextsMade(name=name, done=done, of=of, seconds_left=left))


class FreshObfuscators:
    """Paillier's randomness of one key as it is used up, made a batch at a time.

    Args:
        modulus: n, the public key.
        apply: Does the work, perhaps on several cores.
        progress: Hears of every batch while it is made.
    """

    def __init__(self, modulus: int, apply: Apply, progress: Progress) -> None:
        self._modulus = modulus
        self._apply = apply
        self._progress = progress
        self._stock: deque[int] = deque()
        self._made = 0

    def take(self, count: int, *, due: int) -> Iterator[int]:
        """Yield as many obfuscators as are wanted; nobody gets one of them again.

        Args:
            count: How many.
            due: How many will be wanted from now on, as far as is known.
        """
        if len(self._stock) < count:
            # A large batch costs less each: its generators cost as much as 2,000 of them.
            missing = max(count, due) - len(self._stock)
            size = max(count - len(self._stock), min(missing, _BATCH))
            self._stock += self._batch(size, missing)
        return (self._stock.popleft() for _ in range(count))

    def _batch(self, size: int, missing: int) -> list[int]:
        begin, before = time.monotonic(), self._made

        def tell(made: int, _size: int, left: float) -> None:
            # Later batches take as long as this one, each in its size.
            took = time.monotonic() - begin + left
            later = took * (missing - size) / size
            self._progress(before + made, before + missing, left + later)

        self._made += size
        return prepared_obfuscators(self._modulus, size, apply=self._apply, progress=tell)


def pack_numbers(rows: Sequence[Sequence[int]], modulus: int) -> UInt8[np.ndarray, "packs n width"]:
    """Return numbers below the modulus' square as bytes, all of one width."""
    width = cipher_bytes(modulus)
    raw = b"".join(number.to_bytes(width, "big") for row in rows for number in row)
    return np.frombuffer(raw, dtype=np.uint8).reshape(len(rows), -1, width)


def unpack_numbers(raw: UInt8[np.ndarray, "packs n width"], modulus: int) -> list[list[int]]:
    """Return the numbers in received bytes.

    Raises:
        ProtocolError: If one is no ciphertext of that modulus.
    """
    square = modulus**2
    rows = [[int.from_bytes(cell.tobytes(), "big") for cell in row] for row in raw]
    if not all(0 < number < square for row in rows for number in row):
        raise ProtocolError("a ciphertext came that is none of the agreed key")
    return rows


def cipher_bytes(modulus: int) -> int:
    """Return how many bytes a ciphertext takes."""
    return -(-2 * modulus.bit_length() // 8)
