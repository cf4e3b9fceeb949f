"""A secondary believes nothing of what the primary says in a round of assisted boosting."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.assisted import LINEAR, write_assisted
from helpers.built import Built, built
from helpers.secondaries import answer

from securevfl.core.errors import ProtocolError
from securevfl.federation.messages import EpochMark
from securevfl.federation.rounds.secondary import Secondary, save_nothing
from securevfl.federation.session.peers import HandlerTable, ReplyHere
from securevfl.stages.assist.assisted_boosting import AssistKind, ModelFitted, Residuals, Step
from securevfl.transport.message import Message


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_assisted(
        tmp_path_factory.mktemp("lies"),
        rows=60,
        model={**LINEAR, "rounds": 1},
        training={"batch_size": 64},
    )


@pytest.fixture
def world(tables: Path, tmp_path: Path) -> Iterator[Built]:
    with built(tables, tmp_path) as parties:
        yield parties


def told(rows: np.ndarray, *, epoch: int = 1, value: float = 0.1) -> Message:
    residuals = np.full((len(rows), 3), value, dtype=np.float32)
    return Residuals(epoch=epoch, rows=rows, residuals=residuals).to_message()


def step(value: float = 1.0, *, epoch: int = 1) -> Message:
    return Step(epoch=epoch, step=value).to_message()


def hear(one: Secondary, message: Message) -> list[Any]:
    """Let a secondary handle a message as its server does; return its answers."""
    table, reply = HandlerTable(one.handlers(save_nothing)), ReplyHere()
    table.handle(table.read(message), reply)
    return reply.messages


def play(world: Built, one: Secondary, until: str) -> None:
    """Go through a round of boosting as an honest primary does, up to what is named."""
    split = world.split
    acts: dict[str, Callable[[], object]] = {
        "residuals": lambda: hear(one, told(split.train)),
        "scores": lambda: answer(one, world.round(1, split.train, "train")),
        "step": lambda: hear(one, step()),
        "validation": lambda: answer(one, world.round(2, split.validation, "validation")),
        "mark": lambda: one.validator.validate_epoch(EpochMark(epoch=1, best=True)),
        "end": lambda: one.validator.validate_epoch(
            EpochMark(epoch=1, best=False, restore_best=True)
        ),
    }
    for name, act in acts.items():
        act()
        if name == until:
            return


def test_an_honest_primary_is_answered(world: Built) -> None:
    one = world.secondaries[1]
    first, rest = np.split(world.split.train, [5])
    assert hear(one, told(first)) == []
    (answer,) = hear(one, told(rest))
    assert isinstance(answer, ModelFitted)
    # Beside the words of the sum this is all that a secondary says, and it says nothing.
    assert not answer.to_message().meta
    assert not answer.to_message().tensors
    answer(one, world.round(1, world.split.train, "train"))
    hear(one, step())
    answer(one, world.round(2, world.split.validation, "validation"))


@pytest.mark.parametrize(
    ("message", "says"),
    [
        (lambda rows: told(rows, value=np.nan), "NaN or infinite"),
        (lambda rows: told(rows, value=np.inf), "NaN or infinite"),
        (lambda rows: told(rows, value=1.0), "norm 1.732; 1 is the most"),
        (lambda rows: told(rows[:0]), "rows must not be empty"),
        (lambda rows: told(rows + 60), "no such rows among 60"),
        (lambda rows: told(rows - 60), "no such rows among 60"),
        (lambda rows: told(np.r_[rows[:3], rows[:1]]), "of a row twice"),
        (lambda _: told(np.arange(60)), "more than the 42 training rows"),
        (lambda rows: told(rows, epoch=2), "round 1 is under way"),
        (lambda rows: told(rows, epoch=0), "round 1 is under way"),
        (lambda _: step(), "is not due"),
        (lambda _: step(-1.0), "at least 0"),
        (lambda _: step(float("inf")), "must be finite"),
        (
            lambda rows: Message(
                kind=AssistKind.RESIDUALS,
                meta={"epoch": 1},
                tensors={"rows": rows, "residuals": np.zeros((len(rows), 2), np.float32)},
            ),
            "must have shape",
        ),
    ],
)
def test_lies_are_refused(
    message: Callable[[np.ndarray], Message], says: str, world: Built
) -> None:
    with pytest.raises(ProtocolError, match=says):
        hear(world.secondaries[1], message(world.split.train))


def test_residuals_come_once(world: Built) -> None:
    one = world.secondaries[1]
    hear(one, told(world.split.train[:5]))
    with pytest.raises(ProtocolError, match="of a row twice"):
        hear(one, told(world.split.train[4:]))


@pytest.mark.parametrize("until", ["residuals", "scores", "step", "validation"])
def test_a_round_has_its_residuals_once(until: str, world: Built) -> None:
    one = world.secondaries[1]
    play(world, one, until)
    with pytest.raises(ProtocolError, match="not due"):
        hear(one, told(world.split.train))


@pytest.mark.parametrize("until", ["mark", "end"])
def test_there_are_no_more_rounds_than_the_file_says(until: str, world: Built) -> None:
    one = world.secondaries[1]
    play(world, one, until)
    for epoch in (1, 2):
        with pytest.raises(ProtocolError, match="training is over"):
            hear(one, told(world.split.train, epoch=epoch))


def test_nothing_is_scored_out_of_turn(world: Built) -> None:
    """No scores before residuals, none of other rows, no validation before the step."""
    one, split = world.secondaries[1], world.split
    with pytest.raises(ProtocolError, match="follow their residuals"):
        answer(one, world.round(1, split.train, "train"))
    play(world, one, "residuals")
    with pytest.raises(ProtocolError, match="follow their residuals"):
        answer(one, world.round(1, split.validation, "train"))
    with pytest.raises(ProtocolError, match="follow the step"):
        answer(one, world.round(1, split.validation, "validation"))
    with pytest.raises(ProtocolError, match="is not due"):
        hear(one, step())
    with pytest.raises(ProtocolError, match="not due"):
        one.validator.validate_epoch(EpochMark(epoch=1, best=True))


def test_another_round_is_of_the_same_rows(tables: Path, tmp_path: Path) -> None:
    """Rows of validation never become rows that are learned from."""
    path = write_assisted(tmp_path, rows=60, training={"batch_size": 64})
    with built(path, tmp_path / "run") as world:
        one, split = world.secondaries[1], world.split
        play(world, one, "mark")
        for others in (split.validation, split.test):
            with pytest.raises(ProtocolError, match="rows that do not train"):
                hear(one, told(others[:2], epoch=2))


def test_other_families_hear_none_of_it(tmp_path: Path) -> None:
    path = write_assisted(tmp_path, rows=60, model={"family": "exact"})
    with (
        built(path, tmp_path / "run") as world,
        pytest.raises(ProtocolError, match="RESIDUALS of round 0 where"),
    ):
        hear(world.secondaries[1], told(world.split.train))
