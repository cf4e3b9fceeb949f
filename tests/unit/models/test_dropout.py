"""Dropout from random bytes: its share, its scale, its stream."""

import pytest
import torch
from scipy.stats import binomtest
from torch.func import vmap

from securevfl.models.layers import ByteDropout

LEVELS = 256


@pytest.mark.parametrize(
    ("share", "dropped"), [(0.0005, 1), (0.1, 26), (0.3, 77), (0.7, 179), (0.9999, 255)]
)
def test_units_are_dropped_one_by_one_and_means_stay(share: float, dropped: int) -> None:
    """The share is t/256, never 0 or 1; mean 1 and variance t / (256 - t) follow from the values.

    Exact tests of a million draws, twice, at 5e-10 each: a false alarm of 1e-9 for each share.
    """
    torch.manual_seed(0)
    out = ByteDropout(share)(torch.ones(999, 1001))
    gone = out == 0

    assert out[~gone].unique().tolist() == [pytest.approx(LEVELS / (LEVELS - dropped))]
    chance = dropped / LEVELS
    assert binomtest(int(gone.sum()), gone.numel(), chance).pvalue > 5e-10
    # Neighbours in pairs that share no unit: bytes that overlap or repeat would show.
    both = gone[:, 0:1000:2] & gone[:, 1:1000:2]
    assert binomtest(int(both.sum()), both.numel(), chance**2).pvalue > 5e-10


def test_gradients_pass_where_units_do() -> None:
    """A dropped unit has no gradient, a kept one the factor of its value."""
    torch.manual_seed(0)
    inputs = torch.ones(3, 5, 7, requires_grad=True)
    out = ByteDropout(0.5)(inputs)
    out.sum().backward()

    assert inputs.grad is not None
    assert torch.equal(inputs.grad, out)
    assert {0.0, 2.0} == set(out.unique().tolist())


def test_nothing_is_dropped_or_drawn_in_evaluation_or_without_a_share() -> None:
    """The inputs come back, and the generator stays where it was."""
    inputs, state = torch.ones(4, 4), torch.get_rng_state()

    assert ByteDropout(0.5).eval()(inputs) is inputs
    assert ByteDropout(0.0)(inputs) is inputs
    assert torch.equal(torch.get_rng_state(), state)


def test_a_seed_draws_the_same_units_and_another_seed_others() -> None:
    """One of 2^64 pairs of seeds would agree on 64 units of a half."""
    layer, inputs = ByteDropout(0.5), torch.ones(8, 8)
    drawn = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        drawn.append(layer(inputs))

    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])


def test_rows_one_by_one_drop_what_rows_together_drop() -> None:
    """A dp-trained encoder's lesson goes by ``vmap`` over rows that its release took together."""
    layer, rows = ByteDropout(0.3), torch.randn(6, 5, 7)
    torch.manual_seed(3)
    together = layer(rows)
    torch.manual_seed(3)
    apart = vmap(layer, randomness="different")(rows.unsqueeze(1)).squeeze(1)

    assert torch.equal(together, apart)
    assert layer(rows[:0]).shape == (0, 5, 7)
