"""Secondaries that are computed together learn what each would learn by itself."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from helpers.fixed_entropy import fixed_entropy
from helpers.secondaries import FEATURES, LINKS, RECORDS, ROWS, WIDTH, answer, make_secondary

from securevfl import read_federation
from securevfl.federation.messages import RoundPlan
from securevfl.federation.rounds import stacks
from securevfl.models.fet.family import FeTBottom
from securevfl.models.fet.settings import FeTConfig
from securevfl.models.pairs import ManyLinksSettings, RecordBottom
from securevfl.testing import run_in_process, write_federation

SECONDARIES = 5
# Plain steps: Adam makes whole steps of the rounding of gradients that are nothing but rounding.
TRAINING = {"epochs": 1, "batch_size": 32, "optimizer": "sgd", "learning_rate": 0.05}


@contextmanager
def counted_stacks(largest: int) -> Iterator[list[int]]:
    """Stack what is not larger, and list how many secondaries each stack had."""
    sizes: list[int] = []

    class Counted(stacks.Stack):
        def __init__(self, network: Any, plan: Any) -> None:
            super().__init__(network, plan)
            sizes.append(len(network.members))

    with (
        mock.patch.object(stacks, "LARGEST", largest),
        mock.patch.object(stacks, "Stack", Counted),
    ):
        yield sizes


def run(path: Path, out: Path, *, largest: int) -> tuple[list[float], dict[str, Any], list[int]]:
    """Return losses, what every secondary has saved of the last epoch, and sizes of stacks."""
    config = read_federation(path)
    with fixed_entropy(), counted_stacks(largest) as sizes:
        result = run_in_process(config, out, data_root=path.parent)
    saved = {
        party.name: torch.load(out / "parties" / party.name / "epoch-1.pt")["state"]
        for party in config.secondaries
    }
    return result.losses, saved, sizes


def numbers(saved: Any) -> dict[str, Any]:
    """Return all that was saved by its place."""
    if isinstance(saved, dict):
        found = {}
        for name, value in saved.items():
            found |= {f"{name}/{inner}": one for inner, one in numbers(value).items()}
        return found
    if isinstance(saved, list):
        return numbers(dict(enumerate(saved)))
    return {"": saved}


@pytest.mark.parametrize(
    "sections",
    [
        {
            "model": {"dropout": 0.3, "party_dropout": 0.2},
            "linkage": {"max_distance": 0.3},
        },
        {
            "model": {"release": "pooled", "dropout": 0.3},
            "privacy": {
                "mechanism": "gaussian",
                "noise_multiplier": 0.5,
                "encoder": "trained",
                "accounting": "as-published",
            },
        },
        {"model": {"neighbours": 1, "average_positions_every": 1}},
        {"model": {"family": "fedsim", "neighbours": 3, "hidden": 8, "layer_width": 8}},
    ],
    ids=["dropout and absent links", "noise", "one link", "fedsim"],
)
def test_together_is_as_alone(tmp_path: Path, sections: dict[str, Any]) -> None:
    """Losses, weights, and what optimizers and dropout go on from, saved as each party's own."""
    path = write_federation(
        tmp_path, secondaries=SECONDARIES, rows=120, training=TRAINING, **sections
    )
    alone, kept_alone, none = run(path, tmp_path / "alone", largest=0)
    together, kept_together, sizes = run(path, tmp_path / "together", largest=2**20)

    assert not none
    # All validate, and all but one train where parties drop out.
    assert set(sizes) == ({4, 5} if "linkage" in sections else {5})
    assert together == pytest.approx(alone, rel=1e-6)
    assert kept_together.keys() == kept_alone.keys()
    for name, kept in kept_alone.items():
        expected, found = numbers(kept), numbers(kept_together[name])
        assert found.keys() == expected.keys()
        for place, value in expected.items():
            torch.testing.assert_close(found[place], value, rtol=1e-5, atol=1e-6, msg=place)
        size = (tmp_path / "alone" / "parties" / name / "epoch-1.pt").stat().st_size
        assert size == (tmp_path / "together" / "parties" / name / "epoch-1.pt").stat().st_size


def test_few_records_are_computed_once_each() -> None:
    """A model of single records has less to do by itself than for every link of a batch."""
    settings = ManyLinksSettings(hidden=WIDTH)
    everyone = {
        rank: make_secondary(bottom=RecordBottom(settings, num_features=FEATURES, key_dim=2))
        for rank in range(1, 5)
    }
    together = stacks.Stacks(everyone, links=LINKS)
    found = []
    for rows in (RECORDS // LINKS, RECORDS // LINKS + 1):
        plan = RoundPlan(
            round_number=1, rows=np.arange(rows), active=tuple(everyone), purpose="validation"
        )
        found.append(len(together.of_round(plan)))
    assert found == [4, 0]


@pytest.mark.parametrize(
    ("count", "at_once", "expected"),
    [(3, 9, []), (4, 9, [4]), (10, 5, [5, 5]), (10, 9, [5, 5]), (5, 4, []), (9, 0, [])],
    ids=["too few", "few", "two stacks", "even stacks", "no small rests", "too large"],
)
def test_how_many_are_computed_at_once(count: int, at_once: int, expected: list[int]) -> None:
    """As many as fit, in even parts; never so few that each alone would be quicker."""
    config = FeTConfig(neighbours=LINKS, hidden=WIDTH, heads=1, fourier_features=4, fourier_width=4)
    # Beside them two that have no like: another shape, and a model that is not made for it.
    others = {
        20: make_secondary(bottom=FeTBottom(config, num_features=FEATURES, key_dim=1)),
        21: make_secondary(),
    }
    alike = {
        rank: make_secondary(bottom=FeTBottom(config, num_features=FEATURES, key_dim=2))
        for rank in range(1, count + 1)
    }
    everyone = {**alike, **others}
    plan = RoundPlan(
        round_number=1, rows=np.arange(ROWS), active=tuple(everyone), purpose="validation"
    )
    largest = at_once * ROWS * LINKS * 2 * WIDTH
    with counted_stacks(largest) as sizes:
        shares = stacks.Stacks(everyone, links=LINKS).of_round(plan)
    assert sizes == expected
    assert set(shares) == (set(alike) if expected else set())


@pytest.mark.parametrize("keys_as_features", [False, True])
def test_tables_of_different_width_are_computed_together(keys_as_features: bool) -> None:
    """Representations and gradients are each secondary's own, in its own shape."""
    config = FeTConfig(
        neighbours=LINKS,
        hidden=WIDTH,
        heads=1,
        fourier_features=4,
        fourier_width=4,
        keys_as_features=keys_as_features,
        dropout=0.0,
    )
    everyone = {}
    for rank, width in enumerate((1, 2, 2, 1), 1):
        torch.manual_seed(rank)
        bottom = FeTBottom(config, num_features=width, key_dim=2)
        one = make_secondary(seed=rank, bottom=bottom)
        one.data = replace(one.data, features=one.data.features[:, :width])
        everyone[rank] = one
    plan = RoundPlan(round_number=1, rows=np.arange(ROWS), active=tuple(everyone), purpose="train")
    shares = stacks.Stacks(everyone, links=LINKS).of_round(plan)
    assert len(shares) == len(everyone)
    together = {rank: share.represent() for rank, share in shares.items()}
    for rank, share in shares.items():
        share.backward_step(together[rank])
    wanted = torch.randn_like(together[1])
    for rank, one in everyone.items():
        shares[rank].gradients_from(wanted)
        found = [weight.grad for weight in one.bottom.parameters()]
        alone = one.represent(plan)
        expected = torch.autograd.grad(alone, list(one.bottom.parameters()), wanted)
        torch.testing.assert_close(together[rank], alone)
        torch.testing.assert_close(found, list(expected))
        assert all(weight.is_contiguous() for weight in found)


def test_a_gradient_that_is_not_finite_is_zero_for_its_secondary_alone() -> None:
    """With a promise; the others of the stack learn."""
    config = FeTConfig(neighbours=LINKS, hidden=WIDTH, heads=1, fourier_features=4, fourier_width=4)
    everyone = {
        rank: make_secondary(seed=rank, bottom=FeTBottom(config, num_features=FEATURES, key_dim=2))
        for rank in range(1, 5)
    }
    plan = RoundPlan(round_number=1, rows=np.arange(ROWS), active=tuple(everyone), purpose="train")
    shares = stacks.Stacks(everyone, links=LINKS).of_round(plan)
    for rank, share in shares.items():
        term = share.represent() * (float("nan") if rank == 2 else 1.0)
        share.backward_step(term)
    wanted = torch.ones(ROWS, LINKS, WIDTH)
    lost = [float(share.gradients_from(wanted, zero_lost=True)) for share in shares.values()]
    assert lost == [0, 1, 0, 0]
    sizes = [
        sum(float(w.grad.abs().sum()) for w in one.bottom.parameters()) for one in everyone.values()
    ]
    assert sizes[1] == 0
    assert all(size > 0 for place, size in enumerate(sizes) if place != 1)


def test_a_stack_ends_with_its_round() -> None:
    """What a secondary computes of other rows later is of those rows."""
    config = FeTConfig(neighbours=LINKS, hidden=WIDTH, heads=1, fourier_features=4, fourier_width=4)
    everyone = {
        rank: make_secondary(seed=rank, bottom=FeTBottom(config, num_features=FEATURES, key_dim=2))
        for rank in range(1, 5)
    }
    whole, few = (
        RoundPlan(round_number=1, rows=np.arange(rows), active=tuple(everyone), purpose="test")
        for rows in (ROWS, 2)
    )
    shares = stacks.Stacks(everyone, links=LINKS).of_round(whole)
    everyone[1].stacked_in = lambda _plan: shares[1]
    answer(everyone[1], whole)

    assert len(everyone[1].represent(few)) == 2
