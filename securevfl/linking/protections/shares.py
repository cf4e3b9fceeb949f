"""Additive secret shares of squared distances, with masks of a dealer that sees nothing else."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from jaxtyping import UInt64

from securevfl.core.errors import ProtocolError
from securevfl.linkage.on_cores import Progress
from securevfl.linkage.shared_distances import (
    Dealing,
    deal,
    masked_keys,
    primary_share,
    secondary_share,
)
from securevfl.linkage.spec import LinkRoles
from securevfl.linking.messages import LinkingKind
from securevfl.linking.protections.block_messages import RecordsBlock, ShareWords
from securevfl.linking.protections.blockwise import (
    BLOCK_MESSAGES,
    COORDINATOR_LEARNS,
    Blockwise,
    PrimaryShare,
    SecondaryShare,
    Units,
)
from securevfl.linking.protections.protection import DataParty, Helper, HelperRole
from securevfl.transport.message import Message, StarKind, TypedMessage


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class DealerTurn(TypedMessage):
    """Whose turn it is, and how many rows and records the next block has."""

    KIND = LinkingKind.LINK_TURN
    WAY = "primary to dealer"

    secondary: int
    """Its rank."""

    rows: int
    records: int

    def to_message(self) -> Message:
        """Return it as it is sent."""
        meta = {"secondary": self.secondary, "rows": self.rows, "records": self.records}
        return Message(kind=self.KIND, meta=meta)

    @classmethod
    def from_message(cls, message: Message, *, roles: LinkRoles) -> "DealerTurn":
        """Check a received one.

        Raises:
            ProtocolError: If it names nobody, or a figure is none.
        """
        rank, rows, records = (message.figure(n, int) for n in ("secondary", "rows", "records"))
        if rank not in [roles.ranks[name] for name in roles.present]:
            raise ProtocolError("the primary named a secondary that there is not")
        return cls(secondary=rank, rows=rows, records=records)


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class Dealt(TypedMessage):
    """Uniformly random masks for one block."""

    KIND = LinkingKind.LINK_DEALING
    WAY = "dealer to a data party"

    dealing: Dealing
    """The party's mask, and its share of twice the product of both masks."""

    def to_message(self) -> Message:
        """Return it as it is sent."""
        tensors = {
            "mask": self.dealing.mask.view(np.int64),
            "product": self.dealing.product.view(np.int64),
        }
        return Message(kind=self.KIND, tensors=tensors)

    @classmethod
    def from_message(
        cls, message: Message, *, own: tuple[int, int], rows: int, records: int
    ) -> "Dealt":
        """Check a received one.

        Args:
            message: What came.
            own: The shape of the party's own keys in the block.
            rows: Primary rows of the block.
            records: The secondary's records of the block.

        Raises:
            ProtocolError: If masks are not of the block's size.
        """
        mask = message.tensor("mask", dtype=np.int64, shape=own)
        product = message.tensor("product", dtype=np.int64, shape=(rows, records))
        return cls(dealing=Dealing(mask=mask.view(np.uint64), product=product.view(np.uint64)))


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class MaskedKeys(TypedMessage):
    """A party's keys of one block under a mask that the other does not know."""

    KIND = LinkingKind.LINK_MASKED
    WAY = "data party to data party"

    keys: UInt64[np.ndarray, "own key_dim"]
    """Uniform numbers to whoever does not know the mask."""

    def to_message(self) -> Message:
        """Return it as it is sent."""
        return Message(kind=self.KIND, tensors={"keys": self.keys.view(np.int64)})

    @classmethod
    def from_message(cls, message: Message, *, count: int, key_dim: int) -> "MaskedKeys":
        """Check received keys.

        Raises:
            ProtocolError: If they are not as many as the block has.
        """
        keys = message.tensor("keys", dtype=np.int64, shape=(count, key_dim))
        return cls(keys=keys.view(np.uint64))


class Shares(Blockwise):
    """A dealer's masks hide the data parties' keys from one another."""

    name: ClassVar[str] = "shares"
    helpers: ClassVar[tuple[HelperRole, ...]] = ("coordinator", "dealer")
    learned: ClassVar[Mapping[str, str]] = {
        "primary": "uniformly random numbers, and how many records each secondary has",
        "secondary": "uniformly random numbers; for each primary row, which of its own records are "
        "nearest, in order and without distances",
        "coordinator": COORDINATOR_LEARNS,
        "dealer": "how many rows and records there are",
    }
    messages: ClassVar[tuple[type[TypedMessage], ...]] = (
        *BLOCK_MESSAGES,
        *(DealerTurn, Dealt, MaskedKeys),
    )

    @contextmanager
    def primary_shares(self, party: DataParty, units: Units) -> Iterator[PrimaryShare]:
        """Ask the dealer for masks block by block, and exchange masked keys with the secondary.

        Reveals:
            To the dealer: numbers of rows and records. To the secondary: masked keys.
        """
        lines, roles = party.lines, party.spec.roles
        dealer, ranks, key_dim = roles.helpers["dealer"], roles.ranks, units.shape[1]

        def share(name: str, rows: np.ndarray, records: int, tell: Progress) -> ShareWords:
            mine = units[rows]
            turn = DealerTurn(secondary=ranks[name], rows=len(mine), records=records)
            lines.send(turn.to_message(), dealer)
            message = lines.receive(dealer, LinkingKind.LINK_DEALING)
            own = (len(mine), key_dim)
            dealt = Dealt.from_message(message, own=own, rows=len(mine), records=records).dealing
            lines.send(MaskedKeys(keys=masked_keys(mine, dealt)).to_message(), name)
            answer = lines.receive(name, LinkingKind.LINK_MASKED)
            theirs = MaskedKeys.from_message(answer, count=records, key_dim=key_dim).keys
            words = primary_share(mine, dealt, theirs)
            tell(1, 1, 0)
            return words

        yield share

    @contextmanager
    def secondary_shares(self, party: DataParty, units: Units) -> Iterator[SecondaryShare]:
        """Exchange masked keys with the primary, under masks of the dealer.

        Reveals:
            To the primary: masked keys.
        """
        lines, primary = party.lines, party.spec.roles.primary
        dealer, key_dim = party.spec.roles.helpers["dealer"], units.shape[1]

        def share(block: RecordsBlock) -> ShareWords:
            mine = units[block.records]
            message = lines.receive(dealer, LinkingKind.LINK_DEALING)
            own = (len(mine), key_dim)
            dealt = Dealt.from_message(message, own=own, rows=block.rows, records=len(mine)).dealing
            lines.send(MaskedKeys(keys=masked_keys(mine, dealt)).to_message(), primary)
            answer = lines.receive(primary, LinkingKind.LINK_MASKED)
            theirs = MaskedKeys.from_message(answer, count=block.rows, key_dim=key_dim).keys
            return secondary_share(mine, dealt, theirs)

        yield share

    def help_to_link(self, role: HelperRole, helper: Helper) -> Mapping[str, Any]:
        """Rank as the coordinator, or deal masks as the dealer; see :class:`Protection`.

        Reveals:
            By the coordinator: what :class:`Coordinated` says. By the dealer, to the primary and
            each secondary: uniformly random numbers.
        """
        return {"blocks": _deal(helper)} if role == "dealer" else super().help_to_link(role, helper)


def _deal(helper: Helper) -> int:
    """Deal masks until the primary says that linkage is done; return how many blocks there were."""
    lines, roles, blocks = helper.lines, helper.spec.roles, 0
    key_dim = len(helper.spec.keys.columns)
    while True:
        message = lines.receive(roles.primary, LinkingKind.LINK_TURN, StarKind.DONE)
        if message.kind is StarKind.DONE:
            return blocks
        turn = DealerTurn.from_message(message, roles=roles)
        mine, theirs = deal(turn.rows, turn.records, key_dim)
        lines.send(Dealt(dealing=mine).to_message(), roles.primary)
        lines.send(Dealt(dealing=theirs).to_message(), roles.secondaries[turn.secondary - 1])
        blocks += 1
