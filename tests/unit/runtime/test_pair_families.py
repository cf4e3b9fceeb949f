"""FedSim and the baselines that link, as simulated runs on small tables."""

import tomllib
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from helpers.federations import FROZEN

from securevfl import RunResult, read_federation
from securevfl.config.federation import link_spec
from securevfl.core.errors import PrivacyError
from securevfl.federation.build import primary_data
from securevfl.federation.run_plan import run_facts
from securevfl.lab.pooled_methods import method_inputs
from securevfl.linkage.stage.linking import Linker
from securevfl.linkage.stage.party_keys import keys_of
from securevfl.testing import read_tables, run_in_process, save_federation, write_federation

FEDSIM = {"family": "fedsim", "neighbours": 4, "kernel": 2, "hidden": 8, "layer_width": 16}


def write(folder: Path, model: dict[str, object], **sections: dict[str, object]) -> Path:
    """Write a federation file for another family than the helper's."""
    source = tomllib.loads(write_federation(folder, **sections).read_text())
    return save_federation(folder, {**source, "model": model})


def run(path: Path, out: Path) -> RunResult:
    """Simulate a federation file."""
    return run_in_process(path, out)


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
    path = write(tmp_path, {"family": "exact", "hidden": 8}, linkage={"least_linked": 0.0})
    keys = pd.read_csv(tmp_path / "agency.csv")[["lon", "lat"]]
    theirs = pd.read_csv(tmp_path / "bank-1.csv")
    theirs.loc[theirs.index[:100], ["lon", "lat"]] = keys.to_numpy()[:100]
    theirs.to_csv(tmp_path / "bank-1.csv", index=False)
    config = read_federation(path)
    tables = read_tables(config, path.parent)
    spec = link_spec(config)
    link = Linker(spec, keys_of(spec.keys, tables["agency"]))
    linked = link(keys_of(spec.keys, tables["bank-1"])).source.link(np.arange(240))

    assert linked.indices[:100, 0].tolist() == list(range(100))
    assert (linked.indices[100:] == -1).all()
    assert np.isfinite(run(path, tmp_path / "run").metrics["test"])


@pytest.mark.parametrize("encoder", ["frozen", "trained", "dp-trained"])
@pytest.mark.parametrize("family", ["fedsim", "featuresim"])
def test_similarities_are_refused_beside_an_epsilon(
    tmp_path: Path, family: str, encoder: str
) -> None:
    """A row without a record has none, whatever the noise; without a promise noise is allowed."""
    model = {"family": family, "neighbours": 4, "hidden": 8, "layer_width": 16}
    privacy = {**FROZEN, "encoder": encoder}
    source = tomllib.loads(write(tmp_path, model, privacy=privacy).read_text())
    source["linkage"]["similarity_noise"] = 100.0
    for party in source["party"][1:]:
        party |= {"scaling": "bounds", "bounds": [-4.0, 4.0]}
    refused = rf"model\.family: '{family}' sends .*record.*avgsim.*similarity_noise"
    with pytest.raises(PrivacyError, match=refused) as error:
        run(save_federation(tmp_path, source), tmp_path / "run")
    assert error.value.exit_code == 4
    assert not (tmp_path / "run").exists()
    source["privacy"] = {"mechanism": "none", "encoder": "trained"}
    source["training"]["epochs"] = 1
    assert np.isfinite(run(save_federation(tmp_path, source), tmp_path / "run").metrics["test"])


def test_secondaries_of_equal_keys_find_one_list_of_links(tmp_path: Path) -> None:
    """Slot k is one record everywhere: the paper's join of secondaries, without a join."""
    path = write(tmp_path, FEDSIM)
    first = pd.read_csv(tmp_path / "bank-1.csv")
    first.sample(frac=1, random_state=1).to_csv(tmp_path / "bank-2.csv", index=False)
    config = read_federation(path)
    tables = read_tables(config, path.parent)
    spec = link_spec(config)
    link = Linker(spec, keys_of(spec.keys, tables["agency"]))
    found = []
    for name in ("bank-1", "bank-2"):
        links = link(keys_of(spec.keys, tables[name])).source.link(np.arange(240))
        found.append(tables[name].features[links.indices])

    np.testing.assert_array_equal(*found)


@pytest.mark.parametrize("keys_as_features", [False, True])
def test_combine_reads_the_keys_whoever_else_does(tmp_path: Path, keys_as_features: bool) -> None:
    """The ceiling has all columns: 3 features of each of two parties, and the 2 key columns."""
    model = {**FEDSIM, "keys_as_features": keys_as_features}
    path = write(tmp_path, model, linkage={"protection": "none", "truth": "entity"})
    for name in ("agency", "bank-1", "bank-2"):
        table = pd.read_csv(tmp_path / f"{name}.csv")
        table.assign(entity=range(len(table))).to_csv(tmp_path / f"{name}.csv", index=False)
    config = read_federation(path)
    tables = read_tables(config, path.parent)
    spec = link_spec(config)
    primary = tables["agency"]
    split, _ = run_facts(config, primary)
    link = Linker(spec, keys_of(spec.keys, primary))
    data = primary_data(config, primary, split, link.primary, device=torch.device("cpu"))
    inputs = method_inputs(config, tables, "combine", data, link)
    assert inputs.shape[1] == 3 * 3 + 2
