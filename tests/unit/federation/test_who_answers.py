"""Who answers where the top model is fitted in one go: training rows have a say, and how much."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from securevfl.federation.primary import Primary
from securevfl.models.tasks import TaskHead

TRAIN, VALIDATION = np.arange(60), np.arange(60, 80)


def primary(*, votes: bool, on_training: float, on_validation: float) -> Any:
    """Return what a decision reads: a base that knows nothing, and outputs that add a little.

    Args:
        votes: Whether encoders were fitted to training rows' labels.
        on_training: What outputs add for the right class, of training rows.
        on_validation: The same of validation rows.
    """
    targets = torch.tensor(np.arange(80) % 2, dtype=torch.float32)
    signs = (2 * targets - 1)[:, None]
    return SimpleNamespace(
        head=TaskHead(task="binary"),
        plan=SimpleNamespace(votes=votes),
        data=SimpleNamespace(
            base=torch.zeros(80, 1),
            targets=targets,
            split=SimpleNamespace(validation=VALIDATION),
            training_rows=TRAIN,
        ),
        out_of_fold=on_training * signs[TRAIN],
        best_outputs=on_validation * signs[VALIDATION],
        scale=1.0,
    )


@pytest.mark.parametrize(
    ("votes", "on_validation", "used"),
    [
        (False, 0.1, "joint"),
        (True, 0.1, "joint"),
        # Training rows gain, and validation rows lose.
        (False, -0.1, "joint"),
        (True, -0.1, "alone"),
    ],
)
def test_votes_need_the_validation_rows_too(votes: bool, on_validation: float, used: str) -> None:
    """Directions have seen training rows' labels, so what these rows gain may be their own."""
    one = primary(votes=votes, on_training=0.5, on_validation=on_validation)
    assert Primary.decide(one, torch.zeros(80, 1), base_is_alone=True).used == used


def test_training_rows_are_not_asked_where_alone_is_not_known_there() -> None:
    """Another model than the base: of training rows it knows the labels."""
    one = primary(votes=False, on_training=0.5, on_validation=-0.1)
    decision = Primary.decide(one, torch.zeros(80, 1), base_is_alone=False)
    assert (decision.used, decision.rows) == ("alone", len(VALIDATION))
    # lambda is chosen by all of them, and counts though alone answers.
    assert decision.scale > 0
