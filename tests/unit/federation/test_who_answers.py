"""Who answers where the top model is fitted in one go: training rows have a say, and how much."""

from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from securevfl.federation.rounds.primary import Primary
from securevfl.models.alone import choice
from securevfl.models.tasks import TaskHead

TRAIN, VALIDATION = np.arange(60), np.arange(60, 80)


class Decided(SimpleNamespace):
    """What deciding reads of a primary, which checks of calls take for one."""

    __class__ = property(lambda _self: Primary)  # type: ignore[assignment]
    _base = Primary._base
    _best_outputs = Primary._best_outputs


def primary(
    *,
    columns: int = 0,
    surviving: float = 1.0,
    on_training: float,
    on_validation: float,
    firsts: torch.Tensor | None = None,
) -> Any:
    """Return what a decision reads: a base that knows nothing, and outputs that add a little.

    Args:
        columns: Numbers of records that directions were fitted to, with training rows' labels.
        surviving: Share of a score's variance that survives its release.
        on_training: What outputs add for the right class, of training rows.
        on_validation: The same of validation rows.
        firsts: First row of each row's key, where rows share keys.
    """
    targets = torch.tensor(np.arange(80) % 2, dtype=torch.float32)
    signs = (2 * targets - 1)[:, None]
    one = Decided(
        head=TaskHead(task="binary"),
        plan=SimpleNamespace(surviving=surviving),
        fitted_columns=columns,
        data=SimpleNamespace(
            base=torch.zeros(80, 1),
            targets=targets,
            split=SimpleNamespace(validation=VALIDATION),
            training_rows=TRAIN,
            firsts=firsts,
        ),
        out_of_fold=on_training * signs[TRAIN],
        best_outputs=on_validation * signs[VALIDATION],
        scale=1.0,
    )
    one._measures_better = partial(Primary._measures_better, one)
    one._unseen_loss = partial(Primary._unseen_loss, one)
    one._unseen_outputs = partial(Primary._unseen_outputs, one)
    return one


@pytest.mark.parametrize(
    ("columns", "surviving", "used"),
    [
        # Training rows gain 0.025 each; a direction of d columns gains up to v d / 60 of that.
        (0, 1.0, "joint"),
        (1, 1.0, "joint"),
        (7, 1.0, "alone"),
        (7, 0.1, "joint"),
    ],
)
def test_rows_whose_labels_directions_have_seen_decide_less_what_that_gains(
    columns: int, surviving: float, used: str
) -> None:
    """A row that decides although it was seen must not be taken for a fresh one."""
    one = primary(columns=columns, surviving=surviving, on_training=0.05, on_validation=0.0)
    decision = Primary.decide(one, torch.zeros(80, 1), base_is_alone=True)
    assert decision.used == used
    assert decision.optimism == pytest.approx(columns * surviving / 60 * 60 / 80)


@pytest.mark.parametrize(("on_validation", "used"), [(0.0, "alone"), (0.5, "joint")])
def test_validation_rows_decide_where_directions_have_many_columns(
    on_validation: float, used: str
) -> None:
    """Training rows have little to say then, and are not asked."""
    one = primary(columns=40, on_training=0.5, on_validation=on_validation)
    decision = Primary.decide(one, torch.zeros(80, 1), base_is_alone=True)
    assert (decision.used, decision.rows, decision.optimism) == (used, 20, 0.0)


@pytest.mark.parametrize(
    ("on_training", "surviving", "better"),
    [(0.06, 1.0, False), (0.06, 0.01, True), (0.04, 1.0, False)],
)
def test_a_network_without_partners_has_no_optimism_to_lose(
    on_training: float, surviving: float, better: bool
) -> None:
    """Partners must gain more over it than directions gain on labels that they have seen."""
    joint = primary(columns=7, surviving=surviving, on_training=on_training, on_validation=0.0)
    own = primary(on_training=0.05, on_validation=0.0)
    assert Primary.is_better_than(joint, own) == better


def test_rows_of_one_key_may_all_gain_by_the_one_label_that_was_seen() -> None:
    """Of six keys with ten rows each, the label of one row is fitted to, and all may be alike."""
    firsts = torch.arange(80) // 10 * 10
    few = primary(columns=1, on_training=0.5, on_validation=0.0, firsts=firsts)
    many = primary(columns=1, on_training=0.5, on_validation=0.0)
    first, second = (
        Primary.decide(one, torch.zeros(80, 1), base_is_alone=True).optimism for one in (few, many)
    )
    assert first == pytest.approx(10 * second)


def test_validation_rows_are_fresh_whatever_directions_have_seen() -> None:
    """Nothing is taken off where they alone decide."""
    one = primary(columns=6, on_training=0.5, on_validation=0.5)
    decision = Primary.decide(one, torch.zeros(80, 1), base_is_alone=False)
    assert (decision.used, decision.rows, decision.optimism) == ("joint", 20, 0.0)


def test_training_rows_are_not_asked_where_alone_is_not_known_there() -> None:
    """Another model than the base: of training rows it knows the labels."""
    one = primary(on_training=0.5, on_validation=-0.1)
    decision = Primary.decide(one, torch.zeros(80, 1), base_is_alone=False)
    assert (decision.used, decision.rows) == ("alone", len(VALIDATION))
    # lambda is chosen by all of them, and counts though alone answers.
    assert decision.scale > 0


@pytest.mark.parametrize(("right", "used"), [(13, "alone"), (14, "joint")])
def test_validation_rows_that_chose_the_epoch_must_gain_more(right: int, used: str) -> None:
    """A network is right about 13 of 20 rows, or 14: 1.4 or 1.9 standard errors."""
    one = primary(on_training=0.0, on_validation=0.01)
    one.out_of_fold = None
    one.best_outputs[right:] *= -1
    decision = Primary.decide(one, torch.zeros(80, 1), base_is_alone=True)
    assert decision.gain > decision.error
    assert (decision.used, decision.rows) == (used, 20)


def test_a_lower_loss_is_not_enough_where_the_metric_is_worse(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Alone is right about order and too sure of it; the joint model says less, in bad order."""
    # All of the correction counts: less of it would keep alone's order.
    monkeypatch.setattr(choice, "choose_scale", lambda *_, **__: 1.0)
    one = primary(on_training=0.1, on_validation=0.1)
    sure = 30.0 * (2 * one.data.targets - 1)[:, None]
    # One row in ten is told wrong, by so much that all loss is theirs; the order is nearly right.
    wrong = torch.arange(80) % 10 == 0
    one.data.base = torch.where(wrong[:, None], -sure, sure)
    noisy = torch.from_numpy(np.random.default_rng(0).normal(scale=0.5, size=(80, 1))).float()
    joint = 0.01 * one.data.base + noisy
    one.out_of_fold, one.best_outputs = joint[TRAIN], joint[VALIDATION]
    decision = Primary.decide(one, one.data.base, base_is_alone=True)
    assert decision.gain > decision.error
    assert decision.used == "alone"
