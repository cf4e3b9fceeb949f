"""A session that begins without some parties: they are turned away, and known to call."""

import time

import pytest
from helpers.patience import PATIENCE_S
from helpers.star import WAIT_S, make_star, together

from securevfl.core.errors import PartyAbsentError, PartyFailedError, PartyLostError
from securevfl.transport.message import Message, StarKind


@pytest.fixture(scope="module")
def star(tmp_path_factory):
    return make_star(tmp_path_factory.mktemp("star"))


def until(condition) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_who_comes_too_late_is_turned_away_and_remembered(star) -> None:
    """The session goes on with the others; the late one may call again, and the primary knows."""
    primary = star.primary()
    address = primary.listen()
    rental, bank, again = (star.secondary(name, address) for name in ("rental", "bank", "bank"))
    try:
        rental.connect(WAIT_S)
        asked = []

        def enough(joined, waited_s: float) -> bool:
            asked.append((set(joined), waited_s))
            return joined == {"rental"}

        assert primary.wait_for_parties(WAIT_S, enough=enough) == {"rental"}
        assert asked[-1][0] == {"rental"}
        assert primary.calling() == ()
        with pytest.raises(PartyLostError, match=r"^bank: is lost to the others.*an epoch ends"):
            bank.connect(WAIT_S)
        assert primary.calling() == ("bank",)
        # Whoever knows that it was there before calls until it is let in.
        with pytest.raises(
            PartyAbsentError, match=r"did not let this party in.*is lost to the oth"
        ):
            again.connect(0.5, returning=True)
        primary.broadcast(["rental"], Message(kind=StarKind.DONE))
        rental.receive(StarKind.DONE, round_number=None, deadline_s=WAIT_S)
    finally:
        together([end.close for end in (primary, rental, bank, again)])


def test_who_is_sent_away_is_no_loss(star) -> None:
    """It reads why; the others do not notice."""
    with star.joined() as (primary, ends):
        primary.dismiss("bank", "goes on with another run")
        with pytest.raises(PartyFailedError, match=r"^bank: goes on with another run$"):
            ends["bank"].receive(StarKind.DONE, round_number=None, deadline_s=WAIT_S)
        ends["bank"].close()
        until(lambda: primary._connection("bank").ended)
        assert primary.failure is None
        primary.broadcast(["rental"], Message(kind=StarKind.DONE))
        ends["rental"].receive(StarKind.DONE, round_number=None, deadline_s=WAIT_S)


def test_nobody_waits_for_enough_for_ever(star) -> None:
    primary = star.primary()
    try:
        primary.listen()
        with pytest.raises(PartyAbsentError, match=r"rental, bank: .* within 0.1 s; two must be"):
            primary.wait_for_parties(
                0.1, enough=lambda _joined, _waited: False, else_said="; two must be there"
            )
    finally:
        primary.close()
