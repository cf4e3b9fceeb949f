"""Assisted boosting in one process: what runs learn, keep and predict, and who sees what."""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from helpers.assisted import LINEAR, TREES, write_assisted

from securevfl.config.disclosure import channels
from securevfl.config.reading import read_federation
from securevfl.core.errors import ConfigError, PrivacyError
from securevfl.core.progress import ProgressEvent, RoundDone
from securevfl.federation.rounds.exchanges import SimulatedExchange
from securevfl.runtime.entry import simulate
from securevfl.runtime.run_options import RunOptions
from securevfl.runtime.run_tables import read_tables
from securevfl.runtime.simulation import RunResult, simulate_federation
from securevfl.runtime.trained_run import predict


def run(path: Path, out: Path, **settings: Any) -> RunResult:
    config = read_federation(path)
    return simulate_federation(
        config,
        read_tables(config, path.parent),
        RunOptions(run_folder=out, **settings),
        with_alone=False,
    )


def test_secondaries_add_what_the_primary_lacks(tmp_path: Path) -> None:
    """The label is a sum over all parties: the loss falls far below that of its class shares."""
    found = run(write_assisted(tmp_path), tmp_path / "run")
    assert len(found.history) == 2
    assert found.losses[0] > 0.9
    assert found.history[0]["loss"] < 0.8 * found.losses[0]
    assert found.metrics["test"] > 0.6


@pytest.mark.parametrize("task", ["regression", "binary"])
def test_every_task(task: str, tmp_path: Path) -> None:
    """One output a row for numbers and for two classes, by each of the other estimators."""
    model = {**TREES, "outputs": 1, "estimator": "forest" if task == "binary" else "boosting"}
    path = write_assisted(
        tmp_path, model={**model, "trees": 20}, federation={"name": "test", "task": task, "seed": 3}
    )
    frame = pd.read_csv(tmp_path / "agency.csv")
    frame["y"] = frame["y"].clip(upper=1) if task == "binary" else frame["x0"] + frame["y"]
    frame.to_csv(tmp_path / "agency.csv", index=False)
    found = run(path, tmp_path / "run")
    assert found.history[-1]["loss"] < found.losses[0]


def test_training_scores_know_nothing_of_random_labels(tmp_path: Path) -> None:
    """Scores are out of fold: labels without any signal are not learned by heart.

    In-fold scores of trees of two rows a leaf would take the loss below half of where it began.
    """
    model = {**LINEAR, "estimator": "boosting", "trees": 30, "leaves": 40, "rounds": 1}
    path = write_assisted(tmp_path, model=model)
    frame = pd.read_csv(tmp_path / "agency.csv")
    frame["y"] = np.random.default_rng(0).permutation(frame["y"].to_numpy())
    frame.to_csv(tmp_path / "agency.csv", index=False)
    found = run(path, tmp_path / "run")
    assert found.history[0]["loss"] > 0.9 * found.losses[0]


def test_the_primary_sees_a_sum_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every round returns one average over secondaries, within the ball that bounds each."""
    path = write_assisted(tmp_path)
    seen: list[tuple[str, torch.Tensor]] = []
    average_of = SimulatedExchange.average

    def watched(self: SimulatedExchange, plan: Any) -> torch.Tensor:
        words = [party.contribution for party in self.secondaries.values()]
        assert all(one.aggregation.cut.shape == (1, 3) for one in words)
        average = average_of(self, plan)
        seen.append((plan.purpose, average))
        return average

    monkeypatch.setattr(SimulatedExchange, "average", watched)
    run(path, tmp_path / "run")
    assert {purpose for purpose, _ in seen} == {"train", "validation", "test"}
    # The cut bounds a row: no party's score is longer than 1, and so no average is.
    assert all(float(one.norm(dim=2).max()) <= 1 + 1e-3 for _, one in seen)
    assert any(float(one.norm()) > 0 for _, one in seen)


def test_rows_without_a_link_get_zero(tmp_path: Path) -> None:
    """They are predicted by what the primary starts from: the shares of its classes."""
    path = write_assisted(
        tmp_path, linkage={"protection": "none", "max_distance": 1.0}, training={"batch_size": 32}
    )
    frame = pd.read_csv(tmp_path / "agency.csv")
    found = simulate(path, out=tmp_path / "run")
    far = frame.head(3).assign(lon=1000.0)
    near, away = found.predict(frame.head(3)), found.predict(far)
    shares = away.frame().filter(like="probability").to_numpy()
    assert np.ptp(shares, axis=0).max() == 0
    assert np.ptp(near.frame().filter(like="probability").to_numpy(), axis=0).max() > 0


@pytest.mark.parametrize("model", [LINEAR, TREES], ids=["linear", "trees"])
def test_a_kept_model_predicts_what_the_run_predicted(
    model: dict[str, Any], tmp_path: Path
) -> None:
    """All rounds' models answer at once, from files that hold no code."""
    path = write_assisted(tmp_path, model=model)
    simulate(path, out=tmp_path / "run")
    tested = pd.read_csv(tmp_path / "run" / "predictions.csv")
    rows = pd.read_csv(tmp_path / "agency.csv").iloc[tested["row"] - 1]
    rows.to_csv(tmp_path / "new.csv", index=False)
    found = predict(
        tmp_path / "run",
        tmp_path / "new.csv",
        out=tmp_path / "out.csv",
        data_root=tmp_path,
    ).frame()
    columns = [name for name in tested.columns if name.startswith("probability")]
    assert columns
    np.testing.assert_allclose(found[columns], tested[columns], atol=1e-6)


class PowerCutError(Exception):
    """The simulated crash."""


def test_a_run_that_was_cut_ends_like_an_undisturbed_one(tmp_path: Path) -> None:
    """Margins, steps and models of the rounds before come back."""
    path = write_assisted(tmp_path, rows=240, model={**TREES, "rounds": 3})
    once = run(path, tmp_path / "once")

    def cut(event: ProgressEvent) -> None:
        if isinstance(event, RoundDone) and (event.epoch, event.done) == (3, 1):
            raise PowerCutError

    with pytest.raises(PowerCutError):
        run(path, tmp_path / "cut", observe=cut)
    again = run(path, tmp_path / "cut", resume=True)
    assert again.losses == once.losses[2 * len(once.losses) // 3 :]
    for figure in ("train", "validation", "test", "best_epoch"):
        assert again.metrics[figure] == once.metrics[figure]


@pytest.mark.parametrize("accounting", ["sound", "as-published"])
def test_a_promise_is_refused_with_what_to_take_instead(accounting: str, tmp_path: Path) -> None:
    """Models that are fitted to private records without noise can't be behind an epsilon."""
    privacy = {
        "epsilon": 8.0,
        "delta": 1e-5,
        "encoder": "trained",
        "accounting": accounting,
    }
    path = write_assisted(tmp_path, privacy=privacy)
    with pytest.raises(PrivacyError, match=r"model\.family: 'assist'.*frozen encoders"):
        run(path, tmp_path / "run")


@pytest.mark.parametrize(
    ("sections", "says"),
    [
        ({"model": {**LINEAR, "outputs": 1}}, r"model\.outputs: is 1.*write model\.outputs = 3"),
        ({"privacy": {"mechanism": "none", "encoder": "frozen"}}, r'write encoder = "trained"'),
        ({"training": {"iso_gradients": 0.1}}, r"training\.iso_gradients"),
    ],
)
def test_settings_that_do_not_fit_are_refused(
    sections: dict[str, Any], says: str, tmp_path: Path
) -> None:
    path = write_assisted(tmp_path, **sections)
    with pytest.raises(ConfigError, match=says):
        run(path, tmp_path / "run")


def test_the_channel_says_that_labels_are_shown(tmp_path: Path) -> None:
    told = {one["channel"]: one for one in channels(read_federation(write_assisted(tmp_path)))}
    assert "labels can be read" in told["residuals"]["reveals"]
    assert told["residuals"]["guarantee"] == "not covered"
    assert told["gradients"]["guarantee"] == "nothing is sent"


def test_rounds_go_on_from_the_base(tmp_path: Path) -> None:
    """The base's margins are where residuals begin, and part of every prediction."""
    path = write_assisted(tmp_path, rows=240, base={"estimator": "linear"})
    found = run(path, tmp_path / "run")
    assert [line["epoch"] for line in found.history] == [0, 1, 2]
    base, first, _ = found.history
    assert found.losses[0] == pytest.approx(base["loss"])
    assert first["loss"] < 0.8 * base["loss"]
    assert first["validation"] > base["validation"]
    assert found.metrics["base"]["used"] == "joint"
