"""``sv.train`` on tables and models in memory: a process a party, and nothing of it left behind."""

import os
import signal
import stat
import subprocess
import sys
import tempfile
import types
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from helpers.launched import processes_of
from helpers.patience import PATIENCE_S
from sklearn.linear_model import LogisticRegression
from torch import nn

import securevfl as sv
from securevfl.core.errors import PartyFailedError
from securevfl.models import registry

pytestmark = pytest.mark.multiprocess

FREE = sv.dp.Privacy(mechanism="none", encoder="trained")
TRAINING = sv.TrainingSettings(epochs=2, learning_rate=0.02)
# As close as the ring's steps let sums of float32 be; see test_simulated_equals_federated.py.
STEP = 2**-14


def frames(rows: int = 120) -> dict[str, Any]:
    """The label is in the bank's column alone; keys are texts."""
    random = np.random.default_rng(0)
    wealth = random.normal(size=rows)
    names = [f"person {number}" for number in range(rows)]
    own = pd.DataFrame({"name": names, "age": random.normal(size=rows), "y": wealth > 0})
    bank = pd.DataFrame({"name": names, "wealth": wealth}).sample(frac=1, random_state=0)
    link = sv.LinkageSettings(metric="exact", protection="none")
    tables = {"primary": own, "secondaries": {"bank": bank}, "label": "y", "key": "name"}
    return {**tables, "linkage": link, "progress": False, "training": TRAINING}


@pytest.fixture
def private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder for temporary files, of this test alone."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


@pytest.fixture(autouse=True)
def nothing_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test registers is gone with it."""
    monkeypatch.setattr(registry, "_REGISTERED", {})


def layers(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(inputs, 16), nn.ReLU(), nn.Linear(16, outputs))


def test_one_word_turns_a_simulation_of_frames_into_processes(private: Path) -> None:
    """Equal losses, figures and predictions; a folder for this user alone, gone with the result."""
    given = {**frames(), "model": sv.models.Top1Sim(hidden=8), "privacy": FREE}
    simulated, trained = sv.simulate(**given), sv.train(**given)
    assert trained.losses == pytest.approx(simulated.losses, abs=STEP)
    assert trained.metrics["test"] == pytest.approx(simulated.metrics["test"], abs=0.03)
    assert trained.metrics["alone_test"] == simulated.metrics["alone_test"]
    assert trained.metrics["peak_memory_bytes"].keys() == {"primary", "bank"}
    new = given["primary"].drop(columns="y")[:20]
    theirs, ours = simulated.predict(new), trained.predict(new, id_column="name")
    assert ours.rows == new["name"].tolist()
    np.testing.assert_allclose(ours.probabilities, theirs.probabilities, atol=1e-3)
    assert trained.trained is not None
    folder = trained.trained.folder
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert len(files) > 10
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in files}
    public = {"federation.toml", "history.csv", "metrics.json"}  # and the folder is not
    assert {name for name, mode in modes.items() if mode & 0o077} <= public
    assert not [path for path in files if b"person 1" in path.read_bytes()]
    del simulated, trained
    assert list(private.iterdir()) == []


def test_models_of_this_program_reach_the_processes(private: Path) -> None:
    """Two functions as a model, and an estimator as the base; tables without a schema."""
    values = np.random.default_rng(0).normal(size=(200, 2))
    views = {"left": [0], "right": [1]}
    y = (values[:, 1] > 0).astype(int)
    parties = sv.datasets.split_views(values, y, views=views, key_dim=1, key_noise=0.0, seed=0)
    model = sv.models.split_model(layers, layers, width=4, name="of-a-test")
    given: dict[str, Any] = {"privacy": FREE, "training": TRAINING, "progress": False}
    given["base"] = LogisticRegression(C=0.5)
    simulated, trained = sv.simulate(parties, model, **given), sv.train(parties, model, **given)
    assert trained.losses == pytest.approx(simulated.losses, abs=STEP)
    assert trained.metrics["alone_test"] == simulated.metrics["alone_test"]
    theirs, ours = simulated.predict(parties[0]), trained.predict(parties[0])
    np.testing.assert_allclose(ours.probabilities, theirs.probabilities, atol=1e-3)


def test_under_a_promise_processes_charge_what_a_simulation_does(private: Path) -> None:
    """With class means of shared labels, for which a dealer is started too."""
    X = np.random.default_rng(1).uniform(0, 16, size=(300, 8))
    y = (X[:, 5] > 8).astype(int)
    parties = sv.datasets.split_table(X, y, parties=3, key_dim=2, key_noise=0.05, seed=0)
    given: dict[str, Any] = {
        "privacy": sv.dp.Privacy(epsilon=8.0, delta=1e-4, encoder="frozen", links_per_record=1),
        "encoder": sv.EncoderSettings(method="class-means", labels="shares", label_epsilon=4.0),
        "linkage": sv.LinkageSettings(protection="none", choose="records"),
        "bounds": [0.0, 16.0],
        "progress": False,
        # Noise would decide whether the base answers, and so what is released of test rows.
        "base": "none",
        "with_alone": False,
    }
    model = sv.models.FeT(release="pooled", neighbours=1, hidden=1)
    simulated, trained = sv.simulate(parties, model, **given), sv.train(parties, model, **given)
    assert trained.metrics["privacy"]["epsilon"] == simulated.metrics["privacy"]["epsilon"] <= 8.0
    assert "dealer" in trained.metrics["peak_memory_bytes"]
    kinds = [[line["kind"] for line in run.ledger] for run in (simulated, trained)]
    assert kinds[0].count("charge") == kinds[1].count("charge") > 0
    names = trained.features().columns
    assert list(names) == list(simulated.features().columns)


class _Died(Exception):
    """Raised by an observer in this process."""


@pytest.mark.parametrize("how", ["killed", "interrupted", "observer"])
def test_nothing_is_left_where_a_run_breaks_off(how: str, private: Path) -> None:
    """A party that is killed, Ctrl-C, and an observer that raises, in the first round."""
    pids: list[int] = []

    def observe(event: sv.progress.ProgressEvent) -> None:
        if not isinstance(event, sv.progress.RoundDone) or pids:
            return
        (folder,) = private.iterdir()
        running = processes_of(folder)
        pids.extend(running.values())
        if how == "killed":
            os.kill(running["bank"], signal.SIGKILL)
        else:
            raise KeyboardInterrupt if how == "interrupted" else _Died

    errors = {"killed": PartyFailedError, "interrupted": KeyboardInterrupt, "observer": _Died}
    given = {**frames(), "model": sv.models.Top1Sim(hidden=8), "privacy": FREE}
    given["training"] = sv.TrainingSettings(epochs=200)
    with pytest.raises(errors[how]):
        sv.train(**given, observe=observe)
    assert len(pids) == 2
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]
    assert list(private.iterdir()) == []


TABLES = """
import numpy as np, pandas as pd
from torch import nn
import securevfl as sv

random = np.random.default_rng(0)
wealth = random.normal(size=60)
own = pd.DataFrame({"id": np.arange(60), "age": random.normal(size=60), "y": wealth > 0})
bank = pd.DataFrame({"id": np.arange(60), "wealth": wealth})
given = {"primary": own, "secondaries": [bank], "label": "y", "key": "id", "with_alone": False}
given["privacy"] = sv.dp.Privacy(mechanism="none", encoder="trained")
given["training"] = sv.TrainingSettings(epochs=1)


class Half(nn.Linear):
    pass


"""
UNGUARDED = f"""
{TABLES}
print(sv.train(**given, model=sv.models.Top1Sim(hidden=4)))
try:
    sv.train(**given, model=sv.models.split_model(Half, nn.Linear))
except sv.SecureVflError as error:
    print(error)
"""
GUARDED = f"""
{TABLES}
if __name__ == "__main__":
    print(sv.train(**given, model=sv.models.split_model(Half, nn.Linear)))
"""


def test_a_notebook_needs_no_guard_and_a_file_for_its_models(tmp_path: Path) -> None:
    """A fresh interpreter runs it as a cell, whose main program is no file to be read."""
    ended = subprocess.run(
        [sys.executable, "-c", f"exec({UNGUARDED!r})"],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
        cwd=tmp_path,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    assert ended.returncode == 0, ended.stderr
    shown = ended.stdout.splitlines()
    assert shown[0] == "RunResult(simulation: top1sim, binary, 2 parties, 1 epoch)"
    assert "'Half' is defined in this notebook; write it into a file such as" in shown[-1]
    assert list(tmp_path.iterdir()) == []


def test_a_script_needs_a_guard_where_it_defines_the_model_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Processes read the script for it, and do not start its runs again."""

    def shown_by(text: str) -> list[str]:
        script = tmp_path / "script.py"
        script.write_text(text, encoding="utf-8")
        main = types.ModuleType("__main__")
        main.__file__ = str(script)
        with monkeypatch.context() as patched:
            patched.setitem(sys.modules, "__main__", main)
            exec(compile(text, script, "exec"), main.__dict__)
        return capsys.readouterr().out.splitlines()

    shown = shown_by(UNGUARDED)
    assert shown[0] == "RunResult(simulation: top1sim, binary, 2 parties, 1 epoch)"
    assert "import script.py for the model that it defines, and cannot: " in shown[-1]
    assert 'it would start the parties again; write if __name__ == "__main__": abo' in shown[-1]
    shown = shown_by(GUARDED)
    assert shown[0] == "RunResult(simulation: split, binary, 2 parties, 1 epoch)"
