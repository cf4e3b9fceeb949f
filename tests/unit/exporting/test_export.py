"""Exported parts compute what the kept halves compute, and say what they are."""

import hashlib
import importlib.util
import json
import stat
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pandas as pd
import pytest
import torch
from helpers.command_line import securevfl
from helpers.federations import FROZEN
from helpers.kept import FEATURES, kept, write_kept_run
from scipy.spatial import cKDTree

from securevfl import read_federation
from securevfl.core.errors import ConfigError
from securevfl.data.tables import PartyTable
from securevfl.exporting.export import FORMATS, TOLERANCE, PrimaryModule, export_run
from securevfl.federation.build import build_bottom
from securevfl.testing import run_in_process, write_federation

KEYS = ["lon", "lat"]
FET = {
    "family": "fet", "neighbours": 4, "hidden": 8, "heads": 2,
    "fourier_features": 8, "fourier_width": 8, "average_positions_every": 0,
}  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    "fet": {"model": FET},
    "fet pooled": {"model": {**FET, "release": "pooled"}, "task": "regression"},
    "fet frozen": {
        "model": {**FET, "release": "pooled", "top": "additive"},
        "privacy": FROZEN,
    },
    "principal": {
        "model": {**FET, "release": "pooled", "top": "additive", "hidden": 2},
        "privacy": FROZEN,
        "encoder": {"method": "principal", "layout": "blocks"},
    },
    "fedsim": {"model": {"family": "fedsim", "neighbours": 6, "hidden": 8}, "task": "binary"},
    "fedsim weights": {
        "model": {
            "family": "fedsim", "neighbours": 6, "hidden": 8, "sort": "weight",
            "merge": "convolution", "weight": "learned",
        },
    },
    "exact": {"model": {"family": "exact", "hidden": 8}},
    "top1sim": {"model": {"family": "top1sim", "hidden": 8}, "task": "binary"},
    "avgsim": {"model": {"family": "avgsim", "neighbours": 3, "hidden": 8}, "task": "regression"},
    "featuresim": {"model": {"family": "featuresim", "neighbours": 3, "hidden": 8}},
    "fedsplitnn": {"model": {"family": "fedsplitnn", "hidden": 8, "encoder_hidden": 8}},
    "fedhssl": {"model": {"family": "fedhssl", "hidden": 8, "encoder_hidden": 8}},
}  # fmt: skip


# Each half takes a second under the checks of types: the others run with make test-all.
OFTEN = {
    ("fet", "onnx"), ("fedsim", "onnx"), ("principal", "onnx"), ("featuresim", "onnx"),
    ("fedhssl", "onnx"), ("fedsim", "torchscript"),
}  # fmt: skip


@pytest.mark.parametrize(
    ("case", "kind"),
    [
        pytest.param(case, kind, marks=() if (case, kind) in OFTEN else pytest.mark.slow)
        for case in CASES
        for kind in FORMATS
    ],
)
def test_every_family_goes(case: str, kind: str, tmp_path: Path) -> None:
    """Any number of rows, empty slots and rows without a record, as torch computes them."""
    config = write_kept_run(tmp_path, **CASES[case])
    exported = export_run(config, tmp_path, kind=kind)

    assert [one.party for one in exported] == ["agency", "bank-1"]
    for one in exported:
        assert 0 <= one.difference <= one.allowed
        told = json.loads(one.path.with_suffix(".json").read_text())
        data = one.path.read_bytes()
        assert told["sha256"] == hashlib.sha256(data).hexdigest()
        assert told["inputs"][0]["shape"][-1] == len(told["features"]) == FEATURES
        assert ("NOT PRIVATE" in told.get("warning", "")) == (one.role == "secondary")
        assert stat.S_IMODE(one.path.stat().st_mode) == 0o600
        assert stat.S_IMODE(one.path.with_suffix(".json").stat().st_mode) == 0o600
        if kind == "onnx":
            model = onnx.load_from_string(data)
            assert {one.name for one in model.graph.input} == {x["name"] for x in told["inputs"]}
            own = {entry.key: entry.value for entry in model.metadata_props}
            assert own["party"] == one.party
            assert ("NOT PRIVATE" in model.doc_string) == (one.role == "secondary")


def test_scaling_and_the_clip_are_in_the_file(tmp_path: Path) -> None:
    """Columns as the schema encodes them in, a term of the average out, of norm C at most."""
    config = write_kept_run(tmp_path, model=FET)
    (one,) = export_run(config, tmp_path, party="bank-1")
    model = kept(config, "bank-1", seed=1)
    random = np.random.default_rng(0)
    features = random.normal(scale=20, size=(3, 4, FEATURES)).astype(np.float32)
    keys = 100 + 5 * random.normal(size=(3, 4, 2))
    present = np.ones((3, 4), dtype=bool)
    (found,) = onnxruntime.InferenceSession(one.path).run(
        None, {"features": features, "keys": keys, "present": present}
    )

    table = PartyTable(
        name="bank-1", key_names=("a", "b"), keys=np.zeros((1, 2)),
        feature_names=model.features, features=np.zeros((1, FEATURES), dtype=np.float32),
    )  # fmt: skip
    bottom = build_bottom(config, config.party("bank-1"), table)
    model.into(bottom)
    scaled = model.feature_scaler.apply(features.reshape(12, FEATURES)).reshape(features.shape)
    assert model.key_scale is not None
    places = (keys - model.key_scale.centre) / np.array(model.key_scale.width)
    with torch.no_grad():
        plain = bottom.eval()(
            torch.from_numpy(scaled), torch.from_numpy(places).float(), torch.from_numpy(present)
        ).numpy()
    norms = np.linalg.norm(plain.reshape(3, -1), axis=1)[:, None, None]
    clip = config.privacy.clip_norm
    assert norms.min() > clip
    assert np.allclose(found, plain * clip / norms, atol=1e-5)


def test_exported_parts_together_predict_as_the_run_did(tmp_path: Path) -> None:
    """Records linked by hand, terms averaged by hand: the run's own predictions.csv comes out."""
    path = write_federation(
        tmp_path, rows=60, model={"family": "top1sim", "hidden": 8}, training={"epochs": 1}
    )
    config = read_federation(path)
    run = tmp_path / "run"
    run_in_process(config, run, data_root=tmp_path)
    parts = {one.party: onnxruntime.InferenceSession(one.path) for one in export_run(config, run)}
    said = pd.read_csv(run / "predictions.csv")
    rows = said["row"].to_numpy() - 1
    own = pd.read_csv(tmp_path / "agency.csv").iloc[rows]

    def features(frame: pd.DataFrame) -> np.ndarray:
        return frame[["x0", "x1", "x2"]].to_numpy(dtype=np.float32)

    terms = []
    for name in ("bank-1", "bank-2"):
        frame = pd.read_csv(tmp_path / f"{name}.csv")
        _, nearest = cKDTree(frame[KEYS]).query(own[KEYS])
        fed = {
            "features": features(frame.iloc[nearest])[:, None],
            "present": np.ones((len(rows), 1), bool),
        }
        fed["keys"] = frame[KEYS].to_numpy()[nearest][:, None]
        terms.append(run_part(parts[name], fed))
    fed = {"features": features(own), "keys": own[KEYS].to_numpy(), "aggregate": sum(terms) / 2}
    found = run_part(parts["agency"], fed)

    wanted = said[["probability_0", "probability_1", "probability_2"]].to_numpy()
    # The run's average was added up in whole units of the ring.
    assert np.abs(found - wanted).max() < 1e-4
    assert wanted.std() > 0.01


def run_part(part: onnxruntime.InferenceSession, fed: dict[str, np.ndarray]) -> np.ndarray:
    (out,) = part.run(None, {one.name: fed[one.name] for one in part.get_inputs()})
    return out


def test_a_file_that_computes_something_else_is_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A branch by values stays as the example had it; the check on other rows finds it."""
    plain = PrimaryModule.forward

    def branching(self: PrimaryModule, features: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        out = plain(self, features, *rest)
        return out if len(out) == 5 else out / 2

    config = write_kept_run(tmp_path, model={"family": "top1sim", "hidden": 8})
    monkeypatch.setattr(PrimaryModule, "forward", branching)
    with pytest.raises(ConfigError, match=r"'agency': as onnx it differs from torch by 0\.\d"):
        export_run(config, tmp_path)
    assert not list(tmp_path.rglob("*.onnx"))


def test_what_is_missing_is_said_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A package, a model, a party, a format, an order that depends on the batch."""
    model = {"family": "fedsim", "neighbours": 6, "hidden": 8, "sort": "none"}
    config = write_kept_run(tmp_path, model=model)
    with pytest.raises(ConfigError, match=r"'agency': .*onnx"):
        export_run(config, tmp_path)
    with pytest.raises(ConfigError, match="party 'nobody': is not in the federation file"):
        export_run(config, tmp_path, party="nobody")
    with pytest.raises(ConfigError, match="kind must be one of"):
        export_run(config, tmp_path, kind="pickle")
    with pytest.raises(ConfigError, match="has no party's model"):
        export_run(config, tmp_path / "elsewhere")
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "onnx" else found(name)
    )
    with pytest.raises(
        ConfigError, match=r"needs the package onnx, .*; pip install 'securevfl\[export\]'"
    ):
        FORMATS["onnx"].require_installed()


def test_a_primary_with_labels_alone_has_a_half_too(tmp_path: Path) -> None:
    """It reads what the secondaries release, and keys; its features are an empty input."""
    path = write_federation(tmp_path, rows=60, training={"epochs": 1, "batch_size": 32}, model=FET)
    table = tmp_path / "agency.csv"
    pd.read_csv(table)[[*KEYS, "y"]].to_csv(table, index=False)
    config = read_federation(path)
    run = tmp_path / "run"
    run_in_process(config, run, data_root=tmp_path)
    for kind in FORMATS:
        written = export_run(config, run, kind=kind)
        assert [one.party for one in written] == ["agency", "bank-1", "bank-2"]
        told = json.loads(written[0].path.with_suffix(".json").read_text())
        assert told["features"] == []


def test_the_command_says_what_it_wrote(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Files where they were asked for, the difference, and the warning."""
    write_kept_run(tmp_path, model={"family": "top1sim", "hidden": 8})
    out = tmp_path / "files"
    done = securevfl(capfd, "model", "export", tmp_path, "--party", "bank-1", "--out", out)
    assert (done.code, done.out.split()) == (0, [str(out / "bank-1.onnx")])
    assert "NOT PRIVATE" in done.err
    assert "differs from torch by at most" in done.err
    done = securevfl(capfd, "model", "export", tmp_path, "--format", "torchscript", "--json")
    told = json.loads(done.out)["exported"]
    assert [one["private"] for one in told] == [True, False]
    assert all(one["difference"] <= TOLERANCE for one in told)
    done = securevfl(capfd, "model", "export", out)
    assert (done.code, "has no federation.toml" in done.complaint) == (2, True)
