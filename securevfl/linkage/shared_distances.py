"""Squared distances from additive secret shares mod 2^64, with multiplication triples of a dealer.

Four roles: the primary holds keys X, the secondary keys Y, a *dealer* makes masks before it sees
anything, a *coordinator* adds two shares of each squared distance. Dealer and coordinator must not
be one organisation, nor collude: both together know X and Y up to what distances tell.

With A, B uniform and 2 A B^T = C_0 + C_1 split into two shares ([Beaver91], for matrices), and
D = X - A, E = Y - B exchanged between the data parties, all mod 2^64:

    2 X Y^T = (C_0 + 2 X E^T) + (C_1 + 2 D B^T)

so each data party computes one term without the other's keys, and with its own squared norms,
|x|^2 - (.) and |y|^2 - (.), one share of |x - y|^2. Twice the product is shared, as doubling a
share of it would leave the lowest bit unmasked, and with it the parity of a norm.

Every mask hides one matrix, once: a second linkage needs a new dealing.
"""

import os
from dataclasses import dataclass
from typing import Final

import numpy as np
from jaxtyping import Int64, UInt64

from securevfl.core.errors import DataError
from securevfl.linkage.links import LinkTable
from securevfl.linkage.quantised import LARGEST_UNIT
from securevfl.linkage.topk import nearest_in_block

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


def links_from_shares(
    primary: UInt64[np.ndarray, "rows records"],
    secondary: UInt64[np.ndarray, "rows records"],
    k: int,
    *,
    key_dim: int,
    step: float,
) -> LinkTable:
    """Add two shares and link, as the coordinator does.

    Args:
        primary: From :func:`primary_share`.
        secondary: From :func:`secondary_share`.
        k: Links a row.
        key_dim: Dimensions of the keys, which bound the largest distance.
        step: Width of a unit, to bring distances back to the keys' unit.

    Returns:
        The links of :func:`~securevfl.linkage.metrics.euclidean.nearest_records` on quantised keys.

    Raises:
        DataError: If a sum is no squared distance: the shares do not belong together.

    Reveals:
        The coordinator learns every pairwise distance, hence both parties' keys up to rotation,
        reflection and shift, and all of them if it knows a few. It learns no features.
    """
    squared = primary + secondary
    largest = key_dim * LARGEST_UNIT**2
    if squared.size and int(squared.max()) > largest:
        raise DataError("shares of distances: do not belong together; deal anew and link again")
    near = nearest_in_block(squared, k)
    distances = np.where(near.present, np.sqrt(near.distances) * step, np.inf)
    return LinkTable(indices=near.indices, distances=distances)


def _uniform(rows: int, columns: int) -> UInt64[np.ndarray, "rows columns"]:
    words = np.frombuffer(os.urandom(8 * rows * columns), dtype=np.uint64)
    return words.reshape(rows, columns)
