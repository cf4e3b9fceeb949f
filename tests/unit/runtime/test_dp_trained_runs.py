"""Whole simulated runs with dp-trained encoders: what they promise, book, refuse and resume."""

import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from securevfl import RunResult
from securevfl.core.errors import BudgetExceededError, ConfigError, PrivacyError
from securevfl.core.progress import ProgressEvent, RoundDone
from securevfl.dp import Privacy
from securevfl.dp.accountant import epsilon_of
from securevfl.dp.budget import Budget
from securevfl.dp.release_plan import ReleasePlan
from securevfl.ledger.ledger import Ledger
from securevfl.testing import run_in_process, save_federation, write_federation

PRIVACY = {
    "epsilon": 40.0,
    "delta": 1e-4,
    "encoder": "dp-trained",
    "links_per_record": 2,
    "gradient_clip_norm": 0.5,
}
ROWS, EPOCHS = 90, 3


def federation(folder: Path, *, model: Mapping[str, Any] | None = None, **privacy: Any) -> Path:
    """Write a federation whose scaling does not depend on data."""
    return write_federation(
        folder,
        rows=ROWS,
        model={"release": "pooled", "dropout": 0.1, **(model or {})},
        training={"epochs": EPOCHS, "batch_size": 32},
        privacy={**PRIVACY, **privacy},
        of_secondaries={"scaling": "bounds", "bounds": [-4.0, 4.0]},
    )


def run(path: Path, out: Path, *, resume: bool = False, observe=None) -> RunResult:
    return run_in_process(path, out, resume=resume, observe=observe or (lambda _event: None))


@pytest.mark.parametrize("rate", [1.0, 0.6])
def test_a_run_spends_what_the_calculator_says(rate: float, tmp_path: Path) -> None:
    """Epsilon of metrics.json, of both ledgers and of the calculator are one number."""
    path = federation(
        tmp_path, model={"average_positions_every": 1}, sampling_rate=rate, gradient_share=0.25
    )
    out = tmp_path / "run"
    privacy = run(path, out).metrics["privacy"]
    # Without sampling a pass is one round of m rows; with it, m rounds of a pass touch a record.
    budget = Budget(
        steps=EPOCHS * (1 if rate == 1 else 2),
        delta=1e-4,
        encoder="dp-trained",
        links_per_record=2,
        sampling_rate=rate,
        secondaries=2,
        gradient_noise_multiplier=privacy["gradient_noise_multiplier"],
        counts_links=True,
    )
    expected = budget.epsilon(noise_multiplier=privacy["noise_multiplier"])

    assert privacy["epsilon"] == pytest.approx(expected, rel=1e-9)
    assert 39.9 < privacy["epsilon"] <= 40.0
    assert privacy["epsilon"] == privacy["epsilon_planned"]
    assert privacy["epsilon_as_published"] != pytest.approx(expected, rel=0.1)
    rounds = EPOCHS * (2 + 1) + 1
    assert (privacy["releases"], privacy["updates"]) == (rounds, EPOCHS * 2)
    assert privacy["gradient_noise_std"] == pytest.approx(
        privacy["gradient_noise_multiplier"] * 2 * 0.5 * 2
    )
    assert "linked to at most 2 of the primary's rows" in privacy["statement"]
    averaging = next(one for one in privacy["channels"] if "averaging" in one["channel"])
    assert averaging["guarantee"].startswith("covered by epsilon")
    for name in ("agency", "bank-1", "bank-2"):
        last = (out / "parties" / name / "ledger.jsonl").read_text().splitlines()[-1]
        line = json.loads(last)
        assert line["epsilon"] == privacy["epsilon"]
        assert line["purpose"] == "test"


def test_bottom_models_learn_through_the_noise(tmp_path: Path) -> None:
    """With little noise, weights move, and training is better for it than untrained weights."""
    path = federation(tmp_path, epsilon=1e5)
    losses = run(path, tmp_path / "run").losses
    first = torch.load(tmp_path / "run" / "parties" / "bank-1" / "epoch-2.pt", weights_only=True)
    last = torch.load(tmp_path / "run" / "parties" / "bank-1" / "epoch-3.pt", weights_only=True)

    assert np.mean(losses[-2:]) < np.mean(losses[:2])
    moved = [
        float((last["state"]["bottom"][name] - value).abs().max())
        for name, value in first["state"]["bottom"].items()
    ]
    assert min(moved) > 0


class PowerCutError(Exception):
    """The simulated crash."""


def test_a_resumed_run_pays_for_what_it_repeats_and_stops_in_time(tmp_path: Path) -> None:
    """Cut in its second epoch, it goes on from the first and has one epoch less to spend."""
    path = federation(tmp_path)
    out = tmp_path / "run"

    def cut(event: ProgressEvent) -> None:
        if isinstance(event, RoundDone) and (event.epoch, event.done) == (2, 1):
            raise PowerCutError

    with pytest.raises(PowerCutError):
        run(path, out, observe=cut)
    metrics = run(path, out, resume=True).metrics

    assert metrics["epochs"] == EPOCHS - 1
    assert metrics["privacy"]["epsilon"] <= 40.0
    assert metrics["privacy"]["releases"] == (3 + 1) + 3 + 1


def test_a_primary_that_asks_for_a_row_too_often_is_refused() -> None:
    """The price is for so many passes: a row that comes back more often is not answered."""
    for settings in ({"epsilon": 4.0}, {"noise_multiplier": 3.0}):
        plan = ReleasePlan(
            privacy=Privacy(encoder="dp-trained", links_per_record=1, **settings),
            parties=2,
            min_active=2,
            rounds=20,
            rows_per_round=10,
            row_releases=200,
            releases_per_row=2,
            links=3,
        )
        tau = plan.noise_share_std()
        ledger = Ledger(None, party="bank", plan=plan, noise_share_std=tau)
        for number in (1, 2):
            ledger.charge(round_number=number, rows=np.arange(10), purpose="train")
        ledger.charge(round_number=3, rows=np.arange(10, 20), purpose="train")
        with pytest.raises(BudgetExceededError):
            ledger.charge(round_number=4, rows=np.arange(9, 19), purpose="validation")
        assert (ledger.updates, ledger.rounds) == (3, 3)


def test_sessions_of_one_run_add_up(tmp_path: Path) -> None:
    """Their passes compose as the calculator composes them, one after another."""
    plan = ReleasePlan(
        privacy=Privacy(
            encoder="dp-trained", links_per_record=1, sampling_rate=0.3, epsilon=6.0, delta=1e-5
        ),
        parties=2,
        min_active=2,
        rounds=4,
        rows_per_round=10,
        row_releases=40,
        releases_per_row=2,
        links=3,
    )
    tau = 2.0 * plan.noise_share_std()
    spent = []
    for passes in (2, 4, 6):
        path = tmp_path / "ledger.jsonl"
        ledger = Ledger(path, party="bank", plan=plan, noise_share_std=tau, run="one")
        for number in range(1, 5):
            rows = np.arange(10) + 10 * (number % 2)
            ledger.charge(round_number=number, rows=rows, purpose="train")
        spent.append(ledger.epsilon_spent)
        release = plan.release(tau, rounds=4, row_releases=40)
        assert ledger.updates == 2 * passes
        assert ledger.epsilon_spent == epsilon_of([release] * (passes // 2), delta=1e-5)
        ledger.close()

    assert 0 < spent[0] < spent[1] < spent[2] < 6.0


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"mechanism": "none"}, ConfigError, "must be left out"),
        ({"accounting": "as-published"}, ConfigError, 'needs mechanism = "gaussian"'),
        ({"encoder": "trained"}, ConfigError, "gradient_clip_norm: goes with encoder"),
        ({"links_per_record": None}, PrivacyError, "links_per_record: must be given"),
        ({"gradient_clip_norm": 0.0}, ConfigError, "gradient_clip_norm must be finite and > 0"),
        ({"gradient_clip_norm": float("nan")}, ConfigError, "must be finite and > 0"),
        ({"gradient_share": 1.0}, ConfigError, r"gradient_share must lie in \(0, 1\)"),
        ({"gradient_noise_multiplier": 1.0}, ConfigError, "goes with noise_multiplier"),
        ({"sampling_rate": 0.5, "unit": "entity"}, PrivacyError, "is not accounted for"),
        ({"sampling_rate": 0.5, "unit": "linked-row"}, PrivacyError, "does not amplify"),
    ],
)
def test_what_no_accounting_makes_true_is_refused(
    change: dict[str, Any], error: type[Exception], text: str, tmp_path: Path
) -> None:
    """Exit code 4 for what is unsound, 2 for what is impossible; nothing was released."""
    settings = {key: value for key, value in {**PRIVACY, **change}.items() if value is not None}
    path = write_federation(tmp_path, rows=ROWS, privacy=settings)
    with pytest.raises(error, match=text):
        run(path, tmp_path / "run")
    assert not list(tmp_path.glob("run/**/ledger.jsonl"))


@pytest.mark.parametrize("scaling", ["standard", "clamped"])
def test_scaling_by_the_tables_own_statistics_is_refused(tmp_path: Path, scaling: str) -> None:
    """One record would move every row's features, whatever is noised."""
    source = tomllib.loads(write_federation(tmp_path, rows=ROWS, privacy=PRIVACY).read_text())
    source["party"][1]["scaling"] = scaling
    path = save_federation(tmp_path, source)
    with pytest.raises(PrivacyError, match=rf'scaling = "{scaling}".*dp-trained encoder'):
        run(path, tmp_path / "run")
