"""Pretraining goes on as the federation file says; every other step is refused by name."""

from pathlib import Path

import numpy as np
import pytest

from securevfl.config.reading import read_federation
from securevfl.core.errors import ProtocolError
from securevfl.federation.run_plan import RunFacts, plan_run
from securevfl.federation.session.request_validator import RequestValidator, SessionLimits
from securevfl.stages.pretraining.messages import (
    CrossBatch,
    IterationBegin,
    IterationEnd,
    LearnLocally,
    PretrainingValidator,
)
from securevfl.testing import write_federation

HELD_OUT = np.array([8, 9, 10, 11], dtype=np.int64)
EVERYWHERE = np.ones(12, dtype=np.bool_)


class Pretraining:
    """Says to a validator what a primary would: 12 rows, 8 of them to learn from."""

    def __init__(
        self,
        folder: Path,
        *,
        done: int = 0,
        family: str = "fedhssl",
        linked: np.ndarray = EVERYWHERE,
    ) -> None:
        config = read_federation(
            write_federation(
                folder,
                model={"family": family},
                training={"epochs": 1, "batch_size": 4},
                pretraining={"iterations": 2, "cross_epochs": 1, "batch_size": 4},
            )
        )
        facts = RunFacts(
            rows=12,
            train_rows=6,
            validation_rows=2,
            test_rows=2,
            unlabelled_rows=2,
            resume_stage=done,
        )
        plan = plan_run(config, facts)
        session = RequestValidator(SessionLimits.of(plan, party="bank-1"))
        self.validator = PretrainingValidator(
            config.pretraining,
            steps=config.family.pretraining,
            learning_rows=facts.train_rows + facts.unlabelled_rows,
            linked=linked,
            done=done,
            take_round=session.take_round,
        )
        self.number = 0

    def begin(self, iteration: int, held_out: np.ndarray = HELD_OUT) -> None:
        self.validator.validate_begin(IterationBegin(iteration=iteration, held_out=held_out))

    def cross(self, *rows: int, number: int | None = None) -> None:
        self.number = self.number + 1 if number is None else number
        self.validator.validate_batch(
            CrossBatch(
                round_number=self.number,
                rows=np.array(rows, dtype=np.int64),
                sent=np.zeros((len(rows), 2), np.float32),
            )
        )

    def local(self, iteration: int) -> None:
        self.validator.validate_local(LearnLocally(iteration=iteration))

    def tops(self) -> None:
        self.number += 1
        self.validator.validate_tops(self.number)

    def end(self, iterations: int, *, last: bool) -> None:
        self.validator.validate_end(IterationEnd(iterations=iterations, last=last))

    def iteration(self, number: int) -> None:
        self.begin(number)
        self.cross(0, 1, 2, 3)
        self.cross(4, 5, 6, 7)
        self.local(number)
        self.tops()
        self.end(number + 1, last=number == 1)


def test_a_whole_pretraining_is_admitted(tmp_path: Path) -> None:
    """From the start, from its middle, and where all is learned already."""
    whole = Pretraining(tmp_path)
    whole.iteration(0)
    whole.iteration(1)
    Pretraining(tmp_path, done=1).iteration(1)
    finished = Pretraining(tmp_path, done=2)
    finished.begin(1)
    finished.end(2, last=True)


def test_iterations_come_in_order_and_end(tmp_path: Path) -> None:
    """None twice, none before it is due, none after the last, and no work outside of one."""
    one = Pretraining(tmp_path)
    with pytest.raises(ProtocolError, match="the step 'cross' of pretraining is not due"):
        one.cross(0, 1)
    with pytest.raises(ProtocolError, match="iteration 2 is not due"):
        one.begin(1)
    with pytest.raises(ProtocolError, match="the end of iteration 1 is not due"):
        one.end(1, last=False)
    one.begin(0)
    with pytest.raises(ProtocolError, match="iteration 1 is not due"):
        one.begin(0)
    with pytest.raises(ProtocolError, match="the end of iteration 2 is not due"):
        one.end(2, last=True)
    with pytest.raises(ProtocolError, match="the end of iteration 1 is not due"):
        one.end(1, last=True)
    over = Pretraining(tmp_path)
    over.iteration(0)
    over.iteration(1)
    with pytest.raises(ProtocolError, match="iteration 3 is not due"):
        over.begin(2)


@pytest.mark.parametrize(
    "rows",
    [(0, 0), (8, 0), (0, 12), (-1, 0), (0, 1, 2, 3, 4)],
    ids=["twice", "held out", "outside", "below", "too many"],
)
def test_batches_have_rows_that_are_for_learning(rows: tuple[int, ...], tmp_path: Path) -> None:
    """Each once, and at most a batch of them."""
    one = Pretraining(tmp_path)
    one.begin(0)
    with pytest.raises(ProtocolError, match="round 1: the primary names"):
        one.cross(*rows)


def test_rows_without_a_link_here_are_learned_from_by_nobody_else(tmp_path: Path) -> None:
    """A primary that calls all rows aligned would have wrong pairs learn from one another."""
    linked = np.isin(np.arange(12), [3, 5], invert=True)
    one = Pretraining(tmp_path, linked=linked)
    one.begin(0)
    one.cross(0, 1, 2, 4)
    with pytest.raises(ProtocolError, match="round 2: the primary names 1 rows that have no link"):
        one.cross(5, 6)
    one.cross(6, 7)


def test_a_row_is_in_as_many_batches_as_there_are_passes(tmp_path: Path) -> None:
    """One pass; nor more batches than that has, however small they are made."""
    one = Pretraining(tmp_path)
    one.begin(0)
    one.cross(0, 1)
    with pytest.raises(ProtocolError, match="more often than"):
        one.cross(1, 2)
    small = Pretraining(tmp_path)
    small.begin(0)
    small.cross(0)
    small.cross(1)
    with pytest.raises(ProtocolError, match="in batch 3 of an iteration, which has at most 2"):
        small.cross(2)


def test_round_numbers_are_the_sessions(tmp_path: Path) -> None:
    """A number that was used is refused, in pretraining and in what follows."""
    one = Pretraining(tmp_path)
    one.begin(0)
    one.cross(0, 1)
    with pytest.raises(ProtocolError, match="rounds up to 1 were announced"):
        one.cross(2, 3, number=1)


def test_steps_come_once_and_in_order(tmp_path: Path) -> None:
    """Local learning and the average once each; no batch after them."""
    one = Pretraining(tmp_path)
    one.begin(0)
    with pytest.raises(ProtocolError, match="iteration 2 is not due"):
        one.local(1)
    one.local(0)
    with pytest.raises(ProtocolError, match="the step 'local' of pretraining is not due"):
        one.local(0)
    with pytest.raises(ProtocolError, match="the step 'cross' of pretraining is not due"):
        one.cross(0, 1)
    one.tops()
    with pytest.raises(ProtocolError, match="the step 'aggregate' of pretraining is not due"):
        one.tops()


def test_steps_that_the_family_has_not_are_refused(tmp_path: Path) -> None:
    """FedCSSL has no local learning, and averages nothing."""
    one = Pretraining(tmp_path, family="fedcssl")
    one.begin(0)
    with pytest.raises(ProtocolError, match="the step 'local' of pretraining is not due"):
        one.local(0)
    with pytest.raises(ProtocolError, match="the step 'aggregate' of pretraining is not due"):
        one.tops()


@pytest.mark.parametrize("held_out", [[8, 9, 10], [8, 8, 9, 10], [8, 9, 10, 12], [-1, 9, 10, 11]])
def test_as_many_rows_are_held_out_as_there_are(held_out: list[int], tmp_path: Path) -> None:
    """Validation and test rows, each once."""
    with pytest.raises(ProtocolError, match="the primary holds out"):
        Pretraining(tmp_path).begin(0, np.array(held_out, dtype=np.int64))


def test_what_is_held_out_stays(tmp_path: Path) -> None:
    """A later iteration holds out the same rows: others would have been learned from."""
    one = Pretraining(tmp_path)
    one.iteration(0)
    with pytest.raises(ProtocolError, match="holds out other rows than before"):
        one.begin(1, np.array([0, 9, 10, 11], dtype=np.int64))
