import struct
import tracemalloc

import numpy as np
import pytest
from helpers.frames import SESSION, feed, frame_bytes, new_reader

from securevfl.core.errors import ProtocolError
from securevfl.federation.messages import RoundKind
from securevfl.transport.framing import encode
from securevfl.transport.message import Message, StarKind

WORDS = Message(
    kind=RoundKind.SHARE, round_number=3, tensors={"words": np.arange(4, dtype=np.int64)}
)
# Offsets of the header's fields, from the table in the module's text.
VERSION, KIND, BODY_BYTES, HEAD = 4, 5, 44, 52


def altered(raw: bytes, at: int, new: bytes) -> bytes:
    return raw[:at] + new + raw[at + len(new) :]


def test_header_layout_is_the_documented_one():
    """Field by field, the bytes are those that the module's text promises."""
    raw = frame_bytes(WORDS, sequence=5)
    assert raw[:4] == b"SVFL"
    assert struct.unpack_from("<BBH", raw, 4) == (1, RoundKind.SHARE, 1)
    assert raw[8:24] == SESSION
    sequence, round_number, head, body = struct.unpack_from("<QQIQ", raw, 24)
    assert (sequence, round_number, body) == (5, 3, 32)
    assert len(raw) == HEAD + head + body
    assert raw[HEAD:-32] == (
        struct.pack("<H", 1) + b"\x05words" + struct.pack("<BBQ", 0, 1, 4) + b"{}"
    )
    assert raw[-32:] == np.arange(4, dtype="<i8").tobytes()


@pytest.mark.parametrize(
    ("raw", "text"),
    [
        (altered(frame_bytes(WORDS), 0, b"HTTP"), "no securevfl message"),
        (altered(frame_bytes(WORDS), VERSION, b"\x09"), "speaks protocol 9, this party 1"),
        (altered(frame_bytes(WORDS), KIND, b"\xfa"), "unknown kind 250"),
        (frame_bytes(WORDS, session=bytes(16)), "SHARE of another session"),
        (frame_bytes(WORDS, sender_rank=2), "in the name of rank 2, but is rank 1"),
        (frame_bytes(WORDS, sequence=1), "frame 1 where frame 0 was due"),
        (frame_bytes(WORDS) * 2, "frame 0 where frame 1 was due: a replayed or lost"),
        (altered(frame_bytes(WORDS), BODY_BYTES - 4, b"\xff\xff\xff\xff"), "a head of 4294967295"),
        (altered(frame_bytes(WORDS), BODY_BYTES - 4, bytes(4)), "a head of 0 bytes"),
        (altered(frame_bytes(WORDS), BODY_BYTES, b"\xff" * 8), "at most 1048576 are taken"),
        (altered(frame_bytes(WORDS), BODY_BYTES, b"\x21"), "of 33 bytes, but its arrays take 32"),
        (altered(frame_bytes(WORDS), HEAD, b"\x02"), "a head that cannot be read"),
        (altered(frame_bytes(WORDS), HEAD + 8, b"\x63"), "a head that cannot be read"),
        (altered(frame_bytes(WORDS), HEAD + 9, b"\x63"), "a head that cannot be read"),
        (altered(frame_bytes(WORDS), HEAD + 18, b"[]"), "figures are no JSON object"),
        (altered(frame_bytes(WORDS), HEAD + 18, b"{{"), "a head that cannot be read"),
    ],
)
def test_what_was_not_agreed_on_is_refused(raw, text):
    """Each altered field is refused with the sender's name and what was wrong."""
    with pytest.raises(ProtocolError, match=f"^rental: .*{text}"):
        feed(new_reader(), raw)


def test_a_session_is_learned_from_a_session_frame_only():
    """A secondary takes the session id from the first frame, which must be SESSION."""
    reader = new_reader(session=None)
    feed(reader, frame_bytes(Message(kind=StarKind.SESSION), session=b"s" * 16))
    assert reader.session == b"s" * 16
    with pytest.raises(ProtocolError, match="another session"):
        feed(reader, frame_bytes(WORDS, sequence=1))
    with pytest.raises(ProtocolError, match="began with SHARE where SESSION was due"):
        feed(new_reader(session=None), frame_bytes(WORDS))


def test_a_size_is_refused_before_memory_is_set_aside():
    """A frame that claims 2^60 bytes costs the receiver no more than its header."""
    raw = altered(frame_bytes(WORDS), BODY_BYTES, struct.pack("<Q", 1 << 60))
    tracemalloc.start()
    with pytest.raises(ProtocolError, match="at most"):
        feed(new_reader(), raw)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20


def test_a_shape_that_no_array_can_have_is_refused():
    """Lengths whose product is zero but that no array can have do not crash the reader."""
    head = struct.pack("<H", 1) + b"\x01x" + struct.pack("<BB3Q", 0, 3, 1 << 62, 1 << 62, 0) + b"{}"
    header = struct.pack("<4sBBH16sQQIQ", b"SVFL", 1, 10, 1, SESSION, 0, 0, len(head), 0)
    with pytest.raises(ProtocolError, match="rental: sent SHARE whose 'x' has shape"):
        feed(new_reader(), header + head)


def test_a_truth_value_is_zero_or_one():
    """A byte of 2 under the type bool would be both true and unequal to true."""
    raw = frame_bytes(Message(kind=RoundKind.PLAN, tensors={"mask": np.array([True, False])}))
    assert feed(new_reader(), raw)[0].tensors["mask"].tolist() == [True, False]
    with pytest.raises(ProtocolError, match="'mask' is bool but not 0 or 1"):
        feed(new_reader(), raw[:-1] + b"\x02")


@pytest.mark.parametrize("dtype", ["float16", "complex64", "object", "datetime64[s]", "U3", "u8"])
def test_only_six_types_travel(dtype):
    """Objects, texts and every type that the protocol does not know are refused when sent."""
    message = Message(kind=RoundKind.SHARE, tensors={"x": np.zeros(2, dtype=dtype)})
    with pytest.raises(ProtocolError, match=r"SHARE: x is .*, which may not be sent; allowed"):
        encode(message)


def test_figures_must_be_few_and_finite():
    """A table hidden in the figures, or a NaN among them, does not leave the party."""
    with pytest.raises(ProtocolError, match="send arrays as tensors"):
        encode(Message(kind=RoundKind.HELLO, meta={"column": list(range(100_000))}))
    with pytest.raises(ValueError, match="JSON"):
        encode(Message(kind=RoundKind.HELLO, meta={"loss": float("nan")}))


def test_large_arrays_are_sent_from_where_they_lie():
    """A large body refers to the array's own memory; a small one is a copy."""
    large = np.zeros(100_000, dtype=np.int64)
    small = np.zeros(10, dtype=np.int64)
    encoded = encode(Message(kind=RoundKind.SHARE, tensors={"words": large}))
    assert encoded.borrows
    assert np.shares_memory(np.frombuffer(encoded.body[0], dtype=np.int64), large)
    copied = encode(Message(kind=RoundKind.SHARE, tensors={"words": small}))
    assert not copied.borrows
    small[:] = 1
    assert not any(copied.body[0])


def test_foreign_byte_order_and_strides_are_made_plain():
    """Big-endian and non-contiguous arrays arrive as the same numbers."""
    swapped = np.arange(5).astype(">i4")
    strided = np.arange(10.0)[::2]
    message = Message(kind=RoundKind.MEAN, tensors={"a": swapped, "b": strided})
    arrived = feed(new_reader(), frame_bytes(message))[0]
    assert arrived.tensor("a", dtype="int32", shape=(5,)).tolist() == [0, 1, 2, 3, 4]
    assert arrived.tensor("b", dtype="float64", shape=(5,)).tolist() == [0, 2, 4, 6, 8]
