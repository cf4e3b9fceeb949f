"""A family of one's own, followed to the letter: installed, named in a file, trained, compared."""

import json
import os
import sys
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.built import built, write_tables
from helpers.federations import FROZEN
from helpers.installed import install, register
from helpers.warm import printed

import securevfl as sv
from securevfl.core.errors import ConfigError, PrivacyError
from securevfl.dp import Privacy
from securevfl.models.registry import GROUP, load_family
from securevfl.testing import run_in_process, save_federation, write_federation

PACKAGE = Path(__file__).with_name("family_package")
MODEL = {"family": "average", "neighbours": 3, "hidden": 8}
TRAINING = {"epochs": 20, "learning_rate": 2e-2}

NORMALISED = """
from average_family import AverageFamily
from torch import nn

class NormalisedFamily(AverageFamily):
    name = "normalised"

    def build_bottom(self, settings, **sizes):
        bottom = super().build_bottom(settings, **sizes)
        bottom.project = nn.Sequential(bottom.project, nn.BatchNorm1d(settings.neighbours))
        return bottom
"""

# Bottom models without any layer that is known to mix rows.
MIXING = """
import torch
from average_family import AverageBottom, AverageFamily

class MixingBottom(AverageBottom):
    def forward(self, features, keys, present):
        out = super().forward(features, keys, present)
        {line}

class MixingFamily(AverageFamily):
    name = "mixing"

    def build_bottom(self, settings, *, num_features, **_):
        bottom = MixingBottom(num_features, settings.hidden)
        bottom.recordwise = False
        return bottom
"""


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A folder of installed packages, as ``pip install tests/extending/family_package`` fills."""
    return install(PACKAGE, tmp_path / "site-packages")


def securevfl(site: Path, *arguments: object) -> str:
    """Run the command where the package is installed, and return what it printed."""
    path = os.pathsep.join([str(site), os.environ.get("PYTHONPATH", "")])
    with pytest.MonkeyPatch.context() as there:
        there.setenv("PYTHONPATH", path)
        return printed("securevfl.cli.main", *arguments)


@pytest.mark.multiprocess
def test_it_is_simulated_and_trained_by_its_name(tmp_path: Path, site: Path) -> None:
    """The joint model learns what the primary alone cannot know; every party's process finds it."""
    path = write_federation(
        tmp_path, secondaries=1, rows=400, model={**MODEL, "neighbours": 1}, training=TRAINING
    )
    found = {}
    for how in ("simulate", "train"):
        securevfl(site, how, path, "--out", tmp_path / how)
        found[how] = json.loads((tmp_path / how / "metrics.json").read_text())

    assert found["simulate"]["family"] == found["train"]["family"] == "average"
    assert found["simulate"]["test"] > found["simulate"]["alone_test"] + 0.1
    assert found["train"]["test"] == pytest.approx(found["simulate"]["test"], abs=0.05)


@pytest.mark.slow
def test_it_is_compared_with_another_family(tmp_path: Path, site: Path) -> None:
    """Also in worker processes, and with settings of a method's own."""
    path = write_federation(
        tmp_path,
        rows=120,
        model={"family": "avgsim", "neighbours": 3, "hidden": 8},
        training={"epochs": 1},
        methods={"wide": {"family": "average", "hidden": 32}},
    )
    methods = ("average", "wide", "avgsim")
    command = ("lab", "compare", path, "--methods", ",".join(methods), "--seeds", 1, "--jobs", 2)
    answer = json.loads(securevfl(site, *command, "--out", tmp_path / "out", "--json"))
    wide = tomllib.loads((tmp_path / "out/runs/wide/seed-3/federation.toml").read_text())

    assert set(answer["methods"]) == set(methods)
    assert wide["model"] == {"family": "average", "neighbours": 3, "hidden": 32}


def simulated(folder: Path, encoder: str, family: str) -> dict[str, Any]:
    """Return the metrics of a run with a budget, where features have declared bounds."""
    privacy, model = {**FROZEN, "encoder": encoder}, {**MODEL, "family": family}
    path = write_federation(folder, rows=120, model=model, privacy=privacy)
    source = tomllib.loads(path.read_text())
    for party in source["party"]:
        party |= {"scaling": "bounds", "bounds": [-4.0, 4.0]}
    metrics: dict[str, Any] = run_in_process(
        save_federation(folder, source), folder / "run"
    ).metrics
    return metrics


@pytest.mark.parametrize("encoder", ["frozen", "dp-trained"])
def test_promises_are_kept_with_it(
    encoder: str, tmp_path: Path, site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is accounted for is no privilege of the package's own families."""
    monkeypatch.syspath_prepend(site)
    metrics = simulated(tmp_path, encoder, "average")
    assert metrics["privacy"]["epsilon"] == pytest.approx(50.0, rel=1e-3)


@pytest.mark.parametrize("encoder", ["frozen", "trained", "dp-trained"])
def test_promises_that_it_breaks_are_refused(
    encoder: str, tmp_path: Path, site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """BatchNorm lets one record move a whole batch, under every encoder."""
    monkeypatch.syspath_prepend(site)
    (site / "normalised_family.py").write_text(NORMALISED)
    register(site, "normalised", {GROUP: {"normalised": "normalised_family:NormalisedFamily"}})
    with pytest.raises(PrivacyError, match="BatchNorm1d, which mixes the rows"):
        simulated(tmp_path, encoder, "normalised")


@pytest.mark.parametrize("encoder", ["frozen", "trained", "dp-trained"])
@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("return out - out.mean(0, keepdim=True)", "mixes the rows of a batch"),
        ("return out if out.sum() > 1e9 else -out", r"row by row.*mixing_family\.py:8"),
    ],
    ids=["mean", "if"],
)
def test_models_that_mix_rows_are_refused(
    line: str,
    complaint: str,
    encoder: str,
    tmp_path: Path,
    site: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In one line before the first round, whatever layers they are made of."""
    monkeypatch.syspath_prepend(site)
    monkeypatch.delitem(sys.modules, "mixing_family", raising=False)
    (site / "mixing_family.py").write_text(MIXING.format(line=line))
    register(site, "mixing", {GROUP: {"mixing": "mixing_family:MixingFamily"}})
    load_family.cache_clear()
    with pytest.raises(PrivacyError, match=f"bottom model of 'mixing' .*{complaint}"):
        simulated(tmp_path, encoder, "mixing")


def test_rows_are_apart_by_construction(
    tmp_path: Path, site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model that mixes rows at one value alone passes every trial, and mixes nothing."""
    monkeypatch.syspath_prepend(site)
    monkeypatch.delitem(sys.modules, "mixing_family", raising=False)
    line = "return torch.where((features == 0.75).any(), out.mean(0, keepdim=True), out)"
    (site / "mixing_family.py").write_text(MIXING.format(line=line))
    register(site, "mixing", {GROUP: {"mixing": "mixing_family:MixingFamily"}})
    load_family.cache_clear()
    features = np.random.default_rng(0).uniform(-1, 1, (60, 2))
    features[5, 0] = 0.75
    model = {**MODEL, "family": "mixing", "neighbours": 1}
    privacy = {**FROZEN, "links_per_record": 1}
    path = write_tables(tmp_path, features, model=model, privacy=privacy)
    with built(path, tmp_path / "run") as world:
        secondary = world.secondaries[1]
        rows = np.arange(60)
        together = secondary.represent(world.round(1, rows))
        alone = torch.cat([secondary.represent(world.round(1, rows[[row]])) for row in rows])
    assert torch.allclose(together, alone, atol=1e-6)


def test_an_instance_of_its_settings_is_a_model(
    site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``securevfl.simulate`` takes it as it takes the package's own."""
    monkeypatch.syspath_prepend(site)
    from average_family import AverageSettings

    random = np.random.default_rng(0)

    def table(name: str, **labels: Any) -> sv.data.PartyTable:
        return sv.data.PartyTable(
            name=name,
            key_names=("x",),
            keys=random.normal(size=(80, 1)),
            feature_names=("a", "b"),
            features=random.normal(size=(80, 2)).astype(np.float32),
            **labels,
        )

    result = sv.simulate(
        [table("agency", labels=random.normal(size=80)), table("bank")],
        AverageSettings(neighbours=2),
        privacy=Privacy(mechanism="none", encoder="trained"),
        training=sv.TrainingSettings(epochs=1),
        base="none",
        with_alone=False,
    )
    assert result.metrics["family"] == "average"


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (
            {"widht": 3},
            r"model\.widht: no such field; .*Allowed: hidden, neighbours, party_dropout",
        ),
        ({"neighbours": 0}, r"model\.neighbours must be at least 1, got 0"),
        ({"hidden": 0}, r"model\.cut_shape\[1\] must be at least 1, got 0"),
        ({"party_dropout": 1.0}, r"model\.party_dropout must lie in \[0, 1\), got 1\.0"),
        ({"keys_as_features": True}, r"model\.keys_as_features: no such field"),
    ],
)
def test_its_settings_are_checked(
    change: dict[str, Any],
    complaint: str,
    tmp_path: Path,
    site: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By the fields of its dataclass, and by what all families have in common."""
    monkeypatch.syspath_prepend(site)
    with pytest.raises(ConfigError, match=complaint):
        sv.read_federation(write_federation(tmp_path, rows=60, model={**MODEL, **change}))
