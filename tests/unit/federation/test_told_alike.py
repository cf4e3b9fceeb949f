"""Secondaries that a primary told different things: their sum is uniform words, and no less.

Real secondaries behind real masks; the wire is a queue for each. What each has sent is added up as
a lying primary would, and compared with the sum of what lies under the masks.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.built import Built, built
from helpers.federations import FROZEN
from helpers.lying_primary import Line, QuietError, done, gradient_for
from torch import Tensor

from securevfl import SecureVflError, read_federation
from securevfl.federation.messages import AverageRequest, EpochMark, Mean, RoundPlan
from securevfl.federation.over_star import serve, sum_from_secondary
from securevfl.federation.rounds.secondary import save_nothing
from securevfl.federation.run_plan import RunFacts
from securevfl.models.fet.positions import position_weights
from securevfl.mpc.codec import SumTo
from securevfl.mpc.masks import PairwiseMasks, SessionKey
from securevfl.testing import save_federation, write_federation
from securevfl.transport.message import Message

RUN = "5" * 32
FACTS = RunFacts(rows=60, train_rows=42, validation_rows=6, test_rows=12, run="6" * 32)
Lie = Callable[[Message], Message]


class Sent(Line):
    """A secondary's end of a wire, which keeps what it sends."""

    def __init__(self) -> None:
        super().__init__()
        self.words: list[np.ndarray] = []

    @property
    def waiting(self) -> int:
        """None: a message of the script counts as sent when it is due."""
        return 0

    def send(self, message: Message, *, owned: bool = False) -> None:
        del owned
        self.words.append(message.tensors["words"].copy())


class Clear:
    """A secure sum that keeps what it is given before it masks it."""

    def __init__(self, real: SumTo) -> None:
        self.bind, self.prepare, self._real = real.bind, real.prepare, real
        self.words: list[np.ndarray] = []

    def __call__(self, words: Tensor, *, round_number: int, active: Sequence[int]) -> Tensor | None:
        self.words.append(words.numpy().copy())
        return self._real(words, round_number=round_number, active=active)


def pair_keys(told: Mapping[int, RunFacts]) -> dict[int, dict[int, bytes]]:
    """Return keys of one session in which each rank was told some facts."""
    keys = {rank: SessionKey(session=bytes(16), rank=rank, name=f"p{rank}") for rank in told}
    offers = {rank: key.offer for rank, key in keys.items()}
    return {rank: key.agree(offers, agreed=told[rank].statement()) for rank, key in keys.items()}


def left_in_sums(
    one: Built,
    scripts: Mapping[int, Sequence[Message]],
    *,
    facts: Mapping[int, RunFacts] | None = None,
) -> list[np.ndarray]:
    """Return what is left of all masks in the sum of each round that all have answered, in order.

    Zeros where the sum is right.
    """
    keys = pair_keys(facts or dict.fromkeys(scripts, one.plan.facts))
    sums = []
    for rank, script in scripts.items():
        line = Sent()
        real, masks = sum_from_secondary(line, one.plan, keys[rank], rank=rank)
        clear = Clear(real)
        line.inbox = deque(script)
        try:
            serve(
                one.secondaries[rank].handlers(save_nothing),
                line,
                clear,
                ranks=tuple(one.plan.secondaries),
                deadline_s=1.0,
            )
        except (QuietError, SecureVflError):
            pass  # Whatever it refuses, it does not answer.
        finally:
            masks.close()
        sums.append([sent - own for sent, own in zip(line.words, clear.words, strict=True)])
    return [
        np.sum([words[: min(map(len, of_round))] for words in of_round], axis=0)
        for of_round in zip(*sums, strict=False)
    ]


def told(script: Sequence[Message], at: int, lie: Lie) -> list[Message]:
    """Return the script with another message in a place."""
    return [lie(one) if place == at else one for place, one in enumerate(script)]


def verdicts(left: Sequence[np.ndarray]) -> list[bool]:
    """Return of each round whether its masks are gone; where some are left, all words have one."""
    for words in left:
        # One word of a uniform sum is zero once in 2^64.
        assert (words == 0).all() or (words != 0).all()
    return [bool((words == 0).all()) for words in left]


@pytest.fixture(scope="module")
def learning(tmp_path_factory: pytest.TempPathFactory):
    """A run of three whose encoders learn, without noise: what masks alone protect."""
    folder = tmp_path_factory.mktemp("learning")
    path = write_federation(
        folder,
        secondaries=3,
        rows=60,
        privacy={"mechanism": "none", "encoder": "trained"},
        model={"average_positions_every": 1},
        training={"epochs": 2, "batch_size": 64},
    )
    return path, folder


def plan_message(number: int, rows: np.ndarray, purpose: str) -> Message:
    plan = RoundPlan(round_number=number, rows=rows, active=(1, 2, 3), purpose=purpose)
    return plan.to_message()


def epoch_message(epoch: int, **mark: bool) -> Message:
    return EpochMark(epoch=epoch, **mark).to_message()


def learning_script(one: Built) -> list[Message]:
    """Return a whole run's messages: every kind that a round of training has, and its test rows."""
    split, numbers = one.split, iter(range(1, 99))
    shapes = position_weights(one.secondaries[1].bottom)
    script = []
    for epoch in (1, 2):
        train = plan_message(next(numbers), split.train, "train")
        asked = RoundPlan.from_message(train)
        averaging = next(numbers)
        values = {name: np.full(tuple(own.shape), 0.5, np.float32) for name, own in shapes.items()}
        script += [
            train,
            gradient_for(one.plan, asked),
            AverageRequest(round_number=averaging).to_message(),
            Mean(round_number=averaging, values=values).to_message(),
            plan_message(next(numbers), split.validation, "validation"),
            epoch_message(epoch, best=True),
        ]
    script.append(epoch_message(2, best=False, restore_best=True))
    script.append(plan_message(next(numbers), split.test, "test"))
    return [*script, done()]


def rows_of(change: Callable[[np.ndarray], np.ndarray]) -> Lie:
    return lambda one: replace(one, tensors={"rows": change(one.tensors["rows"]).copy()})


def arrays_of(one: Message) -> Message:
    return replace(one, tensors={name: array * 1.5 for name, array in one.tensors.items()})


def number_of(one: Message) -> Message:
    return replace(one, round_number=one.round_number + 50)


def figure(**meta: object) -> Lie:
    return lambda one: replace(one, meta={**one.meta, **meta})


# Message of the script, what becomes of it at the last secondary, and the first sum without meaning
# of the seven: training, positions, validation, twice, and test.
LIES: dict[str, tuple[int, Lie, int]] = {
    "rows": (0, rows_of(lambda rows: rows[::-1]), 0),
    "one row": (0, rows_of(lambda rows: np.r_[59, rows[1:]]), 0),
    "number of rows": (0, rows_of(lambda rows: rows[:-1]), 0),
    "gradient": (1, arrays_of, 1),
    "number of an average": (8, number_of, 4),
    "mean": (3, arrays_of, 2),
    "rows for validation": (4, rows_of(lambda rows: rows[::-1]), 2),
    "number of a round": (4, number_of, 2),
    "best epoch": (5, figure(best=False), 3),
    "rows later": (6, rows_of(lambda rows: rows[::-1]), 3),
    "last epoch that is best": (12, figure(epoch=1), 6),
    "rows for tests": (13, rows_of(lambda rows: rows[::-1]), 6),
}


@pytest.mark.parametrize("kind", LIES)
def test_one_secondary_told_otherwise_leaves_masks_in_every_later_sum(
    learning, tmp_path: Path, kind: str
) -> None:
    """Whichever field of whichever message it is; sums of before it are right."""
    path, _ = learning
    place, lie, first = LIES[kind]
    with built(path, tmp_path / "run") as one:
        script = learning_script(one)
        left = left_in_sums(one, {1: script, 2: script, 3: told(script, place, lie)})
    found = verdicts(left)
    assert found[:first] == [True] * first
    assert len(found) > first, "the lie was refused: it shows nothing"
    assert not any(found[first:])


def test_secondaries_that_are_told_alike_add_up(learning, tmp_path: Path) -> None:
    """All seven sums of the run: without it the test above would pass for any masks."""
    path, _ = learning
    with built(path, tmp_path / "run") as one:
        script = learning_script(one)
        left = left_in_sums(one, dict.fromkeys((1, 2, 3), script))
    assert verdicts(left) == [True] * 7


@pytest.mark.parametrize("name", list(asdict(FACTS)))
def test_secondaries_that_were_welcomed_otherwise_share_no_mask(
    learning, tmp_path: Path, name: str
) -> None:
    """Every number of the WELCOME is in their keys, whether a round depends on it or not."""
    path, _ = learning
    with built(path, tmp_path / "run") as one:
        facts, script = one.plan.facts, learning_script(one)[:1]
        other = {"run": RUN, "active": (1, 2, 3), "predicts": True}.get(name, 17)
        lied = {1: facts, 2: facts, 3: replace(facts, **{name: other})}
        left = left_in_sums(one, dict.fromkeys((1, 2, 3), script), facts=lied)
    assert verdicts(left) == [False]


def left_of(parties: Mapping[int, PairwiseMasks], number: int) -> np.ndarray:
    """Return the sum of the masks of one round of these parties."""
    words = {rank: torch.zeros(8, dtype=torch.int64) for rank in parties}
    for rank, masks in parties.items():
        masks.apply(words[rank], round_number=number, active=tuple(parties))
    return sum(words.values(), torch.zeros(8, dtype=torch.int64)).numpy()


def test_a_plan_that_was_told_otherwise_shares_no_mask(learning, tmp_path: Path) -> None:
    """How many rows train, which a message of its own says where only aligned rows do."""
    path, _ = learning
    with built(path, tmp_path / "run") as one:
        plan, keys = one.plan, pair_keys(dict.fromkeys((1, 2), one.plan.facts))
    parties = {
        rank: sum_from_secondary(Sent(), replace(plan, training_rows=rows), keys[rank], rank=rank)[
            1
        ]
        for rank, rows in ((1, 30), (2, 31))
    }
    assert verdicts([left_of(parties, 1)]) == [False]


def write_frozen(folder: Path) -> Path:
    path = write_federation(
        folder,
        secondaries=2,
        rows=60,
        model={"release": "pooled"},
        training={"epochs": 1, "batch_size": 12},
        privacy=FROZEN,
    )
    source = dict(read_federation(path).source)
    for party in source["party"][1:]:
        party |= {"scaling": "bounds", "bounds": [-4.0, 4.0]}
    return save_federation(folder, source)


def releases(one: Built, *, moved: int = 0) -> list[Message]:
    """Return a pass's rounds; ``moved`` gives each the rows of as many rounds later."""
    plans = one.passed()
    rows = [plan.rows for plan in plans]
    return [
        replace(plan, rows=rows[(place + moved) % len(rows)]).to_message()
        for place, plan in enumerate(plans)
    ]


def test_kept_words_of_a_frozen_run_come_again_in_no_other_combination(tmp_path: Path) -> None:
    """A resumed session answers with the same noised words: of the same rows, or for nothing.

    Asked for rows r of one secondary and r' of another, all five sums of the second session used to
    be right, and with them the noise of one round was that of another: 8 was 11.8 of two
    secondaries, 107 of fifty, and nothing was charged.
    """
    path = write_frozen(tmp_path)
    with built(path, tmp_path / "run", run=RUN) as one:
        first = left_in_sums(one, dict.fromkeys((1, 2), releases(one)))
        charged = len(one.booked(1))
    with built(path, tmp_path / "run", run=RUN, resume=True) as one:
        again = left_in_sums(one, dict.fromkeys((1, 2), releases(one)))
    with built(path, tmp_path / "run", run=RUN, resume=True) as one:
        moved = left_in_sums(one, {1: releases(one), 2: releases(one, moved=1)})
        assert sum(line["kind"] == "charge" for line in one.booked(1)) == 5
    assert charged
    assert verdicts(first) == verdicts(again) == [True] * 5
    assert verdicts(moved) == [False] * 5


def test_with_party_dropout_a_message_binds_those_alone_that_had_it() -> None:
    """Two that were told alike add up, whatever a third one has missed."""
    keys = pair_keys(dict.fromkeys((1, 2, 3), FACTS))
    parties = {rank: PairwiseMasks(rank, keys[rank]) for rank in keys}

    def sums(first: int) -> list[bool]:
        active = [(1, 2), (1, 2, 3), (2, 3)]
        return verdicts(
            [
                left_of({rank: parties[rank] for rank in ranks}, first + place)
                for place, ranks in enumerate(active)
            ]
        )

    for rank in (1, 2):
        parties[rank].bind(b"to both", (1, 2))
    assert sums(first=1) == [True, True, True]
    parties[1].bind(b"to one of both", (1, 2))
    assert sums(first=4) == [False, False, True]
