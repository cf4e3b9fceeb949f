"""Views that parties record: what is in them, for whom, and that nothing else changes."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.federations import FROZEN

from securevfl import RunResult, read_federation
from securevfl.core.errors import ConfigError
from securevfl.core.progress import Warned
from securevfl.federation.checkpoint import read_state, write_state
from securevfl.runtime.run_options import RunOptions
from securevfl.runtime.simulation import simulate_federation
from securevfl.testing import read_tables, run_in_process, write_federation


def simulated(folder: Path, *, mib: float | None, said: list[Any], **sections: Any) -> RunResult:
    return run_in_process(
        write_federation(folder, **sections), folder / "run", record_mib=mib, observe=said.append
    )


def view(folder: Path, party: str) -> dict[str, Any]:
    return read_state(folder / "run" / "parties" / party / "view.pt")


def test_every_party_records_what_it_receives_and_no_more(tmp_path: Path) -> None:
    said: list[Any] = []
    simulated(tmp_path, mib=16, said=said)
    primary, secondary = view(tmp_path, "agency"), view(tmp_path, "bank-1")
    assert {line["kind"] for line in primary["lines"]} == {"AVERAGE"}
    trained = [line for line in primary["lines"] if line["purpose"] == "train"]
    kinds = Counter(line["kind"] for line in secondary["lines"])
    assert kinds["PLAN"] == len(primary["lines"])
    assert kinds["GRADIENT"] == len(trained) == 12
    gradients = [line["gradient"] for line in secondary["lines"] if line["kind"] == "GRADIENT"]
    assert gradients[0].shape == trained[0]["average"].shape
    assert {"targets", "train", "test"} <= primary["held"].keys()
    # No label, and nothing of another secondary's.
    assert secondary["held"].keys() == {"features", "keys", "links", "own_keys", "terms"}
    path = tmp_path / "run" / "parties" / "bank-1" / "view.pt"
    assert path.stat().st_mode & 0o777 == 0o600
    warned = [one.text for one in said if isinstance(one, Warned)]
    assert sum("remove the file after the audit" in text for text in warned) == 3


def test_without_noise_terms_average_to_what_the_primary_received(tmp_path: Path) -> None:
    simulated(tmp_path, mib=16, said=[])
    (last,) = [one for one in view(tmp_path, "agency")["lines"] if one["purpose"] == "test"][-1:]
    terms = [view(tmp_path, name)["held"]["terms"][last["rows"]] for name in ("bank-1", "bank-2")]
    # Encoded as whole numbers: equal but for rounding.
    torch.testing.assert_close(last["average"], sum(terms) / 2, rtol=0, atol=1e-3)


def test_recording_changes_no_loss_and_is_off_unless_asked_for(tmp_path: Path) -> None:
    off, on = tmp_path / "off", tmp_path / "on"
    off.mkdir()
    on.mkdir()
    without, recorded = simulated(off, mib=None, said=[]), simulated(on, mib=16, said=[])
    assert without.losses == recorded.losses
    assert list(off.rglob("view.pt")) == []


def test_a_full_record_takes_no_more_and_says_so(tmp_path: Path) -> None:
    said: list[Any] = []
    simulated(tmp_path, mib=0.02, said=said)
    record = tmp_path / "run" / "parties" / "agency" / "view.pt"
    assert view(tmp_path, "agency")["left_out"] > 0
    assert record.stat().st_size < 4 * 0.02 * 2**20
    assert any("takes no more" in one.text for one in said if isinstance(one, Warned))
    with pytest.raises(ConfigError, match="record_views"):
        RunOptions(run_folder=tmp_path, record_mib=0)


def test_a_resumed_run_goes_on_in_its_record_and_in_no_other(tmp_path: Path) -> None:
    first = simulated(tmp_path, mib=16, said=[], training={"epochs": 1, "patience": 5})
    assert first.metrics["epochs"] == 1
    before = len(view(tmp_path, "agency")["lines"])
    config = read_federation(write_federation(tmp_path, training={"epochs": 1, "patience": 5}))
    options = RunOptions(run_folder=tmp_path / "run", record_mib=16, resume=True)
    tables = read_tables(config, tmp_path)
    simulate_federation(config, tables, options, with_alone=False)
    assert len(view(tmp_path, "agency")["lines"]) > before
    path = tmp_path / "run" / "parties" / "agency" / "view.pt"
    write_state(path, {**read_state(path), "run": "another"})
    with pytest.raises(ConfigError, match="of another run"):
        simulate_federation(config, tables, options, with_alone=False)


def test_a_frozen_run_records_one_average_a_row(tmp_path: Path) -> None:
    path = write_federation(tmp_path, privacy=FROZEN, training={"epochs": 2})
    text = path.read_text().replace("[[party]]", '[[party]]\nscaling = "bounds"\nbounds = [-4, 4]')
    path.write_text(text)
    run_in_process(path, tmp_path / "run", record_mib=16)
    rows = torch.cat([one["rows"] for one in view(tmp_path, "agency")["lines"]])
    assert rows.tolist() == list(range(240))
    assert view(tmp_path, "bank-1")["held"]["terms"].shape[0] == 240
