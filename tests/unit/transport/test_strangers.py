"""Whatever a stranger does at the primary's port, the federation behind it goes on."""

import contextlib
import socket
import ssl
import struct
import threading

import numpy as np
import pytest
from helpers.patience import SOON_S
from helpers.star import CALM, WAIT_S, make_star, together

from securevfl.federation.messages import RoundKind
from securevfl.transport.message import Message

RESET = struct.pack("ii", 1, 0)  # SO_LINGER: closing sends a reset
# The first bytes of a handshake that is never finished: a record of 200 bytes is announced.
HALF_A_HELLO = b"\x16\x03\x01\x00\xc8\x01\x00\x00\xc4\x03\x03" + bytes(20)
GARBAGE = bytes(range(256)) * 8


@pytest.fixture(scope="module")
def star(tmp_path_factory):
    return make_star(tmp_path_factory.mktemp("star"))


def call(address, *, source: str = "127.0.0.1") -> socket.socket:
    return socket.create_connection(address, timeout=WAIT_S, source_address=(source, 0))


def reset(address) -> None:
    with call(address) as stranger:
        stranger.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)


def hang_up(address) -> None:
    call(address).close()


def shout_and_reset(address) -> None:
    with call(address) as stranger:
        stranger.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        with contextlib.suppress(ConnectionError):
            stranger.sendall(GARBAGE)


def begin_and_hang_up(address) -> None:
    with call(address) as stranger:
        stranger.sendall(HALF_A_HELLO)


def come_without_certificate(address) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    with contextlib.suppress(OSError), context.wrap_socket(call(address)) as stranger:
        stranger.recv(1)


def exchange(primary, ends, *, number: int) -> None:
    """One round: everybody's words arrive."""
    for name, end in ends.items():
        words = np.full(1_000, number, dtype=np.int64)
        end.send(Message(kind=RoundKind.SHARE, round_number=number, tensors={"words": words}))
        got = primary.receive(name, RoundKind.SHARE, round_number=number, deadline_s=WAIT_S)
        assert got.tensor("words", dtype="int64", shape=(1_000,)).tolist() == words.tolist()


def join_all(star, primary, address):
    ends = {name: star.secondary(name, address, limits=CALM) for name in ("rental", "bank")}
    outcomes = together([lambda end=end: end.connect(WAIT_S) for end in ends.values()])
    assert outcomes == [None, None]
    primary.wait_for_parties(WAIT_S)
    return ends


@pytest.mark.parametrize(
    ("nuisance", "times"),
    [
        (reset, 2_000),
        (hang_up, 200),
        (shout_and_reset, 200),
        (begin_and_hang_up, 200),
        (come_without_certificate, 40),
    ],
)
def test_a_stranger_ends_nothing(star, nuisance, times):
    """Before the parties join, and again while they exchange rounds."""
    primary = star.primary(limits=CALM)
    address = primary.listen()
    for _ in range(times // 2):
        nuisance(address)
    ends = join_all(star, primary, address)
    exchange(primary, ends, number=1)
    for _ in range(times // 2):
        nuisance(address)
    exchange(primary, ends, number=2)
    assert primary.failure is None
    together([primary.close, *(end.close for end in ends.values())])


@pytest.mark.parametrize("opening", [b"", HALF_A_HELLO], ids=["silent", "half a handshake"])
def test_a_crowd_at_the_port_shuts_no_party_out(star, opening):
    """Sixty-six callers hold what they hold; both parties join, from the same address."""
    primary = star.primary(limits=CALM)
    address = primary.listen()
    crowd = [call(address) for _ in range(66)]
    for stranger in crowd:
        with contextlib.suppress(ConnectionError):
            stranger.sendall(opening)
    ends = join_all(star, primary, address)
    exchange(primary, ends, number=1)
    for stranger in crowd:
        stranger.close()
    together([primary.close, *(end.close for end in ends.values())])


def test_one_address_takes_no_place_of_another(star):
    """A crowd makes room among its own: the caller of another address is not sent away."""
    primary = star.primary(limits=CALM)
    address = primary.listen()
    other = call(address)
    other.sendall(HALF_A_HELLO)
    crowd = [call(address, source="127.0.0.2") for _ in range(17)]
    assert crowd[0].recv(1) == b""  # the oldest of its address
    other.setblocking(False)
    with pytest.raises(BlockingIOError):
        other.recv(1)
    for stranger in (other, *crowd):
        stranger.close()
    primary.close()


def test_addresses_together_have_a_limit(star):
    """Beyond sixty-four callers the address that holds the most makes room, whoever comes."""
    primary = star.primary(limits=CALM)
    address = primary.listen()
    few = [call(address, source="127.0.0.9") for _ in range(2)]
    crowds = [
        [call(address, source=f"127.0.0.{place}") for _ in range(16)] for place in range(2, 6)
    ]
    late = call(address, source="127.0.0.10")
    late.sendall(HALF_A_HELLO)
    gone = [crowd[0].recv(1) for crowd in crowds[:3]]
    assert gone == [b"", b"", b""]  # 67 callers, three too many
    for kept in (late, *few):
        kept.setblocking(False)
        with pytest.raises(BlockingIOError):
            kept.recv(1)
    for stranger in (late, *few, *(one for crowd in crowds for one in crowd)):
        stranger.close()
    primary.close()


def test_refusals_are_counted_and_do_not_pile_up(star):
    """What the primary says of a party that never came names each kind of caller once."""
    primary = star.primary(limits=CALM)
    address = primary.listen()
    door, changed = primary._door, primary._loop.changed
    expected = ["127.0.0.1: no certificate was shown (20 times)"]
    for _ in range(19):
        come_without_certificate(address)
    # A stranger hears of its refusal before the primary has counted it: those who wait are woken
    # by the count itself.
    last = threading.Thread(target=come_without_certificate, args=(address,))
    with changed:
        last.start()
        while door.refusals != expected:
            assert changed.wait(SOON_S), f"nobody was woken; counted are {door.refusals}"
    last.join(WAIT_S)
    primary.close()
