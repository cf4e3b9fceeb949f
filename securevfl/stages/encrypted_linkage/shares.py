"""Additive secret shares of squared distances, with masks of a dealer that sees nothing else.

The primary holds keys X, the secondary keys Y, a *dealer* makes masks before it sees anything, a
*coordinator* adds two shares of each squared distance. Dealer and coordinator must not be one
organisation, nor collude: both together know X and Y up to what distances reveal.

With A, B uniform and 2 A B^T = C_0 + C_1 split into two shares ([Beaver91], for matrices), and
D = X - A, E = Y - B exchanged between the data parties, all mod 2^64:

    2 X Y^T = (C_0 + 2 X E^T) + (C_1 + 2 D B^T)

so each data party computes one term without the other's keys, and with its own squared norms,
|x|^2 - (.) and |y|^2 - (.), one share of |x - y|^2. Twice the product is shared, as doubling a
share of it would leave the lowest bit unmasked, and with it the parity of a norm.

Every mask hides one matrix, once: a second linkage needs a new dealing.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import numpy as np
from jaxtyping import Int64, UInt64

from securevfl.core.errors import DataError
from securevfl.linkage.metrics.metric import LARGEST_UNIT
from securevfl.linkage.protections.protection import DataParty, HelperRole, LinkageHelper
from securevfl.stages.encrypted_linkage import blockwise
from securevfl.stages.encrypted_linkage.block_search import Shapes, cut, flat
from securevfl.stages.encrypted_linkage.blockwise import BlockKind, ShareWords
from securevfl.transport.message import DeclaredMessage, StarKind, TypedMessage, wire

_TWO: Final = np.uint64(2)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False, repr=False)
class Dealing:
    """What the dealer gives to one data party: its mask, and a share of twice the product."""

    mask: UInt64[np.ndarray, "own key_dim"]
    """A at the primary, B at the secondary."""

    product: UInt64[np.ndarray, "rows records"]
    """C_0 at the primary, C_1 at the secondary."""

    def __repr__(self) -> str:
        return f"Dealing({self.mask.shape}, {self.product.shape})"


def deal(rows: int, records: int, key_dim: int) -> tuple[Dealing, Dealing]:
    """Make the masks of one block of primary rows and all records.

    Returns:
        The primary's dealing and the secondary's.

    Reveals:
        To each data party: uniform numbers. The dealer learns nothing but the sizes, and must see
        no message of the protocol.
    """
    mine, theirs = _uniform(rows, key_dim), _uniform(records, key_dim)
    share = _uniform(rows, records)
    return (
        Dealing(mask=mine, product=share),
        Dealing(mask=theirs, product=_TWO * (mine @ theirs.T) - share),
    )


def masked_keys(
    units: Int64[np.ndarray, "own key_dim"], dealing: Dealing
) -> UInt64[np.ndarray, "own key_dim"]:
    """Return the party's keys under its mask, for the other data party.

    Raises:
        DataError: If the dealing is of another size, or keys are not quantised.

    Reveals:
        To the other data party: uniform numbers. It must not know the mask.
    """
    if units.shape != dealing.mask.shape:
        raise DataError(f"keys {units.shape} and their mask {dealing.mask.shape} differ in size")
    if units.size and not 0 <= units.min() <= units.max() <= LARGEST_UNIT:
        raise DataError(f"keys must be whole numbers of 0 to {LARGEST_UNIT}")
    return units.astype(np.uint64) - dealing.mask


def primary_share(
    units: Int64[np.ndarray, "rows key_dim"],
    dealing: Dealing,
    masked_records: UInt64[np.ndarray, "records key_dim"],
) -> UInt64[np.ndarray, "rows records"]:
    """Return the primary's share of all squared distances, for the coordinator.

    Reveals:
        To the coordinator, together with the secondary's share: all squared distances of quantised
        keys. Alone: uniform numbers, as C_0 masks it.
    """
    keys = units.astype(np.uint64)
    product = dealing.product + _TWO * (keys @ masked_records.T)
    return (keys * keys).sum(axis=1)[:, None] - product


def secondary_share(
    units: Int64[np.ndarray, "records key_dim"],
    dealing: Dealing,
    masked_rows: UInt64[np.ndarray, "rows key_dim"],
) -> UInt64[np.ndarray, "rows records"]:
    """Return the secondary's share of all squared distances, for the coordinator.

    Reveals:
        To the coordinator, together with the primary's share: all squared distances of quantised
        keys. Alone: uniform numbers, as C_1 masks it.
    """
    keys = units.astype(np.uint64)
    product = dealing.product + _TWO * (masked_rows @ dealing.mask.T)
    return (keys * keys).sum(axis=1)[None] - product


def _uniform(rows: int, columns: int) -> UInt64[np.ndarray, "rows columns"]:
    words = np.frombuffer(os.urandom(8 * rows * columns), dtype=np.uint64)
    return words.reshape(rows, columns)


# A dealer knows no table, so it goes by what it can hold: 1 GiB.
_MOST_DEALT: Final = 2**27


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class DealerTurn(DeclaredMessage):
    """Whose turn it is, and how many rows and records each of the next blocks has."""

    KIND = BlockKind.LINK_TURN
    WAY = "primary to dealer"
    COVERS: ClassVar = {"no record": "secondary", "record counts": "sizes lengths"}

    secondary: int = wire(among="ranks")
    """Rank of the secondary."""

    sizes: Int64[np.ndarray, "_blocks 2"]
    """Rows and records of each block (see :class:`.blocks.Shapes`)."""


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class Dealt(DeclaredMessage):
    """Uniformly random masks for the blocks of one exchange."""

    KIND = BlockKind.LINK_DEALING
    WAY = "dealer to a data party"
    COVERS: ClassVar = {"masks": "mask product", "record counts": "lengths"}

    mask: UInt64[np.ndarray, "count key_dim"] = wire(repr=False)
    """The party's masks, block after block."""

    product: UInt64[np.ndarray, " pairs"] = wire(repr=False)
    """Shares of twice the products of both masks, block after block."""

    @classmethod
    def of(cls, dealings: Sequence[Dealing]) -> "Dealt":
        """Put the dealings of an exchange's blocks together."""
        masks = np.concatenate([dealing.mask for dealing in dealings])
        return cls(mask=masks, product=flat([dealing.product for dealing in dealings]))


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class MaskedKeys(DeclaredMessage):
    """A party's keys of an exchange's blocks, masked."""

    KIND = BlockKind.LINK_MASKED
    WAY = "data party to data party"
    COVERS: ClassVar = {"masks": "keys", "record counts": "lengths"}

    keys: UInt64[np.ndarray, "count key_dim"]
    """Uniform numbers to a party that does not know the mask."""


class Shares(blockwise.Blockwise):
    """A dealer's masks hide the data parties' keys from one another."""

    name: ClassVar[str] = "shares"
    helpers: ClassVar[tuple[HelperRole, ...]] = ("coordinator", "dealer")
    learned: ClassVar[Mapping[str, str]] = {
        "primary": "uniformly random numbers, and how many records each secondary has",
        "secondary": "uniformly random numbers; for each primary row, which of its own records are "
        "nearest, in order and without distances",
        "coordinator": blockwise.COORDINATOR_LEARNS,
        "dealer": "how many rows and records there are",
    }
    messages: ClassVar[tuple[type[TypedMessage], ...]] = (
        *blockwise.BLOCK_MESSAGES,
        *(DealerTurn, Dealt, MaskedKeys),
    )

    @contextmanager
    def primary_shares(
        self, party: DataParty, units: blockwise.Units
    ) -> Iterator[blockwise.PrimaryShare]:
        """Ask the dealer for masks, and exchange masked keys with the secondary.

        Reveals:
            To the dealer: numbers of rows and records. To the secondary: masked keys.
        """
        roles = party.spec.roles

        def share(
            name: str, shapes: Shapes, rows: list[np.ndarray], tell: blockwise.Progress
        ) -> list[ShareWords]:
            turn = DealerTurn(secondary=roles.ranks[name], sizes=shapes.sizes)
            party.channels.send(turn.to_message(), roles.helpers["dealer"])
            mine = [units[chosen] for chosen in rows]
            words = [
                primary_share(*part)
                for part in _masked_both(party, name, mine, shapes, primary=True)
            ]
            tell(1, 1)
            return words

        yield share

    @contextmanager
    def secondary_shares(
        self, party: DataParty, units: blockwise.Units
    ) -> Iterator[blockwise.SecondaryShare]:
        """Exchange masked keys with the primary, under masks of the dealer.

        Reveals:
            To the primary: masked keys.
        """
        primary = party.spec.roles.primary

        def share(shapes: Shapes, records: list[np.ndarray], _due: int) -> list[ShareWords]:
            mine = [units[chosen] for chosen in records]
            parts = _masked_both(party, primary, mine, shapes, primary=False)
            return [secondary_share(*part) for part in parts]

        yield share

    def help_to_link(self, role: HelperRole, helper: LinkageHelper) -> Mapping[str, Any]:
        """Rank as the coordinator, or deal masks as the dealer; see :class:`Protection`.

        Reveals:
            By the coordinator: what :class:`Coordinated` says. By the dealer, to the primary and
            each secondary: uniformly random numbers.
        """
        return {"blocks": _deal(helper)} if role == "dealer" else super().help_to_link(role, helper)


def _masked_both(
    party: DataParty,
    peer: str,
    keys: Sequence[Int64[np.ndarray, "_ key_dim"]],
    shapes: Shapes,
    *,
    primary: bool,
) -> Iterator[tuple[np.ndarray, Dealing, np.ndarray]]:
    """Exchange masked keys of an exchange's blocks, and yield what each block's share is made of.

    Args:
        party: This party.
        peer: The other data party.
        keys: This party's keys, those of each block.
        shapes: How large the blocks are.
        primary: Whether this party is the primary; a secondary otherwise.

    Reveals:
        To the other data party: masked keys.
    """
    channels, key_dim = party.channels, keys[0].shape[1]
    own, others = shapes.rows, shapes.records
    if not primary:
        own, others = others, own
    dealt = Dealt.from_message(
        channels.receive(party.spec.roles.helpers["dealer"], BlockKind.LINK_DEALING),
        count=int(own.sum()),
        key_dim=key_dim,
        pairs=shapes.pairs,
    )
    dealings = [
        Dealing(mask=mask, product=product)
        for mask, product in zip(cut(dealt.mask, own), shapes.by_pairs(dealt.product), strict=True)
    ]
    masked = [masked_keys(*part) for part in zip(keys, dealings, strict=True)]
    channels.send(MaskedKeys(keys=np.concatenate(masked)).to_message(), peer)
    theirs = MaskedKeys.from_message(
        channels.receive(peer, BlockKind.LINK_MASKED), count=int(others.sum()), key_dim=key_dim
    ).keys
    return zip(keys, dealings, cut(theirs, others), strict=True)


def _deal(helper: LinkageHelper) -> int:
    """Deal masks until the primary says that linkage is done; return how many blocks there were."""
    channels, roles, blocks = helper.channels, helper.spec.roles, 0
    key_dim = len(helper.spec.keys.columns)
    while True:
        message = channels.receive(roles.primary, BlockKind.LINK_TURN, StarKind.DONE)
        if message.kind is StarKind.DONE:
            return blocks
        turn = DealerTurn.from_message(message, ranks=[roles.ranks[name] for name in roles.present])
        shapes = Shapes.of(turn.sizes, most_pairs=_MOST_DEALT, sender=roles.primary)
        dealt = [deal(rows, records, key_dim) for rows, records in shapes.sizes.tolist()]
        mine, theirs = zip(*dealt, strict=True)
        channels.send(Dealt.of(mine).to_message(), roles.primary)
        channels.send(Dealt.of(theirs).to_message(), roles.secondaries[turn.secondary - 1])
        blocks += len(dealt)
