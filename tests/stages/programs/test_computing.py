"""Shares between secondaries over the star, and a primary that relays other bytes than it got."""

import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from helpers.star import Star, make_star, together
from jaxtyping import UInt8

from securevfl.core.errors import AuthenticationError, ProtocolError
from securevfl.mpc import on_shares
from securevfl.mpc.crypten_bridge import crypten
from securevfl.stages.programs import messages
from securevfl.stages.programs.messages import ComputingLines, DealingParty, LineToDealer
from securevfl.transport.channels import (
    CallerChannels,
    PrimaryChannels,
    SealedChannel,
    SealedFrom,
    SealedTo,
)
from securevfl.transport.message import Done, Message

RANKS = {"agency": 0, "rental": 1, "bank": 2, "dealer": 3}
NAMES = {1: "rental", 2: "bank"}
CONTEXT = bytes(32)
X = torch.arange(6, dtype=torch.float32)


@pytest.fixture(scope="module")
def star(tmp_path_factory: pytest.TempPathFactory) -> Star:
    return make_star(tmp_path_factory.mktemp("star"), RANKS)


Letter = UInt8[np.ndarray, " _bytes"]


class Relay(PrimaryChannels):
    """A primary that may change, keep or repeat the letters of secondaries."""

    lies: Callable[[list[Letter]], list[Letter]] = staticmethod(lambda letters: letters[-1:])

    def _relay(self, message: Message) -> None:
        letter = SealedTo.from_message(message)
        sender = self._ranks[message.sender]
        if sender == 3 or letter.rank == 3:
            super()._relay(message)
            return
        self.letters = [*getattr(self, "letters", []), letter.sealed]
        for sealed in self.lies(self.letters):
            changed = SealedFrom(rank=sender, sealed=sealed).to_message()
            self._transport.relay(self._names[letter.rank], changed, received=message)


def run(star: Star, lies: Callable[[list[Letter]], list[Letter]], *, quick: bool) -> list[Any]:
    """Let two secondaries multiply, a dealer deal and a primary relay; return how each ended."""
    keys = {frozenset(pair): os.urandom(32) for pair in ((1, 2), (1, 3), (2, 3))}
    with star.joined() as (primary, ends):
        wait_s = 5.0 if quick else 300.0

        def channels(name: str, kinds: Any) -> CallerChannels:
            own, sealed = RANKS[name], {}
            for peer, rank in RANKS.items():
                if rank not in (0, own):
                    sealed[peer] = SealedChannel(
                        keys[frozenset((own, rank))],
                        session=primary.session,
                        own_rank=own,
                        peer=peer,
                        peer_rank=rank,
                    )
            return CallerChannels(
                ends[name], RANKS, sealed, kinds=kinds, deadline_s=wait_s, between_s=wait_s
            )

        def compute(name: str) -> Any:
            lines, rank = channels(name, messages.AT_SECONDARY), RANKS[name]
            member = on_shares.Seat(
                rank=rank,
                world=(1, 2),
                pair_keys={3 - rank: keys[frozenset((1, 2))]},
                context=CONTEXT,
                lines=ComputingLines(lines, NAMES),
                dealer=LineToDealer(lines, "dealer", CONTEXT),
            )
            try:
                with on_shares.computing(member):
                    product = crypten.cryptensor(X, src=0) * crypten.cryptensor(X, src=1)
                    opened = product.get_plain_text()
            except ProtocolError:
                ends[name].close()  # as a party that fails does; the others need not wait for it
                raise
            lines.send(messages.ComputingDone().to_message(), "agency")
            return opened

        def deal() -> Any:
            lines = channels("dealer", messages.AT_DEALER)
            DealingParty(lines, NAMES, CONTEXT).deal()

        def relay() -> Any:
            lines = Relay(primary, RANKS, kinds=messages.AT_PRIMARY, deadline_s=wait_s)
            lines.lies = lies
            try:
                for name in NAMES.values():
                    lines.receive(name, messages.ComputingKind.COMPUTING_DONE)
            finally:
                lines.send(Done().to_message(), "dealer")

        return together([lambda: compute("rental"), lambda: compute("bank"), deal, relay])


def test_two_secondaries_multiply_through_a_primary_that_reads_nothing(star: Star) -> None:
    seen: list[Letter] = []

    def honest(letters: list[Letter]) -> list[Letter]:
        seen.append(letters[-1])
        return letters[-1:]

    rental, bank, dealt, relayed = run(star, honest, quick=False)

    assert torch.allclose(rental, X * X, atol=1e-3)
    assert torch.equal(rental, bank)
    assert (dealt, relayed) == (None, None)
    # A letter says neither whose table nor which step it is of: it is a cipher with a tag.
    assert len(seen) == 4
    assert len({letter.tobytes()[:16] for letter in seen}) == 4


def changed(letters: list[Letter]) -> list[Letter]:
    other = letters[-1].copy()
    other[len(other) // 2] ^= 1
    return [other]


def replayed(letters: list[Letter]) -> list[Letter]:
    return [letters[0]] if len(letters) > 2 else letters[-1:]


def reflected(letters: list[Letter]) -> list[Letter]:
    """What one sent to the other comes back in the other's name."""
    return [letters[0]]


def twice(letters: list[Letter]) -> list[Letter]:
    return [letters[-1]] * 2


@pytest.mark.parametrize("lies", [changed, replayed, reflected, twice])
def test_a_primary_that_relays_other_bytes_is_found_out(star: Star, lies: Any) -> None:
    ends = run(star, lies, quick=True)

    found = [end for end in ends[:2] if isinstance(end, AuthenticationError)]
    assert found, ends
    assert "what the primary relayed is not what was sent" in str(found[0])


def test_a_step_of_another_program_is_refused() -> None:
    message = messages.ComputingTensor(step=2, values=np.zeros(3)).to_message()
    with pytest.raises(ProtocolError, match="sent step 2 of a program that is at 3 here"):
        messages.ComputingTensor.from_message(message, step=3, dtype=np.float64, shape=(3,))
    with pytest.raises(ProtocolError, match=r"must have shape \[4\]"):
        messages.ComputingTensor.from_message(message, step=2, dtype=np.float64, shape=(4,))
