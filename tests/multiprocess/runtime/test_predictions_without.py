"""Predictions without a secondary, with every other party in its own process."""

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from securevfl import read_federation
from securevfl.core.progress import unheard
from securevfl.ledger.ledger_file import ledger_of_table
from securevfl.runtime.entry import simulate
from securevfl.runtime.launching import predict_in_processes
from securevfl.runtime.predictions import read_predictions
from securevfl.runtime.run_options import PredictionJob, RunOptions
from securevfl.runtime.trained_run import predict, trained_run
from securevfl.testing import write_federation

pytestmark = pytest.mark.multiprocess


def test_processes_without_a_secondary_predict_what_one_process_does(tmp_path: Path) -> None:
    path = write_federation(
        tmp_path,
        rows=60,
        secondaries=3,
        training={"epochs": 1, "batch_size": 32},
        model={"party_dropout": 0.34},
        base={"estimator": "none"},
    )
    run = tmp_path / "run"
    simulate(path, out=run)
    rows = tmp_path / "new.csv"
    pd.read_csv(tmp_path / "agency.csv").iloc[:20].drop(columns="y").to_csv(rows, index=False)
    config = read_federation(run / "federation.toml")
    alone = predict(
        run,
        rows,
        federation=config,
        out=tmp_path / "one.csv",
        data_root=tmp_path,
        without=["bank-2"],
    )
    # Gone with everything that it has.
    (tmp_path / "bank-2.csv").rename(tmp_path / "elsewhere.csv")
    named = trained_run(run).name_rows(rows)
    new = PredictionJob(named=named, out=tmp_path / "many.csv", without=("bank-2",))
    options = RunOptions(run_folder=run, data_root=tmp_path, observe=unheard)
    told = predict_in_processes(config, options, new)
    many = read_predictions(new.out, told, rows=named.names)

    assert alone.probabilities is not None
    assert many.probabilities is not None
    np.testing.assert_allclose(many.probabilities, alone.probabilities, atol=1e-3)
    assert many.without == alone.without == ("bank-2",)
    assert set(pd.read_csv(new.out)["without"]) == {"bank-2"}
    for name in ("agency", "bank-1", "bank-3"):
        lines = ledger_of_table(tmp_path / f"{name}.csv").read_text().splitlines()
        opened = [json.loads(line) for line in lines]
        assert sum(line["rows"] for line in opened if line["kind"] == "charge") == 20
    assert not (tmp_path / "bank-2.csv.ledger.jsonl").exists()
