"""Targets of what comes off the wire: frames and every typed message."""

import struct
from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random
from typing import Any, Final, TypeVar

import numpy as np
import numpy.typing as npt
from helpers.frames import SESSION, feed, frame_bytes, new_reader
from helpers.fuzzing.messages import READS
from helpers.fuzzing.mutation import altered_tree, deepened, havoc
from helpers.fuzzing.target import Broken, Target

from securevfl.core.errors import ProtocolError
from securevfl.transport.framing import FrameReader, encode
from securevfl.transport.message import DTYPES, Message, StarKind

_R = TypeVar("_R")
_HEADER_BYTES: Final = 52
_KIND_AT: Final = 5
_LENGTHS_AT: Final = 40
_LENGTHS: Final = struct.Struct("<IQ")
_MOST_BODY: Final = 1 << 20
_MOST_HEAD: Final = 1 << 18
# A message is read off its line near the bottom of a thread, and looked into far above that.
_FRAMES_ABOVE: Final = 80

_EXAMPLE: Final = Message(
    kind=StarKind.SESSION,
    round_number=3,
    meta={"rank": 1, "name": "é", "share": 0.5, "list": [1, None, True], "more": {"a": {}}},
    tensors={
        "ids": np.arange(6).reshape(2, 3),
        "weights": np.zeros((2, 0, 3), dtype=np.float32),
        "flags": np.array([True, False]),
        "bytes": np.arange(5, dtype=np.uint8),
        "one": np.array(0.5),
    },
)


def _frame_seeds() -> list[bytes]:
    nothing = Message(kind=StarKind.LEAVE)
    whole = [frame_bytes(_EXAMPLE), frame_bytes(nothing, sequence=1)]
    return [b"\x00" + b"".join(whole), b"\x07" + whole[0]]


def _read_frames(data: bytes) -> None:
    """Read a stream in pieces of a length that its first byte gives; one in four learns a session.

    What a reader sets aside is looked at before a byte of it has come.
    """
    chunk = data[0] if data else 0
    reader = new_reader(session=None if chunk % 4 == 0 else SESSION)
    for message in _fed(reader, data[1:], chunk=chunk or 1 << 20):
        again = feed(_fresh(), frame_bytes(message))
        _require_same(message, again)


def _fed(reader: FrameReader, raw: bytes, *, chunk: int) -> list[Message]:
    messages = []
    while raw:
        room = len(reader.target())
        if not 0 < room <= max(_MOST_BODY, _MOST_HEAD):
            raise Broken(f"a reader set {room} bytes aside")
        count = min(room, chunk, len(raw))
        messages += feed(reader, raw[:count])
        raw = raw[count:]
    return messages


def _fresh() -> FrameReader:
    return FrameReader(
        peer="rental", sender_rank=1, session=SESSION, max_body_bytes=_MOST_BODY + _MOST_HEAD
    )


def _require_same(before: Message, found: Sequence[Message]) -> None:
    if len(found) != 1:
        raise Broken(f"{before!r} came back as {len(found)} messages")
    (after,) = found
    same = (
        (before.kind, before.round_number, list(before.tensors))
        == (after.kind, after.round_number, list(after.tensors))
        and before.meta == after.meta
        and all(
            array.dtype == after.tensors[name].dtype
            and array.shape == after.tensors[name].shape
            and array.tobytes() == after.tensors[name].tobytes()
            for name, array in before.tensors.items()
        )
    )
    if not same:
        raise Broken(f"{before!r} came back as {after!r}")


def _letter(index: int, message: Message, *, replaced: Callable[[str], str] = str) -> bytes:
    """Return a message as an input: which one, its head's length, head and body."""
    encoded = encode(message)
    head = replaced(encoded.head.decode("latin-1")).encode("latin-1")
    body = b"".join(encoded.body)
    return bytes([index]) + struct.pack("<I", len(head)) + head + body


def _message_seeds() -> list[bytes]:
    return [_letter(index, read.example.to_message()) for index, read in enumerate(READS)]


def _split(data: bytes) -> tuple[int, bytes, bytes]:
    index = data[0] % len(READS) if data else 0
    length = int.from_bytes(data[1:5], "little") % (_MOST_HEAD + 2)
    return index, data[5 : 5 + length], data[5 + length :]


def _arrived(data: bytes) -> tuple[int, Message]:
    """Return an input's message as a reader hands it out; its header fits it."""
    index, head, body = _split(data)
    empty = Message(kind=READS[index].example.KIND, round_number=7)
    header = bytearray(frame_bytes(empty)[:_HEADER_BYTES])
    _LENGTHS.pack_into(header, _LENGTHS_AT, len(head), len(body))
    found = feed(_fresh(), bytes(header) + head + body)
    if len(found) != 1:
        raise ProtocolError("rental: sent no whole message")
    return index, found[0]


def _read_message(data: bytes) -> None:
    index, message = _arrived(data)
    read = READS[index]
    cls = type(read.example)
    if not hasattr(cls, "from_message"):
        return

    def understood() -> None:
        first = cls.from_message(message, **read.knows)
        (sent,) = feed(_fresh(), frame_bytes(first.to_message()))
        second = cls.from_message(replace(sent, sender=message.sender), **read.knows)
        _require_same(first.to_message(), [second.to_message()])

    _above(_FRAMES_ABOVE, understood)


def _above(frames: int, call: Callable[[], _R]) -> _R:
    return call() if frames == 0 else _above(frames - 1, call)


def _altered_message(data: bytes, random: Random) -> bytes:
    try:
        index, message = _arrived(data)
    except ProtocolError:
        return random.choice(_message_seeds())
    tensors: dict[str, Any] = dict(message.tensors)
    meta: Any = dict(message.meta)
    if tensors and random.random() < 0.6:
        name = random.choice(list(tensors))
        array = tensors.pop(name)
        match random.randrange(8):
            case 0:
                tensors[random.choice(("", "x" * 200, "a\nb", "rows"))] = array
            case 1:
                pass
            case _:
                tensors[name] = _altered_array(array, random)
    else:
        meta = altered_tree(meta, random)
    if not isinstance(meta, dict):
        meta = {"meta": meta}
    if random.random() < 0.05:
        index = random.randrange(len(READS))
    altered = Message(
        kind=message.kind, round_number=message.round_number, meta=meta, tensors=tensors
    )
    try:
        return _letter(index, altered, replaced=deepened)
    except (ProtocolError, ValueError):  # what a sender of ours would not send
        return havoc(data, random)


def _altered_array(array: npt.NDArray[Any], random: Random) -> npt.NDArray[Any]:
    extremes = (0, 1, 2, -1, -2, 255, 2**31, 2**62, 2**63 - 1, -(2**63))
    match random.randrange(6):
        case 0:
            return array.astype(random.choice(DTYPES))
        case 1:
            return array.reshape(random.choice(((-1,), (-1, 1), (1, -1), array.shape[::-1])))
        case 2:
            return array[: random.randrange(len(array) + 1)] if array.ndim else array
        case 3 if array.ndim:
            return np.concatenate([array] * random.choice((2, 3)), axis=0)
        case _ if array.size:
            made = array.copy()
            value: Any = random.choice(extremes)
            if array.dtype.kind == "f":
                value = random.choice((np.nan, np.inf, -np.inf, 1e38, -1.0, 0.0, 1e-45))
            elif array.dtype.itemsize < 8:
                value = value % 2
            made.reshape(-1)[random.randrange(array.size)] = value
            return made
        case _:
            return np.zeros((0, 2**40) if random.random() < 0.5 else (3,), dtype=array.dtype)


WIRE: Final = (
    Target(
        name="frames",
        seeds=_frame_seeds,
        read=_read_frames,
        words=(b"SVFL", b'{"a":', b"[" * 600, b'"\\ud800"', b"1e999", b"\xff" * 8, SESSION),
        seconds=1.0,
        room=16 << 20,
    ),
    Target(
        name="messages",
        seeds=_message_seeds,
        read=_read_message,
        words=(b'"\\ud800"', b"1e999", b"\\n", b"\xff" * 8, b"[" * 950 + b"]" * 950),
        mutate=_altered_message,
        seconds=2.0,
        room=16 << 20,
    ),
)
