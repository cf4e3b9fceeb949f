"""What one party can make another hold or do: bounded in bytes, frames and heartbeats."""

import socket
import threading
import time

import numpy as np
import pytest
from helpers.frames import SESSION, feed, frame_bytes, new_reader
from helpers.star import CALM, WAIT_S, Star, make_star, together

from securevfl.core.errors import ProtocolError
from securevfl.federation.messages import RoundKind
from securevfl.transport import framing
from securevfl.transport.connection import (
    TURN_FRAMES,
    Connection,
    Outgoing,
    TransportLimits,
    tls_context,
)
from securevfl.transport.framing import FrameReader, encode
from securevfl.transport.message import Failure, Message, Ping
from securevfl.transport.socket_loop import StarLoop

SHARE = RoundKind.SHARE
WORDS = 50_000  # 400 kB
# Far more than both ends' sockets hold.
MANY = 100
TIGHT = TransportLimits(silence_timeout_s=60.0, farewell_timeout_s=1.0, max_waiting_bytes=1 << 20)
# The bound, what one turn takes in beyond it, and one message.
MOST_HELD = (1 << 20) + (4 << 20) + (1 << 19)


@pytest.fixture(scope="module")
def star(tmp_path_factory):
    return make_star(tmp_path_factory.mktemp("star"))


def share(number: int, *, count: int = WORDS) -> Message:
    array = np.full(count, number, dtype=np.int64)
    return Message(kind=SHARE, round_number=number, tensors={"words": array})


def connection_of(end, peer: str) -> Connection:
    return end._loop.connections[peer]


def wait_until(end, what) -> None:
    with end._loop.changed:
        assert end._loop.changed.wait_for(what, timeout=WAIT_S), "it did not come to that"


def take(primary, name: str, number: int) -> Message:
    return primary.receive(name, SHARE, round_number=number, deadline_s=WAIT_S)


def test_what_nobody_asked_for_stays_at_its_sender(star) -> None:
    """40 MB are sent and few are held; another member is served, and in the end all arrive."""
    with star.joined(limits=TIGHT) as (primary, ends):
        for number in range(MANY):
            ends["rental"].send(share(number), owned=True)
        rental = connection_of(primary, "rental")
        wait_until(primary, lambda: rental.full or len(rental.incoming) == MANY)
        assert 0 < rental.waiting_bytes <= MOST_HELD
        at_rental = connection_of(ends["rental"], "agency")
        wait_until(ends["rental"], lambda: at_rental.peer_full)
        ends["bank"].send(share(7))
        assert take(primary, "bank", 7).tensors["words"][0] == 7
        for number in range(MANY):
            assert take(primary, "rental", number).tensors["words"][-1] == number
            assert rental.waiting_bytes <= MOST_HELD
        wait_until(ends["rental"], lambda: not at_rental.peer_full)
        assert primary.failure is None


def test_what_is_passed_on_counts_for_its_sender(star) -> None:
    """Who sends by way of the primary to a party that takes nothing in is held back itself."""
    with star.joined(limits=TIGHT) as (primary, ends):
        for number in range(MANY):
            ends["rental"].send(share(number), owned=True)
        rental, bank = connection_of(primary, "rental"), connection_of(primary, "bank")
        passed = 0

        def pass_on() -> None:
            nonlocal passed
            message = take(primary, "rental", passed)
            primary.relay("bank", message, received=message)
            passed += 1

        def held_back() -> bool:
            return rental.full and not rental.incoming

        while passed < MANY and not held_back():
            wait_until(primary, lambda: rental.incoming or held_back())
            if rental.incoming:
                pass_on()
        queued = sum(item.encoded.body_bytes for item in list(bank.outgoing))
        assert passed < MANY
        assert queued <= MOST_HELD
        for number in range(MANY):
            while number >= passed:
                pass_on()
            got = ends["bank"].receive(SHARE, round_number=number, deadline_s=WAIT_S)
            assert got.tensors["words"][0] == number


def test_a_turn_takes_a_bounded_number_of_frames(star, monkeypatch) -> None:
    """Small frames of one member wait for another's: at most two turns of them come before."""
    counts: list[tuple[str, int]] = []
    first, sent = threading.Event(), threading.Event()
    read = Connection.read

    def watched(self: Connection, now: float) -> list[Message]:
        if self.peer == "rental" and not first.is_set():
            first.set()
            assert sent.wait(WAIT_S)
        messages = read(self, now)
        counts.append((self.peer, len(messages)))
        return messages

    with star.joined(limits=CALM) as (primary, ends):
        monkeypatch.setattr(Connection, "read", watched)
        queue = connection_of(ends["rental"], "agency").outgoing
        queue.extend(Outgoing(encode(share(number, count=1))) for number in range(20 * TURN_FRAMES))
        last = queue[-1]
        ends["rental"]._loop.wake()
        # The primary's first look at them waits until all of them, and the bank's, are there.
        wait_until(ends["rental"], lambda: last.sent)
        item = Outgoing(encode(share(1, count=1)))
        connection_of(ends["bank"], "agency").outgoing.append(item)
        ends["bank"]._loop.wake()
        wait_until(ends["bank"], lambda: item.sent)
        sent.set()
        take(primary, "bank", 1)
        for number in range(20 * TURN_FRAMES):
            take(primary, "rental", number)
        monkeypatch.undo()
    assert max(count for _, count in counts) <= TURN_FRAMES
    bank = counts.index(("bank", 1))
    assert sum(count for peer, count in counts[:bank] if peer == "rental") <= 2 * TURN_FRAMES


def test_a_flood_of_heartbeats_names_who_sends_it(star) -> None:
    """A hundred early heartbeats disturb nobody; thousands end their sender, and all say so."""
    with star.joined(limits=CALM) as (primary, ends):
        flood = connection_of(ends["rental"], "agency").outgoing

        def ping(times: int) -> None:
            flood.extend(Outgoing(encode(Ping().to_message())) for _ in range(times))
            ends["rental"]._loop.wake()

        ping(100)
        for number in range(20):
            ends["bank"].send(share(number, count=1))
            take(primary, "bank", number)
            ends["rental"].send(share(number, count=1))
            take(primary, "rental", number)
        ping(3_000)
        with pytest.raises(ProtocolError, match=r"^rental: sent \d+ heartbeats in"):
            take(primary, "bank", 20)
        with pytest.raises(ProtocolError, match=r"^rental: sent \d+ heartbeats in"):
            ends["bank"].receive(SHARE, round_number=20, deadline_s=WAIT_S)


def test_more_arrays_than_a_message_may_have_are_refused(monkeypatch) -> None:
    """1,024 are taken; one more is neither sent nor taken."""

    def of(count: int) -> Message:
        empty = np.empty(0, dtype=np.uint8)
        return Message(kind=SHARE, tensors={f"{number}": empty for number in range(count)})

    (taken,) = feed(new_reader(), frame_bytes(of(1024)))
    assert len(taken.tensors) == 1024
    with pytest.raises(ProtocolError, match="has 1025 arrays; at most 1024"):
        encode(of(1025))
    with monkeypatch.context() as another:
        another.setattr(framing, "_MAX_ARRAYS", 2_000)
        raw = frame_bytes(of(1025))
    with pytest.raises(ProtocolError, match="rental: sent SHARE with a head that cannot be read"):
        feed(new_reader(), raw)


def test_a_reason_of_another_party_is_short() -> None:
    """What a party says of its own end fits on the screen, and no terminal obeys it."""
    meta = {"party": "rental", "reason": "\x1b[31m" + "x" * 5_000, "kind": "failed"}
    message = Message(kind=Failure.KIND, meta=meta, sender="rental")
    for relayed in (True, False):
        reason = Failure.from_message(message, relayed=relayed).reason
        assert len(reason) <= 400
        assert reason.isprintable()


class Alone:
    """One end of a connection in a loop whose clock is the test's own."""

    def __init__(self, star: Star, limits: TransportLimits) -> None:
        self.loop = StarLoop(own_name="agency", relays=True, limits=limits)
        server = tls_context(star.identity("agency"), ["rental"], server=True)
        client = tls_context(star.identity("rental"), ["agency"], server=False)
        plain = socket.socketpair()
        own, self.peer = together(
            [
                lambda: server.wrap_socket(plain[0], server_side=True),
                lambda: client.wrap_socket(plain[1]),
            ]
        )
        own.setblocking(False)
        self.connection = Connection(
            peer="rental",
            socket=own,
            reader=new_reader(),
            session=SESSION,
            own_rank=0,
            limits=limits,
        )
        self.loop.add(self.connection)
        self.began = time.monotonic()

    def at(self, second: float) -> Failure | None:
        """Let the loop look after its deadlines ``second`` seconds later."""
        now = self.began + second
        self.loop._last_turn = now
        self.loop._watch(now)
        return self.loop.failure

    def beat(self, second: float, *, full: bool) -> None:
        """The peer's heartbeat comes."""
        self.connection.last_heard = self.began + second
        self.connection.heard_ping(self.began + second, full=full)

    def close(self) -> None:
        self.peer.close()
        self.loop.close()


@pytest.fixture
def alone(star):
    limits = TransportLimits(silence_timeout_s=10.0, busy_timeout_s=100.0)
    end = Alone(star, limits)
    yield end
    end.close()


def test_a_full_peer_is_not_lost_but_not_for_ever(alone) -> None:
    """It takes nothing in for ``busy_timeout_s``, ten times the silence; then it is named."""
    alone.connection.outgoing.append(Outgoing(encode(share(1, count=1))))
    ended: list[int] = []
    for second in range(130):
        alone.beat(second, full=True)
        if alone.at(second) is not None:
            ended.append(second)
    assert ended
    assert 100 < ended[0] <= 112
    assert alone.loop.failure.party == "rental"
    assert "took in" in alone.loop.failure.reason


@pytest.mark.parametrize("every", [2, 7, 50])
def test_room_for_a_moment_gives_no_more_time(alone, every) -> None:
    """Its seconds without room are counted over the whole session, not from each word anew."""
    alone.connection.outgoing.append(Outgoing(encode(share(1, count=1))))
    ended: list[int] = []
    for second in range(300):
        alone.beat(second, full=second % every != 0)
        if alone.at(second) is not None:
            ended.append(second)
    assert ended
    # Every second one with room is none without: then it takes twice as long.
    assert 100 < ended[0] <= 112 * every / (every - 1) + 1
    assert alone.loop.failure.party == "rental"


def test_what_is_taken_in_gives_time_back(alone) -> None:
    """A party that computes for long between two large messages has as long for the next one."""
    alone.connection.outgoing.append(Outgoing(encode(share(1, count=1))))
    for second in range(500):
        alone.beat(second, full=True)
        if second % 90 == 89:  # 100 kB at 1,000 bytes a second are 100 s
            alone.connection.bytes_sent += 100_000
        assert alone.at(second) is None
    for second in range(500, 620):
        alone.beat(second, full=True)
        alone.at(second)
    assert alone.loop.failure is not None
    assert "took in" in alone.loop.failure.reason


def test_a_peer_that_is_not_full_takes_something_in(alone) -> None:
    """The usual limit holds again as soon as it says that it has room."""
    alone.connection.outgoing.append(Outgoing(encode(share(1, count=1))))
    for second in range(50):
        alone.beat(second, full=True)
        assert alone.at(second) is None
    for second in range(50, 62):
        alone.beat(second, full=False)
        alone.at(second)
    assert alone.loop.failure is not None
    assert alone.loop.failure.party == "rental"


def test_a_party_that_is_not_listened_to_is_not_lost(alone) -> None:
    """While too much of it waits here its silence is our doing, and heartbeats tell it so."""
    alone.connection.full = True
    for second in range(60):
        assert alone.at(second) is None
    reader = FrameReader(peer="agency", sender_rank=0, session=SESSION, max_body_bytes=1 << 20)
    said = feed(reader, alone.peer.recv(1 << 16))
    assert said
    assert all(Ping.from_message(message).full for message in said)


def test_a_message_in_tiny_pieces_is_refused(alone) -> None:
    """400 kB, a byte at a time, would keep the thread busy: it ends after some 4,500 pieces."""
    raw = frame_bytes(share(1))
    alone.peer.sendall(raw[:1_000])

    def rest_arrives() -> None:
        for place in range(1_000, 6_000):
            alone.peer.sendall(raw[place : place + 1])
            assert alone.connection.read(alone.began) == []

    with pytest.raises(ProtocolError, match="rental: sends a message in 4487 pieces"):
        rest_arrives()
