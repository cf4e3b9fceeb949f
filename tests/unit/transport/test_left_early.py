import numpy as np
import pytest
from helpers.star import WAIT_S, make_star, together

from securevfl.core.errors import PartyFailedError, PartyTimeoutError
from securevfl.federation.messages import RoundKind
from securevfl.transport.message import Message, StarKind


def test_sending_to_a_party_that_has_left_fails_and_never_waits(tmp_path):
    """A large message to a party that said farewell ends in an error that names the party."""
    star = make_star(tmp_path)
    mean = Message(kind=RoundKind.MEAN, tensors={"weights": np.zeros(4_000_000)})
    with star.joined() as (primary, ends):
        calls = [ends["rental"].close, lambda: primary.broadcast(primary.secondaries, mean)]
        together(calls)
        with pytest.raises(PartyFailedError, match=r"^rental: left before"):
            primary.broadcast(primary.secondaries, mean)
        with pytest.raises(PartyFailedError, match=r"^rental: left before"):
            _receive_both(ends["bank"])


def test_a_broken_connection_is_named_as_such(tmp_path):
    """Between the break and its report nobody says that the party has left."""
    star = make_star(tmp_path)
    with star.joined() as (primary, _ends):
        connection = primary._loop.connections["rental"]
        connection.ended = True  # as the loop has it before it tells why
        with pytest.raises(PartyTimeoutError, match="rental: sent no DONE"):
            primary.receive("rental", StarKind.DONE, round_number=0, deadline_s=0.2)
        connection.ended = False


def _receive_both(end):
    """Receive what may have come whole before the failure, and what comes after it."""
    for _ in range(2):
        end.receive(RoundKind.MEAN, round_number=0, deadline_s=WAIT_S)
