"""Contribution of every family, held to values that are worked out from the models' parts."""

import itertools
import math
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

import securevfl as sv
from securevfl.config.federation import FederationConfig
from securevfl.core.errors import ConfigError
from securevfl.data.tables import PartyTable
from securevfl.federation.build import build_bottom, build_top
from securevfl.federation.run_plan import run_facts
from securevfl.federation.saved_model import SavedModel
from securevfl.testing import read_tables, run_in_process, save_federation, write_federation

FET = {"family": "fet", "hidden": 4, "heads": 1, "fourier_features": 4, "fourier_width": 4}
PAIRS = {"hidden": 4, "layer_width": 6}
EQUAL_KEYS = ("exact", "fedhssl", "fedsplitnn")
CASES: list[tuple[dict[str, Any], int]] = [
    ({"family": "fedsim", "neighbours": 5, **PAIRS}, 1),
    ({"family": "fedsim", "neighbours": 5, **PAIRS}, 3),
    ({"family": "fedsim", "neighbours": 2, "merge": "average", **PAIRS}, 3),
    ({"family": "featuresim", "neighbours": 1, **PAIRS}, 1),
    ({"family": "featuresim", "neighbours": 1, **PAIRS}, 3),
    ({"family": "featuresim", "neighbours": 4, **PAIRS}, 3),
    ({"family": "top1sim", **PAIRS}, 3),
    ({"family": "exact", **PAIRS}, 3),
    ({"family": "avgsim", "neighbours": 1, **PAIRS}, 1),
    ({"family": "avgsim", "neighbours": 3, **PAIRS}, 3),
    ({**FET, "neighbours": 1}, 3),
    ({**FET, "neighbours": 3}, 1),
    ({**FET, "neighbours": 3}, 3),
    ({"family": "fedhssl", "hidden": 4, "encoder_hidden": 4}, 3),
    ({"family": "fedsplitnn", "hidden": 4, "encoder_hidden": 4}, 3),
]


def write(folder: Path, model: dict[str, Any], secondaries: int) -> Path:
    """Write a regression; record n of every secondary is row n, at nearly the same place."""
    random, rows = np.random.default_rng(4), 90
    ssl = {"iterations": 1, "batch_size": 32, "projector": [4], "predictor": 4}
    path = write_federation(folder, secondaries=secondaries, rows=rows)
    source = tomllib.loads(path.read_text())
    source["federation"]["task"] = "regression"
    source["model"] = model
    source["training"]["epochs"] = 2
    if model["family"] == "fedhssl":
        source["pretraining"] = ssl
    if model["family"] in EQUAL_KEYS:
        source["linkage"]["max_distance"] = 0.0
    keys = random.uniform(0, 10, (rows, 2))
    columns = {party["name"]: random.normal(size=(rows, 2)) for party in source["party"]}
    for number, party in enumerate(source["party"]):
        moved = 0.2 * number * (model["family"] not in EQUAL_KEYS)
        places = keys + random.normal(scale=moved, size=keys.shape)
        own = columns[party["name"]]
        frame = pd.DataFrame(
            {"lon": places[:, 0], "lat": places[:, 1], "x0": own[:, 0], "x1": own[:, 1]}
        )
        if party["role"] == "primary":
            weights = np.arange(1, secondaries + 2)
            frame["y"] = sum(w * x[:, 0] for w, x in zip(weights, columns.values(), strict=True))
        frame.to_csv(folder / party["data"], index=False)
    return save_federation(folder, source)


def run(path: Path, out: Path) -> sv.RunResult:
    return run_in_process(path, out)


class ByHand:
    """A run's models without its code: links by brute force, parts averaged by numpy."""

    def __init__(
        self, config: FederationConfig, tables: dict[str, PartyTable], models: dict[str, SavedModel]
    ) -> None:
        self.config, self.tables, self.models = config, tables, models
        self.own = tables[config.primary.name]
        self.test = run_facts(config, self.own)[0].test
        self.parts = {party.name: self.part(party) for party in config.secondaries}

    def keys(self, table: PartyTable) -> torch.Tensor:
        """Keys as models take them."""
        scale = self.models[self.config.primary.name].key_scale
        assert scale is not None
        return torch.tensor((table.keys - scale.centre) / scale.width, dtype=torch.float32)

    def part(self, party: Any) -> tuple[np.ndarray, np.ndarray]:
        """A secondary's clipped vectors of the test rows, and its links' similarities."""
        table, model = self.tables[party.name], self.models[party.name]
        apart = np.linalg.norm(self.own.keys[self.test][:, None] - table.keys[None], axis=2)
        links = np.argsort(apart, axis=1)[:, : self.config.model.neighbours]
        bottom = build_bottom(self.config, party, table)
        model.into(bottom)
        features = torch.from_numpy(model.feature_scaler.apply(table.features))
        with torch.no_grad():
            vectors = bottom.eval()(
                features[links], self.keys(table)[links], torch.ones(links.shape, dtype=torch.bool)
            ).numpy()
        norm = np.sqrt((vectors**2).sum(axis=(1, 2), keepdims=True))
        similarities = -np.take_along_axis(apart, links, axis=1)
        if (scale := model.similarity_scale) is not None:
            similarities = (similarities - scale.mean) / scale.deviation
        clip = self.config.privacy.clip_norm
        return vectors * np.minimum(1, clip / np.maximum(norm, 1e-30)), similarities

    def rmse(self, coalition: tuple[str, ...]) -> float:
        """The joint model's error on the test rows with these partners, in the label's unit."""
        name = self.config.primary.name
        model = self.models[name]
        top = build_top(self.config, self.own, model.head)
        model.into(top)
        parts = [self.parts[one] for one in coalition]
        features = torch.from_numpy(model.feature_scaler.apply(self.own.features[self.test]))
        similarities = np.stack([one[1] for one in parts], axis=1).astype("f4")
        with torch.no_grad():
            outputs = top.eval()(
                features,
                self.keys(self.own)[self.test],
                torch.from_numpy(np.mean([one[0] for one in parts], axis=0)),
                torch.from_numpy(similarities),
            )
        assert model.primary is not None
        assert model.primary.label_scaler is not None
        scaler = model.primary.label_scaler
        said = outputs.numpy()[:, 0] * scaler.deviation + scaler.mean
        assert self.own.labels is not None
        return math.sqrt(np.mean((said - self.own.labels[self.test]) ** 2))


@pytest.mark.parametrize(
    ("model", "secondaries"),
    CASES,
    ids=[f"{m['family']}-{m.get('neighbours', 1)}-{n}" for m, n in CASES],
)
def test_contribution_is_what_the_models_parts_give(
    tmp_path: Path, model: dict[str, Any], secondaries: int
) -> None:
    result = run(write(tmp_path, model, secondaries), tmp_path / "run")
    found = sv.contribution(result).gone

    assert result.trained is not None
    config = result.trained.config
    tables = read_tables(config, tmp_path)
    models = {party.name: result.trained.model(party.name) for party in config.table_parties}
    by_hand = ByHand(config, tables, models)
    names = [party.name for party in config.secondaries]
    values = {(): found.none["rmse"].value}
    for size in range(1, secondaries + 1):
        for coalition in itertools.combinations(names, size):
            values[coalition] = by_hand.rmse(coalition)
            told = found.values[frozenset(coalition)]["rmse"].value
            assert told == pytest.approx(values[coalition], rel=2e-4)
    everybody = tuple(names)
    assert found.all["rmse"].value == pytest.approx(result.metrics["test"], rel=1e-6)
    assert len(set(values.values())) == len(values), "partners differ in what they bring"
    for name, partner in found.partners.items():
        others = tuple(one for one in names if one != name)
        without = values[others] - values[everybody]
        assert partner.leave_one_out["rmse"].value == pytest.approx(without, abs=2e-3)
        added = []
        for order in itertools.permutations(names):
            before = order[: order.index(name)]
            with_it = tuple(one for one in names if one in (*before, name))
            added.append(values[tuple(one for one in names if one in before)] - values[with_it])
        assert partner.shapley["rmse"].value == pytest.approx(np.mean(added), abs=2e-3)


def test_similarities_whose_noise_is_not_kept_are_refused(tmp_path: Path) -> None:
    """Their noise is drawn once: drawn anew, it would value another model than the run's."""
    path = write(tmp_path, {"family": "fedsim", "neighbours": 5, **PAIRS}, 1)
    source = tomllib.loads(path.read_text())
    source["linkage"]["similarity_noise"] = 1.0
    result = run(save_federation(tmp_path, source), tmp_path / "run")

    with pytest.raises(ConfigError, match=r"similarity_noise.*not kept"):
        sv.contribution(result)
