"""Runs with a budget that are lost near their end: what they still do, and what they leave out."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.federations import FROZEN
from torch import nn

from securevfl import RunResult, read_federation
from securevfl.core.errors import ConfigError
from securevfl.core.progress import ProgressEvent, RoundDone, Warned
from securevfl.data.tables import consecutive_batches
from securevfl.desk.command_results import print_results
from securevfl.desk.report.page import write_report
from securevfl.federation.checkpoint import StateFolder
from securevfl.federation.messages import RoundPlan
from securevfl.federation.rounds.cut import CutLayer
from securevfl.federation.rounds.exchanges import RoundExchange
from securevfl.federation.rounds.kept_rounds import CachedTestRounds
from securevfl.federation.run_plan import RunPlan, plan_run, run_facts
from securevfl.federation.session.peers import PeersHere
from securevfl.lab.contribution import contribution
from securevfl.ledger.ledger import Ledger
from securevfl.mpc.codec import RingFormat
from securevfl.runtime import primary_run
from securevfl.runtime.run_folder import UNTESTED
from securevfl.testing import read_tables, run_in_process, write_federation

EPOCHS = 3
CUT = CutLayer(
    ring=RingFormat.choose(clip_norm=1.0, noise_share_std=0.0, parties=2),
    slots=1,
    shape=(1, 8),
    clip_norm=1.0,
)
TRAINED = {"epsilon": 20.0, "delta": 1e-4, "encoder": "trained"}
DP_TRAINED = {
    "epsilon": 40.0,
    "delta": 1e-4,
    "encoder": "dp-trained",
    "links_per_record": 2,
    "gradient_clip_norm": 0.5,
}
BUDGETS = pytest.mark.parametrize("privacy", [TRAINED, DP_TRAINED], ids=["trained", "dp-trained"])


class PowerCutError(Exception):
    """The simulated crash."""


def federation(folder: Path, privacy: dict[str, Any], *, on_loss: str, batch_size: int = 5) -> Path:
    return write_federation(
        folder,
        rows=60,
        model={"release": "pooled"},
        training={"epochs": EPOCHS, "batch_size": batch_size},
        privacy=privacy,
        runtime={"on_loss": on_loss},
        of_secondaries={"scaling": "bounds", "bounds": [-4.0, 4.0]},
    )


def plan_of(path: Path) -> RunPlan:
    config = read_federation(path)
    _, facts = run_facts(config, read_tables(config, path.parent)["agency"])
    return plan_run(config, facts)


@pytest.mark.parametrize(
    ("privacy", "on_loss", "kept"),
    [
        (TRAINED, "wait", True),
        (DP_TRAINED, "wait", True),
        (TRAINED, "stop", False),
        ({**TRAINED, "epsilon": None, "noise_multiplier": 2.0}, "wait", True),
        ({**TRAINED, "accounting": "as-published"}, "wait", False),
        ({"mechanism": "none", "encoder": "trained"}, "wait", False),
        (FROZEN, "wait", False),
    ],
)
def test_room_is_planned_where_a_budget_and_a_loss_may_meet(
    privacy: dict[str, Any], on_loss: str, kept: bool, tmp_path: Path
) -> None:
    """One pass and the test rows once more; and nothing where no budget could run out."""
    privacy = {name: value for name, value in privacy.items() if value is not None}
    plan = plan_of(federation(tmp_path, privacy, on_loss=on_loss)).releases
    if privacy == FROZEN:
        assert (plan.rounds, plan.row_releases, plan.releases_per_row) == (12, 60, 1)
        return
    # 42 training rows in 9 rounds, 6 for validation in 2, and 12 for testing in 3.
    more = int(kept)
    assert plan.rounds == EPOCHS * (9 + 2) + 3 * (1 + more)
    assert plan.row_releases == EPOCHS * (42 + 6) + 12 * (1 + more)
    assert plan.releases_per_row == EPOCHS + more


@BUDGETS
def test_room_costs_what_the_documents_say(privacy: dict[str, Any], tmp_path: Path) -> None:
    """Noise of a trained encoder grows as the root of all rows, of a dp-trained one of passes."""
    waits, stops = (
        plan_of(federation(tmp_path, privacy, on_loss=on_loss)).noise_share_std
        for on_loss in ("wait", "stop")
    )
    rows = EPOCHS * 48 + 12
    more = (rows + 12) / rows if privacy is TRAINED else (EPOCHS + 1) / EPOCHS
    assert waits / stops == pytest.approx(math.sqrt(more), rel=1e-6)


@BUDGETS
def test_room_stays_for_an_end_after_a_loss(privacy: dict[str, Any], tmp_path: Path) -> None:
    """An undisturbed run trains all epochs; one that is lost in the last one can test, once."""
    path = federation(tmp_path, privacy, on_loss="wait")
    plan, config = plan_of(path), read_federation(path)
    split, _ = run_facts(config, read_tables(config, path.parent)["agency"])
    ledger_path = tmp_path / "ledger.jsonl"
    rounds = iter(range(1, 1000))

    def opened() -> Ledger:
        return Ledger(
            ledger_path,
            party="agency",
            plan=plan.releases,
            noise_share_std=plan.noise_share_std,
            run="1" * 32,
        )

    def charge(ledger: Ledger, *parts: str) -> None:
        for part in parts:
            for rows in consecutive_batches(getattr(split, part), batch_size=5):
                ledger.charge(round_number=next(rounds), rows=rows, purpose=part)

    def tests_fit(ledger: Ledger) -> bool:
        return primary_run.covers_test_rounds(ledger, [5, 5, 2])

    ledger = opened()
    for _ in range(EPOCHS):
        assert primary_run.covers_epoch(plan, split, ledger)
        charge(ledger, "train", "validation")
    assert tests_fit(ledger)
    ledger.close()

    # Lost before the last epoch was saved: it is not trained again, and testing fits.
    ledger = opened()
    assert not primary_run.covers_epoch(plan, split, ledger)
    assert tests_fit(ledger)
    charge(ledger, "test")
    ledger.close()

    # Lost in testing too, with no answer kept. A trained encoder's rows add up, whichever they are,
    # and the first session has asked for no test rows; of others a session is a pass.
    ledger = opened()
    assert tests_fit(ledger) == (privacy is TRAINED)
    if privacy is TRAINED:
        charge(ledger, "test")
    assert 0.9 * privacy["epsilon"] < ledger.epsilon_spent <= privacy["epsilon"]
    ledger.close()
    ledger = opened()
    assert not tests_fit(ledger)
    ledger.close()


class Silent(PeersHere):
    """Secondaries that take any message and answer none."""

    def tell(self, message: object, ranks: object = None) -> None:
        del message, ranks


class Secondaries(RoundExchange):
    """Answer with the rows' ids, until the session is lost."""

    def __init__(self, ranks: tuple[int, ...] = (1, 2), *, rounds: int = 100) -> None:
        peers = Silent({rank: {} for rank in ranks})
        super().__init__(peers, CUT, device=torch.device("cpu"))
        self.asked: list[list[int]] = []
        self._left = rounds

    def average(self, plan: RoundPlan) -> torch.Tensor:
        if not self._left:
            raise PowerCutError
        self._left -= 1
        self.asked.append(plan.rows.tolist())
        return torch.from_numpy(plan.rows).float().reshape(-1, 1, 1).repeat(1, 1, 8)


PARTS = [np.arange(0, 5), np.arange(5, 10), np.arange(10, 12)]


def asked(folder: Path, secondaries: Secondaries, weight: float) -> list[int]:
    """Ask for all test rows in a session; return how many rows were still to be asked for."""
    files = StateFolder(folder, settings_digest="any")
    files.run = "1" * 32
    top = nn.Linear(1, 1)
    nn.init.constant_(top.weight, weight)
    nn.init.zeros_(top.bias)
    kept = CachedTestRounds(files, PARTS, top=top, ranks=secondaries.ranks, shape=(1, 8))
    secondaries.test_rounds = kept
    missing = kept.missing()
    plans = (
        RoundPlan(round_number=number, rows=rows, active=secondaries.ranks, purpose="test")
        for number, rows in enumerate(PARTS, 1)
    )
    found = torch.cat([average for _, average in secondaries.release_each(plans)])
    assert found[:, 0, 0].tolist() == list(range(12))
    return missing


def test_test_rows_that_came_are_not_asked_for_again(tmp_path: Path) -> None:
    """Nor is there need of a budget for them, once all have come."""
    lost = Secondaries(rounds=2)
    with pytest.raises(PowerCutError):
        asked(tmp_path, lost, 1.0)
    again = Secondaries()
    assert asked(tmp_path, again, 1.0) == [2]
    assert asked(tmp_path, again, 1.0) == []
    assert lost.asked + again.asked == [part.tolist() for part in PARTS]


def test_answers_for_another_model_are_none_for_this_one(tmp_path: Path) -> None:
    """An epoch trained once more has other weights; others that answer give other averages."""
    assert asked(tmp_path, Secondaries(), 1.0) == [5, 5, 2]
    assert asked(tmp_path, Secondaries(), 2.0) == [5, 5, 2]
    assert asked(tmp_path, Secondaries((1,)), 2.0) == [5, 5, 2]
    damaged = tmp_path / "tested" / "2.pt"
    damaged.write_bytes(damaged.read_bytes()[:-1])
    assert asked(tmp_path, Secondaries((1,)), 2.0) == [5, 2]


def cut_in_the_last_epoch(path: Path, out: Path, **changed: Any) -> RunResult:
    """Simulate a run that is cut when its last epoch is paid for and not saved, and resume it."""

    def observe(event: ProgressEvent) -> None:
        if isinstance(event, RoundDone) and (event.epoch, event.done) == (EPOCHS, event.of):
            raise PowerCutError

    with pytest.raises(PowerCutError):
        run_in_process(path, out, **{**changed, "observe": observe})
    return run_in_process(path, out, **{**changed, "resume": True})


def test_a_run_that_waits_tests_what_it_has_trained(tmp_path: Path) -> None:
    """It ends an epoch earlier, within its budget."""
    privacy = TRAINED
    path = federation(tmp_path, privacy, on_loss="wait", batch_size=32)
    metrics = cut_in_the_last_epoch(path, tmp_path / "run").metrics
    assert metrics["epochs"] == EPOCHS - 1
    assert metrics["test"] is not None
    assert "untested" not in metrics
    assert 0.9 * privacy["epsilon"] < metrics["privacy"]["epsilon"] <= privacy["epsilon"]


def test_where_no_room_was_kept_the_model_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run that stops has a model without test figures, and says so wherever it shows figures."""
    out = tmp_path / "run"
    path = federation(tmp_path, DP_TRAINED, on_loss="stop", batch_size=32)
    told: list[str] = []

    def observe(event: ProgressEvent) -> None:
        if isinstance(event, Warned):
            told.append(event.text)

    result = cut_in_the_last_epoch(path, out, observe=observe)
    metrics = result.metrics
    assert UNTESTED in told
    assert (metrics["test"], metrics["test_metrics"], metrics["alone"]) == (None, {}, None)
    assert metrics["untested"] == UNTESTED
    assert metrics["privacy"]["epsilon"] <= DP_TRAINED["epsilon"]
    assert not (out / "predictions.csv").exists()
    assert result.trained is not None
    assert result.trained.model("agency").weights

    print_results(metrics, out, as_json=False)
    said = capsys.readouterr().out
    assert "no test rows" in said
    assert f"not tested: {UNTESTED}" in said
    assert "does not cover the test rows" in write_report(out).read_text(encoding="utf-8")
    with pytest.raises(ConfigError, match="does not cover the test rows"):
        contribution(result)
    assert json.loads((out / "metrics.json").read_text())["validation_metrics"]
