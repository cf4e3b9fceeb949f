import itertools
import socket
import ssl
import threading
import time
from contextlib import contextmanager, suppress

import numpy as np
import pytest
from cryptography import x509
from helpers.patience import PATIENCE_S, SOON_S
from helpers.proxy import in_the_middle
from helpers.star import CALM, QUICK, RANKS, WAIT_S, make_star, together

from securevfl.core.errors import (
    AuthenticationError,
    ConfigError,
    DataError,
    PartyFailedError,
    PartyTimeoutError,
    ProtocolError,
)
from securevfl.federation.messages import RoundKind
from securevfl.transport.channels import PrimaryChannels, SealedTo
from securevfl.transport.connection import Connection, Outgoing, TransportLimits, tls_context
from securevfl.transport.framing import EncodedMessage, FrameReader, encode
from securevfl.transport.identity import Identity, certificate_pem
from securevfl.transport.message import Failure, Message, StarKind
from securevfl.transport.star import PrimaryTransport

PLAN, SHARE = RoundKind.PLAN, RoundKind.SHARE


@pytest.fixture(scope="module")
def star(tmp_path_factory):
    return make_star(tmp_path_factory.mktemp("star"))


@pytest.fixture
def joined(star):
    with star.joined() as ends:
        yield ends


def words(value: int, *, count: int = 40_000, round_number: int = 1) -> Message:
    array = np.full(count, value, dtype=np.int64)
    return Message(kind=SHARE, round_number=round_number, tensors={"words": array})


def take(primary, name, round_number=1, deadline_s=WAIT_S):
    return primary.receive(name, SHARE, round_number=round_number, deadline_s=deadline_s)


def test_rounds_go_round(joined):
    """Twenty rounds of announcement and shares: every array arrives, from whom it was sent."""
    primary, ends = joined
    for number in range(1, 21):
        plan = Message(kind=PLAN, round_number=number, tensors={"rows": np.arange(number)})
        primary.broadcast(primary.secondaries, plan)
        for name, end in ends.items():
            got = end.receive(PLAN, round_number=number, deadline_s=WAIT_S)
            assert got.sender == "agency"
            assert got.tensor("rows", dtype="int64", shape=(number,))[-1] == number - 1
            end.send(words(RANKS[name], round_number=number))
        arrived = {
            message.sender: message.tensor("words", dtype="int64", shape=(40_000,))
            for message in primary.receive_each(
                primary.secondaries, SHARE, round_number=number, deadline_s=WAIT_S
            )
        }
        assert {name: int(array.max()) for name, array in arrived.items()} == {
            "rental": 1, "bank": 2,
        }  # fmt: skip
        assert all(array.min() == array.max() for array in arrived.values())


def test_both_ends_count_the_same_bytes(joined):
    """What one end has sent, the other has received, and it is the arrays and little more."""
    primary, ends = joined
    ends["rental"].send(words(1))
    take(primary, "rental")
    received = primary.bytes_received["rental"]
    assert 320_000 < received < 320_500
    assert received == ends["rental"].bytes_sent["agency"]


def test_a_sent_array_may_be_changed_at_once(joined):
    """When send returns, the array is its owner's again: what arrives is what was sent."""
    primary, ends = joined
    for value in range(20):
        message = words(value, count=400_000, round_number=value)
        ends["bank"].send(message)
        message.tensors["words"].fill(-1)
    for value in range(20):
        got = take(primary, "bank", round_number=value)
        assert (got.tensor("words", dtype="int64", shape=(400_000,)) == value).all()


def test_many_messages_wait_in_order(joined):
    """Messages that nobody has asked for yet are kept, in the order of their sending."""
    primary, ends = joined
    for number in range(200):
        ends["rental"].send(words(number, count=1, round_number=number))
    for number in range(200):
        assert take(primary, "rental", round_number=number).round_number == number


def test_a_good_end_is_no_failure(star):
    """Parties that leave in any order deliver what they had sent, and nobody fails."""
    with star.joined() as (primary, ends):
        ends["rental"].send(words(5))
        ends["rental"].close()
        assert take(primary, "rental").tensors["words"][0] == 5
        primary.send("bank", Message(kind=StarKind.DONE))
        primary.close()
        ends["bank"].receive(StarKind.DONE, round_number=0, deadline_s=WAIT_S)
    assert primary.failure is None
    assert ends["bank"].failure is None


def test_waiting_for_a_party_that_has_left_fails_at_once(joined):
    """The reason says what was due; nobody waits for a deadline that cannot be met."""
    primary, ends = joined
    ends["rental"].close()
    started = time.monotonic()
    with pytest.raises(PartyFailedError, match="rental: left before it sent SHARE"):
        take(primary, "rental", deadline_s=PATIENCE_S)
    assert time.monotonic() - started < SOON_S


def assert_all_know(primary, ends, error, text):
    """Every wait of every party raises the same failure, quickly."""
    waits = [lambda: primary.receive("bank", SHARE, round_number=9, deadline_s=PATIENCE_S)]
    waits += [
        lambda end=end: end.receive(PLAN, round_number=9, deadline_s=PATIENCE_S)
        for end in ends.values()
    ]
    started = time.monotonic()
    for outcome in together(waits):
        assert type(outcome) is error
        assert text in str(outcome)
        assert outcome.party == str(outcome).partition(":")[0]
    assert time.monotonic() - started < SOON_S


def test_an_abort_reaches_everybody_with_its_origin(joined):
    """A secondary's reason is relayed by the primary under the secondary's name."""
    primary, ends = joined
    ends["rental"].abort("ran out of memory")
    assert_all_know(primary, ends, PartyFailedError, "rental: ran out of memory")


def test_who_reports_another_party_is_not_taken_for_it(joined):
    """A secondary that finds fault with the primary is named, and so is the primary."""
    primary, ends = joined
    failure = Failure(party="agency", reason="sent bytes that are no message", kind="protocol")
    ends["rental"]._loop.fail(failure)
    found = together(
        [
            lambda: primary.receive("bank", SHARE, round_number=9, deadline_s=PATIENCE_S),
            lambda: ends["bank"].receive(PLAN, round_number=9, deadline_s=PATIENCE_S),
            lambda: ends["rental"].receive(PLAN, round_number=9, deadline_s=PATIENCE_S),
        ]
    )
    assert [str(error) for error in found] == [
        "rental: it reports of agency: sent bytes that are no message",
        "rental: it reports of agency: sent bytes that are no message",
        "agency: sent bytes that are no message",
    ]
    assert {type(error) for error in found} == {ProtocolError}


def test_the_first_failure_stays(joined):
    """A later failure, of whatever party, changes nothing."""
    primary, ends = joined
    primary.abort("stopped by its operator")
    primary.abort("second thoughts")
    ends["bank"].abort("bank too")
    assert primary.failure == Failure(party="agency", reason="stopped by its operator")


def test_an_error_in_the_block_ends_the_federation(joined):
    """Leaving the block by an error tells all; settings' texts travel."""
    primary, ends = joined
    with pytest.raises(ConfigError), ends["rental"]:
        raise ConfigError("model.neighbours: 50 is more than the 20 records of this table")
    text = "rental: ConfigError: model.neighbours: 50 is more"
    assert_all_know(primary, ends, PartyFailedError, text)


@pytest.mark.parametrize("error", [DataError("row 3: income is 1234"), KeyError("income 1234")])
def test_texts_that_may_quote_a_table_stay_at_home(joined, error):
    """Other parties learn the kind of error, never the row and value in its text."""
    primary, ends = joined
    with pytest.raises(type(error)), ends["rental"]:
        raise error
    assert_all_know(primary, ends, PartyFailedError, "(its own log says more)")
    assert "1234" not in str(primary.failure)
    assert type(error).__name__ in str(primary.failure)


def test_a_missed_deadline_names_the_party_and_what_was_due(joined):
    """The primary's own deadline ends the federation for everybody."""
    primary, ends = joined
    with pytest.raises(PartyTimeoutError, match=r"rental: sent no SHARE within 0\.3 s"):
        take(primary, "rental", deadline_s=0.3)
    assert_all_know(primary, ends, PartyTimeoutError, "rental: sent no SHARE within 0.3 s")


@pytest.mark.parametrize("toggled", [False, True])
def test_who_takes_a_message_too_slowly_is_named_by_the_primary(star, monkeypatch, toggled):
    """A secondary says that it has no room, and takes that back for a moment now and then.

    The other one has its message, and waits for the primary's next; it hears who holds it up.
    """
    room = Connection.has_room.fget
    held, calls = [], itertools.count()

    def has_room(self):
        if self not in held:
            return room(self)
        return toggled and not next(calls) % 50

    monkeypatch.setattr(Connection, "has_room", property(has_room))
    limits = TransportLimits(silence_timeout_s=5.0, busy_timeout_s=PATIENCE_S)
    plan = Message(kind=PLAN, tensors={"rows": np.zeros(3_000_000, dtype=np.int64)})
    with star.joined(limits=limits) as (primary, ends):
        held.append(ends["rental"]._loop.connections["agency"])
        waiting = threading.Thread(
            target=lambda: outcomes.append(together([lambda: second_plan(ends["bank"])])[0])
        )
        outcomes: list[object] = []
        waiting.start()
        primary.send("bank", plan)
        began = time.monotonic()
        with pytest.raises(PartyTimeoutError, match=r"^rental: did not take PLAN in within 1 s$"):
            primary.broadcast(["rental"], plan, deadline_s=1.0)
        assert time.monotonic() - began < SOON_S
        waiting.join(PATIENCE_S)
    (outcome,) = outcomes
    assert isinstance(outcome, PartyTimeoutError)
    assert str(outcome) == "rental: did not take PLAN in within 1 s"


def second_plan(end) -> None:
    for _ in range(2):
        end.receive(PLAN, round_number=0, deadline_s=WAIT_S)


def test_those_that_wait_together_wait_no_longer_than_one(star):
    """Two that hold the primary up in turn are found before the third loses its patience."""
    limits = TransportLimits(silence_timeout_s=5.0, busy_timeout_s=1.2)
    with star.joined(limits=limits) as (primary, ends):

        def late() -> None:
            time.sleep(0.8)  # the wait itself is what is tested
            ends["rental"].send(words(1))

        sender = threading.Thread(target=late)
        sender.start()
        began = time.monotonic()
        take(primary, "rental")
        with pytest.raises(
            PartyTimeoutError, match=r"^rental: sent no SHARE by when others had waited for 1\.2 s$"
        ):
            take(primary, "rental")
        waited = time.monotonic() - began
        sender.join(PATIENCE_S)
    assert 1.2 <= waited < 1.2 + SOON_S


def test_a_patient_peer_puts_no_end_to_a_wait(star):
    """A helper that waits until the run is over, for example."""
    with star.joined(limits=TransportLimits(silence_timeout_s=5.0, busy_timeout_s=0.2)) as ends:
        primary, _ = ends
        primary.patient = frozenset({"bank"})
        with pytest.raises(PartyTimeoutError, match=r"^rental: sent no SHARE within 0\.6 s$"):
            take(primary, "rental", deadline_s=0.6)


def test_what_others_send_meanwhile_makes_a_wait_no_longer(star):
    """A secondary whose letters the primary relays cannot hold the primary up, or who is named."""
    with star.joined() as (primary, ends):
        kinds = (SHARE, StarKind.SEALED)
        lines = PrimaryChannels(primary, RANKS, kinds=kinds, deadline_s=1.0)
        stop = threading.Event()

        def write_letters() -> None:
            letter = SealedTo(rank=RANKS["rental"], sealed=np.zeros(16, dtype=np.uint8))
            with suppress(ProtocolError):
                while not stop.wait(0.1):
                    ends["bank"].send(letter.to_message())

        writer = threading.Thread(target=write_letters)
        writer.start()
        began = time.monotonic()
        with pytest.raises(PartyTimeoutError, match=r"^rental: sent no SHARE or SEALED within 1 s"):
            lines.receive("rental", SHARE)
        assert time.monotonic() - began < SOON_S
        stop.set()
        writer.join(PATIENCE_S)


def test_a_secondary_that_waits_in_vain_says_so(joined):
    """A secondary's missed deadline is told to all, in its own name."""
    primary, ends = joined
    with pytest.raises(PartyTimeoutError, match=r"agency: sent no PLAN or DONE within 0\.2 s"):
        ends["bank"].receive((PLAN, StarKind.DONE), round_number=1, deadline_s=0.2)
    outcome = together([lambda: take(primary, "rental")])[0]
    assert isinstance(outcome, PartyTimeoutError)
    assert str(outcome).startswith("bank: ")


@pytest.mark.parametrize(
    ("message", "text"),
    [
        (words(1, round_number=1), "rental: sent SHARE of round 1 where SHARE of round 2 was due"),
        (Message(kind=PLAN, round_number=2), "rental: sent PLAN of round 2 where SHARE of round 2"),
    ],
)
def test_an_old_round_or_another_kind_is_refused(joined, message, text):
    """What is not due ends the federation; it is never skipped or used."""
    primary, ends = joined
    ends["rental"].send(message)
    with pytest.raises(ProtocolError, match=text):
        take(primary, "rental", round_number=2)
    assert_all_know(primary, ends, ProtocolError, text)


def inject(end, frame: list[memoryview]) -> None:
    """Put raw bytes on a secondary's authenticated connection, as a lying party could."""

    class Raw(EncodedMessage):
        def frame(self, **_settings):
            return frame

    raw = Raw(SHARE, 0, b"", [], 0)
    end._loop.connections["agency"].outgoing.append(Outgoing(raw))
    end._loop.wake()


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"session": bytes(16)}, "rental: sent SHARE of another session (00000000...)"),
        ({"sender_rank": 2}, "rental: sent SHARE in the name of rank 2, but is rank 1"),
        ({"sequence": 7}, "rental: sent SHARE as frame 7 where frame 0 was due"),
    ],
)
def test_a_lying_header_is_refused(star, changes, text):
    """Another session, another sender or a repeated frame, from a party with a valid identity."""
    session = bytes(range(16))
    with star.joined(session=session, limits=CALM) as (primary, ends):
        honest = {"session": session, "sender_rank": 1, "sequence": 0}
        inject(ends["rental"], encode(words(1)).frame(**{**honest, **changes}))
        with pytest.raises(ProtocolError) as caught:
            take(primary, "rental")
        assert text in str(caught.value)
        assert_all_know(primary, ends, ProtocolError, text)


def test_a_replayed_frame_is_refused(star):
    """The very bytes of an accepted message do not count a second time."""
    session = bytes(range(16))
    with star.joined(session=session, limits=CALM) as (primary, ends):
        frame = encode(words(1)).frame(session=session, sender_rank=1, sequence=0)
        inject(ends["rental"], frame)
        assert take(primary, "rental").tensors["words"][0] == 1
        inject(ends["rental"], frame)
        with pytest.raises(ProtocolError, match="a replayed or lost message"):
            take(primary, "rental")


def test_a_message_over_the_limit_is_refused(star):
    """The receiver's limit counts, whatever the sender allows itself."""
    limits = TransportLimits(max_message_bytes=10_000, silence_timeout_s=PATIENCE_S)
    with star.joined(limits=limits) as (primary, ends):
        ends["rental"].send(words(1, count=1_250))
        assert take(primary, "rental").round_number == 1
        ends["rental"].send(words(1, count=1_251), owned=True)
        with pytest.raises(ProtocolError, match="rental: sent SHARE of 10008 bytes; at most 10000"):
            take(primary, "rental")


def test_a_flood_is_refused(star):
    """A party cannot fill another's memory with messages that nobody asked for."""
    limits = TransportLimits(max_waiting_messages=10, silence_timeout_s=PATIENCE_S)
    with star.joined(limits=limits) as (primary, ends):
        # The sender may hear that it is refused before it is through.
        with suppress(ProtocolError):
            for _ in range(20):
                ends["rental"].send(words(1, count=1))
        with pytest.raises(ProtocolError, match="rental: sends faster than the protocol allows"):
            primary.receive("bank", SHARE, round_number=1, deadline_s=WAIT_S)


def test_a_secondary_cannot_speak_for_another(star):
    """An ABORT that accuses somebody else is the sender's own, and no terminal obeys it."""
    session = bytes(range(16))
    with star.joined(session=session, limits=CALM) as (primary, ends):
        false = Failure(party="bank", reason="went bankrupt\x1b[2J").to_message()
        inject(ends["rental"], encode(false).frame(session=session, sender_rank=1, sequence=0))
        with pytest.raises(
            PartyFailedError, match=r"^rental: it reports of bank: went bankrupt \[2J$"
        ):
            take(primary, "bank")


@pytest.mark.parametrize("kind", [StarKind.DONE, StarKind.LEAVE, RoundKind.READY])
def test_contents_of_a_message_that_has_none_are_refused(joined, kind):
    """Those who wait for it look at its kind alone; it is refused where it arrives, by name."""
    primary, ends = joined
    more = {"zzz": np.zeros(3, dtype=np.int64)}
    ends["rental"].send(Message(kind=kind, tensors=more), owned=True)
    with pytest.raises(
        ProtocolError, match=rf"^rental: {kind.name} of round 0: has 'zzz', which is"
    ):
        primary.receive("rental", kind, round_number=0, deadline_s=WAIT_S)


def test_an_address_in_use_is_a_setting_to_be_fixed(star):
    """The second primary on an address is told so before anything else happens."""
    first = star.primary()
    host, port = first.listen()
    second = star.primary(port=port)
    with pytest.raises(ConfigError, match=rf"address 127\.0\.0\.1:{port}: cannot be listened on"):
        second.listen()
    second.close()
    first.close()
    assert host == "127.0.0.1"


def test_a_foreign_address_is_a_setting_to_be_fixed(star):
    """An address that is not this machine's, or unknown, is one clear line."""
    identity = star.identity("agency")
    primary = PrimaryTransport(("192.0.2.1", 0), identity, star.pinned, bytes(16), RANKS)
    with primary, pytest.raises(ConfigError, match="cannot be listened on"):
        primary.listen()


def test_a_party_that_never_comes_is_named(star):
    """Those that have joined learn who was missing, and who has joined is told on the way."""
    primary = star.primary()
    rental = star.secondary("rental", primary.listen())
    rental.connect(WAIT_S)
    seen: list[str] = []
    with pytest.raises(PartyTimeoutError, match=r"^bank: did not join within 0\.5 s$"):
        primary.wait_for_parties(0.5, seen.append)
    assert seen == ["rental"]
    with pytest.raises(PartyTimeoutError, match=r"^bank: did not join"):
        rental.receive(PLAN, round_number=1, deadline_s=WAIT_S)
    together([primary.close, rental.close])


def test_a_primary_that_never_listens_is_named(star, port):
    """A secondary gives up at its deadline with the address and the system's reason."""
    rental = star.secondary("rental", ("127.0.0.1", port))
    with pytest.raises(PartyTimeoutError, match=r"agency \(127.0.0.1:\d+\): did not answer within"):
        rental.connect(0.3)
    rental.close()


def test_a_secondary_may_come_first(star, port):
    """Secondaries dial until the primary listens."""
    ends = {name: star.secondary(name, ("127.0.0.1", port)) for name in ("rental", "bank")}
    primary = star.primary(port=port)

    def serve():
        primary.listen()
        primary.wait_for_parties(WAIT_S)

    calls = [lambda end=end: end.connect(WAIT_S) for end in ends.values()]
    assert together([*calls, serve]) == [None, None, None]
    together([primary.close, *(end.close for end in ends.values())])


def test_an_impostor_is_refused_and_the_missing_party_named(star):
    """A certificate in the party's name but with another key joins nothing."""
    forged = Identity.create("rental", valid_days=1).trusting(star.identity("rental").trusted)
    primary = star.primary()
    address = primary.listen()
    impostor = star.secondary(
        "rental", address, identity=forged, pinned={**star.pinned, "rental": forged.public_text}
    )
    with pytest.raises(AuthenticationError, match=r"did not accept this party: .* trust folder"):
        impostor.connect(0.5)
    with pytest.raises(PartyTimeoutError, match=r"rental, bank: did not join .*is not trusted"):
        primary.wait_for_parties(0.2)
    together([primary.close, impostor.close])


def test_an_impostor_primary_is_refused(star, tmp_path):
    """A secondary tells nothing to a primary that cannot prove the pinned key."""
    other = make_star(tmp_path)
    forged = other.primary(
        identity=other.identity("agency").trusting(star.identity("bank").trusted),
        pinned={**star.pinned, "agency": other.pinned["agency"]},
    )
    rental = star.secondary("rental", forged.listen())
    with pytest.raises(AuthenticationError, match=r"agency \(.*its certificate is not trusted"):
        rental.connect(0.5)
    together([forged.close, rental.close])


def read_one_byte(address, context) -> None:
    """Call as a stranger would, and try to read what only a party may read."""
    with socket.create_connection(address) as raw:
        raw.settimeout(WAIT_S)
        with context.wrap_socket(raw) as connection:
            assert connection.recv(1), "the primary hung up"


def test_a_certificate_signed_by_a_trusted_party_is_refused(star):
    """A trusted party cannot vouch for another: its certificate signs nothing."""
    bank = star.identity("bank")
    forged = Identity.create("rental", valid_days=1)
    context = tls_context(forged.trusting(bank.trusted), ["agency"], server=False)
    primary = star.primary()
    address = primary.listen()
    chained = _signed_by(bank, forged, star)
    context.load_cert_chain(*chained)
    with pytest.raises((ssl.SSLError, ConnectionError)):
        read_one_byte(address, context)
    with pytest.raises(PartyTimeoutError, match="is not trusted"):
        primary.wait_for_parties(0.2)
    primary.close()


def _signed_by(issuer, subject, star):
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject.certificate.subject)
        .issuer_name(issuer.certificate.subject)
        .public_key(subject.certificate.public_key())
        .serial_number(1)
        .not_valid_before(subject.certificate.not_valid_before_utc)
        .not_valid_after(subject.certificate.not_valid_after_utc)
    )
    chain = (builder.sign(issuer._key, None), issuer.certificate)
    folder = star.folder / "chained"
    folder.mkdir()
    (folder / "chain.pem").write_bytes(b"".join(map(certificate_pem, chain)))
    (folder / "chain.key").write_bytes(subject.key_pem())
    return folder / "chain.pem", folder / "chain.key"


def test_a_second_party_of_one_name_is_turned_away(joined, star):
    """The newcomer is told why; the one that has joined goes on undisturbed."""
    primary, ends = joined
    address = primary._door.listener.getsockname()
    twin = star.secondary("rental", address)
    with pytest.raises(PartyFailedError, match="has joined already, so this second rental"):
        twin.connect(WAIT_S)
    ends["rental"].send(words(3))
    assert take(primary, "rental").tensors["words"][0] == 3
    twin.close()


def test_a_party_that_comes_back_calls_until_its_first_connection_is_gone(star, port):
    """It may know of the loss before the primary does, which then holds a new session."""
    first = star.primary(port=port)
    address = first.listen()
    lost, others = star.secondary("rental", address), star.secondary("bank", address)
    lost.connect(WAIT_S)
    others.connect(WAIT_S)
    first.wait_for_parties(WAIT_S)
    back = star.secondary("rental", address)
    returns = threading.Thread(target=back.connect, args=(WAIT_S,), kwargs={"returning": True})
    returns.start()
    with first._loop.changed:
        assert first._loop.changed.wait_for(lambda: first._door.refusals, timeout=WAIT_S)
    together([first.close, lost.close, others.close])
    second = star.primary(port=port)
    second.listen()
    again = star.secondary("bank", address)
    again.connect(WAIT_S)
    second.wait_for_parties(WAIT_S)
    returns.join(WAIT_S)
    assert back.session == second.session != first.session
    together([second.close, back.close, again.close])


def test_files_that_rank_parties_differently_are_noticed(star):
    """A party that counts itself second where the primary counts it first joins nothing.

    The primary reads why, and not that a line broke.
    """
    primary = star.primary()
    address = primary.listen()
    rental = star.secondary("rental", address, ranks={"agency": 0, "bank": 1, "rental": 2})
    text = r"takes this party for rank 1, .* here says 2"
    with pytest.raises(ProtocolError, match=text):
        rental.connect(WAIT_S)
    with pytest.raises(ProtocolError, match=f"^rental: .*{text}"):
        primary.wait_for_parties(WAIT_S)
    together([primary.close, rental.close])


def test_another_version_is_said_at_both_ends(star, monkeypatch):
    """A caller that cannot read the primary's greeting says so before it hangs up."""
    primary = star.primary()
    rental = star.secondary("rental", primary.listen())
    whole = FrameReader._check_header

    def of_one_more(reader, raw):
        """Read as a party would whose own version is one more than the sender's."""
        return whole(reader, raw[:4] + bytes([raw[4] - 1]) + raw[5:])

    monkeypatch.setattr(FrameReader, "_check_header", of_one_more)
    with pytest.raises(ProtocolError, match=r"^agency: speaks protocol 0, this party 1; install"):
        rental.connect(WAIT_S)
    with pytest.raises(ProtocolError, match=r"^rental: speaks protocol 0, this party 1; install"):
        primary.wait_for_parties(WAIT_S)
    together([primary.close, rental.close])


@pytest.mark.parametrize("hello", [b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\xff\xff" + bytes(64)])
def test_strangers_do_not_disturb(star, hello):
    """A caller without TLS gets nothing, and the parties join as if it had not called."""
    primary = star.primary()
    address = primary.listen()
    with socket.create_connection(address) as stranger:
        stranger.settimeout(WAIT_S)
        stranger.sendall(hello)
        try:
            answer = stranger.recv(100)
        except ConnectionError:
            answer = b""
        assert b"SVFL" not in answer
        ends = [star.secondary(name, address) for name in ("rental", "bank")]
        for end in ends:
            end.connect(WAIT_S)
        primary.wait_for_parties(WAIT_S)
    together([primary.close, *(end.close for end in ends)])


def test_a_caller_without_certificate_or_tls_1_3_is_refused(star):
    """No certificate and an older TLS are both refused in the handshake."""
    primary = star.primary()
    address = primary.listen()
    anonymous = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    anonymous.check_hostname = False
    anonymous.verify_mode = ssl.CERT_NONE
    old = tls_context(star.identity("rental"), ["agency"], server=False)
    old.minimum_version = ssl.TLSVersion.TLSv1_2
    old.maximum_version = ssl.TLSVersion.TLSv1_2
    for context in (anonymous, old):
        with pytest.raises((ssl.SSLError, ConnectionError)):
            read_one_byte(address, context)
    with pytest.raises(PartyTimeoutError) as caught:
        primary.wait_for_parties(1.0)
    assert "no certificate was shown" in str(caught.value)
    assert "TLS 1.3 is required" in str(caught.value)
    primary.close()


def test_a_silent_caller_is_sent_away(star):
    """Who calls and says nothing holds its place no longer than the handshake may last."""
    limits = TransportLimits(handshake_timeout_s=0.3, silence_timeout_s=1.0)
    primary = star.primary(limits=limits)
    address = primary.listen()
    with socket.create_connection(address) as stranger:
        stranger.settimeout(WAIT_S)
        assert stranger.recv(1) == b""
    with pytest.raises(PartyTimeoutError, match="did not prove its identity in time"):
        primary.wait_for_parties(0.1)
    primary.close()


def test_idle_parties_stay(star):
    """Heartbeats keep a federation alive in which nobody has anything to say."""
    limits = TransportLimits(silence_timeout_s=3.0)
    # Longer than the tolerated silence: the wait itself is what is tested.
    vain = pytest.raises(PartyTimeoutError, match="sent no SHARE within 4 s")
    with star.joined(limits=limits) as (primary, _ends), vain:
        take(primary, "rental", deadline_s=4.0)


def test_a_party_that_takes_nothing_in_is_noticed(star):
    """Heartbeats alone are not enough: who never reads what it is sent counts as lost."""
    limits = TransportLimits(silence_timeout_s=3.0, farewell_timeout_s=0.2)
    session = bytes(range(16))
    primary = star.primary(session=session, limits=limits)
    address = primary.listen()
    bank = star.secondary("bank", address, limits=limits)
    bank.connect(WAIT_S)
    ended = threading.Event()
    context = tls_context(star.identity("rental"), ["agency"], server=False)
    with socket.create_connection(address) as raw, context.wrap_socket(raw) as deaf:

        def beat() -> None:
            for sequence in itertools.count():
                ping = encode(Message(kind=StarKind.PING))
                frame = ping.frame(session=session, sender_rank=1, sequence=sequence)
                deaf.sendall(b"".join(frame))
                if ended.wait(0.2):
                    return

        heart = threading.Thread(target=beat)
        heart.start()
        primary.wait_for_parties(WAIT_S)
        large = Message(kind=RoundKind.MEAN, tensors={"x": np.zeros(8_000_000)})
        with pytest.raises(PartyTimeoutError, match=r"^rental: took in nothing .* for 3 s$"):
            primary.send("rental", large)
        ended.set()
        heart.join(WAIT_S)
    together([primary.close, bank.close])


@contextmanager
def slow_line(star, limits):
    """Yield a primary, and a secondary to whom 64 KiB go in four milliseconds."""
    primary = star.primary(limits=limits)
    address = primary.listen()
    bank = star.secondary("bank", address, limits=limits)
    bank.connect(WAIT_S)
    with in_the_middle(address) as (middle, door):
        rental = star.secondary("rental", door, limits=limits)
        rental.connect(WAIT_S)
        primary.wait_for_parties(WAIT_S)
        middle.pause_s = 0.004
        yield primary, rental
        middle.pause_s = 0.0
        together([primary.close, bank.close, rental.close])


def test_a_slow_line_is_no_lost_party(star):
    """An array that takes longer than the silence that is tolerated arrives, as it moves on."""
    limits = TransportLimits(silence_timeout_s=3.0, farewell_timeout_s=10.0)
    array = np.arange(12_000_000, dtype=np.int64)
    with slow_line(star, limits) as (primary, rental):
        started = time.monotonic()
        primary.send("rental", Message(kind=RoundKind.MEAN, tensors={"x": array}))
        assert time.monotonic() - started > limits.silence_timeout_s
        told = rental.receive(RoundKind.MEAN, round_number=0, deadline_s=WAIT_S)
        assert np.array_equal(told.tensors["x"], array)


def test_a_party_that_takes_in_too_little_is_noticed(star):
    """Bytes that trickle through a line are a sign of life, and no way to work."""
    limits = TransportLimits(silence_timeout_s=5.0, farewell_timeout_s=0.2, lowest_rate=1e9)
    large = Message(kind=RoundKind.MEAN, tensors={"x": np.zeros(16_000_000)})
    too_slow = pytest.raises(PartyTimeoutError, match=r"^rental: took in [\d,]+ bytes a second")
    with slow_line(star, limits) as (primary, _), too_slow:
        primary.send("rental", large)


def test_closing_is_quick_and_can_be_repeated(star):
    """A transport that never listened, and one that is closed twice, close."""
    primary = star.primary()
    primary.close()
    primary.close()
    with star.joined() as (primary, ends):
        started = time.monotonic()
        together([primary.close, *(end.close for end in ends.values())])
        assert time.monotonic() - started < QUICK.farewell_timeout_s
        primary.close()


def test_limits_must_be_possible():
    """A limit of zero, or NaN, is refused with its name."""
    with pytest.raises(ConfigError, match="silence_timeout_s"):
        TransportLimits(silence_timeout_s=float("nan"))
    with pytest.raises(ConfigError, match="max_message_bytes"):
        TransportLimits(max_message_bytes=0)
