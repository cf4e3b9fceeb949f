"""FedSim and the baselines that link, as simulated runs on small tables."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from helpers.federations import write_federation

from securevfl.federation.config import read_federation_file
from securevfl.federation.linking.in_process import Linker
from securevfl.federation.linking.keys import keys_of
from securevfl.federation.simulation import SimulationResult, read_tables, simulate_federation
from securevfl.report.page import write_report

FEDSIM = {"family": "fedsim", "neighbours": 4, "kernel": 2, "hidden": 8, "layer_width": 16}
FET_ONLY = ("heads", "fourier_features", "fourier_width", "average_positions_every")


def write(folder: Path, model: dict[str, object], **sections: dict[str, object]) -> Path:
    """Write a federation file for another family than the helper's."""
    path = write_federation(folder, model=model, **sections)
    lines = path.read_text().splitlines()
    drop = FET_ONLY if "neighbours" in model else (*FET_ONLY, "neighbours")
    path.write_text("\n".join(line for line in lines if not line.startswith(drop)))
    return path


def run(path: Path, out: Path) -> SimulationResult:
    """Simulate a federation file."""
    config = read_federation_file(path)
    tables = read_tables(config, path.parent)
    return simulate_federation(config, tables, out, device=torch.device("cpu"))


@pytest.mark.parametrize("model", [FEDSIM, {**FEDSIM, "family": "featuresim"}], ids=str)
def test_similarities_reach_the_top_for_active_secondaries_alone(
    tmp_path: Path, model: dict[str, object]
) -> None:
    """With party dropout a batch has the similarities of the parties that answered."""
    if model["family"] == "featuresim":
        model = {key: value for key, value in model.items() if key != "kernel"}
    path = write(tmp_path, {**model, "party_dropout": 0.5}, training={"epochs": 3})
    result = run(path, tmp_path / "run")

    assert all(np.isfinite(result.losses))
    assert np.mean(result.losses[-6:]) < np.mean(result.losses[:6])


def test_exact_links_equal_keys_alone(tmp_path: Path) -> None:
    """Half the records share a key with the primary; no other row has a link."""
    path = write(tmp_path, {"family": "exact", "hidden": 8})
    keys = pd.read_csv(tmp_path / "agency.csv")[["lon", "lat"]]
    theirs = pd.read_csv(tmp_path / "bank-1.csv")
    theirs.loc[theirs.index[:100], ["lon", "lat"]] = keys.to_numpy()[:100]
    theirs.to_csv(tmp_path / "bank-1.csv", index=False)
    config = read_federation_file(path)
    tables = read_tables(config, path.parent)
    link = Linker(config, keys_of(config, tables["agency"]))
    linked = link(keys_of(config, tables["bank-1"])).source.link(np.arange(240))

    assert linked.indices[:100, 0].tolist() == list(range(100))
    assert (linked.indices[100:] == -1).all()
    assert np.isfinite(run(path, tmp_path / "run").metrics["test"])


def test_report_shows_what_fedsim_makes_of_its_links(tmp_path: Path) -> None:
    """Two more plots, drawn from the run folder alone."""
    result = run(write(tmp_path, FEDSIM, training={"epochs": 1}), tmp_path / "run")
    page = write_report(tmp_path / "run").read_text(encoding="utf-8")

    assert result.metrics["family"] == "fedsim"
    assert "similarity model: weight of a link" in page
    assert "merge gate: mean absolute integrated gradient" in page
