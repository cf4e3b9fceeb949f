"""The start of a session: same file, same people, keys that the relay cannot swap."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from helpers.class_means import write_class_means
from helpers.star import WAIT_S, make_star

from securevfl import read_federation
from securevfl.core.errors import AuthenticationError, ConfigError, PartyTimeoutError, ProtocolError
from securevfl.federation.messages import Hello, RoundKind
from securevfl.federation.run_plan import RunFacts
from securevfl.federation.session import handshake
from securevfl.mpc.masks import SessionKey
from securevfl.testing import write_federation
from securevfl.transport.identity import Identity
from securevfl.transport.message import Message

SESSION = bytes(range(16))
FACTS = RunFacts(rows=10, train_rows=6, validation_rows=2, test_rows=2)


@pytest.fixture
def config(tmp_path: Path):
    return read_federation(write_federation(tmp_path, secondaries=3))


@pytest.fixture
def people(config):
    return {party.name: Identity.create(party.name, valid_days=1) for party in config.parties}


def keys_of(config, session: bytes = SESSION) -> dict[str, SessionKey]:
    return {
        party.name: SessionKey(session=session, rank=config.ranks[party.name], name=party.name)
        for party in config.secondaries
    }


def hellos_of(config, people, keys) -> dict[str, Hello]:
    return {
        name: handshake.hello(config, identity=people[name], key=key, epochs=[1, 2])
        for name, key in keys.items()
    }


def pinned(people) -> dict[str, str]:
    return {name: identity.public_text for name, identity in people.items()}


def test_every_pair_agrees_on_a_key(config, people) -> None:
    """After an honest welcome both ends of each pair hold the same key, and the run's figures."""
    keys = keys_of(config)
    message = handshake.welcome(hellos_of(config, people, keys), FACTS).to_message()

    opened = {
        config.ranks[name]: handshake.open_welcome(config, message, key=key, pinned=pinned(people))
        for name, key in keys.items()
    }

    assert {facts for facts, _ in opened.values()} == {FACTS}
    for rank, (_, own) in opened.items():
        assert set(own) == {1, 2, 3} - {rank}
        for other, key in own.items():
            assert opened[other][1][rank] == key


def test_a_key_that_the_relay_swaps_is_refused(config, people) -> None:
    """The primary puts a session key of its own in another party's place: no fitting signature."""
    keys = keys_of(config)
    hellos = hellos_of(config, people, keys)
    swapped = SessionKey(session=SESSION, rank=2, name="bank-2")
    forged = handshake.hello(config, identity=people["agency"], key=swapped, epochs=[])
    message = handshake.welcome({**hellos, "bank-2": forged}, FACTS).to_message()

    with pytest.raises(AuthenticationError, match="'bank-2' is not signed by the identity"):
        handshake.open_welcome(config, message, key=keys["bank-1"], pinned=pinned(people))


def test_an_offer_of_an_old_session_is_refused(config, people) -> None:
    """A true but old offer does not verify: its signature is over another session."""
    keys = keys_of(config)
    old = hellos_of(config, people, keys_of(config, session=bytes(16)))
    hellos = {**hellos_of(config, people, keys), "bank-3": old["bank-3"]}

    with pytest.raises(AuthenticationError, match="'bank-3'"):
        handshake.open_welcome(
            config,
            handshake.welcome(hellos, FACTS).to_message(),
            key=keys["bank-1"],
            pinned=pinned(people),
        )


def test_a_signature_for_another_federation_is_refused(config, people, tmp_path: Path) -> None:
    """The same parties under another file: signatures do not carry over."""
    other_folder = tmp_path / "other"
    other_folder.mkdir()
    other = read_federation(write_federation(other_folder, secondaries=3, training={"epochs": 9}))
    keys = keys_of(config)
    hellos = hellos_of(config, people, keys)
    hellos["bank-2"] = handshake.hello(
        other, identity=people["bank-2"], key=keys["bank-2"], epochs=[]
    )

    with pytest.raises(AuthenticationError, match="'bank-2'"):
        handshake.open_welcome(
            config,
            handshake.welcome(hellos, FACTS).to_message(),
            key=keys["bank-1"],
            pinned=pinned(people),
        )


def test_files_that_differ_show_both_hashes(config, people, tmp_path: Path) -> None:
    """The message names the party and holds both digests."""
    other_folder = tmp_path / "other"
    other_folder.mkdir()
    other = read_federation(write_federation(other_folder, secondaries=3, training={"epochs": 9}))
    key = keys_of(config)["bank-1"]
    hello = handshake.hello(other, identity=people["bank-1"], key=key, epochs=[])
    message = dataclasses.replace(hello.to_message(), sender="bank-1")

    with pytest.raises(ConfigError) as caught:
        handshake.read_hello(config, message)
    assert config.digest in str(caught.value)
    assert other.digest in str(caught.value)
    assert "'bank-1'" in str(caught.value)


@pytest.mark.parametrize(
    "wrong",
    [{"rows": 11}, {"train_rows": 0}, {"train_rows": -1, "test_rows": 9}, {"resume_epoch": -1}],
)
def test_impossible_counts_are_refused(config, people, wrong: dict[str, int]) -> None:
    """Counts that do not add up, or are not counts, end the session."""
    keys = keys_of(config)
    message = handshake.welcome(
        hellos_of(config, people, keys), dataclasses.replace(FACTS, **wrong)
    ).to_message()

    with pytest.raises(ProtocolError, match="row counts"):
        handshake.open_welcome(config, message, key=keys["bank-1"], pinned=pinned(people))


def test_a_public_key_of_another_size_is_refused(config, people) -> None:
    """A shortened key is named before it is used."""
    sent = hellos_of(config, people, keys_of(config))["bank-1"].to_message()
    tensors = {**sent.tensors, "public": np.zeros(31, dtype=np.uint8)}

    with pytest.raises(ProtocolError, match="public must have shape"):
        handshake.read_hello(config, dataclasses.replace(sent, tensors=tensors))


RUN, OTHER = "1" * 32, "2" * 32


def facts_of(**changes: object) -> RunFacts:
    return dataclasses.replace(FACTS, **{"run": RUN, **changes})


def own(**changes: object) -> dict[str, object]:
    return {"run": RUN, "epochs": [3, 4], "stage_steps": [2], **changes}


FRESH = {"run": "", "epochs": [], "stage_steps": []}


@pytest.mark.parametrize(
    ("facts", "mine"),
    [
        (facts_of(), FRESH),
        (facts_of(resume_epoch=4), own()),
        (facts_of(resume_epoch=3, resume_stage=2), own()),
        (facts_of(resume_stage=2), own(epochs=[])),
        (facts_of(), own(epochs=[1], stage_steps=[])),
    ],
)
def test_what_a_secondary_goes_on_with(config, facts: RunFacts, mine) -> None:
    """All start afresh, or all go on with one run, from what this party has."""
    handshake.require_own_run(config, facts, **mine)


@pytest.mark.parametrize(
    ("facts", "mine", "said"),
    [
        (facts_of(run=OTHER, resume_epoch=4), own(), f"run {RUN}, and 'agency' goes on.*{OTHER}"),
        (facts_of(run=OTHER), own(), f"goes on with run {RUN}, and 'agency' starts afresh; start"),
        (facts_of(resume_epoch=4), FRESH, "this party starts afresh, and 'agency' goes on"),
        (facts_of(resume_stage=2), FRESH, "this party starts afresh, and 'agency' goes on"),
        (facts_of(resume_epoch=5), own(), "from epoch 5, which this party does not have"),
        (facts_of(resume_epoch=4, resume_stage=1), own(), "from stage step 1"),
        (facts_of(), own(), f"wants run {RUN} to begin again, of which this party has epoch 4"),
    ],
)
def test_a_secondary_does_not_believe_where_the_primary_goes_on(config, facts, mine, said) -> None:
    """Another run, a fresh start, or an epoch that it does not have: refused by itself."""
    with pytest.raises(ProtocolError, match=said):
        handshake.require_own_run(config, facts, **mine)


@pytest.mark.parametrize(
    ("run", "theirs", "said"),
    [
        ("", RUN, f"'agency' starts afresh, and 'bank-2' goes on with run {RUN}; start all"),
        (RUN, "", f"'agency' goes on with run {RUN}, and 'bank-2' starts afresh; start all"),
        (RUN, OTHER, f"with run {RUN}, and 'bank-2' goes on with run {OTHER}; start all"),
    ],
)
def test_a_primary_names_who_is_of_another_run(config, people, run, theirs, said) -> None:
    """One secondary that differs is enough; what to do stands in the same line."""
    hellos = {
        name: handshake.hello(
            config,
            identity=people[name],
            key=key,
            epochs=[],
            run=theirs if name == "bank-2" else run,
        )
        for name, key in keys_of(config).items()
    }
    with pytest.raises(ProtocolError, match=said):
        handshake.require_one_run(config, hellos, run=run)
    hellos["bank-2"] = dataclasses.replace(hellos["bank-2"], run=run)
    handshake.require_one_run(config, hellos, run=run)


def test_a_party_that_never_heard_of_a_run_joins_it_while_nothing_is_kept_of_it(
    config, people
) -> None:
    """It was lost while the run began; a party that forgot its part of a run is refused."""
    hellos = hellos_of(config, people, keys_of(config))
    handshake.require_one_run(config, hellos, run=RUN, has_state=False)
    with pytest.raises(ProtocolError, match="'bank-1' starts afresh"):
        handshake.require_one_run(config, hellos, run=RUN)
    hellos["bank-1"] = dataclasses.replace(hellos["bank-1"], run=OTHER)
    with pytest.raises(ProtocolError, match=f"'bank-1' goes on with run {OTHER}"):
        handshake.require_one_run(config, hellos, run=RUN, has_state=False)


@pytest.mark.parametrize("run", ["1" * 31, "g" * 32, "../x", 7])
def test_an_id_that_is_none_is_refused(config, people, run) -> None:
    """An id becomes part of what is shown and compared: only hexadecimal digits are one."""
    key = keys_of(config)["bank-1"]
    sent = handshake.hello(config, identity=people["bank-1"], key=key, epochs=[]).to_message()
    message = dataclasses.replace(sent, sender="bank-1", meta={**sent.meta, "run": run})
    with pytest.raises(ProtocolError, match="run"):
        handshake.read_hello(config, message)


def test_predictions_are_welcome_without_a_dealer_of_class_means(tmp_path: Path) -> None:
    """A dealer for class means alone is missed in training, and not where a kept model answers."""
    config = read_federation(write_class_means(tmp_path))
    people = {party.name: Identity.create(party.name, valid_days=1) for party in config.parties}
    keys = keys_of(config)
    hellos = hellos_of(config, people, keys)
    predicts = RunFacts(rows=0, train_rows=0, validation_rows=0, test_rows=0, predicts=True)
    for facts in (predicts, FACTS):
        message = handshake.welcome(hellos, facts).to_message()
        own = {"key": keys["bank-1"], "pinned": pinned(people)}
        if facts.predicts:
            opened, pair_keys = handshake.open_welcome(config, message, **own)
            assert opened == predicts
            assert set(pair_keys) == {2}
        else:
            with pytest.raises(ProtocolError, match="dealer"):
                handshake.open_welcome(config, message, **own)


class Quiet:
    """A primary that has let a caller in and says nothing more."""

    session = SESSION

    def __init__(self, *_given: object, **_more: object) -> None:
        """Whatever a caller is told."""

    def __enter__(self) -> "Quiet":
        return self

    def __exit__(self, *_error: object) -> None:
        """Nothing is held."""

    def connect(self, _patience_s: float, *, returning: bool, on_busy: object) -> None:
        assert not returning

    def send(self, _message: Message) -> None:
        """Nobody hears it."""

    def receive(self, _kind: object, *, round_number: int, deadline_s: float) -> Message:
        assert round_number == 0
        raise PartyTimeoutError(f"{deadline_s:g}")


@pytest.mark.parametrize(("on_loss", "seconds"), [("stop", "19"), ("wait", "914")])
def test_the_primary_gives_up_first_and_says_who_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on_loss: str, seconds: str
) -> None:
    """A caller that comes for the first time waits as long as those that wait for a lost party."""
    runtime = {"on_loss": on_loss, "join_timeout_s": 5.0, "wait_s": 900.0, "round_timeout_s": 7.0}
    config = read_federation(write_federation(tmp_path, secondaries=3, runtime=runtime))
    people = {party.name: Identity.create(party.name, valid_days=1) for party in config.parties}
    monkeypatch.setattr(handshake, "SecondaryTransport", Quiet)
    joining = handshake.join_session(
        config, people["bank-1"], pinned(people), epochs=[], stage_steps=[], patience_s=5.0
    )
    with pytest.raises(PartyTimeoutError, match=f"^{seconds}$"), joining:
        pass


def test_before_welcome_only_small_messages_are_taken(config, tmp_path: Path) -> None:
    """2 MB of a member that has only come are refused; from WELCOME on they are taken."""
    star = make_star(tmp_path / "star")
    limits = handshake.transport_limits(config, work_s=WAIT_S)
    share = Message(kind=RoundKind.SHARE, tensors={"words": np.zeros(250_000, dtype=np.int64)})
    for welcome in (False, True):
        with star.joined(limits=limits) as (primary, ends):
            if welcome:
                primary.widen(handshake.session_limits(config, FACTS, limits))
            ends["rental"].send(share, owned=True)
            if welcome:
                primary.receive("rental", RoundKind.SHARE, round_number=0, deadline_s=WAIT_S)
                continue
            with pytest.raises(
                ProtocolError, match=r"rental: sent SHARE of \d+ bytes; at most 10485"
            ):
                primary.receive("rental", RoundKind.SHARE, round_number=0, deadline_s=WAIT_S)


def test_the_largest_message_follows_from_the_file_and_hardly_from_the_primary(config) -> None:
    """The file's figure counts; rows that the primary claims ask for 1 GiB at most."""
    runtime = dataclasses.replace(config.runtime, largest_message_mib=7)
    small = dataclasses.replace(config, runtime=runtime)
    greeting = handshake.transport_limits(small, work_s=WAIT_S)
    assert handshake.session_limits(small, FACTS, greeting).max_message_bytes == 7 << 20
    claimed = dataclasses.replace(FACTS, rows=1 << 60)
    assert handshake.session_limits(small, claimed, greeting).max_message_bytes == 1 << 30
    assert greeting.max_message_bytes == 1 << 20
