"""Messages as bytes: a fixed header, a short head that describes the body, the arrays raw.

Layout, all integers little-endian::

    header  magic 4 | version 1 | kind 1 | sender rank 2 | session 16 | sequence 8 | round 8
            | head length 4 | body length 8
    head    array count 2, then for each: name length 1, name, type code 1, dimensions 1,
            lengths 8 each; then JSON text of the figures to the end
    body    the arrays one after the other, each starting at a multiple of 16

A header is checked before its head is read, and a head before memory is allocated for its body. The
reader does no input or output: it provides the buffer for the next bytes, and takes small frames
out of one buffer.
"""

import json
import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, NoReturn

import numpy as np
import numpy.typing as npt

from securevfl.core.checks import strict_json
from securevfl.core.errors import ProtocolError
from securevfl.transport.message import DTYPES, Message, MessageKind, StarKind, kind_of

SESSION_BYTES: Final = 16
FRAME_VERSION: Final = 1

_MAGIC: Final = b"SVFL"
_HEADER: Final = struct.Struct("<4sBBH16sQQIQ")
_ARRAY_COUNT: Final = struct.Struct("<H")
# Vector instructions like aligned memory; numpy and torch need only the width of an element.
_ALIGNMENT: Final = 16
# Names and figures only: thousands of them fit, data does not.
_MAX_HEAD_BYTES: Final = 1 << 18
_MAX_ARRAYS: Final = 1024
_MAX_DIMENSIONS: Final = 8
# Most bytes of one TLS record.
RECORD_BYTES: Final = 1 << 14
# Python's memory for a message, and for a byte of its head (an empty list has two bytes and a
# comma, and takes 64; a named array without elements has five bytes, and takes 400).
_OBJECT_BYTES: Final = 1 << 10
_BYTES_PER_HEAD_BYTE: Final = 64
# Numbers, texts, and lists of them: deeper nesting could overflow the stack when printed.
_MAX_FIGURE_DEPTH: Final = 8
# Below this size, one buffer is cheaper than several writes, and sending need not wait.
SMALL_BODY_BYTES: Final = 1 << 16
_CODES: Final = {dtype: code for code, dtype in enumerate(DTYPES)}


@dataclass(frozen=True, slots=True, eq=False)
class EncodedMessage:
    """A message ready to be sent to any number of parties, except for the header."""

    kind: MessageKind
    round_number: int
    head: bytes
    body: Sequence[memoryview]
    """The arrays' own memory if they are large: it must not change until it has been sent."""
    body_bytes: int

    def frame(self, *, session: bytes, sender_rank: int, sequence: int) -> list[memoryview]:
        """Return the buffers to send, in order."""
        header = _HEADER.pack(
            _MAGIC,
            FRAME_VERSION,
            self.kind,
            sender_rank,
            session,
            sequence,
            self.round_number,
            len(self.head),
            self.body_bytes,
        )
        if self.borrows:
            return [memoryview(header + self.head), *self.body]
        return [memoryview(b"".join([header, self.head, *self.body]))]

    @property
    def borrows(self) -> bool:
        """Whether :attr:`body` is the memory of the sender's arrays."""
        return self.body_bytes >= SMALL_BODY_BYTES


def encode(message: Message) -> EncodedMessage:
    """Encode a message as bytes; large arrays are referenced, small ones copied.

    Raises:
        ProtocolError: If an array's type may not be sent, there are too many arrays, or the figures
            are too large.
    """
    if len(message.tensors) > _MAX_ARRAYS:
        raise ProtocolError(
            f"{message.kind.name}: has {len(message.tensors)} arrays; at most {_MAX_ARRAYS} "
            f"may be sent"
        )
    described = [_ARRAY_COUNT.pack(len(message.tensors))]
    body: list[memoryview] = []
    total = 0
    for name, array in message.tensors.items():
        code = _CODES.get(array.dtype.newbyteorder("<"))
        if code is None:
            raise ProtocolError(
                f"{message.kind.name}: {name} is {array.dtype}, which may not be sent; "
                f"allowed: {', '.join(str(dtype) for dtype in DTYPES)}"
            )
        raw = np.ascontiguousarray(array, dtype=DTYPES[code])
        encoded = name.encode()
        shape = struct.pack(f"<BB{array.ndim}Q", code, array.ndim, *array.shape)
        described.append(bytes([len(encoded)]) + encoded + shape)
        padding = -total % _ALIGNMENT
        if padding:
            body.append(memoryview(bytes(padding)))
        if raw.nbytes:
            body.append(raw.reshape(-1).data.cast("B"))
        total += padding + raw.nbytes
    figures = json.dumps(dict(message.meta), allow_nan=False, separators=(",", ":"))
    head = b"".join(described) + figures.encode()
    if len(head) > _MAX_HEAD_BYTES:
        raise ProtocolError(
            f"{message.kind.name}: its figures take {len(head)} bytes, over {_MAX_HEAD_BYTES}; "
            f"send arrays as tensors"
        )
    if total < SMALL_BODY_BYTES:
        body = [memoryview(b"".join(body))]
    return EncodedMessage(message.kind, message.round_number, head, body, total)


class _Header(NamedTuple):
    kind: MessageKind
    round_number: int
    head_bytes: int
    body_bytes: int


class _Slot(NamedTuple):
    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    start: int


class FrameReader:
    """Decodes the bytes of one connection into messages, and refuses invalid frames.

    Args:
        peer: The party at the other end, for errors.
        sender_rank: The rank that every frame must carry.
        session: The session id that every frame must carry; None reads it from the first frame,
            which must be SESSION.
        max_body_bytes: Most bytes of a body.

    Call :meth:`message` until it returns None; then write received bytes to :meth:`target` and call
    :meth:`advance`.
    """

    def __init__(
        self, *, peer: str, sender_rank: int, session: bytes | None, max_body_bytes: int
    ) -> None:
        self.peer = peer
        self.session = session
        self.max_body_bytes = max_body_bytes
        self._rank = sender_rank
        self._sequence = 0
        self._header: _Header | None = None
        self._slots: list[_Slot] | None = None
        self._meta: Mapping[str, Any] = {}
        self._body: npt.NDArray[np.uint8] = np.empty(0, dtype=np.uint8)
        self._rest = memoryview(bytearray(_HEADER.size))
        self._whole = self._rest
        self._buffer = memoryview(bytearray(RECORD_BYTES))
        self._staged = self._buffer[:0]

    @property
    def announced_bytes(self) -> int:
        """Announced size of the current frame's body; 0 between two frames."""
        return 0 if self._header is None else self._header.body_bytes

    @property
    def staged_bytes(self) -> int:
        """Received bytes that are not decoded yet."""
        return len(self._staged)

    def target(self) -> memoryview:
        """Return the buffer for the next received bytes; never empty."""
        return self._rest if self._fills_directly else self._buffer

    def advance(self, count: int) -> None:
        """Record that ``count`` bytes were written to :meth:`target`."""
        if self._fills_directly:
            self._rest = self._rest[count:]
        else:
            self._staged = self._buffer[:count]

    @property
    def _fills_directly(self) -> bool:
        return len(self._rest) >= len(self._buffer)

    def message(self) -> Message | None:
        """Return the next received message; None if more bytes are needed.

        Raises:
            ProtocolError: If the bytes are not the next frame of this session from this party.
        """
        while True:
            count = min(len(self._staged), len(self._rest))
            self._rest[:count] = self._staged[:count]
            self._rest, self._staged = self._rest[count:], self._staged[count:]
            if len(self._rest):
                return None
            if self._header is None:
                self._header = self._check_header(bytes(self._whole))
                self._expect(memoryview(bytearray(self._header.head_bytes)))
            elif self._slots is None:
                self._slots = self._check_head(self._header, bytes(self._whole))
                # Untouched memory costs nothing until bytes are written to it.
                self._body = np.empty(self._header.body_bytes, dtype=np.uint8)
                self._expect(self._body.data)
            else:
                message = self._assemble(self._header, self._slots)
                self._header = self._slots = None
                self._body = np.empty(0, dtype=np.uint8)
                self._expect(memoryview(bytearray(_HEADER.size)))
                return message

    def _expect(self, buffer: memoryview) -> None:
        self._whole = self._rest = buffer

    def _refuse(self, text: str) -> NoReturn:
        raise ProtocolError(f"{self.peer}: {text}")

    def _check_header(self, raw: bytes) -> _Header:
        magic, version, code, rank, session, sequence, round_number, head, body = _HEADER.unpack(
            raw
        )
        if magic != _MAGIC:
            self._refuse("sent bytes that are no securevfl message")
        if version != FRAME_VERSION:
            self._refuse(
                f"speaks protocol {version}, this party {FRAME_VERSION}; "
                f"install the same version of securevfl at all parties"
            )
        try:
            kind = kind_of(code)
        except ValueError:
            self._refuse(f"sent a message of unknown kind {code}")
        if self.session is None:
            # A party that is turned away gets the reason, without a session.
            if kind not in (StarKind.SESSION, StarKind.ABORT):
                self._refuse(f"began with {kind.name} where SESSION was due")
            self.session = session
        if session != self.session:
            self._refuse(f"sent {kind.name} of another session ({session.hex()[:8]}...)")
        if rank != self._rank:
            self._refuse(f"sent {kind.name} in the name of rank {rank}, but is rank {self._rank}")
        if sequence != self._sequence:
            self._refuse(
                f"sent {kind.name} as frame {sequence} where frame {self._sequence} was due: "
                f"a replayed or lost message"
            )
        if head > _MAX_HEAD_BYTES or head < _ARRAY_COUNT.size:
            self._refuse(f"sent {kind.name} with a head of {head} bytes; at most {_MAX_HEAD_BYTES}")
        if body > self.max_body_bytes:
            self._refuse(
                f"sent {kind.name} of {body} bytes; at most {self.max_body_bytes} are taken now "
                f"(runtime.largest_message_mib)"
            )
        self._sequence += 1
        return _Header(kind, round_number, head, body)

    def _check_head(self, header: _Header, head: bytes) -> list[_Slot]:
        try:
            slots, size, position = _read_slots(head)
            figures = strict_json(head[position:], depth=_MAX_FIGURE_DEPTH)
        except (ValueError, IndexError, struct.error):
            self._refuse(f"sent {header.kind.name} with a head that cannot be read")
        if not isinstance(figures, dict):
            self._refuse(f"sent {header.kind.name} whose figures are no JSON object")
        if size != header.body_bytes:
            self._refuse(
                f"sent {header.kind.name} with a body of {header.body_bytes} bytes, "
                f"but its arrays take {size}"
            )
        self._meta = figures
        return slots

    def _assemble(self, header: _Header, slots: list[_Slot]) -> Message:
        tensors: dict[str, npt.NDArray[Any]] = {}
        for name, dtype, shape, start in slots:
            count = math.prod(shape)
            raw = self._body[start : start + count * dtype.itemsize]
            if dtype.kind == "b" and count and raw.max() > 1:
                self._refuse(f"sent {header.kind.name} whose {name!r} is bool but not 0 or 1")
            try:
                tensors[name] = raw.view(dtype).reshape(shape)
            except ValueError:  # an empty array whose other lengths no array can have
                self._refuse(f"sent {header.kind.name} whose {name!r} has shape {list(shape)}")
        return Message(
            kind=header.kind,
            round_number=header.round_number,
            meta=self._meta,
            tensors=tensors,
            sender=self.peer,
            held_bytes=_OBJECT_BYTES + _BYTES_PER_HEAD_BYTE * header.head_bytes + header.body_bytes,
        )


def _read_slots(head: bytes) -> tuple[list[_Slot], int, int]:
    (count,) = _ARRAY_COUNT.unpack_from(head)
    if count > _MAX_ARRAYS:
        raise ValueError(f"{count} arrays")
    position = _ARRAY_COUNT.size
    slots: list[_Slot] = []
    total = 0
    for _ in range(count):
        length = head[position]
        name = head[position + 1 : position + 1 + length].decode()
        code, dimensions = head[position + 1 + length], head[position + 2 + length]
        if dimensions > _MAX_DIMENSIONS:
            raise ValueError(f"{dimensions} dimensions")
        position += 3 + length
        shape = struct.unpack_from(f"<{dimensions}Q", head, position)
        position += 8 * dimensions
        start = total + -total % _ALIGNMENT
        total = start + math.prod(shape) * DTYPES[code].itemsize
        slots.append(_Slot(name, DTYPES[code], shape, start))
    if len({slot.name for slot in slots}) != count:
        raise ValueError("two arrays of one name")
    return slots, total, position
