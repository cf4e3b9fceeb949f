import contextlib

import pytest
from helpers.frames import feed, frame_bytes, new_reader
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from securevfl.core.errors import ProtocolError
from securevfl.transport.message import DTYPES, Message, StarKind

arrays = st.sampled_from(DTYPES).flatmap(
    lambda dtype: hnp.arrays(dtype, hnp.array_shapes(min_dims=0, max_dims=4, min_side=0))
)
figures = st.dictionaries(
    st.text(max_size=5),
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.text(max_size=5),
    max_size=3,
)
messages = st.builds(
    Message,
    kind=st.sampled_from(StarKind),
    round_number=st.integers(0, 2**63),
    meta=figures,
    tensors=st.dictionaries(st.text(max_size=8), arrays, max_size=4),
)


@settings(max_examples=100, deadline=None)
@given(st.lists(messages, max_size=4), st.integers(1, 200))
def test_messages_arrive_as_they_were_sent_in_any_pieces(sent, chunk):
    """Whatever the kind, types, shapes and the sizes of the pieces, all of it comes back."""
    raw = b"".join(frame_bytes(message, sequence=i) for i, message in enumerate(sent))
    reader = new_reader()
    arrived = feed(reader, raw, chunk=chunk)
    assert len(arrived) == len(sent)
    for before, after in zip(sent, arrived, strict=True):
        assert (after.kind, after.round_number, after.meta) == (
            before.kind, before.round_number, before.meta,
        )  # fmt: skip
        assert after.sender == "rental"
        assert list(after.tensors) == list(before.tensors)
        for name, array in before.tensors.items():
            found = after.tensor(name, dtype=array.dtype, shape=array.shape, finite=False)
            assert found.tobytes() == array.tobytes()
            assert found.flags.writeable


@settings(max_examples=300, deadline=None)
@given(messages, st.data())
def test_altered_frames_are_refused_or_read_never_anything_else(message, data):
    """Whatever byte is changed, the reader refuses, waits for more or reads: it never crashes."""
    raw = bytearray(frame_bytes(message))
    for _ in range(data.draw(st.integers(1, 3))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(ProtocolError):
        feed(new_reader(), bytes(raw))


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=300))
def test_noise_is_refused(raw):
    """Bytes that begin otherwise than our frames are refused once a header's worth is there."""
    noise = b"\x00" + raw.ljust(60, b"\x00")
    with pytest.raises(ProtocolError):
        feed(new_reader(), noise)
