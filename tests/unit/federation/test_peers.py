"""Which messages a secondary takes in a stage, and when."""

from typing import Any

import pytest

from securevfl.core.errors import ProtocolError
from securevfl.federation.messages import AverageRequest, Mean
from securevfl.federation.session.peers import Handler, HandlerTable, PeersHere, ReplyHere
from securevfl.stages.pretraining.messages import LearnLocally, PretrainingKind
from securevfl.transport.message import Message


def recorded() -> tuple[list[Any], HandlerTable]:
    """Return what is handled, and a table in which a mean must follow a request for weights."""
    handled: list[Any] = []

    def take(message: Any, _reply: Any) -> None:
        handled.append(message)

    def ask(message: Any, _reply: Any) -> type[Mean]:
        handled.append(message)
        return Mean

    return handled, HandlerTable(
        {
            LearnLocally: Handler(take),
            AverageRequest: Handler(ask),
            Mean: Handler(take, follows=True),
        }
    )


def test_a_message_that_must_follow_comes_at_no_other_time_and_in_no_other_round() -> None:
    handled, table = recorded()
    mean, other = Mean(round_number=4, values={}), Mean(round_number=5, values={})
    with pytest.raises(ProtocolError, match="MEAN of round 4 where LOCAL or AVERAGE was due"):
        table.handle(mean, ReplyHere())
    table.handle(AverageRequest(round_number=4), ReplyHere())
    assert (table.kinds, table.round_number) == ((Mean.KIND,), 4)
    for wrong in (other, LearnLocally(iteration=1), AverageRequest(round_number=4)):
        with pytest.raises(ProtocolError, match="where MEAN was due"):
            table.handle(wrong, ReplyHere())
    table.handle(mean, ReplyHere())
    table.handle(LearnLocally(iteration=1), ReplyHere())
    assert handled == [AverageRequest(round_number=4), mean, LearnLocally(iteration=1)]


def test_a_message_that_a_stage_does_not_have_is_refused_by_name() -> None:
    _, table = recorded()
    with pytest.raises(ProtocolError, match="TOPS of round 0 where LOCAL or AVERAGE was due"):
        table.read(Message(kind=PretrainingKind.TOPS))


def test_parties_of_one_process_meet_the_same_order() -> None:
    handled: list[Any] = []
    take = Handler(lambda message, _reply: handled.append(message), follows=True)
    request = Handler(lambda _message, _reply: Mean)
    peers = PeersHere({1: {AverageRequest: request, Mean: take}})
    with pytest.raises(ProtocolError, match="where AVERAGE was due"):
        peers.tell(Mean(round_number=1, values={}))
    assert handled == []
