"""What somebody on the network can do: read nothing, alter nothing, repeat nothing."""

from contextlib import contextmanager, suppress

import numpy as np
import pytest
from helpers.proxy import in_the_middle
from helpers.star import CALM, WAIT_S, make_star, together

from securevfl.core.errors import PartyFailedError, ProtocolError
from securevfl.federation.messages import RoundKind
from securevfl.transport.message import Message

SHARE = RoundKind.SHARE
RANKS = {"agency": 0, "rental": 1}
WORDS = np.frombuffer(b"a secret" * 5_000, dtype=np.int64)


@pytest.fixture(scope="module")
def star(tmp_path_factory):
    return make_star(tmp_path_factory.mktemp("pair"), RANKS)


@contextmanager
def tapped(star):
    """A primary and a secondary that reaches it through somebody else's machine."""
    primary = star.primary(limits=CALM)
    with in_the_middle(primary.listen()) as (middle, address):
        rental = star.secondary("rental", address, limits=CALM)
        rental.connect(WAIT_S)
        primary.wait_for_parties(WAIT_S)
        try:
            yield middle, primary, rental
        finally:
            together([primary.close, rental.close])


def share(round_number: int) -> Message:
    return Message(kind=SHARE, round_number=round_number, tensors={"words": WORDS})


def test_an_eavesdropper_reads_nothing(star):
    """All bytes went past the listener; neither values nor names nor headers are among them."""
    with tapped(star) as (middle, primary, rental):
        rental.send(share(1))
        primary.receive("rental", SHARE, round_number=1, deadline_s=WAIT_S)
        assert len(middle.seen) > WORDS.nbytes
        for plain in (b"a secret", b"words", b"SVFL", b"rental", b"agency"):
            assert plain not in middle.seen


def take_rounds(primary, numbers) -> None:
    for number in numbers:
        primary.receive("rental", SHARE, round_number=number, deadline_s=WAIT_S)


def flip_a_bit(raw: bytes) -> bytes:
    return raw[:-1] + bytes([raw[-1] ^ 1])


def repeat(raw: bytes) -> bytes:
    return raw + raw


@pytest.mark.parametrize("alter", [flip_a_bit, repeat])
def test_altered_or_repeated_bytes_end_the_federation(star, alter):
    """One changed bit, or recorded bytes sent again, and nothing of it is taken as a message."""
    with tapped(star) as (middle, primary, rental):
        rental.send(share(1))
        primary.receive("rental", SHARE, round_number=1, deadline_s=WAIT_S)
        middle.alter = alter
        rental.send(Message(kind=SHARE, round_number=2), owned=True)
        # Whoever is slow hears of the broken line before its second message is on its way.
        with suppress(ProtocolError):
            rental.send(Message(kind=SHARE, round_number=3), owned=True)
        with pytest.raises(PartyFailedError, match="rental: its connection broke"):
            take_rounds(primary, (2, 3, 4))


def test_a_cut_line_is_noticed(star):
    """Bytes that stop in the middle of a message are no message."""
    with tapped(star) as (middle, primary, rental):

        def half(raw: bytes) -> bytes:
            middle.cut = True
            return raw[: len(raw) // 2]

        middle.alter = half
        rental.send(share(1), owned=True)
        with pytest.raises(PartyFailedError, match="rental: its connection closed"):
            primary.receive("rental", SHARE, round_number=1, deadline_s=WAIT_S)
