import dataclasses

import pytest

from securevfl.core.errors import AuthenticationError, ConfigError, ProtocolError
from securevfl.mpc.masks import KeyOffer, SessionKey

SESSION = bytes(range(16))


AGREED = b"the session's facts"


def session_keys(session: bytes = SESSION, ranks: tuple[int, ...] = (1, 2, 3)) -> list[SessionKey]:
    return [SessionKey(session=session, rank=rank, name=f"party{rank}") for rank in ranks]


def offers_of(keys: list[SessionKey]) -> dict[int, KeyOffer]:
    return {key.offer.rank: key.offer for key in keys}


def test_both_ends_of_every_pair_hold_the_same_key() -> None:
    """Keys have 256 bits, agree within a pair and differ between pairs."""
    keys = session_keys()
    offers = offers_of(keys)

    agreed = {key.offer.rank: key.agree(offers, agreed=AGREED) for key in keys}

    assert agreed[1][2] == agreed[2][1]
    assert agreed[1][3] == agreed[3][1]
    assert agreed[2][3] == agreed[3][2]
    assert len({agreed[1][2], agreed[1][3], agreed[2][3]}) == 3
    assert all(len(key) == 32 for mine in agreed.values() for key in mine.values())


def test_a_new_session_has_new_keys() -> None:
    """A restart is a new session: nothing of the old masks comes back."""
    first, second = session_keys(), session_keys()

    old = first[0].agree(offers_of(first), agreed=AGREED)
    new = second[0].agree(offers_of(second), agreed=AGREED)

    assert not set(old.values()) & set(new.values())


@pytest.mark.parametrize(
    ("field", "value"),
    [("session", bytes(16)), ("rank", 7), ("name", "other"), ("public", bytes(32))],
)
def test_the_signed_statement_binds_every_field(field: str, value: object) -> None:
    """A signature for one session, rank, name or key is none for another."""
    offer = session_keys()[0].offer

    assert dataclasses.replace(offer, **{field: value}).statement() != offer.statement()


def test_statements_cannot_be_read_in_two_ways() -> None:
    """Moving a byte between name and key gives another statement, since the length is in it."""
    one = KeyOffer(session=SESSION, rank=1, name="ab", public=b"c" * 32)
    two = KeyOffer(session=SESSION, rank=1, name="abc", public=b"c" * 32)

    assert not two.statement().startswith(one.statement()[:-32])


def test_the_pair_key_depends_on_the_names() -> None:
    """Parties that disagree about who is who do not get a common key."""
    one, two, _ = session_keys()
    renamed = dataclasses.replace(two.offer, name="impostor")

    mine = one.agree({1: one.offer, 2: renamed}, agreed=AGREED)
    theirs = two.agree({1: one.offer, 2: two.offer}, agreed=AGREED)

    assert mine[2] != theirs[1]


def test_a_key_that_the_relay_puts_in_between_gives_no_common_key() -> None:
    """Without the signature check a substituted key would still not match the honest peer's."""
    one, two, _ = session_keys()
    relay = SessionKey(session=SESSION, rank=2, name="party2")

    mine = one.agree({1: one.offer, 2: relay.offer}, agreed=AGREED)
    theirs = two.agree({1: one.offer, 2: two.offer}, agreed=AGREED)

    assert mine[2] != theirs[1]


def test_keys_are_agreed_once() -> None:
    """A second set of masks from the same keys would cancel the first."""
    keys = session_keys()
    keys[0].agree(offers_of(keys), agreed=AGREED)

    with pytest.raises(ProtocolError, match="agreed before; start a new session"):
        keys[0].agree(offers_of(keys), agreed=AGREED)


def test_an_offer_of_another_session_or_rank_is_refused() -> None:
    """Replayed offers do not lead to keys."""
    for changed in ({"session": bytes(16)}, {"rank": 3}):
        one, two, _ = session_keys()
        with pytest.raises(AuthenticationError, match="party2"):
            one.agree({1: one.offer, 2: dataclasses.replace(two.offer, **changed)}, agreed=AGREED)


def test_a_relay_that_echoes_a_key_is_refused() -> None:
    """Two parties with one key, or this party's own key changed, is an attack."""
    one, two, _ = session_keys()
    echoed = dataclasses.replace(two.offer, public=one.offer.public)
    with pytest.raises(AuthenticationError, match="one and the same key"):
        one.agree({1: one.offer, 2: echoed}, agreed=AGREED)

    one, two, _ = session_keys()
    changed = dataclasses.replace(one.offer, public=bytes([9]) + bytes(31))
    with pytest.raises(AuthenticationError, match="the relay changed the key"):
        one.agree({1: changed, 2: two.offer}, agreed=AGREED)


@pytest.mark.parametrize("point", [bytes(32), bytes([1]) + bytes(31)])
def test_points_of_low_order_are_refused(point: bytes) -> None:
    """They would make the secret all zeros, whoever computes it."""
    one, two, _ = session_keys()
    with pytest.raises(AuthenticationError, match="low order"):
        one.agree({1: one.offer, 2: dataclasses.replace(two.offer, public=point)}, agreed=AGREED)


def test_impossible_offers_cannot_exist() -> None:
    """The primary does not mask, and lengths are fixed."""
    with pytest.raises(ConfigError, match="rank 0"):
        SessionKey(session=SESSION, rank=0, name="primary")
    with pytest.raises(ConfigError, match="16 bytes"):
        SessionKey(session=b"short", rank=1, name="party1")
    with pytest.raises(AuthenticationError, match="not 32"):
        KeyOffer(session=SESSION, rank=1, name="party1", public=b"short")


def test_nothing_secret_is_printed() -> None:
    """The text of a session key shows who it is of, and no key."""
    assert repr(session_keys()[0]) == "SessionKey(rank=1, name='party1')"


def test_parties_that_were_told_different_facts_have_no_common_key() -> None:
    """The relay says of the session to each what it likes; a key of both follows from all of it."""
    keys = session_keys(ranks=(1, 2))
    offers = offers_of(keys)

    mine = keys[0].agree(offers, agreed=b"100 rows")
    theirs = keys[1].agree(offers, agreed=b"200 rows")

    assert mine[2] != theirs[1]
