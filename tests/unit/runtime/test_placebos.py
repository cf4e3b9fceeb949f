"""Placebos: the same training without what partners know, and what they say of a gain."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from research.local_baseline import null_partners
from securevfl import RunResult
from securevfl.config.federation import FederationConfig
from securevfl.config.reading import parse_federation
from securevfl.core.conventions import stream
from securevfl.data.tables import PartyTable
from securevfl.desk.report.wording import noise_in_words
from securevfl.federation.base import Base
from securevfl.federation.rounds.primary import Primary
from securevfl.runtime.run_options import RunOptions
from securevfl.runtime.simulation import simulate_federation


def federation(
    partner: str, *, seed: int, method: str = "fedsim", rows: int = 240
) -> tuple[FederationConfig, dict[str, PartyTable]]:
    """Return a table's federation of the study of partners that know nothing."""
    task, parties = null_partners.tables(partner, rows=rows, seed=seed)
    config = parse_federation(null_partners.source(method, task, seed, 0.4, 0.1), file="test")
    return config, {table.name: table for table in parties}


def simulated(
    config: FederationConfig,
    tables: dict[str, PartyTable],
    out: Path,
    *,
    fitted_base: Base | None = None,
    **how: Any,
) -> RunResult:
    options = RunOptions(run_folder=out, fitted_base=fitted_base)
    return simulate_federation(config, tables, options, **how)


@pytest.mark.full_fits
def test_a_network_that_gains_without_partners_does_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside a partner of pure noise the average with the base looks better by one deviation.

    So does the average with the same network without the partner, which takes the gain away; a
    rule that does not ask it lets the joint model answer (the negative control).
    """
    config, tables = federation("noise", seed=29)
    base = simulated(config, tables, tmp_path / "run").metrics["base"]

    assert base["gain"] > base["error"]
    assert base["own_lambda"] > 0
    assert base["used"] == "alone"
    with monkeypatch.context() as planted:
        planted.setattr(Primary, "is_better_than", lambda _primary, _own: True)
        again = simulated(config, tables, tmp_path / "planted").metrics["base"]
    assert again["used"] == "joint"


def test_a_partner_that_knows_something_answers_and_its_part_is_said(tmp_path: Path) -> None:
    """Both placebos stay far behind, and the verdict names the partners' part."""
    config, tables = federation("real", seed=1)
    asked = {"with_placebo": True, "with_noise_cost": True}
    metrics = simulated(config, tables, tmp_path / "run", **asked).metrics
    gain, rmse = metrics["gain"], {name: one["rmse"] for name, one in metrics["placebos"].items()}

    assert set(rmse) == {"own", "permuted"}
    assert metrics["base"]["used"] == "joint"
    assert gain["placebo"] == min(rmse, key=lambda name: rmse[name])
    assert gain["partners"] == pytest.approx(min(rmse.values()) - metrics["test"])
    assert gain["partners_interval"][0] > 0
    assert gain["outcome"] == "better"
    assert "from the partners" in gain["verdict"]
    # Nothing is promised, so nothing could be without noise.
    assert metrics["without_noise"] is None
    assert noise_in_words(metrics) == ""


def test_the_permuted_placebo_is_the_run_on_permuted_columns(tmp_path: Path) -> None:
    """Each record has another's columns and its own keys; all else of the run is the same."""
    config, tables = federation("real", seed=3, method="top1sim")
    metrics = simulated(config, tables, tmp_path / "run", with_placebo=True).metrics
    partner = tables["partner"]
    order = stream(3, "placebo", "partner").permutation(partner.num_rows)
    assert (order != np.arange(partner.num_rows)).mean() > 0.9
    permuted = replace(partner, features=partner.features[order])
    by_hand = simulated(config, {**tables, "partner": permuted}, tmp_path / "by-hand").metrics

    assert metrics["placebos"]["permuted"] == by_hand["joint_test_metrics"]


def test_what_noise_costs_is_the_same_run_without_a_promise(tmp_path: Path) -> None:
    """Tables, links and base are the run's; nothing but the noise is gone, and a line says it."""
    config, tables = federation("real", seed=3, method="auto@2")
    assert config.encoder is not None
    config = replace(config, encoder=replace(config.encoder, labels="plaintext"))
    run = simulated(config, tables, tmp_path / "run", with_noise_cost=True)
    plain = replace(config.privacy, mechanism="none", epsilon=None)
    by_hand = simulated(replace(config, privacy=plain), tables, tmp_path / "by-hand").metrics
    figures = run.metrics["without_noise"]

    assert figures == by_hand["joint_test_metrics"]
    assert figures["rmse"] < run.metrics["joint_test_metrics"]["rmse"]
    assert noise_in_words(run.metrics).startswith("joint model, rmse of test rows: ")


def test_corrections_of_the_base_have_no_network_without_partners(tmp_path: Path) -> None:
    """Nothing is left of a correction without partners, and the base is held against it."""
    config, tables = federation("noise", seed=2, method="auto@8")
    metrics = simulated(config, tables, tmp_path / "run").metrics

    assert metrics["placebos"] == {}
    assert metrics["gain"]["placebo"] is None
    assert metrics["gain"]["partners"] == metrics["gain"]["value"]


def test_a_base_of_other_rows_is_not_taken(tmp_path: Path) -> None:
    """A base that was fitted to rows that are test rows now would know their labels."""
    config, tables = federation("noise", seed=4, method="top1sim")
    other = replace(config, federation=replace(config.federation, seed=9))
    fitted = simulated(other, tables, tmp_path / "other").base
    own = simulated(config, tables, tmp_path / "own")
    again = simulated(config, tables, tmp_path / "again", fitted_base=fitted)

    assert again.base is not None
    assert own.base is not None
    assert again.base.fitted_to == own.base.fitted_to
    assert torch.equal(again.base.margins, own.base.margins)
    assert again.metrics["test_metrics"] == own.metrics["test_metrics"]
