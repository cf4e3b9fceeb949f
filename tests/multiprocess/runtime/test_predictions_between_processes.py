"""Predictions with every party in its own process: the same numbers, and every owner's limit."""

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from securevfl import Predictions, read_federation
from securevfl.config.federation import FederationConfig
from securevfl.core.errors import PrivacyError
from securevfl.core.progress import unheard
from securevfl.ledger.book import Limit
from securevfl.ledger.ledger_file import ledger_of_table, set_limit
from securevfl.runtime.entry import simulate
from securevfl.runtime.launching import predict_in_processes
from securevfl.runtime.predictions import read_predictions
from securevfl.runtime.run_options import PredictionJob, RunOptions
from securevfl.runtime.trained_run import predict, trained_run
from securevfl.testing import write_federation

PARTIES = ("agency", "bank-1", "bank-2")
SMALL = {"rows": 60, "training": {"epochs": 1, "batch_size": 32}}

pytestmark = pytest.mark.multiprocess


def trained(path: Path) -> tuple[FederationConfig, Path, Path]:
    """Return the federation, its run folder, and a file of fifty new rows without labels."""
    folder = path.parent
    run = folder / "run"
    simulate(path, out=run)
    rows = folder / "new.csv"
    pd.read_csv(folder / "agency.csv").iloc[:50].drop(columns="y").to_csv(rows, index=False)
    return read_federation(run / "federation.toml"), run, rows


def in_processes(config: FederationConfig, run: Path, rows: Path) -> Predictions:
    named = trained_run(run, federation=config).name_rows(rows)
    new = PredictionJob(named=named, out=run.parent / "many.csv")
    options = RunOptions(run_folder=run, data_root=run.parent, observe=unheard)
    told = predict_in_processes(config, options, new)
    return read_predictions(new.out, told, rows=named.names)


def test_processes_predict_what_one_process_does(tmp_path: Path) -> None:
    config, run, rows = trained(write_federation(tmp_path, **SMALL))
    alone = predict(run, rows, federation=config, out=tmp_path / "one.csv", data_root=tmp_path)
    many = in_processes(config, run, rows)
    assert alone.probabilities is not None
    assert many.probabilities is not None
    # As close as the ring's steps let sums of float32 be.
    np.testing.assert_allclose(many.probabilities, alone.probabilities, atol=1e-3)
    for name in PARTIES:
        # Real parties' ledgers lie with their tables, and not in a run folder.
        ledger = ledger_of_table(tmp_path / f"{name}.csv")
        lines = [json.loads(line) for line in ledger.read_text().splitlines()]
        assert sum(line["rows"] for line in lines if line["kind"] == "charge") == 50


def test_a_secondary_whose_owner_allows_no_more_refuses_before_anything_is_sent(
    tmp_path: Path,
) -> None:
    path = write_federation(
        tmp_path,
        model={"release": "pooled", "top": "additive", "hidden": 6},
        privacy={"epsilon": 8.0, "delta": 1e-5, "encoder": "frozen", "links_per_record": 1},
        linkage={"choose": "records"},
        **SMALL,
    )
    text = path.read_text(encoding="utf-8")
    bounds = 'role = "secondary"\nscaling = "bounds"\nbounds = [-5, 5]'
    path.write_text(text.replace('role = "secondary"', bounds), encoding="utf-8")
    config, run, rows = trained(path)
    limited = ledger_of_table(tmp_path / "bank-2.csv")
    set_limit(limited, Limit(unit="secondary-record", epsilon=0.5, delta=1e-5))
    with pytest.raises(PrivacyError, match=r"bank-2: the request.* over the limit of its owner"):
        in_processes(config, run, rows)
    for name in PARTIES:
        ledger = ledger_of_table(tmp_path / f"{name}.csv")
        # A party that was stopped before it had opened its ledger has none.
        assert not ledger.exists() or '"charge"' not in ledger.read_text()
    assert not (tmp_path / "many.csv").exists()


def test_a_record_is_released_once_however_often_it_is_asked_for(tmp_path: Path) -> None:
    """Over requests and processes: then its rows have noise alone, which is tiny here.

    Noise of a thousandth of the change on outputs of order 1: that two answers behind noise alone
    are further apart than 0.02 takes more than ten deviations, 1e-23.
    """
    path = write_federation(
        tmp_path,
        model={"release": "pooled", "top": "additive", "hidden": 6},
        privacy={
            "noise_multiplier": 1e-3,
            "delta": 1e-5,
            "encoder": "frozen",
            "links_per_record": 1,
        },
        linkage={"choose": "records", "max_distance": 0.5},
        **SMALL,
    )
    text = path.read_text(encoding="utf-8")
    bounds = 'role = "secondary"\nscaling = "bounds"\nbounds = [-5, 5]'
    path.write_text(text.replace('role = "secondary"', bounds), encoding="utf-8")
    config, run, rows = trained(path)
    whole = pd.read_csv(rows)
    asked = {"first": whole[:25], "other": whole[25:], "again": whole[:25], "all": whole}
    found, spent = {}, []
    for name, some in asked.items():
        some.to_csv(rows, index=False)
        answer = in_processes(config, run, rows)
        found[name], _ = answer.probabilities, spent.append(answer.epsilon)
    once = np.concatenate([found["first"], found["other"]])
    moved = np.abs(once - found["all"]).max(axis=1)
    assert (moved > 0.02).mean() > 0.5
    assert np.abs(found["again"] - found["all"][:25]).max() < 0.02
    assert len(set(spent)) == 1
    for name in PARTIES[1:]:
        lines = [
            json.loads(line)
            for line in (run / "parties" / name / "records-ledger.jsonl").read_text().splitlines()
        ]
        released = [one["records"] for one in lines if one["kind"] == "released"]
        assert [len(one) > 0 for one in released] == [True, True, False, False, False]
        together = [record for some in released for record in some]
        assert len(together) == len(set(together))
