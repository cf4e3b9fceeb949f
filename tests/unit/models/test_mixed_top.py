"""The mixed top model: trees where released numbers depend on own columns, else the correction."""

import numpy as np
import pytest
import torch

from securevfl.models import fitted_top
from securevfl.models.fitted_top import FittedTop, MixedTop, TiedTop
from securevfl.models.tasks import TaskHead

ROWS = 600
HEAD = TaskHead(task="regression")


def made() -> MixedTop:
    trees = FittedTop(HEAD, words=(), own=1, released=2, similarities=0)
    return MixedTop(TiedTop(width=2, outputs=1), trees)


def fitted(targets: torch.Tensor, values: np.ndarray) -> tuple[MixedTop, torch.Tensor]:
    """Fit one beside a correction that says 0."""
    top = made()
    return top, top.fit(values, torch.zeros(len(values), 1), targets, seed=3)


def rows() -> np.ndarray:
    return np.random.default_rng(0).normal(size=(ROWS, 3))


def joint(top: MixedTop, values: np.ndarray) -> torch.Tensor:
    numbers = torch.from_numpy(values)
    return top(numbers[:, :1], numbers[:, :0], numbers[:, None, 1:], None)


def test_a_product_of_own_and_released_takes_trees_and_is_kept() -> None:
    """What the correction cannot say; the same for the same seed, and after it was saved."""
    values = rows()
    targets = torch.from_numpy(np.sign(values[:, 0]) * values[:, 1]).float()
    top, margins = fitted(targets, values)
    told = top.as_json()
    assert told["trees"] > 0.5
    assert told["gain"] > told["error"] > 0
    assert top.of_base == 1 - top.share
    loss = HEAD.row_losses(margins, targets).mean()
    assert float(loss) == pytest.approx(
        float(HEAD.row_losses(torch.zeros_like(margins), targets).mean()) - told["gain"], rel=1e-4
    )
    again, same = fitted(targets, values)
    assert torch.equal(margins, same)
    other = made()
    other.load_state_dict(top.state_dict())
    new = rows()[::-1].copy()
    assert other.as_json() == told
    assert torch.equal(joint(other, new), joint(top, new))
    assert torch.equal(joint(again, new), joint(top, new))


@pytest.mark.parametrize("part", [0.0, 0.3])
def test_noise_and_a_gain_within_an_error_leave_the_correction(part: float) -> None:
    """No tree is kept then, so that nothing of it is saved or loaded."""
    values = rows()
    noise = np.random.default_rng(1).normal(size=ROWS)
    product = np.sign(values[:, 0]) * values[:, 1]
    top, margins = fitted(torch.from_numpy(part * product + noise).float(), values)
    told = top.as_json()
    assert (told["gain"] > 0) == (part > 0), "trees have a weight that lowers the loss"
    assert told["gain"] <= told["error"]
    assert (top.share, top.of_base, top.trees.model) == (0, 1, None)
    assert torch.equal(margins, torch.zeros(ROWS, 1))
    assert torch.equal(joint(top, values), torch.zeros(ROWS, 1)), "the correction is not fitted"


def test_many_rows_are_bounded_and_all_are_out_of_fold(monkeypatch: pytest.MonkeyPatch) -> None:
    values = rows()
    targets = torch.from_numpy(values[:, 1] * np.sign(values[:, 0])).float()
    fits = []
    whole = fitted_top.cross_fit

    def counted(*given, **more):  # type: ignore[no-untyped-def]
        fits.append(more["train"])
        return whole(*given, **more)

    monkeypatch.setattr(fitted_top, "cross_fit", counted)
    monkeypatch.setattr(fitted_top, "_MIXED_BY", 200)
    top, margins = fitted(targets, values)
    (train,) = fits
    assert len(train) == len(set(train)) == 200
    assert margins.shape == (ROWS, 1)
    # A row that was fitted to would be answered by the very model that is kept.
    known = joint(top, values)
    rest = np.setdiff1d(np.arange(ROWS), train)
    assert torch.equal(known[rest], margins[rest])
    assert not torch.isclose(known[train], margins[train]).all()
