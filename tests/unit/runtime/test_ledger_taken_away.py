"""A ledger under a run and under a server: taken away, or wanted by two at a time."""

import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from helpers.command_line import securevfl
from helpers.federations import FROZEN

import securevfl as sv
from securevfl.core.errors import ConfigError, PrivacyError
from securevfl.core.progress import EpochDone, RowsReleased, unheard
from securevfl.runtime.trained_run import trained_run
from securevfl.serving.server import OpenedModel, open_model
from securevfl.testing import run_in_process, save_federation, write_federation

SECONDARY = Path("parties", "bank-1", "ledger.jsonl")


def frozen_run(folder: Path, observe: Callable[[Any], None] = unheard) -> sv.RunResult:
    """Simulate a frozen run of a few rounds of release, under a promise."""
    path = write_federation(
        folder,
        rows=90,
        privacy=FROZEN,
        training={"epochs": 2, "batch_size": 16},
        prediction={"epsilon": 500.0},
    )
    source = tomllib.loads(path.read_text())
    for party in source["party"][1:]:
        party |= {"scaling": "bounds", "bounds": [-4.0, 4.0]}
    return run_in_process(save_federation(folder, source), folder / "run", observe=observe)


def test_nothing_is_released_after_a_ledger_has_gone(tmp_path: Path) -> None:
    ledger, heard = tmp_path / "run" / SECONDARY, []

    def observe(event: Any) -> None:
        if isinstance(event, RowsReleased):
            heard.append(event.done)
            if event.done == 2:
                ledger.unlink()

    with pytest.raises(PrivacyError, match=r"was moved or removed while this run was using it"):
        frozen_run(tmp_path, observe)
    assert heard == [1, 2]
    assert not ledger.exists()


def test_a_run_whose_ledger_goes_after_its_last_charge_does_not_end_well(tmp_path: Path) -> None:
    """Its model is kept, but nobody may believe that what it spent is known."""
    ledger = tmp_path / "run" / SECONDARY

    def observe(event: Any) -> None:
        if isinstance(event, EpochDone) and event.epoch == 2:
            ledger.rename(ledger.with_suffix(".old"))

    with pytest.raises(PrivacyError, match="was moved or removed"):
        frozen_run(tmp_path, observe)


def test_of_two_servers_one_starts(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """So with predictions beside a server: one line, and nothing is charged."""
    run = frozen_run(tmp_path)
    rows = pd.read_csv(tmp_path / "agency.csv").iloc[:3].drop(columns="y")
    rows.to_csv(tmp_path / "rows.csv", index=False)

    def serve() -> Any:
        return open_model(trained_run(tmp_path / "run", data_root=tmp_path), observe=unheard)

    def asked(model: OpenedModel) -> int:
        with model.model.open() as session:
            named = model.model.rows(rows)
            session.ask(named, observe=unheard)
            return session.budgets()[0].rows

    with serve() as first:
        before = (tmp_path / "run" / SECONDARY).read_bytes()
        with pytest.raises(ConfigError, match="is in use by another run"), serve():
            pass
        with pytest.raises(ConfigError, match="is in use by another run"):
            run.predict(rows)
        for command in ("predict", "serve"):
            more = ("--rows", tmp_path / "rows.csv") if command == "predict" else ()
            refused = securevfl(capfd, command, tmp_path / "run", *more, "--data-root", tmp_path)
            assert refused.code == 2
            assert "is in use by another run" in refused.complaint
        assert (tmp_path / "run" / SECONDARY).read_bytes() == before
        assert asked(first) == 3
        assert asked(first) == 6
    with serve() as second:
        assert asked(second) == 9
    assert sv.predict(tmp_path / "run", rows, data_root=tmp_path).values is not None
