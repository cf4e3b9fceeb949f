"""What a run decides once: its noise, and the format that both ends of the cut share."""

import tomllib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.federations import FROZEN

from securevfl import read_federation
from securevfl.config.reading import parse_federation
from securevfl.core.errors import ProtocolError
from securevfl.dp.release_plan import ReleasePlan
from securevfl.dp.symbols import SymbolPlan
from securevfl.federation.rounds.cut import CutLayer
from securevfl.federation.run_plan import RunFacts, plan_prediction, plan_run, prediction_facts
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


def test_symbols_follow_from_the_file_alone(tmp_path: Path) -> None:
    """Neither how many rows there are nor which are predicted chooses another number of cells."""
    source = tomllib.loads(write_federation(tmp_path).read_text(encoding="utf-8"))
    for party in source["party"][1:]:
        party |= {"scaling": "bounds", "bounds": [-4.0, 4.0]}
    config = parse_federation(
        {
            "federation": {**source["federation"], "task": "binary"},
            "encoder": {"method": "auto"},
            "privacy": {"epsilon": 2.0},
            "linkage": {"protection": "none"},
            "party": source["party"],
        },
        file="fed.toml",
    )
    few, many = (plan_run(config, replace(FACTS, rows=rows)) for rows in (60, 60_000))
    predicted = plan_prediction(
        config, prediction_facts(rows=9, predicted_rows=9), noise_share_std=few.noise_share_std
    )

    symbols = many.releases.symbols
    assert symbols == SymbolPlan(cells=5, exchanged=False)
    assert few.releases.symbols == predicted.releases.symbols == symbols
    # All predictions are as many symbols as training's, without a fit.
    assert predicted.releases.epsilon(few.noise_share_std) < 2.0
    # What crosses has no noise of its own.
    assert many.cut.noise_share_std == 0.0 < many.noise_share_std < 1.0
    # As docs/class-means.md says of epsilon 2.
    assert many.surviving == pytest.approx(0.57, abs=0.01)
