"""Attacks on recorded runs find planted failures, and nothing where there is none."""

import json
import tomllib
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from helpers.altered_mechanisms import SameInEveryRound, scaled, without_noise, wrapped
from helpers.class_means import write_class_means
from helpers.federations import FROZEN, write_overlapping
from helpers.fixed_entropy import fixed_entropy
from torch import Tensor, nn
from typer.testing import CliRunner

import securevfl.linkage.sampling
from securevfl.core.errors import ConfigError
from securevfl.desk.report.page import write_report
from securevfl.federation import build as building
from securevfl.federation.build import build_secondary, optimizer_of
from securevfl.federation.checkpoint import read_state, write_state
from securevfl.federation.rounds.secondary import Secondary
from securevfl.lab.attacks.run_audit import all_attacks, attack_names, audit_run
from securevfl.lab.commands import app
from securevfl.testing import run_in_process, save_federation, write_federation

BOUNDED = '[[party]]\nscaling = "bounds"\nbounds = [-4, 4]'
NOISY = {**FROZEN, "epsilon": 8.0, "links_per_record": 1}


def recorded(folder: Path, *, bounded: bool = False, **sections: Any) -> Path:
    """Simulate and record a federation, without a local baseline; return the run folder."""
    folder.mkdir(exist_ok=True)
    path = write_federation(folder, **{"base": {"estimator": "none"}, **sections})
    if bounded:
        path.write_text(path.read_text().replace("[[party]]", BOUNDED))
    run_in_process(path, folder / "run", record_mib=64)
    return folder / "run"


def found(run: Path, *names: str, **options: Any) -> dict[str, dict[str, Any]]:
    """Attack a run; return the findings by attack, the first of each."""
    audit = audit_run(run, names, **options)
    assert audit.not_tried == {}
    return {one["attack"]: one for one in reversed(audit.findings)}


def altered(monkeypatch: pytest.MonkeyPatch, alter: Callable[[Any, Secondary], object]) -> None:
    """Let every secondary of simulations be altered as soon as it is built."""

    def build(plan: Any, *arguments: Any, **options: Any) -> Secondary:
        secondary = build_secondary(plan, *arguments, **options)
        alter(plan, secondary)
        return secondary

    monkeypatch.setattr(building, "build_secondary", build)


NOISE = ("membership", "noise-size", "noise-again")


def test_a_right_run_keeps_its_promises(tmp_path: Path) -> None:
    first = recorded(tmp_path / "first", bounded=True, privacy=NOISY)
    second = recorded(tmp_path / "second", bounded=True, privacy=NOISY)
    audit = audit_run(first, list(all_attacks()), beside=second)
    assert audit.violations == []
    assert {one["attack"] for one in audit.findings} >= {*NOISE, "row-numbers", "reconstruction"}
    noise = next(one for one in audit.findings if one["attack"] == "noise-size")
    assert noise["value"] == pytest.approx(1, abs=0.05)
    status = {one["channel"]: one["status"] for one in audit.channels}
    assert status["aggregates"] == "covered by a guarantee"
    assert status["gradients"] == "nothing is sent"
    assert status["linkage"] == "not covered, not measured"


def test_noise_that_is_off_behind_a_valid_ledger_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    altered(monkeypatch, lambda _plan, secondary: without_noise(secondary))
    run = recorded(tmp_path, bounded=True, privacy=NOISY)
    text = found(run, "noise-size")["noise-size"]["violates"]
    assert text.startswith("noise of ")
    assert "told apart" in found(run, "membership")["membership"]["violates"]
    result = CliRunner().invoke(app, ["audit", str(run), "--json"])
    assert result.exit_code == 4
    assert json.loads(result.stdout)["violations"]


def test_noise_of_half_the_deviation_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    altered(monkeypatch, lambda _plan, secondary: scaled(0.5)(secondary))
    run = recorded(tmp_path, bounded=True, privacy=NOISY)
    assert found(run, "noise-size")["noise-size"]["value"] == pytest.approx(0.25, abs=0.05)
    assert found(run, "noise-size")["noise-size"]["violates"]


def test_noise_that_comes_again_in_every_round_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    altered(monkeypatch, lambda _plan, secondary: wrapped(SameInEveryRound)(secondary))
    run = recorded(tmp_path, bounded=True, privacy=NOISY, rows=256)
    assert "several rounds" in found(run, "noise-again")["noise-again"]["violates"]


def test_a_public_seed_of_the_noise_is_found_by_another_run(tmp_path: Path) -> None:
    with fixed_entropy():
        first = recorded(tmp_path / "first", bounded=True, privacy=NOISY)
    with fixed_entropy():
        second = recorded(tmp_path / "second", bounded=True, privacy=NOISY)
    assert found(first, "noise-again")["noise-again"]["violates"] is None
    beside = found(first, "noise-again", beside=second)["noise-again"]
    assert beside["violates"] == "the same noise in several two runs"


SAMPLED = {
    "epsilon": 8.0,
    "delta": 1e-5,
    "unit": "secondary-record",
    "links_per_record": 1,
    "encoder": "dp-trained",
    "sampling_rate": 0.3,
}


@pytest.mark.parametrize("again", [False, True])
def test_a_secret_sample_that_is_used_again_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, again: bool
) -> None:
    if again:
        system = types.SimpleNamespace(**vars(securevfl.linkage.sampling.os))
        system.urandom = lambda size: b"7" * size
        monkeypatch.setattr(securevfl.linkage.sampling, "os", system)
    run = recorded(tmp_path, bounded=True, privacy=SAMPLED)
    one = found(run, "sample-again")["sample-again"]
    assert (one["violates"] is not None) is again
    assert again or one["value"] < 0.45


class Remembers(nn.Module):
    """A bottom model that learns a vector for each record, which it knows by its columns."""

    recordwise = False

    def __init__(self, features: Tensor, width: int) -> None:
        super().__init__()
        self.register_buffer("features", features)
        self.memory = nn.Parameter(torch.zeros(len(features), width))

    def forward(self, features: Tensor, keys: Tensor, present: Tensor) -> Tensor:
        del keys, present
        return self.memory[torch.cdist(features, self.features).argmin(dim=-1)]


def test_an_encoder_that_remembers_records_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def remember(plan: Any, secondary: Secondary) -> None:
        secondary.bottom = Remembers(secondary.data.features, plan.cut.shape[1])
        secondary.optimizer = optimizer_of(plan.config, secondary.bottom)

    training = {"epochs": 10, "learning_rate": 0.1, "patience": 10, "batch_size": 64}
    sections = {"rows": 300, "training": training, "model": {"neighbours": 1}}
    plain = found(recorded(tmp_path / "plain", **sections), "model-completion")
    altered(monkeypatch, remember)
    memory = found(recorded(tmp_path / "memory", **sections), "model-completion")
    assert memory["encoder-memory"]["beats_floor"]
    assert memory["encoder-memory"]["value"] > plain["encoder-memory"]["value"] + 0.1


def test_a_split_by_label_and_a_table_in_order_of_labels_are_found(tmp_path: Path) -> None:
    run = recorded(tmp_path)
    assert not found(run, "row-numbers")["row-numbers"]["beats_floor"]
    path = run / "parties" / "agency" / "view.pt"
    view = read_state(path)
    labels = view["held"]["targets"]
    for name, label in {"train": 0, "validation": 1, "test": 2}.items():
        view["held"][name] = (labels == label).nonzero().flatten()
    write_state(path, view)
    by_label = found(run, "row-numbers")["row-numbers"]
    assert by_label["beats_floor"]
    assert by_label["value"] > 0.99


def test_gradients_give_labels_away_and_random_ones_do_not(tmp_path: Path) -> None:
    run = recorded(tmp_path)
    told = found(run, "gradient-direction", "gradient-clusters")
    assert told["gradient-direction"]["value"] > 0.8
    assert all(one["beats_floor"] for one in told.values())
    for name in ("bank-1", "bank-2"):
        path = run / "parties" / name / "view.pt"
        view = read_state(path)
        for line in view["lines"]:
            if line["kind"] == "GRADIENT":
                line["gradient"] = torch.randn(line["gradient"].shape)
        write_state(path, view)
    assert not any(
        one["beats_floor"] for one in found(run, "gradient-direction", "gradient-clusters").values()
    )


def test_lengths_of_gradients_tell_a_rare_class(tmp_path: Path) -> None:
    path = write_federation(tmp_path, federation={"task": "binary"})
    frame = pd.read_csv(tmp_path / "agency.csv")
    frame["y"] = (frame["y"] == 2).astype(int)
    frame.to_csv(tmp_path / "agency.csv", index=False)
    run_in_process(path, tmp_path / "run", record_mib=64)
    one = found(tmp_path / "run", "gradient-norm")["gradient-norm"]
    assert one["measure"] == "AUC"
    assert one["value"] > 0.8
    assert one["beats_floor"]


def test_columns_are_reconstructed_as_far_as_noise_allows(tmp_path: Path) -> None:
    clear = {"mechanism": "none", "encoder": "frozen"}
    one_link = {"model": {"neighbours": 1}, "secondaries": 1}
    both = found(
        recorded(tmp_path / "clear", bounded=True, privacy=clear, rows=400, **one_link),
        "reconstruction",
        "column-means",
    )
    without, means = both["reconstruction"], both["column-means"]
    assert means["beats_floor"]
    assert means["value"] > 0.3
    noisy = found(
        recorded(
            tmp_path / "noisy",
            bounded=True,
            privacy={**NOISY, "epsilon": 1.0},
            rows=400,
            **one_link,
        ),
        "reconstruction",
    )["reconstruction"]
    assert (without["beats_floor"], noisy["beats_floor"]) == (True, False), without["value"]
    assert without["ceiling"] is None
    assert noisy["value"] < without["value"] / 2
    assert noisy["ceiling"] > noisy["value"] + 0.1


def test_similarities_say_how_far_records_are_and_where(tmp_path: Path) -> None:
    value = {}
    for noise in (0.0, 3.0):
        run = recorded(
            tmp_path / str(noise),
            rows=300,
            model={"family": "fedsim", "neighbours": 4, "hidden": 4},
            linkage={"similarity_noise": noise},
            training={"epochs": 1},
        )
        names = ("similarity-greedy", "similarity-places")
        value[noise] = {name: one["value"] for name, one in found(run, *names, seeds=1).items()}
    # The most likely distance of one similarity explains 1 / (1 + sigma^2) of the variance.
    assert value[0.0]["similarity-greedy"] > 0.99
    assert value[3.0]["similarity-greedy"] == pytest.approx(0.1, abs=0.06)
    assert value[0.0]["similarity-places"] > 0.3 > value[3.0]["similarity-places"]


def test_rows_without_a_link_are_told_by_their_averages(tmp_path: Path) -> None:
    run = recorded(tmp_path, linkage={"max_distance": 0.02}, model={"neighbours": 1})
    one = found(run, "linked-or-not")["linked-or-not"]
    assert one["beats_floor"]


def by_ids(folder: Path, protection: str, *, ids: Callable[[Any], Any]) -> Path:
    """Simulate and record a federation that links ids, some of which all parties have."""
    folder.mkdir()
    path = write_overlapping(folder, linkage={"metric": "exact", "protection": protection})
    source = tomllib.loads(path.read_text())
    del source["pretraining"], source["training"]["labelled_rows"]
    source["model"], source["training"]["epochs"] = {"family": "top1sim"}, 1
    if protection == "hashes":
        source["party"].append({"name": "helper", "role": "coordinator"})
    for table in folder.glob("*.csv"):
        frame = pd.read_csv(table)
        frame["id"] = ids(frame["id"])
        frame.to_csv(table, index=False)
    run_in_process(save_federation(folder, source), folder / "run", record_mib=64)
    return folder / "run"


def test_guessed_ids_and_frequent_codes_are_found_behind_protections(tmp_path: Path) -> None:
    guessed = found(by_ids(tmp_path / "psi", "psi", ids=lambda one: 2 * one), "guessed-ids")
    one = guessed["guessed-ids"]
    # Ids lie in nearly one range, and a secondary may list all of it.
    assert one["value"] > 0.9 > one["floor"]
    # Frequencies that all tables share: each code comes as often as its key.
    alike = lambda one: np.log2(np.arange(len(one)) + 1).astype(int)  # noqa: E731
    named = by_ids(tmp_path / "hashes", "hashes", ids=alike)
    one = found(named, "code-frequencies")["code-frequencies"]
    assert one["attacker"] == "helper"
    assert one["value"] == 1.0
    assert one["floor"] < 0.6


def coordinated(folder: Path, *helpers: str, **linkage: Any) -> Path:
    """Simulate and record a federation that links numbers through helpers; return its folder."""
    source = tomllib.loads(
        write_federation(folder, training={"epochs": 1}, base={"estimator": "none"}).read_text()
    )
    source["linkage"] = {"ranges": [[-1, 11], [-1, 11]], **linkage}
    source["party"] += [{"name": one, "role": one} for one in helpers]
    run_in_process(save_federation(folder, source), folder / "run", record_mib=64)
    return folder / "run"


def test_codes_of_numbers_are_read_by_whoever_knows_some(tmp_path: Path) -> None:
    run = coordinated(tmp_path, "coordinator", protection="bloom")
    one = found(run, "code-places")["code-places"]
    assert (one["attacker"], one["beats_floor"]) == ("coordinator", True)
    assert one["value"] > 0.5


@pytest.mark.parametrize("cell", [{}, {"cell": 0.5}])
def test_a_coordinator_places_all_keys_from_a_few(tmp_path: Path, cell: dict[str, float]) -> None:
    """With cells most pairs are never compared, yet places spread from block to block."""
    run = coordinated(tmp_path, "coordinator", "dealer", protection="shares", **cell)
    assert not (run / "parties" / "dealer" / "view.pt").exists()
    audit = audit_run(run, ["trilateration", "code-places"])
    assert audit.not_tried == {"code-places": "no coordinator is sent codes of numbers"}
    (linkage,) = [one for one in audit.channels if one["channel"] == "linkage"]
    assert linkage["status"] == "not covered, measured"
    assert {one["about"] for one in audit.findings} == {"agency", "bank-1", "bank-2"}
    for one in audit.findings:
        assert (one["attacker"], one["beats_floor"]) == ("coordinator", True)
        assert one["floor"] < 0.05 < 0.9 < one["value"]


def test_an_audit_is_told_and_in_the_report(tmp_path: Path) -> None:
    run = recorded(tmp_path)
    tried: list[str] = []
    audit_run(run, ["gradient-direction", "row-numbers"], tell=tried.append)
    assert tried == ["1/2 gradient-direction", "2/2 row-numbers"]
    page = write_report(run).read_text(encoding="utf-8")
    assert "<td>not covered, measured</td>" in page
    assert "Measured: labels, gradient-direction: accuracy " in page
    assert "Attacked: 1 of 2 attacks clearly beat their trivial guess" in page
    assert "Clearly above the trivial guess: labels: gradient-direction" in page
    assert (run / "audit.json").stat().st_mode & 0o777 == 0o600


def test_what_cannot_be_tried_says_why(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="did you mean 'gradient-norm'"):
        attack_names("gradient-nrm")
    run = recorded(tmp_path)
    for name in ("bank-1", "bank-2"):
        (run / "parties" / name / "view.pt").unlink()
    audit = audit_run(run, list(all_attacks()))
    assert audit.not_tried["gradient-direction"] == "needs the view of a secondary"
    assert "needs the views of all parties" in audit.not_tried["membership"]
    (run / "parties" / "agency" / "view.pt").unlink()
    with pytest.raises(ConfigError, match="--record-views"):
        audit_run(run, attack_names(None))
    assert np.isfinite(audit.seconds)


def test_class_means_are_read_as_labels(tmp_path: Path) -> None:
    run_in_process(
        write_class_means(tmp_path, labels="plaintext", dealer=False),
        tmp_path / "run",
        record_mib=64,
    )
    audit = audit_run(tmp_path / "run", ["class-sums"])
    assert {one["attacker"] for one in audit.findings} == {"bank-1", "bank-2"}
    assert all(0.2 < one["value"] < 1 for one in audit.findings)
