"""A joining party calls until its deadline, whatever ended a call, and names the true cause."""

import contextlib
import socket
import ssl
import struct
import threading
import time

import pytest
from helpers.star import CALM, WAIT_S, make_star, together

from securevfl.core.errors import AuthenticationError, PartyAbsentError, ProtocolError
from securevfl.transport import connection
from securevfl.transport.connection import TransportLimits, in_plain_words

RESET = struct.pack("ii", 1, 0)  # SO_LINGER: closing sends a reset
CALLS = 4


@pytest.fixture(scope="module")
def star(tmp_path_factory):
    return make_star(tmp_path_factory.mktemp("star"))


@pytest.fixture(scope="module")
def others(tmp_path_factory):
    """A federation with the same names and other keys."""
    return make_star(tmp_path_factory.mktemp("others"))


def close(caller: socket.socket, _others) -> None:
    caller.close()


def reset(caller: socket.socket, _others) -> None:
    caller.recv(1)
    caller.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
    caller.close()


def speak_of_something_else(caller: socket.socket, _others) -> None:
    caller.sendall(b"SSH-2.0-OpenSSH_9.6\r\n")
    caller.close()


def show_another_key(caller: socket.socket, others) -> None:
    context = connection.tls_context(others.identity("agency"), ["rental"], server=True)
    with contextlib.suppress(OSError):
        context.wrap_socket(caller, server_side=True).close()


def say_nothing(_caller: socket.socket, _others) -> None:
    return


TREATMENTS = [close, reset, speak_of_something_else, show_another_key, say_nothing]


@contextlib.contextmanager
def front(treat, others, *, port: int, calls: int):
    """Something else at the primary's address, which treats so many callers so and goes."""
    listener = socket.create_server(("127.0.0.1", port))
    listener.settimeout(WAIT_S)
    held = []

    def serve() -> None:
        with contextlib.suppress(OSError), listener:
            for _ in range(calls):
                caller, _ = listener.accept()
                held.append(caller)
                treat(caller, others)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield listener.getsockname(), thread
    finally:
        with contextlib.suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)
        thread.join(WAIT_S)
        for caller in held:
            caller.close()
        assert not thread.is_alive()


@pytest.mark.parametrize("treat", TREATMENTS)
def test_a_party_joins_once_the_primary_is_there(star, others, port, treat):
    """Whatever answered before it: a tunnel, another service, an impostor, a deaf host."""
    limits = TransportLimits(handshake_timeout_s=0.5, silence_timeout_s=60.0)
    with front(treat, others, port=port, calls=CALLS) as (address, thread):
        patient = star.secondary("rental", address, limits=limits)
        primary = star.primary(port=port, limits=CALM)

        def serve() -> None:
            thread.join(WAIT_S)
            primary.listen()

        assert together([lambda: patient.connect(WAIT_S), serve]) == [None, None]
        assert patient.session == primary.session
    together([primary.close, patient.close])


@pytest.mark.parametrize(
    ("treat", "error", "text"),
    [
        (close, PartyAbsentError, "the other end (hung up|cut the connection)"),
        (reset, PartyAbsentError, "the other end cut the connection"),
        (speak_of_something_else, PartyAbsentError, "the other end does not speak TLS"),
        (show_another_key, AuthenticationError, "its certificate is not trusted"),
        (say_nothing, PartyAbsentError, "answered the call and then said nothing"),
    ],
)
def test_the_true_cause_is_named_at_the_deadline(star, others, port, treat, error, text):
    """Who was cut off is not sent to look into trust folders, nor shown what OpenSSL says."""
    # Only who says nothing is waited for; the others have until the deadline for one call at least.
    patience_s = 0.3 if treat is say_nothing else 60.0
    limits = TransportLimits(handshake_timeout_s=patience_s, silence_timeout_s=60.0)
    with front(treat, others, port=port, calls=1_000) as (address, _thread):
        rental = star.secondary("rental", address, limits=limits)
        started = time.monotonic()
        with pytest.raises(error, match=text) as caught:
            rental.connect(2.0)
        assert time.monotonic() - started >= 2.0
        rental.close()
    message = str(caught.value)
    assert type(caught.value) is error
    assert f"agency (127.0.0.1:{address[1]}): did not let this party in within 2 s" in message
    assert "trust folder" not in message
    for raw in ("[SSL", "_ssl.c", "ALERT", "EOF", "violation"):
        assert raw not in message


def test_the_most_telling_cause_outlives_the_last(star, others, port):
    """An impostor that has gone is still named, with what came after it."""
    with front(show_another_key, others, port=port, calls=1) as (address, _thread):
        rental = star.secondary("rental", address, limits=CALM)
        with pytest.raises(AuthenticationError) as caught:
            rental.connect(2.0)
        rental.close()
    assert "its certificate is not trusted; the last of" in str(caught.value)
    assert "Connection refused" in str(caught.value)


def test_a_name_that_is_not_known_yet_is_asked_for_again(star, monkeypatch):
    """A container's name is known once it runs; a host that never comes is named."""
    primary = star.primary(limits=CALM)
    address = primary.listen()
    known = socket.getaddrinfo
    asked = []

    def look_up(host, *more, **settings):
        asked.append(host)
        if host == "agency.example" and len(asked) <= CALLS:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return known("127.0.0.1", *more, **settings)

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    rental = star.secondary("rental", ("agency.example", address[1]), limits=CALM)
    rental.connect(WAIT_S)
    assert len(asked) == CALLS + 1
    together([primary.close, rental.close])
    asked.clear()
    late = star.secondary("rental", ("agency.example", address[1]), limits=CALM)
    with pytest.raises(PartyAbsentError, match="Name or service not known"):
        late.connect(0.2)
    late.close()


def test_what_the_primary_itself_says_ends_it_at_once(star):
    """A true primary that counts the parties otherwise will not change its mind."""
    primary = star.primary(limits=CALM)
    address = primary.listen()
    rental = star.secondary("rental", address, ranks={"agency": 0, "bank": 1, "rental": 2})
    with pytest.raises(ProtocolError, match="takes this party for rank 1"):
        rental.connect(WAIT_S)
    together([primary.close, rental.close])


@pytest.mark.parametrize(
    "error",
    [
        ssl.SSLError(1, "[SSL: TLSV1_ALERT_INTERNAL_ERROR] tlsv1 alert (_ssl.c:1006)"),
        ssl.SSLEOFError(8, "EOF occurred in violation of protocol (_ssl.c:1006)"),
        ssl.SSLError(1, "[SSL: DECRYPTION_FAILED_OR_BAD_RECORD_MAC] failed (_ssl.c:2580)"),
        ConnectionResetError(104, "Connection reset by peer"),
        OSError(113, "No route to host"),
        OSError("nothing known"),
    ],
)
def test_plain_words(error):
    """No broken connection is told in OpenSSL's own words."""
    text = in_plain_words(error)
    assert text
    assert not any(raw in text for raw in ("SSL", "_ssl", "ALERT", "EOF ", "violation"))
