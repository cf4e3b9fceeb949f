"""A budget of device operations a training round, for each family and regime.

What a GPU replays counts as what it is made of: kernels and views, by the stand-in for a GPU.
"""

from pathlib import Path

import pytest
from helpers.labelled_runs import ROUNDS, operations_a_round, write

BUDGETS = {
    "fet": 953,
    "fet-noise": 1059,
    "fet-dp": 1845,
    "fedsim": 433,
    "fedsim-paper": 400,
    "fedsim-unsorted": 372,
    "exact": 306,
    "top1sim": 297,
    "avgsim": 298,
    "featuresim": 318,
    "fet-best": 864,
    "fedhssl": 389,
    "fedgssl": 401,
    "fedlocalssl": 289,
    "fet of one": 719,
    "fet of four": 1040,
    "fet of four, noise": 1099,
    "top1sim of one": 219,
}


@pytest.mark.parametrize("name", ROUNDS)
def test_a_training_round_keeps_to_its_budget(name: str, tmp_path: Path) -> None:
    path = write(tmp_path, ROUNDS[name])
    assert 0 < operations_a_round(path, tmp_path / "run") <= BUDGETS[name]
