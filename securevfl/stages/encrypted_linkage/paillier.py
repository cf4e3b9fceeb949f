"""Protection of keys by Paillier encryption: the primary's encrypted keys, and masked distances."""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import ClassVar, Final

import numpy as np
from jaxtyping import UInt8

from securevfl.core.errors import ProtocolError
from securevfl.core.progress import CiphertextsMade, Pace
from securevfl.linkage.cores import on_cores
from securevfl.linkage.protections.protection import DataParty
from securevfl.linkage.spec import LinkSpec
from securevfl.stages.encrypted_linkage import blockwise
from securevfl.stages.encrypted_linkage.block_search import Shapes
from securevfl.stages.encrypted_linkage.blockwise import BlockKind, ShareWords
from securevfl.stages.encrypted_linkage.homomorphic import (
    FEWEST_KEY_BITS,
    FreshObfuscators,
    Keyholder,
    Lanes,
    PackedRows,
    masked_distances,
)
from securevfl.transport.message import Message, TypedMessage

# Tasks of about 0.2 s that take less time than it takes to start a process on every core.
_IN_PLACE_TASKS: Final = 32


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class EncryptedRows(TypedMessage):
    """The primary's keys of an exchange's blocks, encrypted, and its public key."""

    KIND = BlockKind.LINK_CIPHERS
    WAY = "primary to a secondary"
    COVERS: ClassVar = {"masks": "blocks", "sizes and times": "lengths"}

    blocks: list[PackedRows]
    """Encrypted rows of each block; at least one, all of one key."""

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
            message: The received message.
            rows: Primary rows of each block.
            key_dim: Dimensions of the keys.
            key_bits: Bits of the agreed modulus.

        Raises:
            ProtocolError: If the key or the ciphertexts are not what was agreed on.
        """
        message.require_only("modulus", "packs")
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
                PackedRows(
                    modulus=modulus,
                    rows=own,
                    packs=tuple(map(tuple, itertools.islice(packs, count))),
                )
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

    KIND = BlockKind.LINK_CIPHERS
    WAY = "secondary to primary"
    COVERS: ClassVar = {"masks": "blocks", "no record": "modulus", "record counts": "lengths"}

    blocks: list[list[list[int]]]
    """Ciphertexts by block, pack of rows and record."""

    modulus: int
    """n, the primary's public key."""

    def to_message(self) -> Message:
        """Return it as it is sent."""
        answers = [ciphertext for answers in self.blocks for pack in answers for ciphertext in pack]
        packed = pack_numbers([answers], self.modulus)[0]
        return Message(kind=self.KIND, tensors={"answers": packed})

    @classmethod
    def from_message(
        cls, message: Message, *, packs: Sequence[int], records: Sequence[int], modulus: int
    ) -> "EncryptedDistances":
        """Check received answers.

        Args:
            message: The received message.
            packs: Packs of rows of each block.
            records: Records of each block.
            modulus: n, the primary's public key.

        Raises:
            ProtocolError: If they are no ciphertexts of that modulus, or not as many as are due.
        """
        message.require_only("answers")
        due = sum(own * others for own, others in zip(packs, records, strict=True))
        raw = message.tensor("answers", dtype=np.uint8, shape=(due, cipher_bytes(modulus)))
        answers = iter(unpack_numbers(raw[None], modulus)[0])
        return cls(
            blocks=[
                [list(itertools.islice(answers, others)) for _ in range(own)]
                for own, others in zip(packs, records, strict=True)
            ],
            modulus=modulus,
        )


def _key_bits(spec: LinkSpec) -> int:
    """Return the bits of the modulus."""
    bits: int = spec.hiding.settings.get("key_bits", FEWEST_KEY_BITS)
    return bits


class Paillier(blockwise.Blockwise):
    """The primary alone can decrypt; the secondary computes under encryption."""

    name: ClassVar[str] = "paillier"
    learned: ClassVar[Mapping[str, str]] = {
        "primary": "numbers masked to within 2^-40, and how many records each secondary has",
        "secondary": "ciphertexts; for each primary row, which of its own records are nearest, in "
        "order and without distances",
        "coordinator": blockwise.COORDINATOR_LEARNS,
    }
    messages: ClassVar[tuple[type[TypedMessage], ...]] = (
        *blockwise.BLOCK_MESSAGES,
        *(EncryptedRows, EncryptedDistances),
    )

    reads: ClassVar[frozenset[str]] = blockwise.Blockwise.reads | {"key_bits"}

    def lanes(self, spec: LinkSpec) -> int:
        """Return how many rows share one ciphertext."""
        return Lanes(key_dim=len(spec.keys.columns), key_bits=_key_bits(spec)).count

    @contextmanager
    def primary_shares(
        self, party: DataParty, units: blockwise.Units
    ) -> Iterator[blockwise.PrimaryShare]:
        """Encrypt rows on all cores, and decrypt the secondary's answers into shares.

        Reveals:
            To the secondary: ciphertexts, and the public key.
        """
        channels, holder = party.channels, Keyholder(bits=_key_bits(party.spec))
        encrypted: dict[bytes, PackedRows] = {}
        with on_cores(-1, after=_IN_PLACE_TASKS, check=channels.check) as apply:

            def share(
                name: str, shapes: Shapes, rows: list[np.ndarray], tell: blockwise.Progress
            ) -> list[ShareWords]:
                # A later block may have the rows of an earlier one.
                labels = {chosen.tobytes(): chosen for chosen in rows}
                new = {label: units[own] for label, own in labels.items() if label not in encrypted}
                made = holder.encrypt(list(new.values()), apply=apply)
                encrypted.update(zip(new, made, strict=True))
                packed = [encrypted[chosen.tobytes()] for chosen in rows]
                channels.send(EncryptedRows(blocks=packed).to_message(), name)
                answers = EncryptedDistances.from_message(
                    channels.receive(name, BlockKind.LINK_CIPHERS),
                    packs=[len(block.packs) for block in packed],
                    records=shapes.records.tolist(),
                    modulus=holder.modulus,
                ).blocks
                own = [units[chosen] for chosen in rows]
                parts = list(zip(own, answers, strict=True))
                return holder.share(parts, apply=apply, progress=tell)

            yield share

    @contextmanager
    def secondary_shares(
        self, party: DataParty, units: blockwise.Units
    ) -> Iterator[blockwise.SecondaryShare]:
        """Answer the primary's ciphertexts with masked distances, on all cores.

        Reveals:
            To the primary: masked distances, encrypted under its key.
        """
        spec, channels, primary = party.spec, party.channels, party.spec.roles.primary
        fresh: FreshObfuscators | None = None

        with on_cores(-1, after=_IN_PLACE_TASKS, check=channels.check) as apply:

            def share(shapes: Shapes, records: list[np.ndarray], due: int) -> list[ShareWords]:
                nonlocal fresh
                sent = EncryptedRows.from_message(
                    channels.receive(primary, BlockKind.LINK_CIPHERS),
                    rows=shapes.rows.tolist(),
                    key_dim=units.shape[1],
                    key_bits=_key_bits(spec),
                )
                if fresh is None:
                    pace = Pace(party.observe, CiphertextsMade, name=party.keys.name)
                    fresh = FreshObfuscators(sent.modulus, apply, pace)
                if sent.modulus != fresh.modulus:
                    raise ProtocolError("the primary's key changed while linking")
                own = [units[chosen] for chosen in records]
                parts = list(zip(sent.blocks, own, strict=True))
                wanted = sum(len(packed.packs) * len(keys) for packed, keys in parts)
                masked_blocks = masked_distances(parts, fresh.take(wanted, due=due), apply=apply)
                answer = EncryptedDistances(
                    blocks=[block_answers for block_answers, _ in masked_blocks],
                    modulus=sent.modulus,
                )
                channels.send(answer.to_message(), primary)
                return [words for _, words in masked_blocks]

            yield share


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
    together = 1
    for number in (number for row in rows for number in row):
        if not 0 < number < square:
            raise ProtocolError("received a ciphertext outside the range of the agreed key")
        together = together * number % modulus
    # Ciphertexts are units: one that shares a factor with n has no inverse, and encrypts nothing.
    if math.gcd(together, modulus) != 1:
        raise ProtocolError("received a ciphertext that shares a factor with the agreed key")
    return rows


def cipher_bytes(modulus: int) -> int:
    """Return how many bytes a ciphertext takes."""
    return -(-2 * modulus.bit_length() // 8)
