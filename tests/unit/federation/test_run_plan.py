"""What a run decides once: its noise, and the format that both ends of the cut share."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.federations import FROZEN

from securevfl import read_federation
from securevfl.core.errors import ProtocolError
from securevfl.dp.release_plan import ReleasePlan
from securevfl.federation.rounds.cut import CutLayer
from securevfl.federation.run_plan import RunFacts, plan_run
from securevfl.mpc.codec import InProcessSum, RingFormat
from securevfl.testing import run_in_process, write_federation

FACTS = RunFacts(rows=60, train_rows=42, validation_rows=6, test_rows=12)
DP_TRAINED = {"epsilon": 40.0, "delta": 1e-4, "encoder": "dp-trained", "links_per_record": 2}


def bounded(folder: Path, privacy: Mapping[str, Any]) -> Path:
    return write_federation(
        folder,
        rows=60,
        privacy=dict(privacy),
        model={"release": "pooled"},
        of_secondaries={"scaling": "bounds", "bounds": [-4.0, 4.0]},
    )


@pytest.mark.parametrize("privacy", [FROZEN, DP_TRAINED], ids=["frozen", "dp-trained"])
def test_a_run_calibrates_its_noise_once(
    privacy: Mapping[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ring, noise, ledgers, fitting and figures of all parties read one number."""
    calibrated: list[float] = []
    calibrate = ReleasePlan.noise_share_std

    def counted(plan: ReleasePlan) -> float:
        calibrated.append(calibrate(plan))
        return calibrated[-1]

    monkeypatch.setattr(ReleasePlan, "noise_share_std", counted)
    result = run_in_process(bounded(tmp_path, privacy), tmp_path / "run")

    assert len(calibrated) == 1
    assert result.metrics["privacy"]["noise_share_std"] == calibrated[0] > 0
    assert {line["noise_share_std"] for line in result.ledger if line["kind"] == "open"} == {
        calibrated[0]
    }


def test_pooled_rows_cross_as_sums_and_arrive_as_means(tmp_path: Path) -> None:
    """K slots, k secondaries: what is decoded is the mean over both."""
    plan = plan_run(read_federation(bounded(tmp_path, FROZEN)), FACTS)
    assert plan.cut.slots == 4
    assert plan.cut.shape == (1, 8)
    units = [torch.full((3, 1, 8), 40, dtype=torch.int32) for _ in range(2)]
    total = InProcessSum()([plan.cut.encode(one) for one in units])
    average = plan.cut.decode(total, rows=3, active=("a", "b"), round_number=1)
    assert torch.equal(average, torch.full((3, 1, 8), 10 * plan.cut.ring.granularity))


def test_a_sum_of_another_size_is_refused() -> None:
    """Words that do not belong to so many rows are no average of them."""
    ring = RingFormat.choose(clip_norm=1.0, noise_share_std=0.0, parties=2)
    cut = CutLayer(ring=ring, slots=1, shape=(2, 3), clip_norm=1.0)
    assert len(cut.zeros(5)) == cut.words(5) == 10
    with pytest.raises(ProtocolError, match="a sum of 24 elements needs 8 words, got 10"):
        cut.decode(cut.zeros(5), rows=4, active=("a", "b"), round_number=1)
