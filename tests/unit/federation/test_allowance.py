"""A session goes on as its plan says; everything else is refused, by name and before any use."""

import numpy as np
import pytest
from helpers.secondaries import ROWS, limits

from securevfl.core.errors import ProtocolError
from securevfl.federation.messages import EpochMark, RoundPlan
from securevfl.federation.run_plan import Purpose
from securevfl.federation.session.request_validator import RequestValidator

BOTH = (1, 2)


class Session:
    """Says to an allowance what a primary would."""

    def __init__(self, **changes) -> None:
        self.validator = RequestValidator(limits(**changes))
        self.number = 0

    def round(
        self,
        purpose: Purpose,
        *rows: int,
        active: tuple[int, ...] = BOTH,
        number: int | None = None,
    ) -> None:
        self.number = self.number + 1 if number is None else number
        self.validator.validate_round(
            RoundPlan(
                round_number=self.number,
                rows=np.array(rows, dtype=np.int64),
                active=active,
                purpose=purpose,
            )
        )

    def average(self) -> None:
        self.number += 1
        self.validator.validate_average(self.number)

    def train(self) -> None:
        for rows in ((0, 1), (2, 3), (4, 5)):
            self.round("train", *rows)

    def validate(self) -> None:
        self.round("validation", 6, 7)
        self.round("validation", 8)

    def end(self, epoch: int, *, restore_best: bool = False) -> None:
        self.validator.validate_epoch(EpochMark(epoch=epoch, best=True, restore_best=restore_best))

    def done(self) -> None:
        self.validator.validate_done()

    def epoch(self, number: int) -> None:
        self.train()
        self.validate()
        self.end(number)


def test_a_whole_run_is_admitted() -> None:
    """Epochs with averages, the best weights, and one pass over the test rows."""
    session = Session(average_positions_every=2)
    session.epoch(1)
    session.train()
    session.average()
    session.validate()
    session.end(2)
    session.end(1, restore_best=True)
    session.round("test", 9, 10)
    session.round("test", 11)
    session.done()


def test_a_run_that_stops_early_or_goes_on_is_admitted() -> None:
    """Patience may run out, and a resumed run starts in its middle."""
    early = Session()
    early.epoch(1)
    early.end(1, restore_best=True)
    resumed = Session()
    resumed.validator.start_after(1)
    resumed.epoch(2)
    finished = Session()
    finished.validator.start_after(2)
    finished.end(1, restore_best=True)
    finished.round("test", 9)


def test_epochs_beyond_the_plan_are_refused() -> None:
    """Rounds of a third epoch of two are refused, and so is its end."""
    session = Session()
    session.epoch(1)
    session.epoch(2)
    with pytest.raises(ProtocolError, match="round for train is not due after 2 epochs of 2"):
        session.round("train", 0, 1)
    with pytest.raises(ProtocolError, match="round for validation is not due"):
        session.round("validation", 6, 7)
    with pytest.raises(ProtocolError, match="ends epoch 3, which is not due"):
        session.end(3)
    with pytest.raises(ProtocolError, match="after epoch 3"):
        Session().validator.start_after(3)


def test_oversized_rounds_are_refused() -> None:
    """The noise of updates is made for rounds of at most batch_size rows."""
    with pytest.raises(ProtocolError, match=r"names 3 rows; a round has at most .* = 2"):
        Session().round("train", 0, 1, 2)


@pytest.mark.parametrize(
    ("rows", "match"),
    [
        ((-1, 0), "rows outside the 12"),
        ((0, ROWS), "rows outside the 12"),
        ((3, 3), "a row twice"),
    ],
)
def test_impossible_rows_are_refused(rows: tuple[int, ...], match: str) -> None:
    """Rows that there are not, and rows twice in one batch."""
    with pytest.raises(ProtocolError, match=match):
        Session().round("train", *rows)


def test_a_row_comes_once_in_an_epoch_and_for_one_purpose() -> None:
    """Neither again in the epoch, nor for training what was for validation, nor ever more rows."""
    session = Session()
    session.round("train", 0, 1)
    with pytest.raises(ProtocolError, match="again for 1 rows that were released in this epoch"):
        session.round("train", 1, 2)
    session = Session()
    session.epoch(1)
    with pytest.raises(ProtocolError, match="used for another purpose"):
        session.round("train", 6, 0)
    session = Session()
    session.epoch(1)
    with pytest.raises(ProtocolError, match="used 8 different rows for train; it has 6"):
        session.round("train", 9, 10)


def test_more_rounds_than_a_pass_are_refused() -> None:
    """Six training rows of batches of two are three rounds, however small they are made."""
    session = Session()
    for row in range(3):
        session.round("train", row)
    with pytest.raises(ProtocolError, match="4 rows in 4 rounds for train"):
        session.round("train", 3)


@pytest.mark.parametrize(
    ("purpose", "active", "ranks"),
    [
        ("train", (1,), BOTH),
        ("train", (1, 2, 3), (1, 2, 3)),
        ("validation", (1, 2), (1, 2, 3)),
        ("train", (2, 1), BOTH),
        ("train", (2, 3), (1, 2, 3)),
        ("train", (1, 9), BOTH),
        ("train", (), BOTH),
    ],
)
def test_other_parties_than_the_plan_has_are_refused(
    purpose: Purpose, active: tuple[int, ...], ranks: tuple[int, ...]
) -> None:
    """Too few for the noise, too many, out of order, others, and without this party."""
    session = Session(ranks=ranks)
    with pytest.raises(ProtocolError, match=r"impossible parties|secondaries take part"):
        session.round(purpose, 0, 1, active=active)


def test_round_numbers_rise() -> None:
    """A number that was announced is never taken again, by a round or by an average."""
    session = Session(average_positions_every=1)
    session.train()
    with pytest.raises(ProtocolError, match="rounds up to 3 were announced"):
        session.round("validation", 6, 7, number=3)
    with pytest.raises(ProtocolError, match="rounds up to 3 were announced"):
        session.validator.validate_average(3)


def test_positions_are_averaged_only_when_due() -> None:
    """Never where averaging is off; not before training is over, nor twice, nor in other epochs."""
    off = Session()
    off.train()
    with pytest.raises(ProtocolError, match="no average of them is due"):
        off.average()
    on = Session(average_positions_every=1)
    on.round("train", 0, 1)
    with pytest.raises(ProtocolError, match="no average of them is due"):
        on.average()
    on = Session(average_positions_every=1)
    on.train()
    on.average()
    with pytest.raises(ProtocolError, match="no average of them is due"):
        on.average()
    with pytest.raises(ProtocolError, match="round for train is not due"):
        on.round("train", 9)
    other = Session(average_positions_every=2)
    other.train()
    with pytest.raises(ProtocolError, match="no average of them is due"):
        other.average()


def test_epochs_end_when_they_are_whole() -> None:
    """Not before training and validation are over, nor while an average is due."""
    session = Session(average_positions_every=1)
    with pytest.raises(ProtocolError, match="ends epoch 1, which is not due"):
        session.end(1)
    session.train()
    with pytest.raises(ProtocolError, match="round for validation is not due"):
        session.validate()
    session.average()
    with pytest.raises(ProtocolError, match="ends epoch 1, which is not due"):
        session.end(1)
    session.validate()
    with pytest.raises(ProtocolError, match="ends epoch 2, which is not due"):
        session.end(2)
    session.end(1)


def test_a_run_ends_between_epochs_or_in_testing() -> None:
    """The end of a run within an epoch is refused: nothing would be kept of it."""
    session = Session()
    session.done()
    session.round("train", 0, 1)
    with pytest.raises(ProtocolError, match="ends the run within epoch 1"):
        session.done()


def test_testing_comes_after_training_and_once() -> None:
    """No test round before the best weights are back, none after the test rows, no training."""
    session = Session()
    with pytest.raises(ProtocolError, match="ends training at epoch 1"):
        session.end(1, restore_best=True)
    session.epoch(1)
    with pytest.raises(ProtocolError, match="round for test is not due"):
        session.round("test", 9)
    with pytest.raises(ProtocolError, match="ends training at epoch 2"):
        session.end(2, restore_best=True)
    session.end(1, restore_best=True)
    session.round("test", 9, 10)
    with pytest.raises(ProtocolError, match="again for 1 rows that were released before"):
        session.round("test", 10)
    with pytest.raises(ProtocolError, match="round for train is not due"):
        session.round("train", 0, 1)
    with pytest.raises(ProtocolError, match="ends training at epoch 1"):
        session.end(1, restore_best=True)


def test_a_frozen_run_is_one_pass_of_releases() -> None:
    """Every row once, whatever came between; no other purpose, no epochs, no averages."""
    session = Session(frozen=True, batch_size=4)
    session.round("release", 0, 1, 2, 3)
    session.round("release", 4, 5, 6, 7)
    with pytest.raises(ProtocolError, match="again for 1 rows that were released before"):
        session.round("release", 0, 8, 9)
    for purpose in ("train", "validation", "test"):
        with pytest.raises(ProtocolError, match=f"round for {purpose} is not due"):
            session.round(purpose, 8, 9)
    with pytest.raises(ProtocolError, match="ends epoch 1"):
        session.end(1)
    with pytest.raises(ProtocolError, match="no average of them is due"):
        session.average()


def test_with_party_dropout_a_party_hears_of_its_own_rounds_alone() -> None:
    """It cannot know whether training is over, and validation may follow any part of it."""
    session = Session(ranks=(1, 2, 3), active=2)
    session.round("train", 0, 1, active=(1, 3))
    session.round("validation", 6, 7, active=(1, 2, 3))
    session.round("validation", 8, active=(1, 2, 3))
    session.end(1)
