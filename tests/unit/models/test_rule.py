"""Who answers: the joint model only where it is better by more than chance."""

import pytest
import torch

from securevfl.models.alone.choice import decide
from securevfl.models.tasks import TaskHead

NUMBER = TaskHead(task="regression")
ROWS = 200


def drawn(*, seed: int = 0) -> torch.Tensor:
    return torch.randn(ROWS, 1, generator=torch.Generator().manual_seed(seed))


def test_a_correction_that_helps_every_row_is_used_in_full() -> None:
    """Targets are the correction itself: all of it counts, and the gain is their mean square."""
    targets = drawn()
    base = torch.zeros(ROWS, 1)
    found = decide(NUMBER, base=base, joint=targets, alone=base, targets=targets[:, 0])
    assert (found.used, found.scale, found.rows) == ("joint", 1.0, ROWS)
    assert found.gain == pytest.approx(float(targets.square().mean()), rel=1e-6)


def test_a_correction_that_goes_too_far_is_scaled_down() -> None:
    """Four times what is missing: a quarter of it is right."""
    targets = drawn()
    base = torch.zeros(ROWS, 1)
    found = decide(NUMBER, base=base, joint=4 * targets, alone=base, targets=targets[:, 0])
    assert (found.used, found.scale) == ("joint", 0.25)


@pytest.mark.parametrize("correction", [-drawn(), torch.full((ROWS, 1), torch.nan)])
def test_a_correction_that_only_harms_counts_for_nothing(correction: torch.Tensor) -> None:
    """Away from the targets, or not a number: lambda is 0, and the primary answers alone."""
    base = torch.zeros(ROWS, 1)
    found = decide(NUMBER, base=base, joint=correction, alone=base, targets=drawn()[:, 0])
    assert (found.used, found.scale, found.gain) == ("alone", 0.0, 0.0)


@pytest.mark.parametrize(("errors", "used"), [(0.9, "joint"), (1.1, "alone")])
def test_the_gain_must_be_more_than_one_standard_error(errors: float, used: str) -> None:
    """Alone is worse by one row's loss in a way that leaves 1/0.9 or 1/1.1 errors of gain."""
    # The joint model is right everywhere; alone's losses have this mean and this error.
    spread = errors * ROWS**0.5
    losses = torch.full((ROWS,), 1 + spread * (1 - 1 / ROWS) ** 0.5)
    losses[::2] = 1 - spread * (1 - 1 / ROWS) ** 0.5
    base = torch.zeros(ROWS, 1)
    targets = torch.zeros(ROWS)
    # A negative loss is none: all are lifted by what the joint model loses in every row.
    lift = float(-losses.min()) + 1.0
    found = decide(
        NUMBER,
        base=base + (lift + 1) ** 0.5,
        joint=base + lift**0.5,
        alone=(losses + lift).sqrt().unsqueeze(1).to(torch.float64),
        targets=targets,
    )
    assert found.gain == pytest.approx(1.0, rel=1e-4)
    assert found.error == pytest.approx(errors, rel=1e-2)
    assert found.used == used


def test_who_is_better_than_the_base_and_not_than_alone_is_not_used() -> None:
    """The base is not what the joint model must beat."""
    targets, base = drawn(), torch.zeros(ROWS, 1)
    found = decide(NUMBER, base=base, joint=0.5 * targets, alone=targets, targets=targets[:, 0])
    assert found.scale == 1.0
    assert found.used == "alone"
