"""What promises of labels and fitted encoders rest on: each number that a charge is made from."""

import math
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.federations import FROZEN
from stages.class_means.test_class_means_in_runs import CLASS_MEANS, MODEL, run, write_means

from securevfl import read_federation
from securevfl.core.errors import BudgetExceededError
from securevfl.dp import Privacy
from securevfl.dp.class_sums import SumFormat
from securevfl.dp.gaussian import gaussian_noise_multiplier
from securevfl.dp.release_plan import ReleasePlan
from securevfl.dp.ring_noise import NoiseTables
from securevfl.federation import build
from securevfl.federation.checkpoint import StateFolder
from securevfl.federation.run_plan import plan_run, run_facts
from securevfl.federation.saved_model import load_model
from securevfl.ledger.ledger import Ledger
from securevfl.linkage.spec import LinkedPrimary
from securevfl.stages.class_means.class_labels import class_labels_of
from securevfl.testing import read_tables, save_federation


def test_label_noise_of_a_regression_is_for_all_rows_that_one_label_moves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One number that is exchanged moves a row over each border, round a cycle of classes."""
    drawn: list[float] = []

    def noise(format_: SumFormat, std: float) -> np.ndarray:
        drawn.append(std / (2 * format_.radius * 2.0**format_.bits))
        return np.zeros(format_.shape, dtype=np.int64)

    monkeypatch.setattr(SumFormat, "noise", noise)
    encoder = {**CLASS_MEANS, "labels": "shares"}
    path = write_means(
        tmp_path, encoder=encoder, federation={"task": "regression"}, model={**MODEL, "hidden": 1}
    )
    source = dict(read_federation(path).source)
    source["party"].append({"name": "dealer", "role": "dealer"})
    config = read_federation(save_federation(tmp_path, source))
    run(path, tmp_path / "run")

    assert config.labels_moved == 2
    promised = gaussian_noise_multiplier(
        epsilon=config.label_epsilon or 0, delta=config.privacy.delta
    )
    assert max(drawn) == pytest.approx(math.sqrt(2) * promised, rel=1e-3)


@pytest.mark.statistical
def test_drawn_labels_of_a_regression_keep_a_row_no_oftener_than_its_part_of_epsilon(
    tmp_path: Path,
) -> None:
    """One number that is exchanged moves 2 rows, so each has half of label_epsilon.

    Of 14,000 drawn rows the share that is kept is off by more than 0.028 with probability below
    1e-9, by the binomial; at the whole epsilon of each row it would be 0.88 in place of 0.73.
    """
    epsilon, drawn = 2.0, {}
    for labels in ("plaintext", "randomised"):
        path = write_means(
            tmp_path,
            rows=20_000,
            encoder={**CLASS_MEANS, "labels": labels, "label_epsilon": epsilon},
            federation={"task": "regression"},
            model={**MODEL, "hidden": 1},
        )
        config = read_federation(path)
        table = read_tables(config, tmp_path)["agency"]
        split, facts = run_facts(config, table)
        plan = plan_run(config, facts)
        linked = LinkedPrimary(keys=np.zeros((table.num_rows, 2), np.float32))
        data = build.primary_data(config, table, split, linked, device=torch.device("cpu"))
        ledger = Ledger(None, party="agency", plan=plan.releases, noise_share_std=1.0)
        files = StateFolder(tmp_path / labels, settings_digest="")
        drawn[labels] = class_labels_of(plan, data, table, ledger, files, ()).bins_of_rows
    true, found = drawn["plaintext"], drawn["randomised"]
    rows = true < 2
    assert rows.sum() == 14_000
    np.testing.assert_array_equal(found[~rows], 2)
    odds = math.exp(epsilon / 2)
    assert np.mean(found[rows] == true[rows]) == pytest.approx(odds / (odds + 1), abs=0.028)


def test_a_record_moves_class_sums_by_its_rounding_too() -> None:
    """Drawn back and rounded towards zero, each of d + 1 numbers may lose up to a unit."""
    for features, links in ((3, 1), (40, 4)):
        format_ = SumFormat(features=features, bins=3, links_per_record=links, bits=10)
        longest = math.sqrt(1.25) * format_.radius * 2**10
        assert format_.change_of_record == pytest.approx(
            links * (longest + math.sqrt(features + 1)), rel=1e-12
        )


@pytest.mark.parametrize("deviation", [64.37, 1000.5, 3.3e7])
def test_a_samplers_tables_leave_out_no_tail_that_anybody_could_meet(deviation: float) -> None:
    """Beyond the tables lies less than 2^-250: tables cut at six deviations leave 2e-9 a number."""
    tables = NoiseTables(deviation)
    reach = tables.reach * tables.block / deviation
    left_out = math.erfc(reach / math.sqrt(2)) if reach < 26 else 0.0
    assert left_out < 2.0**-250


def test_a_run_with_a_noise_multiplier_spends_its_plan_and_no_more(tmp_path: Path) -> None:
    """Sessions of one run share what the first one planned: the second is refused its first round.

    Another run has a plan of its own.
    """
    plan = ReleasePlan(
        privacy=Privacy(noise_multiplier=1.2, delta=1e-5, encoder="trained"),
        parties=2,
        min_active=2,
        rounds=10,
        rows_per_round=10,
        row_releases=100,
        releases_per_row=1,
        links=1,
    )
    tau = plan.noise_share_std()

    def session(run_id: str) -> Ledger:
        return Ledger(
            tmp_path / "ledger.jsonl", party="bank", plan=plan, noise_share_std=tau, run=run_id
        )

    def released(ledger: Ledger, rounds: int) -> None:
        for number in range(rounds):
            rows = np.arange(10) + 10 * number
            ledger.charge(round_number=number + 1, rows=rows, purpose="train")

    with closing(session("ab" * 16)) as first:
        released(first, 10)
        assert first.epsilon_spent == pytest.approx(plan.epsilon(tau), rel=1e-6)
    with (
        closing(session("ab" * 16)) as second,
        pytest.raises(BudgetExceededError, match="was planned"),
    ):
        released(second, 1)
    with closing(session("cd" * 16)) as other:
        released(other, 10)


def test_a_kept_model_has_keys_of_all_rows_and_shows_no_part_of_the_split(tmp_path: Path) -> None:
    """Keys without the test rows' would show which these are, in every request."""
    path = write_means(tmp_path, privacy={**FROZEN, "links_per_record": 1})
    run(path, tmp_path / "run")
    config = read_federation(path)
    model = load_model(tmp_path / "run" / "parties" / "agency" / "model", config, party="agency")

    assert model.primary is not None
    assert model.primary.keys is not None
    assert model.primary.keys.num_rows == 90


def test_noise_is_planned_for_each_step_of_a_score(tmp_path: Path) -> None:
    """At one epsilon three releases of records leave less for each than one does."""
    spread = {}
    for task, width, steps in (("multiclass", 3, 1), ("regression", 1, 3)):
        folder = tmp_path / task
        folder.mkdir()
        promise = {**FROZEN, "links_per_record": 1, "epsilon": 2.0}
        promise.pop("noise_multiplier", None)
        model = {**MODEL, "hidden": width}
        path = write_means(folder, federation={"task": task}, model=model, privacy=promise)
        config = read_federation(path)
        assert config.fitting is not None
        assert config.fitting.steps == steps
        tables: dict[str, Any] = dict(read_tables(config, folder))
        _, facts = run_facts(config, tables["agency"])
        spread[steps] = plan_run(config, facts).releases.fitting_multiplier()
    assert spread[3] == pytest.approx(math.sqrt(3) * (spread[1] or 0), rel=0.02)
