"""The one-table baselines: their inputs, their training, their independence of global state."""

import math

import numpy as np
import pytest
import torch

from securevfl.core.errors import ConfigError, DataError
from securevfl.data.tables import PartyTable
from securevfl.lab.pooled_methods import MethodFigures, fit_table, true_matches
from securevfl.models.alone.margins import BaselineConfig
from securevfl.models.layers import MLP
from securevfl.models.tasks import TaskHead


def fit(seed: int, *, inputs: torch.Tensor, targets: torch.Tensor) -> tuple[MethodFigures, MLP]:
    """Train the baseline on the first 200 rows, validate on 50 and test on the other 50."""
    rows = torch.arange(300)
    return fit_table(
        inputs,
        targets,
        head=TaskHead(task="multiclass", num_classes=2),
        train=rows[:200],
        validation=rows[200:250],
        test=rows[250:],
        config=BaselineConfig(epochs=30, hidden=(32,)),
        seed=seed,
    )


def table() -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs and the labels that they tell."""
    inputs = torch.randn(300, 4, generator=torch.Generator().manual_seed(0))
    return inputs, (inputs[:, 0] + inputs[:, 1] ** 2 > 1).long()


def test_a_baseline_learns_what_its_table_tells() -> None:
    """A boundary that is not linear is learned; shuffled labels are not."""
    inputs, labels = table()
    shuffled = labels[torch.randperm(300, generator=torch.Generator().manual_seed(1))]

    assert fit(0, inputs=inputs, targets=labels)[0].test > 0.85
    assert fit(0, inputs=inputs, targets=shuffled)[0].test < 0.75


def test_a_baseline_depends_on_its_seed_alone() -> None:
    """The global generator is neither read nor moved; another seed gives other weights."""
    inputs, labels = table()
    torch.manual_seed(1)
    _, first = fit(3, inputs=inputs, targets=labels)
    state = torch.get_rng_state()
    torch.manual_seed(2)
    _, again = fit(3, inputs=inputs, targets=labels)
    torch.manual_seed(1)

    assert torch.equal(torch.get_rng_state(), state)
    for ours, theirs in zip(first.parameters(), again.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    _, other = fit(4, inputs=inputs, targets=labels)
    assert not torch.equal(next(first.parameters()), next(other.parameters()))


def test_test_rows_do_not_choose_the_epoch() -> None:
    """Wrong labels on the test rows change the test metric and nothing else."""
    inputs, labels = table()
    wrong = labels.clone()
    wrong[250:] = 1 - wrong[250:]
    right, bad = (fit(0, inputs=inputs, targets=y)[0] for y in (labels, wrong))

    assert (right.best_epoch, right.validation) == (bad.best_epoch, bad.validation)
    assert right.test == pytest.approx(1 - bad.test)


def test_true_matches_are_found_for_every_row() -> None:
    """Each row gets its own record at a secondary; a missing one is an error that names both."""
    own, other = (
        PartyTable(
            name=name,
            key_names=("k",),
            keys=np.zeros((len(entities), 1)),
            feature_names=("x",),
            features=np.zeros((len(entities), 1), dtype=np.float32),
            entities=np.array(entities),
        )
        for name, entities in (("shop", [7, 5]), ("bank", [5, 6, 7]))
    )
    assert true_matches(own, other).tolist() == [2, 0]
    with pytest.raises(DataError, match="1 rows of 'bank' have no match at 'shop'"):
        true_matches(other, own)


def test_an_empty_group_of_rows_is_refused() -> None:
    """The message says which."""
    inputs, labels = table()
    with pytest.raises(DataError, match="no validation rows"):
        fit_table(
            inputs,
            labels,
            head=TaskHead(task="multiclass", num_classes=2),
            train=torch.arange(10),
            validation=torch.arange(0),
            test=torch.arange(10),
            config=BaselineConfig(),
            seed=0,
        )


def test_impossible_baselines_are_refused() -> None:
    """Settings check themselves."""
    with pytest.raises(ConfigError, match=r"hidden\[1\] must be at least 1, got 0"):
        BaselineConfig(hidden=(8, 0))


def test_training_rows_of_one_class_have_no_figure_and_end_nothing() -> None:
    """A fold may lack a rare class; a run ended there, after its keys were linked."""
    inputs, labels = table()
    rows = torch.arange(300)
    one_class = rows[labels == 0]

    found, _ = fit_table(
        inputs,
        labels.float(),
        head=TaskHead(task="binary"),
        train=one_class[:100],
        validation=rows[200:250],
        test=rows[250:],
        config=BaselineConfig(epochs=1),
        seed=0,
    )

    assert math.isnan(found.train)
    assert math.isfinite(found.validation)
