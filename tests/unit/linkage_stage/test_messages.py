"""What parties tell one another while linking: what was not agreed on is refused on reading."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from helpers.linking import hidden_spec

from securevfl.core.errors import ProtocolError
from securevfl.linkage.sampling import EligiblePairs
from securevfl.linkage.stage.linkage_parts import PROTECTIONS
from securevfl.linkage.stage.messages import LinkingKind, Lists, OwnSimilarities
from securevfl.stages.bloom.by_codes import Codes
from securevfl.stages.encrypted_linkage.block_search import Shapes, cut
from securevfl.stages.encrypted_linkage.blockwise import BlockKind, RecordBlocks, RowBlocks, Turn
from securevfl.stages.encrypted_linkage.homomorphic import PackedRows
from securevfl.stages.encrypted_linkage.paillier import EncryptedDistances, EncryptedRows
from securevfl.stages.encrypted_linkage.shares import DealerTurn
from securevfl.transport.message import Message, StarKind

SPEC = hidden_spec("shares")
CAPPED = hidden_spec("shares", links_per_record=2, sampling_rate=0.5)
MODULUS = 2**2047 + 1


def sizes(*blocks: tuple[int, int]) -> np.ndarray:
    return np.array(blocks, dtype=np.int64).reshape(-1, 2)


def similarities(value: float) -> Message:
    return OwnSimilarities(similarities=np.full((2, 4), value, dtype=np.float32)).to_message()


def read_similarities(message: Message, rows: int) -> OwnSimilarities:
    return OwnSimilarities.from_message(message, rows=rows, neighbours=4)


def read_records(message: Message) -> list[np.ndarray]:
    blocks = RecordBlocks.from_message(message, num_records=3)
    shapes = Shapes.of(blocks.sizes, most_pairs=9, sender=message.sender)
    return cut(blocks.records, shapes.records)


def read_rows_of_blocks(message: Message, num_rows: int) -> list[np.ndarray]:
    blocks = RowBlocks.from_message(message, num_rows=num_rows)
    shapes = Shapes.of(blocks.sizes, most_pairs=9, sender=message.sender, none_ends=True)
    return cut(blocks.rows, shapes.rows)


def read_turn(message: Message) -> Shapes:
    turn = DealerTurn.from_message(message, ranks=[1, 2])
    return Shapes.of(turn.sizes, most_pairs=2**27, sender=message.sender)


def pairs(starts: list[int], records: list[int]) -> Message:
    made = EligiblePairs(
        starts=np.array(starts), records=np.array(records), distances=np.zeros(len(records))
    )
    return Lists(candidates=made, apart=False, most=18).to_message()


def rows(modulus: int, packs: tuple[tuple[int, ...], ...]) -> Message:
    packed = PackedRows(modulus=modulus, rows=5, packs=packs)
    return EncryptedRows(blocks=[packed]).to_message()


def read_rows(message: Message) -> EncryptedRows:
    return EncryptedRows.from_message(message, rows=[5], key_dim=2, key_bits=2048)


REFUSED: dict[str, tuple[Callable[[Message], Any], Message, str]] = {
    "an infinite similarity": (
        lambda message: read_similarities(message, rows=2),
        similarities(np.inf),
        "infinite",
    ),
    "similarities of other rows": (
        lambda message: read_similarities(message, rows=3),
        similarities(0.0),
        r"shape \[3, 4\]",
    ),
    "pairs that do not add up": (
        lambda message: Lists.from_message(message, spec=CAPPED, rows=2, records=9),
        pairs([0, 2, 1], [3]),
        "do not add up",
    ),
    "a record that does not exist": (
        lambda message: Lists.from_message(message, spec=CAPPED, rows=2, records=9),
        pairs([0, 1, 2], [3, 9]),
        "does not exist",
    ),
    "fewer pairs than hide how many there are": (
        lambda message: Lists.from_message(message, spec=CAPPED, rows=2, records=10),
        pairs([0, 1, 2], [3, 8]),
        r"shape \[20\]",
    ),
    "a block's record that there is not": (
        read_records,
        RecordBlocks(records=np.array([0, 3]), sizes=sizes((1, 2)), due=0).to_message(),
        "records must lie in 0 to 2, got 0 to 3",
    ),
    "fewer records than blocks have": (
        read_records,
        RecordBlocks(records=np.array([0]), sizes=sizes((1, 1), (1, 1)), due=0).to_message(),
        "have 2 rows or records in all, but 1 came",
    ),
    "an empty block": (
        lambda message: read_rows_of_blocks(message, 3),
        RowBlocks(rows=np.array([1]), sizes=sizes((1, 2), (0, 2)), done=0, of=0).to_message(),
        "someone: named no blocks, empty ones",
    ),
    "a block of fewer than no rows": (
        lambda message: read_rows_of_blocks(message, 3),
        RowBlocks(rows=np.array([1]), sizes=sizes((2, 2), (-1, 2)), done=0, of=0).to_message(),
        "empty ones",
    ),
    "no block of records": (
        read_records,
        RecordBlocks(records=np.arange(0), sizes=sizes(), due=0).to_message(),
        "named no blocks",
    ),
    "more pairs than may be compared at once": (
        lambda message: read_rows_of_blocks(message, 9),
        RowBlocks(rows=np.arange(4), sizes=sizes((2, 3), (2, 2)), done=0, of=0).to_message(),
        "more than 9 pairs",
    ),
    "pairs that do not fit into 64 bits": (
        read_turn,
        DealerTurn(secondary=1, sizes=sizes((2**33, 2**31))).to_message(),
        f"more than {2**27} pairs",
    ),
    "a dealer's turn without blocks": (
        read_turn,
        DealerTurn(secondary=1, sizes=sizes()).to_message(),
        "named no blocks",
    ),
    "fewer records than K": (
        lambda message: Turn.from_message(message, name="bank", neighbours=4),
        Turn(records=3, tags=("a", "b")).to_message(),
        "bank: has 3 records, fewer than model.neighbours",
    ),
    "a tag too many": (
        lambda message: Turn.from_message(message, name="bank", neighbours=4),
        Message(kind=BlockKind.LINK_TURN, meta={"records": 9, "tags": ["a", "b", "c"]}),
        "3 tags",
    ),
    "codes of another length": (
        lambda message: Codes.from_message(message, code_bytes=8),
        Codes(codes=np.zeros((2, 9), dtype=np.uint8), check="x").to_message(),
        r"shape \[any, 8\]",
    ),
    "a dealer's turn of the primary itself": (
        read_turn,
        DealerTurn(secondary=0, sizes=sizes((1, 1))).to_message(),
        "secondary = 0 is not due",
    ),
    "a dealer's turn of a third party": (
        read_turn,
        DealerTurn(secondary=3, sizes=sizes((1, 1))).to_message(),
        "secondary = 3 is not due",
    ),
    "an even modulus": (read_rows, rows(MODULUS - 1, ((7, 7),)), "agreed 2048 bits"),
    "more ciphertexts than rows": (read_rows, rows(MODULUS, ((7, 7), (7, 7))), "rows that are due"),
    "a ciphertext of nothing": (
        read_rows,
        rows(MODULUS, ((7, 0),)),
        "the range of the agreed",
    ),
    "a ciphertext of no unit": (read_rows, rows(MODULUS, ((7, MODULUS),)), "shares a factor"),
    "an answer too few": (
        lambda message: EncryptedDistances.from_message(
            message, packs=[1, 1], records=[1, 1], modulus=MODULUS
        ),
        EncryptedDistances(blocks=[[[7]]], modulus=MODULUS).to_message(),
        r"shape \[2, 512\]",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_was_not_agreed_on_is_refused(case: str) -> None:
    """Where it is read, before anything is made of it."""
    read, message, words = REFUSED[case]
    with pytest.raises(ProtocolError, match=words):
        read(replace(message, sender="someone"))


def test_lines_let_in_what_a_protection_says() -> None:
    """Without a third party nothing is relayed, and nobody may send shares or ciphertexts."""
    assert set(PROTECTIONS["none"].kinds) == {
        LinkingKind.LINK_KEYS,
        LinkingKind.LINKED,
        LinkingKind.LINKED_ROWS,
    }
    assert StarKind.SEALED in PROTECTIONS["bloom"].kinds
    assert BlockKind.LINK_SHARE not in PROTECTIONS["bloom"].kinds
    assert BlockKind.LINK_CIPHERS not in PROTECTIONS["shares"].kinds
