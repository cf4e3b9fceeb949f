"""A party's dropout stream: its own, wherever it runs, and leaving the outside alone."""

import pytest
import torch

from securevfl.federation.rounds.updates import DropoutStream

CPU = torch.device("cpu")


def draws(stream: DropoutStream, count: int) -> list[float]:
    with stream.active():
        return torch.rand(count).tolist()


def test_draws_do_not_depend_on_who_else_draws() -> None:
    """Two parties of one process draw what each would draw alone."""
    alone = draws(DropoutStream(7, "bank", device=CPU), 6)
    bank, rental = (DropoutStream(7, name, device=CPU) for name in ("bank", "rental"))
    mixed = []
    for _ in range(3):
        mixed += draws(bank, 2)
        draws(rental, 5)
        torch.rand(3)
    assert mixed == alone


def test_streams_differ_by_party_and_seed() -> None:
    """No two parties, and no two runs, drop the same units."""
    first = draws(DropoutStream(7, "bank", device=CPU), 4)
    assert draws(DropoutStream(7, "bank", device=CPU), 4) == first
    assert draws(DropoutStream(7, "rental", device=CPU), 4) != first
    assert draws(DropoutStream(8, "bank", device=CPU), 4) != first


def test_outside_is_left_as_it_was() -> None:
    """Torch's global generator goes on after the block as if there had been none, even on error."""
    torch.manual_seed(1)
    expected = torch.rand(3).tolist()
    torch.manual_seed(1)
    stream = DropoutStream(7, "bank", device=CPU)
    with pytest.raises(RuntimeError, match="size"), stream.active():
        torch.rand(2) @ torch.rand(3)
    assert torch.rand(3).tolist() == expected


def test_state_goes_into_a_checkpoint() -> None:
    """A restored state goes on with the same draws."""
    stream = DropoutStream(7, "bank", device=CPU)
    draws(stream, 3)
    state = stream.state.clone()
    later = draws(stream, 3)
    other = DropoutStream(0, "other", device=CPU)
    other.state = state
    assert draws(other, 3) == later
