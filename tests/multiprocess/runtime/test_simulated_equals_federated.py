"""The simulator and the processes run the same federation."""

import json
import tomllib
from pathlib import Path

import pytest
import torch
from helpers.fitted_once import FOLDER_VARIABLE

from research.scale.wire import Bytes, WiredRun
from securevfl import read_federation
from securevfl.core.progress import RoundDone
from securevfl.federation.checkpoint import read_state
from securevfl.federation.run_plan import plan_run, run_facts
from securevfl.runtime.launching import train_in_processes
from securevfl.runtime.run_options import RunOptions
from securevfl.testing import read_tables, run_in_process, save_federation, write_federation

pytestmark = pytest.mark.multiprocess

EPOCHS = 4  # of 6 rounds each: 168 training rows in batches of 32


def federated_losses(
    path: Path, out: Path, *, record_mib: float | None = None
) -> tuple[list[float], dict]:
    losses: list[float] = []

    def observe(event):
        if isinstance(event, RoundDone):
            losses.append(event.loss)

    options = RunOptions(
        run_folder=out, data_root=path.parent, observe=observe, record_mib=record_mib
    )
    figures = train_in_processes(read_federation(path), options)
    metrics = figures.as_json()
    return losses, metrics


def simulated(path: Path, out: Path, *, with_alone: bool = False, record_mib: float | None = None):
    return run_in_process(path, out, record_mib=record_mib, with_alone=with_alone)


def test_losses_are_equal_without_noise_and_not_with_it(tmp_path: Path) -> None:
    """24 rounds with dropout, party dropout, own and averaged encodings: equal; with noise: not."""
    model = {
        "party_dropout": 0.5,
        "average_positions_every": 2,
        "positions_start": "separate",
        "dropout": 0.2,
    }
    path = write_federation(tmp_path, model=model, training={"epochs": EPOCHS})
    losses, metrics = federated_losses(path, tmp_path / "federated", record_mib=16)
    alone = simulated(path, tmp_path / "simulated", record_mib=16)

    assert len(losses) == len(alone.losses) == 6 * EPOCHS
    # Sums are exact integers in both; what is left is the order of float32 additions in torch,
    # which may round one value to the neighbouring fixed-point step of 2^-16.
    assert losses == pytest.approx(alone.losses, abs=2**-14)
    assert metrics["test"] == pytest.approx(alone.metrics["test"], abs=0.03)
    _require_same_views(tmp_path)

    noisy = {"encoder": "trained", "noise_multiplier": 1.0, "delta": 1e-4}
    noisy_path = write_federation(
        tmp_path,
        model={**model, "average_positions_every": 0},
        training={"epochs": 2},
        privacy=noisy,
    )
    noised = simulated(noisy_path, tmp_path / "noised")
    assert noised.losses[:12] != pytest.approx(losses[:12], abs=2**-10)


def _require_same_views(folder: Path) -> None:
    """Every party's process has recorded what a simulation records for it, and no more."""
    for party in ("agency", "bank-1", "bank-2"):
        views = [
            read_state(folder / run / "parties" / party / "view.pt")
            for run in ("federated", "simulated")
        ]
        first, second = (
            [(one["kind"], one.get("rows", torch.empty(0)).tolist()) for one in view["lines"]]
            for view in views
        )
        # A process hears of the end too.
        assert first == second + [("DONE", [])] * (party != "agency")
        assert views[0]["held"].keys() == views[1]["held"].keys()
        name = "targets" if party == "agency" else "terms"
        torch.testing.assert_close(
            *(view["held"][name] for view in views), rtol=0, atol=0.05, equal_nan=True
        )


def test_fitted_encoders_are_the_same_between_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without noise, encoders fitted to each table and records that choose, over a base.

    Equal losses, and the same model answers.
    """
    path = write_federation(
        tmp_path,
        model={"release": "pooled", "top": "additive", "hidden": 4},
        base={"estimator": "boosting"},
        encoder={"method": "principal"},
        privacy={"mechanism": "none", "encoder": "frozen", "links_per_record": 1},
        linkage={"choose": "records"},
    )
    losses, metrics = federated_losses(path, tmp_path / "federated")
    monkeypatch.delenv(FOLDER_VARIABLE)  # the simulation fits the primary's own models itself
    alone = simulated(path, tmp_path / "simulated", with_alone=True)

    assert len(losses) == len(alone.losses) > 0
    assert losses == pytest.approx(alone.losses, abs=2**-14)
    assert metrics["base"] == pytest.approx(alone.metrics["base"])
    for name in ("test", "test_metrics", "validation_metrics", "alone"):
        assert metrics[name] == alone.metrics[name]
    assert set(metrics["test_metrics"]) >= {"accuracy", "macro_f1", "macro_auc"}


def test_fedsim_is_equal_too(tmp_path: Path) -> None:
    """Similarities arrive as the simulator makes them; they are all that differs from FeT."""
    model = {
        "family": "fedsim",
        "neighbours": 4,
        "kernel": 2,
        "hidden": 8,
        "layer_width": 16,
        "party_dropout": 0.5,
    }
    path = write_federation(tmp_path, training={"epochs": 2})
    source = tomllib.loads(path.read_text())
    path = save_federation(tmp_path, {**source, "model": model})
    losses, metrics = federated_losses(path, tmp_path / "federated")
    alone = simulated(path, tmp_path / "simulated")

    assert len(losses) == len(alone.losses) == 12
    assert losses == pytest.approx(alone.losses, abs=2**-14)
    assert metrics["test"] == pytest.approx(alone.metrics["test"], abs=0.03)


def test_noised_updates_between_processes(tmp_path: Path) -> None:
    """With noise too small to see: nearly equal losses, and the same figures to the last digit.

    Each of 12 rounds is charged with its update at every party, before it is made. The run leaves
    every file of a run folder.
    """
    path = write_federation(
        tmp_path,
        model={"release": "pooled", "dropout": 0.2, "average_positions_every": 1},
        training={"epochs": 2},
        privacy={
            "epsilon": 1e7,
            "delta": 1e-4,
            "encoder": "dp-trained",
            "links_per_record": 2,
        },
        # No heartbeat comes between the frames that are counted.
        runtime={"silence_timeout_s": 4000.0},
    )
    text = path.read_text().replace(
        'role = "secondary"', 'role = "secondary"\nscaling = "bounds"\nbounds = [-4.0, 4.0]'
    )
    path.write_text(text)
    out = tmp_path / "federated"
    losses, metrics = federated_losses(path, out)
    alone = simulated(path, tmp_path / "simulated")

    assert len(losses) == len(alone.losses) == 12
    # Over six runs the deviation of a loss was 2e-4 at most: 0.02 is a hundred of them.
    assert losses == pytest.approx(alone.losses, abs=0.02)
    assert {"metrics.json", "history.csv", "federation.toml", "parties"} <= {
        item.name for item in out.iterdir()
    }
    assert metrics["privacy"] == alone.metrics["privacy"]
    assert metrics["privacy"]["updates"] == 12
    for name in ("agency", "bank-1", "bank-2"):
        folder = out / "parties" / name
        lines = [json.loads(line) for line in (folder / "ledger.jsonl").read_text().splitlines()]
        charged = [line for line in lines if line["kind"] == "charge"]
        assert [line["purpose"] for line in charged].count("train") == 12
        assert charged[-1]["epsilon"] == metrics["privacy"]["epsilon"]
        assert charged[0]["epsilon"] < charged[-1]["epsilon"]
        assert (folder / "log.jsonl").read_text().count('"event": "done"') == 1
    _require_bytes_of_the_formula(path, out, metrics)


def _require_bytes_of_the_formula(path: Path, out: Path, metrics: dict) -> None:
    """Bytes by the formulas of research/scale/README.md are those counted, to the byte."""
    config = read_federation(path)
    _, facts = run_facts(config, read_tables(config, path.parent)["agency"])
    plan = plan_run(config, facts)
    weights = torch.load(out / "parties" / "bank-1" / "epoch-1.pt")["state"]["bottom"]
    where = "embedding.positions."
    run = WiredRun(
        facts=facts,
        primary="agency",
        secondaries=["bank-1", "bank-2"],
        keys=2,
        cut=plan.cut.shape,
        lanes=plan.cut.ring.lanes,
        batch_size=config.training.batch_size,
        positions={
            name.removeprefix(where): tuple(value.shape)
            for name, value in weights.items()
            if name.startswith(where)
        },
        average_every=1,
        best_epochs=[True, metrics["best_epoch"] == 2],
    )
    total = Bytes()
    for name in run.secondaries:
        total += run.total(name)
        assert Bytes(**metrics["bytes"][name]) == run.total(name)
    assert Bytes(**metrics["bytes"]["agency"]) == Bytes(sent=total.received, received=total.sent)
