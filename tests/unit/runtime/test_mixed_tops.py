"""Runs whose top model weighs trees beside its correction: the same wherever it computes."""

import html
import shutil
import tomllib
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from helpers.class_means import write_class_means
from helpers.command_line import securevfl

import securevfl as sv
from securevfl.config.reading import read_federation
from securevfl.desk.report.wording import top_in_words
from securevfl.federation.build import build_top
from securevfl.federation.saved_model import FOLDER, load_model
from securevfl.models.alone.margins import OwnInputs
from securevfl.models.fitted_top import MixedTop
from securevfl.runtime.primary_run import PrimaryRun
from securevfl.runtime.run_options import RunOptions
from securevfl.runtime.run_tables import read_tables
from securevfl.runtime.simulation import simulate_federation
from securevfl.testing import run_in_process, save_federation

Capture = pytest.CaptureFixture[str]
ROWS = 200


def federation(folder: Path, *, other: np.ndarray | None = None) -> Path:
    """Write a regression whose label is a partner's number, its sign turned by the primary's.

    Args:
        folder: Where.
        other: Rows of the primary's that have other labels and columns.
    """
    folder.mkdir(exist_ok=True)
    path = write_class_means(
        folder, labels="plaintext", dealer=False, federation={"task": "regression"}
    )
    source = tomllib.loads(path.read_text())
    source["model"] |= {"hidden": 1, "top": "mixed"}
    source["party"] = source["party"][:2]
    source["party"][1] |= {"scaling": "bounds", "bounds": [-4.0, 4.0]}
    random = np.random.default_rng(0)
    keys = pd.DataFrame({"lon": np.arange(ROWS), "lat": 0.0})
    theirs = random.normal(size=(ROWS, 2))
    own = random.normal(size=(ROWS, 2))
    label = theirs[:, 0] * np.where(own[:, 0] > -1, 1.0, -1.0) + own[:, 1]
    if other is not None:
        own[other], label[other] = 7.0, 7.0
    pd.concat([keys, pd.DataFrame({"x0": own[:, 0], "x1": own[:, 1], "y": label})], axis=1).to_csv(
        folder / "agency.csv", index=False
    )
    pd.concat([keys, pd.DataFrame(theirs, columns=["x0", "x1"])], axis=1).to_csv(
        folder / "bank-1.csv", index=False
    )
    return save_federation(folder, source)


def kept(run: Path) -> list[torch.Tensor]:
    """Return the numbers of a run's top model, and what its trees say of some rows."""
    config = read_federation(run / "federation.toml")
    model = load_model(run / "parties" / "agency" / FOLDER, config, party="agency")
    top = build_top(config, read_tables(config, run.parent)["agency"], model.head)
    model.into(top)
    assert isinstance(top, MixedTop)
    rows = np.random.default_rng(1).normal(size=(20, len(top.trees.filling)))
    trees = top.trees.model
    assert trees is not None
    numbers = [value for name, value in top.state_dict().items() if "extra" not in name]
    return [*numbers, torch.from_numpy(trees.margins(OwnInputs(values=rows)))]


def same(run: Path, other: Path) -> bool:
    return all(map(torch.equal, kept(run), kept(other)))


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, sv.RunResult]:
    folder = tmp_path_factory.mktemp("mixed")
    return folder, run_in_process(federation(folder), folder / "run", with_alone=True)


def test_new_rows_are_answered_as_test_rows_were(
    finished: tuple[Path, sv.RunResult], tmp_path: Path, capfd: Capture
) -> None:
    """By trees and correction, weighed as the run's figures say in one line."""
    folder, run = finished
    top = run.metrics["base"]["top"]
    assert 0 < top["error"] < top["gain"]
    assert 0 < top["trees"] < 1
    assert run.metrics["base"]["used"] == "joint"
    assert "own_lambda" in run.metrics["base"], "trees without partners are a placebo"
    line = top_in_words(run.metrics)
    assert f"the trees with weight {top['trees']:g} of 1" in line
    shutil.copytree(folder / "run", tmp_path / "run")
    done = securevfl(capfd, "report", tmp_path / "run")
    assert done.code == 0, done.err
    assert line[1:] in html.unescape((tmp_path / "run" / "report.html").read_text())
    before = pd.read_csv(folder / "run" / "predictions.csv")
    table = pd.read_csv(folder / "agency.csv")
    again = run.predict(table.iloc[before["row"] - 1].reset_index(drop=True))
    assert np.array_equal(again.frame()["prediction"], before["prediction"])


def test_test_rows_choose_nothing(finished: tuple[Path, sv.RunResult], tmp_path: Path) -> None:
    """With other labels and columns in them, what is kept is the same to the last bit."""
    folder, _ = finished
    rows = pd.read_csv(folder / "run" / "predictions.csv")["row"].to_numpy() - 1
    run_in_process(federation(tmp_path, other=rows), tmp_path / "run")
    assert same(tmp_path / "run", folder / "run")


class CutError(Exception):
    """The simulated crash."""


def test_a_resumed_run_keeps_what_it_weighed(
    finished: tuple[Path, sv.RunResult], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the last bit of an undisturbed run."""
    folder, run = finished
    path = federation(tmp_path)

    def cut(_run: PrimaryRun) -> None:
        raise CutError

    with monkeypatch.context() as crash:
        crash.setattr(PrimaryRun, "_test", cut)
        with pytest.raises(CutError):
            run_in_process(path, tmp_path / "run")
    config = read_federation(path)
    again = simulate_federation(
        config,
        read_tables(config, tmp_path),
        RunOptions(run_folder=tmp_path / "run", resume=True),
        with_alone=False,
    )
    assert again.metrics["base"]["top"] == run.metrics["base"]["top"]
    assert same(tmp_path / "run", folder / "run")
