"""Typed messages between parties: a kind, a round number, a few figures and named arrays.

A message can hold nothing but JSON figures and arrays of six number types. It is never an
object: nothing that arrives is ever executed, imported or unpickled.
"""

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from securevfl.core.errors import ProtocolError

# The position of a type in this tuple is its code on the wire: append, never reorder.
DTYPES: Final = tuple(np.dtype(name) for name in ("<i8", "<i4", "u1", "<f4", "<f8", "?"))


class MessageKind(enum.IntEnum):
    """What a message is for, and what it tells to whom. Codes are never reused."""

    SESSION = 1
    """Primary to a secondary, the first frame of a connection: session id and rank. Public."""

    PING = 2
    """Either way, from the input and output thread: "I am alive". Tells nothing else."""

    ABORT = 3
    """Either way: who failed and why, relayed to everybody. Never holds data."""

    LEAVE = 4
    """Either way: the sender is done; the connection closes after it."""

    HELLO = 5
    """Secondary to primary: protocol version, digest of the federation file, its signed public key
    of the session, and the epochs that it could resume."""

    WELCOME = 6
    """Primary to every secondary: all have joined; their signed public keys of the session, and
    how many rows there are for training, validation and test."""

    LINK_KEYS = 7
    """Primary to every secondary: its key columns with their mean and deviation, as the linkage
    protection ``none`` allows."""

    LINKED = 8
    """Secondary to primary: linkage is done; for families that read them, noised similarities of
    every row's links, in falling order and without record numbers."""

    PLAN = 9
    """Primary to every active secondary: row ids of a round, who is active and what it is for."""

    SHARE = 10
    """Active secondary to primary: its masked words; only the sum over all can be read."""

    GRADIENT = 11
    """Primary to every active secondary: one gradient for all, from which labels may leak."""

    AVERAGE = 12
    """Primary to every secondary: send your positional encodings' words. Tells nothing else."""

    MEAN = 13
    """Primary to every secondary: mean parameters."""

    EPOCH = 14
    """Primary to every secondary: an epoch has ended, and whether it was the best."""

    DONE = 15
    """Primary to every secondary: the run is over. Tells nothing else."""

    READY = 16
    """Secondary to primary: its table and its budget have room for the run. Tells nothing else."""

    SEALED = 20
    """Between two callers, through the primary: a message under a key that the primary does not
    have. Tells the primary its size."""

    LINK_CODES = 21
    """Data party to coordinator: Bloom-filter codes of its keys under the linkage secret, and a
    value that tells whether two secrets are equal."""

    LINK_TURN = 22
    """Whose turn in a protected linkage: numbers of rows and records. Tells nothing else."""

    LINK_DEALING = 23
    """Dealer to a data party: uniformly random masks for one block."""

    LINK_MASKED = 24
    """Data party to data party: its keys under a mask that the other does not know."""

    LINK_SHARE = 25
    """Data party to coordinator: its share of one block's squared distances."""

    LINK_CIPHERS = 26
    """Primary to a secondary: its keys, encrypted; back: masked distances, encrypted."""

    LINK_LISTS = 27
    """Coordinator to a secondary: for each primary row, record numbers in order of distance."""

    SIMILARITIES = 28
    """Coordinator to primary: one secondary's noised similarities in falling order, without
    record numbers."""

    LINK_CELLS = 29
    """Primary to a secondary: a random shift of the grid. Data party to coordinator: the grid cell
    of each of its keys, shifted. Only where ``linkage.cell`` says so."""

    LINK_BLOCK = 30
    """Coordinator to primary: numbers of its rows to compare next, with how many records. To a
    secondary: numbers of its records to compare next, with how many rows. Without
    ``linkage.cell`` it tells nothing but sizes."""

    PRETRAIN = 32
    """Primary to every secondary: an iteration of pretraining begins; which of its rows are held
    out for validation and testing."""

    CROSS = 33
    """Primary to every secondary: row ids of a batch and the primary's projections of them, with
    the noise that ``pretraining.primary_sends`` asks for."""

    PROJECTIONS = 34
    """Secondary to primary, in a plain exchange alone: its projections of the batch in clear. (In
    an averaged one it sends a SHARE.)"""

    LOCAL = 35
    """Primary to every secondary: learn from your own records. Tells nothing else."""

    TOPS = 36
    """Primary to every secondary: send your local top encoder's words. Tells nothing else."""

    PRETRAINED = 37
    """Primary to every secondary: so many iterations are done, and whether it was the last."""


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class Message:
    """One message. The arrays of a received message are the receiver's own, and writable."""

    kind: MessageKind
    """What it is for."""

    round_number: int = 0
    """The round that it belongs to; 0 outside of rounds."""

    meta: Mapping[str, Any] = field(default_factory=dict)
    """A few figures and words, as JSON knows them."""

    tensors: Mapping[str, npt.NDArray[Any]] = field(default_factory=dict)
    """Arrays by name; int64, int32, uint8, float32, float64 or bool."""

    sender: str = ""
    """The party that it came from; set by the transport when it is received."""

    def __repr__(self) -> str:
        """Sizes only: what is inside is nobody's business in a log."""
        shapes = ", ".join(
            f"{name} {array.dtype}{list(array.shape)}" for name, array in self.tensors.items()
        )
        origin = f" from {self.sender}" if self.sender else ""
        return f"<{self.kind.name} round {self.round_number}{origin}: {shapes or 'no arrays'}>"

    def tensor(
        self,
        name: str,
        *,
        dtype: npt.DTypeLike,
        shape: tuple[int | None, ...],
        finite: bool = True,
    ) -> npt.NDArray[Any]:
        """Return the array ``name`` if it is exactly what was agreed on.

        Args:
            name: Which array.
            dtype: Its type.
            shape: Its shape; None stands for any length.
            finite: Whether NaN and infinity are refused.

        Raises:
            ProtocolError: Naming the sender, what was wanted and what came.
        """
        wanted = np.dtype(dtype)
        found = self.tensors.get(name)
        place = f"{self.sender or 'sender'}: {self.kind.name} of round {self.round_number}"
        if found is None:
            raise ProtocolError(f"{place}: has no array {name!r}, only {sorted(self.tensors)}")
        if found.dtype != wanted:
            raise ProtocolError(f"{place}: {name} must be {wanted}, got {found.dtype}")
        fits = len(shape) == found.ndim and all(
            want is None or want == length for want, length in zip(shape, found.shape, strict=True)
        )
        if not fits:
            sizes = ", ".join("any" if length is None else str(length) for length in shape)
            raise ProtocolError(
                f"{place}: {name} must have shape [{sizes}], got {list(found.shape)}"
            )
        if finite and wanted.kind == "f" and not np.isfinite(found).all():
            raise ProtocolError(f"{place}: {name} holds a value that is NaN or infinite")
        return found

    def figure(self, name: str, kind: type[Any]) -> Any:
        """Return the figure ``name`` of :attr:`meta` if it is of the type ``kind``.

        Raises:
            ProtocolError: Naming the sender, what was wanted and what came.
        """
        place = f"{self.sender or 'sender'}: {self.kind.name} of round {self.round_number}"
        value = self.meta.get(name)
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise ProtocolError(f"{place}: {name} must be {kind.__name__}, got {value!r:.80}")
        return value
