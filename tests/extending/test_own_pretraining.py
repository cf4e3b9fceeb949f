"""A family of one's own that pretrains: the stage reaches it through the family alone."""

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.installed import install, register

from securevfl.config.reading import read_federation
from securevfl.core.errors import DataError
from securevfl.core.progress import PretrainingIteration, ProgressEvent
from securevfl.models.registry import GROUP
from securevfl.runtime.run_options import RunOptions
from securevfl.runtime.run_tables import read_tables
from securevfl.runtime.simulation import RunResult, simulate_federation
from securevfl.testing import save_federation, write_federation

PRETRAINED = """
import torch
from average_family import AverageBottom, AverageFamily
from torch import nn

class Autoencoder:
    def __init__(self, pretraining, features, hidden, seed):
        self.settings = pretraining
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.encoder = nn.Linear(features.shape[1], hidden)
            self.model = nn.Sequential(self.encoder, nn.Linear(hidden, features.shape[1]))
        self.optimizer = torch.optim.Adam(self.model.parameters(), pretraining.learning_rate)

    def begin_iteration(self, iteration):
        pass

    def learn_local(self, features):
        codes = self.encoder(features)
        loss = (self.model[1](codes) - features).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.detach(), codes.detach()

    def shared_weights(self):
        return self.encoder.state_dict()

    def load_shared(self, weights):
        self.encoder.load_state_dict(weights)

    def encoders(self):
        return {"own": {name: value.clone() for name, value in self.encoder.state_dict().items()}}

    def state(self):
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def load_state(self, state):
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])

    def project(self, features):
        raise AssertionError("there is no step that asks for it")

    learn_cross = project

class PretrainedFamily(AverageFamily):
    name = "pretrained"
    pretraining = ("local",)

    def build_learner(self, settings, pretraining, *, features, feature_names, party, seed):
        assert len(feature_names) == features.shape[1]
        return Autoencoder(pretraining, features, settings.hidden, seed)

    def load_pretrained(self, model, encoders):
        if isinstance(model, AverageBottom):
            model.project.load_state_dict(encoders["own"])
"""
MODEL = {"family": "pretrained", "neighbours": 1, "hidden": 2}
STAGE = {"iterations": 4, "learning_rate": 1e-2, "batch_size": 16}


def simulate(path: Path, out: Path, **options: Any) -> RunResult:
    config = read_federation(path)
    tables = read_tables(config, path.parent)
    return simulate_federation(
        config,
        tables,
        RunOptions(run_folder=out, **options),
        with_alone=False,
    )


@pytest.fixture
def federation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file of the family, which is installed."""
    site = install(Path(__file__).with_name("family_package"), tmp_path / "site-packages")
    (site / "pretrained_family.py").write_text(PRETRAINED)
    register(site, "pretrained", {GROUP: {"pretrained": "pretrained_family:PretrainedFamily"}})
    monkeypatch.syspath_prepend(site)
    return write_federation(tmp_path, rows=120, model=MODEL, pretraining=STAGE)


def test_its_learners_learn_and_every_party_keeps_its_encoder(
    federation: Path, tmp_path: Path
) -> None:
    """The stage writes what it writes for any family."""
    run = tmp_path / "run"
    simulate(federation, run)
    told = json.loads((run / "pretraining.json").read_text())
    losses = [line["local_loss"] for line in told["history"]]
    kept = torch.load(run / "parties/bank-1/encoders.pt", weights_only=True)

    assert (told["method"], told["steps"]) == ("pretrained", ["local"])
    assert losses[-1] < 0.8 * losses[0]
    assert set(kept) == {"own"}


def test_a_pretraining_that_was_cut_off_goes_on(federation: Path, tmp_path: Path) -> None:
    """What a learner calls its state is all that it needs."""

    def cut(event: ProgressEvent) -> None:
        if isinstance(event, PretrainingIteration) and event.iteration == 2:
            raise DataError("the power went")

    whole = simulate(federation, tmp_path / "whole")
    with pytest.raises(DataError, match="power"):
        simulate(federation, tmp_path / "broken", observe=cut)
    resumed = simulate(federation, tmp_path / "broken", resume=True)
    assert (
        resumed.metrics["pretraining"]["local_loss"] == (whole.metrics["pretraining"]["local_loss"])
    )
    assert resumed.losses == whole.losses


def test_fine_tuning_starts_from_its_encoders(federation: Path, tmp_path: Path) -> None:
    """Another encoder gives another first loss; without pretraining it would be the same."""
    losses = []
    for iterations in (1, 4):
        source = tomllib.loads(federation.read_text())
        source["pretraining"]["iterations"] = iterations
        result = simulate(save_federation(tmp_path, source), tmp_path / str(iterations))
        losses.append(result.losses[0])
    assert losses[0] != losses[1]
