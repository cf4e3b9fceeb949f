"""What a primary says to two secondaries differently: every sum that comes of it is noise.

Two real secondaries answer behind real masks. What the primary adds up is compared with the sum of
what both have masked: equal where both were told the same, and without one word in common where
they were told different things, in any field of any message, in a first session and in a resumed
one that sends kept words again.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.fuzzing.messages import READS, Read
from helpers.lying_primary import Played, Promise, QuietError, gradient_for, honest, plan_of, world
from helpers.ring_keys import random_pair_keys
from torch import Tensor

from securevfl.federation.messages import EpochMark, PredictRequest, RoundKind, RoundPlan
from securevfl.federation.run_plan import new_run
from securevfl.mpc.masks import PairwiseMasks
from securevfl.transport.message import Message

RANKS = (1, 2)
LEARNS = Promise(encoder="trained", unit="linked-row")
FROZEN = Promise(encoder="frozen", unit="linked-row")


class Masked(Played):
    """A secondary whose words leave under real masks; the test sees them before and after."""

    masks: PairwiseMasks

    def begin(self, masks: PairwiseMasks) -> None:
        """Take a new session's masks."""
        self.masks = masks
        self.plain: dict[int, Tensor] = {}
        self.masked: dict[int, Tensor] = {}

    def bind(self, message_digest: bytes, ranks: Sequence[int]) -> None:
        """Bind a message, as a party's end of the secure sum does."""
        self.masks.bind(message_digest, ranks)

    def __call__(self, words: Tensor, *, round_number: int, active: Sequence[int]) -> None:
        """Mask words, and keep them before and after."""
        self.plain[round_number] = words.clone()
        self.masks.apply(words, round_number=round_number, active=active)
        self.masked[round_number] = words.clone()


def two(folder: Path, promise: Promise) -> tuple[Masked, Masked]:
    """Begin a run's first session with both."""
    parties = tuple(Masked(promise=promise, folder=folder / str(rank)) for rank in RANKS)
    facts = replace(world(promise).facts, run=new_run())
    for one in parties:
        one.folder.mkdir()
        one.join(facts, resume=False)
    fresh_masks(parties)
    return parties


def fresh_masks(parties: Sequence[Masked]) -> None:
    """Give a session's pair keys to both."""
    keys = random_pair_keys(RANKS)
    for rank, one in zip(RANKS, parties, strict=True):
        one.begin(PairwiseMasks(rank, keys[rank]))


def common(parties: Sequence[Masked], round_number: int) -> float:
    """Return the share of a round's words in which the primary's sum is that of the plain words."""
    first, second = (one.masked[round_number] for one in parties)
    size = min(len(first), len(second))
    true = sum(one.plain[round_number][:size] for one in parties)
    return float((first[:size] + second[:size] == true).double().mean())


def say(one: Masked, *messages: Message) -> None:
    one.line.inbox.extend(messages)
    try:
        one.serve()
    except QuietError:
        # All that was said is done; a message that waits for another one is as good as none.
        return


def plan(number: int, rows: Sequence[int], purpose: str, active: Sequence[int] = RANKS) -> Message:
    wanted = RoundPlan(
        round_number=number,
        rows=np.array(rows, dtype=np.int64),
        active=tuple(active),
        purpose=purpose,
    )
    return wanted.to_message()


def gradient(promise: Promise, number: int, rows: Sequence[int], value: float) -> Message:
    facts = world(promise).facts
    wanted = RoundPlan(
        round_number=number,
        rows=np.array(rows, dtype=np.int64),
        active=RANKS,
        purpose="train",
    )
    return gradient_for(plan_of(promise, facts), wanted, value=value)


BATCH = tuple(range(8))
NEXT = tuple(range(8, 16))


def test_both_are_told_the_same_and_the_sum_is_exact(tmp_path: Path) -> None:
    """The negative control of all that follows: training rounds, one after another."""
    parties = two(tmp_path, LEARNS)
    for one in parties:
        say(one, plan(1, BATCH, "train"), gradient(LEARNS, 1, BATCH, 0.01), plan(2, NEXT, "train"))
    assert common(parties, 1) == common(parties, 2) == 1.0


@pytest.mark.parametrize(
    "said",
    [
        plan(1, NEXT, "train"),
        plan(1, BATCH[::-1], "train"),
        plan(1, BATCH[:-1], "train"),
    ],
    ids=["other rows", "another order", "fewer rows"],
)
def test_a_first_round_of_other_things_is_noise(said: Message, tmp_path: Path) -> None:
    """One secondary is asked for something else under the same round number."""
    parties = two(tmp_path, LEARNS)
    say(parties[0], plan(1, BATCH, "train"))
    say(parties[1], said)
    assert common(parties, 1) == 0.0


def test_after_one_other_gradient_every_later_round_is_noise(tmp_path: Path) -> None:
    """The least bit of a float32 is enough, and the round before it was still exact."""
    parties = two(tmp_path, LEARNS)
    other = float(np.nextafter(np.float32(0.01), np.float32(1)))
    for one, value in zip(parties, (0.01, other), strict=True):
        say(one, plan(1, BATCH, "train"), gradient(LEARNS, 1, BATCH, value))
        say(one, plan(2, NEXT, "train"))
    assert common(parties, 1) == 1.0
    assert common(parties, 2) == 0.0


@pytest.mark.parametrize("lies", [False, True])
def test_after_another_end_of_an_epoch_every_later_round_is_noise(
    lies: bool, tmp_path: Path
) -> None:
    """An epoch as an honest primary leads it, but for its end, which one hears otherwise."""
    parties = two(tmp_path, LEARNS)
    ended = False
    for step in honest(parties[0].plan, released=0):
        said = () if step.round is None else (step.round.to_message(),)
        for one in parties:
            messages = [*said, *step.messages]
            if lies and one is parties[1] and messages[0].kind is RoundKind.EPOCH:
                messages = [EpochMark(epoch=1, best=False).to_message()]
            say(one, *messages)
        if ended and step.round is not None:
            break
        ended = ended or any(message.kind is RoundKind.EPOCH for message in step.messages)
    assert step.round is not None
    assert common(parties, step.round.round_number) == (0.0 if lies else 1.0)


def test_a_resumed_frozen_run_answers_kept_words_in_no_other_combination(tmp_path: Path) -> None:
    """B0: rows r of one and r' of the other, both kept: noise; the same rows of both: their sum."""
    parties = two(tmp_path, FROZEN)
    facts = parties[0].plan.facts
    steps = honest(parties[0].plan, released=0)
    rounds = []
    for _ in range(5):
        step = next(steps)
        assert step.round is not None
        rounds.append(step.round)
        for one in parties:
            say(one, step.round.to_message())
        assert common(parties, step.round.round_number) == 1.0
    before = [len(one.ledger.released_rows) for one in parties]

    for shift, expected in ((0, 1.0), (1, 0.0)):
        for one in parties:
            one.join(facts, resume=True)
        fresh_masks(parties)
        for number, (first, second) in enumerate(
            zip(rounds, [*rounds[shift:], *rounds[:shift]], strict=True), 1
        ):
            for one, asked in zip(parties, (first, second), strict=True):
                say(one, replace(asked, round_number=number).to_message())
            assert common(parties, number) == expected
        assert [len(one.ledger.released_rows) for one in parties] == before


@pytest.mark.parametrize(
    "changed",
    [{"run": "1" * 32}, {"rows": 41}, {"predicted_rows": 7}, {"active": (1,)}],
    ids=lambda one: next(iter(one)),
)
def test_requests_for_predictions_are_bound_in_every_field(changed: dict[str, object]) -> None:
    """Two secondaries with two requests have no mask in common."""
    request = PredictRequest(run="0" * 32, rows=40, predicted_rows=8, active=RANKS)
    keys = random_pair_keys(RANKS)
    words = []
    for rank, one in zip(RANKS, (request, replace(request, **changed)), strict=True):
        masks = PairwiseMasks(rank, keys[rank])
        masks.bind(one.to_message().digest(), RANKS)
        zeros = torch.zeros(500, dtype=torch.int64)
        masks.apply(zeros, round_number=1, active=RANKS)
        words.append(zeros)
    assert int((words[0] + words[1] == 0).sum()) == 0


@pytest.mark.parametrize("read", READS, ids=lambda read: type(read.example).__name__)
def test_a_messages_digest_is_of_all_that_it_says(read: Read) -> None:
    """Any figure or array that differs by the least gives another digest; the sender does not."""
    message = read.example.to_message()
    own = message.digest()
    assert replace(message, sender="somebody").digest() == own
    assert replace(message, round_number=message.round_number + 1).digest() != own
    for name, value in message.meta.items():
        meta = {key: one for key, one in message.meta.items() if key != name}
        assert replace(message, meta=meta).digest() != own, name
        assert replace(message, meta={**meta, name: [value]}).digest() != own, name
    for name, array in message.tensors.items():
        for other in _altered(array):
            assert replace(message, tensors={**message.tensors, name: other}).digest() != own, name


def _altered(array: np.ndarray) -> list[np.ndarray]:
    found = [array.astype(np.float64 if array.dtype != np.float64 else np.float32)]
    if array.size:
        bits = np.ascontiguousarray(array).view(np.uint8).copy()
        bits.reshape(-1)[0] ^= 1
        found.append(bits.view(array.dtype).reshape(array.shape))
    if array.ndim > 1:
        found.append(array.reshape(-1))
    return found


def test_facts_of_a_session_are_bound_in_every_field() -> None:
    """Whatever the primary says of a session to two callers differently parts their keys."""
    facts = world(LEARNS).facts
    own = facts.statement()
    for field in dataclasses.fields(facts):
        value = getattr(facts, field.name)
        changed = (
            not value
            if isinstance(value, bool)
            else value + 1
            if isinstance(value, int)
            else f"{value}1"
            if isinstance(value, str)
            else (1,)
        )
        if changed == value:
            changed = (2,)
        assert replace(facts, **{field.name: changed}).statement() != own, field.name
