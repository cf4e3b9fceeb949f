"""Frames as bytes, and a reader to feed them to, for tests of the wire format."""

from securevfl.transport.framing import FrameReader, encode
from securevfl.transport.message import Message

SESSION = bytes(range(16))


def frame_bytes(
    message: Message, *, session: bytes = SESSION, sender_rank: int = 1, sequence: int = 0
) -> bytes:
    frame = encode(message).frame(session=session, sender_rank=sender_rank, sequence=sequence)
    return b"".join(frame)


def new_reader(*, session: bytes | None = SESSION) -> FrameReader:
    return FrameReader(peer="rental", sender_rank=1, session=session, max_body_bytes=1 << 20)


def feed(reader: FrameReader, raw: bytes, *, chunk: int = 1 << 30) -> list[Message]:
    """Hand bytes to a reader as a socket would, at most ``chunk`` at a time."""
    messages = []
    while True:
        while (message := reader.message()) is not None:
            messages.append(message)
        if not raw:
            return messages
        target = reader.target()
        count = min(len(target), len(raw), chunk)
        target[:count] = raw[:count]
        raw = raw[count:]
        reader.advance(count)
