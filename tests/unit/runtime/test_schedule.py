"""Step sizes of every party, epoch by epoch."""

from pathlib import Path

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from securevfl.models.optimisers import learning_rate_in
from securevfl.testing import run_in_process, write_federation

EPOCHS, FIRST, SECONDARIES = 4, 0.2, 3


def test_a_cosine_goes_from_the_first_rate_down_to_nearly_nothing() -> None:
    """[SGDR] equation 5 by hand for four epochs: 1, cos^2(pi/8), 1/2, sin^2(pi/8)."""
    rates = [learning_rate_in(epoch, first=3, schedule="cosine", epochs=4) for epoch in range(1, 5)]

    assert rates == pytest.approx([3, 2.5606601718, 1.5, 0.4393398282])
    assert learning_rate_in(1, first=3, schedule="cosine", epochs=1) == 3
    assert learning_rate_in(9, first=3, schedule="constant", epochs=9) == 3


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [("constant", [FIRST] * EPOCHS), ("cosine", [0.2, 0.170711, 0.1, 0.029289])],
)
@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "lamb"])
def test_every_party_takes_the_steps_of_its_epoch(
    schedule: str, expected: list[float], optimizer: str, tmp_path: Path
) -> None:
    """Three rounds an epoch, a step of the primary and of each secondary in each of them."""
    if optimizer == "lamb":
        pytest.importorskip("pytorch_optimizer")
    path = write_federation(
        tmp_path,
        secondaries=SECONDARIES,
        rows=120,
        training={
            "epochs": EPOCHS,
            "patience": EPOCHS,
            "batch_size": 32,
            "learning_rate": FIRST,
            "schedule": schedule,
            "optimizer": optimizer,
        },
        base={"estimator": "none"},
    )
    taken: list[float] = []

    def look(stepping: torch.optim.Optimizer, *_: object) -> None:
        taken.append(stepping.param_groups[0]["lr"])

    hook = register_optimizer_step_pre_hook(look)
    try:
        run_in_process(path, tmp_path / "run")
    finally:
        hook.remove()

    rounds = -(-round(120 * 0.7) // 32)
    each = rounds * (1 + SECONDARIES)
    assert taken == pytest.approx([rate for rate in expected for _ in range(each)], rel=1e-4)
