"""Whole simulated runs on a GPU that is not there: every family, top model and encoder."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from helpers.labelled_cuda import device_of, labelled_cuda, operations
from helpers.labelled_runs import RUNS, run, write

from securevfl import read_federation
from securevfl.core.progress import ProgressEvent, RoundDone
from securevfl.federation.rounds.primary import Primary
from securevfl.lab.comparison import Comparison, compare_methods
from securevfl.lab.contribution import contribution
from securevfl.models.alone.choice import Decision, decide
from securevfl.models.fedhssl.encoders import CategoricalColumn
from securevfl.stages.pretraining.augment import CorruptedFeatures
from securevfl.testing import write_federation


@pytest.mark.parametrize("name", RUNS)
def test_runs(name: str, tmp_path: Path) -> None:
    """From linking to the predictions of a kept model nothing mixes devices."""
    path = write(tmp_path, RUNS[name])
    with labelled_cuda():
        result = run(path, tmp_path / "run", device="cuda")
        assert operations() > 20
        predicted = result.predict(tmp_path / "agency.csv")

    assert len(predicted.rows) == len(pd.read_csv(tmp_path / "agency.csv"))


@pytest.mark.parametrize("name", ["fet", "fedsim"])
def test_the_joint_model_answers_and_rows_without_a_key_too(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a base (fedsim's) or without one; which model is the best does not matter here."""
    take = Primary._take_if_best

    def joint(*args: Any, **more: Any) -> Decision:
        return replace(decide(*args, **more), used="joint", scale=1.0)

    def last(self: Primary, *args: Any) -> bool:
        self.best_metric = None
        return take(self, *args)

    monkeypatch.setattr(Primary, "_take_if_best", last)
    monkeypatch.setattr("securevfl.models.alone.choice.decide", joint)
    monkeypatch.setattr(Primary, "_measures_better", lambda *_: False)
    path = write(tmp_path, RUNS[name])
    new = pd.read_csv(tmp_path / "agency.csv")
    new.loc[1, "lon"] = None
    new.to_csv(tmp_path / "new.csv", index=False)
    with labelled_cuda():
        predicted = run(path, tmp_path / "run", device="cuda").predict(tmp_path / "new.csv")

    assert len(predicted.rows) == len(new)


@pytest.mark.parametrize("name", ["fet", "fedsim"])
def test_branches_of_a_gpu_compute_the_same(name: str, tmp_path: Path) -> None:
    """A GPU has code of its own in the codec, for checks and for stacks: losses are the CPU's."""
    model = {**RUNS[name]["model"], "dropout": 0.0}
    path = write(tmp_path, {**RUNS[name], "model": model, "training": {"epochs": 2}})
    here = run(path, tmp_path / "here", device="cpu")
    with labelled_cuda():
        there = run(path, tmp_path / "there", device="cuda")

    assert there.losses == pytest.approx(here.losses, rel=1e-5)


class CutError(Exception):
    """The end of a run before its time."""


def cut_in_epoch_2(event: ProgressEvent) -> None:
    """End a run in the first round of its second epoch."""
    if isinstance(event, RoundDone) and event.epoch == 2:
        raise CutError


@pytest.mark.parametrize("name", ["fet", "fedhssl"])
def test_a_cut_run_goes_on(name: str, tmp_path: Path) -> None:
    """Whatever was written on the device is read there again: weights, optimizers, streams."""
    path = write(tmp_path, {**RUNS[name], "training": {"epochs": 2}})
    with labelled_cuda():
        whole = run(path, tmp_path / "whole", device="cuda")
        with pytest.raises(CutError):
            run(path, tmp_path / "cut", device="cuda", observe=cut_in_epoch_2)
        again = run(path, tmp_path / "cut", device="cuda", resume=True)

    assert again.losses == whole.losses[-len(again.losses) :]


@pytest.mark.parametrize("name", ["fet", "fet-additive"])
def test_contributions_are_measured(name: str, tmp_path: Path) -> None:
    """Coalitions go through kept models, or through what was released."""
    path = write(tmp_path, RUNS[name])
    with labelled_cuda():
        measured = contribution(run(path, tmp_path / "run", device="cuda"))

    assert measured.rows == 8


def test_methods_that_need_no_federation(tmp_path: Path) -> None:
    """A comparison trains them on the device too."""
    methods = ("alone", "solo", "combine", "boosting", "boosting-links")
    small = {"epochs": 1}
    path = write_federation(
        tmp_path,
        secondaries=1,
        rows=40,
        base={"estimator": "linear"},
        linkage={"truth": "who"},
        methods={
            "solo": small,
            "combine": small,
            "boosting": {"iterations": 3},
            "boosting-links": {"iterations": 3},
        },
    )
    for name in ("agency", "bank-1"):
        table = pd.read_csv(tmp_path / f"{name}.csv").sort_values("lon", ignore_index=True)
        table.assign(who=range(len(table))).to_csv(tmp_path / f"{name}.csv", index=False)
    plan = Comparison(
        config=read_federation(path),
        methods=methods,
        seeds=1,
        data_root=tmp_path,
        folder=tmp_path / "out",
        device="cuda",
    )
    with labelled_cuda():
        results = compare_methods(plan)
        assert operations() > 20

    assert [one["name"] for one in results] == list(methods)


@pytest.mark.parametrize("drawn_on", ["cpu", "cuda"])
def test_views_are_drawn_where_the_generator_is(drawn_on: str) -> None:
    """Of tables with numbers and words, from either device's numbers."""
    with labelled_cuda() as there:
        table = torch.rand(6, 3 * 4 * 4, device=there)
        table[:, 0] = 1.0
        words = CategoricalColumn(places=(0,), categories=3)
        augmentation = CorruptedFeatures(table, columns=(words,))
        view = augmentation(table, torch.Generator(device=drawn_on))
        assert device_of(view) == there
        assert view.shape == table.shape
