"""A session's lines between callers: one numbering, however many stages or requests it has."""

from collections import deque

import numpy as np
import pytest

from securevfl.core.errors import ProtocolError
from securevfl.stages.encrypted_linkage.blockwise import BlockKind
from securevfl.transport.channels import (
    CallerChannels,
    SealedChannel,
    SealedFrom,
    SealedTo,
    _ChannelsOverStar,
)
from securevfl.transport.message import Message, StarKind
from securevfl.transport.star import SecondaryTransport

RANKS = {"agency": 0, "bank": 1, "dealer": 2}
SESSION = bytes(16)
KINDS = (BlockKind.LINK_DEALING, StarKind.SEALED)


class Relayed(SecondaryTransport):
    """A caller's connection: keeps what goes out, and hands out what a test puts in."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.session = SESSION
        self.sent: list[Message] = []
        self.due: deque[Message] = deque()

    def send(self, message: Message) -> None:
        self.sent.append(message)

    def receive(self, _kinds, **_deadline) -> Message:
        return self.due.popleft()


def ends() -> tuple[dict[str, SealedChannel], dict[str, SealedChannel]]:
    def line(own: str, peer: str) -> SealedChannel:
        return SealedChannel(
            b"p" * 32, session=SESSION, own_rank=RANKS[own], peer=peer, peer_rank=RANKS[peer]
        )

    return {"dealer": line("bank", "dealer")}, {"bank": line("dealer", "bank")}


def lines(transport: Relayed, sealed, ranks=RANKS) -> CallerChannels:
    return CallerChannels(transport, ranks, sealed, kinds=KINDS, deadline_s=1.0, between_s=1.0)


def test_two_stages_of_a_session_never_seal_under_one_number() -> None:
    """Equal messages of two requests: other letters each time, and the receiver reads both.

    Two letters under one number would show their difference to the primary that relays them.
    """
    theirs, mine = ends()
    message = Message(kind=BlockKind.LINK_DEALING, tensors={"mask": np.arange(6, dtype=np.int64)})
    letters = []
    for _ in range(2):
        out, back = Relayed("dealer"), Relayed("bank")
        lines(out, mine).send(message, "bank")
        letter = SealedTo.from_message(out.sent[0])
        letters.append(letter.sealed.tobytes())
        back.due.append(SealedFrom(rank=RANKS["dealer"], sealed=letter.sealed).to_message())
        opened = lines(back, theirs).receive("dealer", BlockKind.LINK_DEALING)
        assert (opened.tensors["mask"] == np.arange(6)).all()
    same = np.frombuffer(letters[0], np.uint8) == np.frombuffer(letters[1], np.uint8)
    # Of letters with two key streams one byte in 256 is equal; of one stream almost all.
    assert same.mean() < 0.5


def test_a_letter_of_somebody_who_takes_no_part_is_refused() -> None:
    """A party that the stage does not know has no say in it, though the session has its line."""
    theirs, mine = ends()
    out, back = Relayed("dealer"), Relayed("bank")
    lines(out, mine).send(Message(kind=BlockKind.LINK_DEALING), "bank")
    sealed = SealedTo.from_message(out.sent[0]).sealed
    back.due.append(SealedFrom(rank=RANKS["dealer"], sealed=sealed).to_message())
    without = {name: rank for name, rank in RANKS.items() if name != "dealer"}
    with pytest.raises(ProtocolError, match="relayed a message of nobody"):
        lines(back, theirs, without).receive("agency", BlockKind.LINK_DEALING)


def test_what_comes_before_its_turn_is_bounded() -> None:
    """One message by itself may be larger; then each party has its own 256 MiB."""

    class Lines(_ChannelsOverStar):
        def _next(self) -> None:
            raise AssertionError("nothing is due")

    inboxes = Lines(Relayed("bank"), (StarKind.DONE,), deadline_s=1.0)

    def message(mebibytes: int) -> Message:
        return Message(kind=StarKind.DONE, held_bytes=mebibytes << 20)

    inboxes._put("bank", message(900))
    with pytest.raises(ProtocolError, match=r"^bank: sends more than 256 MiB before its turn"):
        inboxes._put("bank", message(1))
    inboxes._put("rental", message(200))
    inboxes._put("rental", message(56))
    assert inboxes.receive("bank", StarKind.DONE).held_bytes == 900 << 20
    inboxes._put("bank", message(256))
    with pytest.raises(ProtocolError, match=r"^rental"):
        inboxes._put("rental", message(1))
