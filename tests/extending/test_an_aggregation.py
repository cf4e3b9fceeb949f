"""An aggregation of one's own: a class, a line in the table, and a family that asks for it."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from securevfl import read_federation
from securevfl.core.errors import ConfigError, EncodingRangeError
from securevfl.federation import run_plan
from securevfl.federation.rounds.cut import AGGREGATIONS, MeanOfRows
from securevfl.federation.run_plan import RunFacts, plan_run
from securevfl.models.fet.family import FeTFamily
from securevfl.testing import run_in_process, write_federation

FACTS = RunFacts(rows=60, train_rows=42, validation_rows=6, test_rows=12)


class MeanOfLargest(MeanOfRows):
    """Each row keeps its largest half, is clipped as a whole, and is averaged as usual.

    A row without some of its numbers is no longer than before, so it moves the sum no further than
    ``securevfl.dp.sensitivity.row_change`` says of whole rows.
    """

    def clip(self, representation: Tensor) -> Tensor:
        """Put zeros in the place of the smaller half, then clip."""
        flat = representation.flatten(1)
        middle = flat.detach().abs().median(dim=1, keepdim=True).values
        return super().clip((flat * (flat.detach().abs() > middle)).view_as(representation))


@pytest.fixture(autouse=True)
def _known(monkeypatch: pytest.MonkeyPatch) -> None:
    # In the package, this is the line in federation/rounds/cut.py, and a method of a family.
    monkeypatch.setattr(run_plan, "AGGREGATIONS", {**AGGREGATIONS, "largest": MeanOfLargest})
    monkeypatch.setattr(FeTFamily, "aggregation", lambda *_arguments, **_settings: "largest")


def test_a_run_trains_through_it(tmp_path: Path) -> None:
    """Every round clips and encodes with it, and the gradient goes back through what it kept."""
    config = read_federation(write_federation(tmp_path, rows=60))
    result = run_in_process(config, tmp_path / "run", data_root=tmp_path)
    assert len(result.losses) == 4
    assert np.isfinite(result.losses).all()

    released = plan_run(config, FACTS).aggregation()
    assert isinstance(released, MeanOfLargest)
    rows = torch.randn(5, 4, 8, generator=torch.Generator().manual_seed(1), requires_grad=True)
    clipped = released.clip(rows)
    assert ((clipped != 0).flatten(1).sum(dim=1) == 16).all()
    clipped.sum().backward()
    assert rows.grad is not None
    assert torch.equal(rows.grad.flatten(1)[(clipped == 0).flatten(1)], torch.zeros(5 * 16))


def test_the_bound_on_norms_holds_for_it(tmp_path: Path) -> None:
    """What its clip forgets, the check before the noise refuses."""
    plan = plan_run(read_federation(write_federation(tmp_path, rows=60)), FACTS)
    with pytest.raises(EncodingRangeError, match="clip before encoding"):
        plan.aggregation().units(torch.full((1, 4, 8), 0.5), bounded=True)


def test_a_name_that_is_not_there_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one line, before anything runs; and so is one that pools where the family does not."""
    config = read_federation(write_federation(tmp_path, rows=60))
    monkeypatch.setattr(FeTFamily, "aggregation", lambda *_arguments, **_settings: "median")
    with pytest.raises(ConfigError, match="asks for the aggregation 'median'; there are 'rows'"):
        plan_run(config, FACTS)
    monkeypatch.setattr(FeTFamily, "aggregation", lambda *_arguments, **_settings: "pooled")
    with pytest.raises(ConfigError, match="only one of the two pools"):
        plan_run(config, FACTS)
