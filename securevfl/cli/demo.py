"""What the command ``demo`` does: the main job on real digits, and the figures beside it."""

import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from securevfl.cli.results import print_results
from securevfl.cli.run import run_folder_for, train_and_report
from securevfl.config.federation import FederationConfig
from securevfl.config.link_spec import link_spec
from securevfl.config.reading import parse_federation
from securevfl.core import files
from securevfl.data.tables import PartyTable
from securevfl.federation.build import primary_data
from securevfl.federation.own_numbers import features_of
from securevfl.federation.run_plan import run_facts
from securevfl.lab.digits import demo_federation, digits_tables, write_tables
from securevfl.linkage.stage.linking import Linker
from securevfl.linkage.stage.party_keys import keys_of
from securevfl.models.baselines.fit import BaselineResult
from securevfl.runtime.baselines import train_combined
from securevfl.runtime.simulation import simulate_federation


def run_demo(*, out: Path | None, seed: int, as_json: bool) -> dict[str, Any]:
    """Train between processes on digits, and print the accuracy beside the baselines."""
    source = demo_federation(seed=seed)
    config = parse_federation(source, file="demo")
    folder = run_folder_for(config, out)
    files.require_writable_folder(folder)
    tables = digits_tables(seed=seed)
    write_tables(tables, folder / "tables")

    def beside() -> dict[str, Any]:
        print("without noise (simulated), for comparison", file=sys.stderr)
        no_privacy = _without_noise(source, tables)
        print("combine: all features in one place", file=sys.stderr)
        combine = combined(config, tables)
        return {
            "no_privacy_test": no_privacy["test"],
            "no_privacy_test_metrics": no_privacy["test_metrics"],
            "combine_test": combine.test,
            "combine_test_metrics": combine.test_metrics,
        }

    metrics = train_and_report(
        config, folder, data_root=folder, resume=False, device="cpu", beside=beside
    )
    print_results(metrics, folder, as_json=as_json)
    return metrics


def _without_noise(source: dict[str, Any], tables: list[PartyTable]) -> dict[str, Any]:
    privacy = {"mechanism": "none", "encoder": source["privacy"]["encoder"]}
    for name in ("links_per_record", "clip_norm"):
        if name in source["privacy"]:
            privacy[name] = source["privacy"][name]
    config = parse_federation({**source, "privacy": privacy}, file="demo without noise")
    with tempfile.TemporaryDirectory(prefix="securevfl-") as folder:
        return simulate_federation(
            config,
            {table.name: table for table in tables},
            Path(folder),
            device=torch.device("cpu"),
            with_alone=False,
        ).metrics


def combined(config: FederationConfig, tables: list[PartyTable]) -> BaselineResult:
    """Train one network on all features, joined by the true matches."""
    primary, secondaries = tables[0], tables[1:]
    split, _ = run_facts(config, primary)
    spec = link_spec(config)
    linked = Linker(spec, keys_of(spec.keys, primary)).primary
    data = primary_data(config, primary, split, linked, device=torch.device("cpu"))
    return train_combined(
        config,
        data,
        primary=primary,
        secondaries=secondaries,
        features=[
            torch.from_numpy(features_of(party, table))
            for party, table in zip(config.secondaries, secondaries, strict=True)
        ],
    )
