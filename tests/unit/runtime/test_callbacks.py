"""Callbacks hear what a run tells, and no run ends because of one."""

import importlib.util
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import securevfl as sv
from securevfl.core.errors import ConfigError
from securevfl.testing import write_federation

TINY = {"family": "avgsim", "neighbours": 2, "hidden": 4}


class Ears(sv.callbacks.Callback):
    """Keeps what it hears, and fails at the event of one kind."""

    def __init__(self, failing: type[Any] | None = None, *, at_the_end: bool = False) -> None:
        self.events: list[sv.progress.ProgressEvent] = []
        self.ends: list[Mapping[str, Any] | None] = []
        self.failing, self.at_the_end = failing, at_the_end

    def on_event(self, event: sv.progress.ProgressEvent) -> None:
        self.events.append(event)
        if self.failing is not None and isinstance(event, self.failing):
            raise OSError("the disk is full")

    def on_end(self, figures: Mapping[str, Any] | None) -> None:
        self.ends.append(figures)
        if self.at_the_end:
            raise OSError("the disk is full")


def simulated(folder: Path, **how: Any) -> sv.RunResult:
    path = write_federation(folder, secondaries=1, rows=80, model=TINY)
    return sv.simulate(path, out=folder / "run", **how)


def test_tensorboard_reads_the_runs_own_figures(tmp_path: Path) -> None:
    """By its own reader: every round's loss, every epoch's metrics, and the last figures."""
    board = sv.callbacks.TensorBoard(tmp_path / "logs")
    run = simulated(tmp_path, callbacks=[board])
    found = EventAccumulator(str(tmp_path / "logs")).Reload()

    def curve(name: str) -> list[tuple[int, float]]:
        return [(point.step, point.value) for point in found.Scalars(name)]

    assert curve("round/loss") == [
        (number, pytest.approx(loss, rel=1e-6)) for number, loss in enumerate(run.losses, 1)
    ]
    assert curve("epoch/validation") == [
        (row["epoch"], pytest.approx(row["validation"], rel=1e-6)) for row in run.history
    ]
    assert curve("end/test") == [(0, pytest.approx(run.metrics["test"], rel=1e-6))]
    assert curve("end/alone_test") == [(0, pytest.approx(run.metrics["alone_test"], rel=1e-6))]
    assert curve("end/gain") == [(0, pytest.approx(run.metrics["gain"]["value"], rel=1e-6))]
    assert {"end/delta", "epoch/seconds"} <= set(found.Tags()["scalars"])


@pytest.mark.parametrize("at_the_end", [False, True])
def test_a_callback_that_fails_is_named_once_and_the_run_goes_on(
    at_the_end: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The others hear all of it; the failed one is told that it is over."""
    deaf = Ears(None if at_the_end else sv.progress.RoundDone, at_the_end=at_the_end)
    well, heard = Ears(), []
    run = simulated(tmp_path, callbacks=[deaf, well], observe=heard.append)

    said = [record.__dict__["figures"]["text"] for record in caplog.records]
    (warning,) = [text for text in said if text.startswith("callback Ears failed")]
    assert "and is not called again: OSError: the disk is full" in warning
    assert [event for event in heard if event not in well.events] == [
        sv.progress.Warned(text=warning)
    ]
    assert well.ends == [run.metrics]
    assert deaf.ends == ([run.metrics, None] if at_the_end else [None])
    rounds = [event for event in deaf.events if isinstance(event, sv.progress.RoundDone)]
    assert len(rounds) == (len(run.losses) if at_the_end else 1)


def test_a_run_that_fails_is_told(tmp_path: Path) -> None:
    """Whatever stops it; what an observer raises still stops it."""
    ears = Ears()

    def stop(_event: sv.progress.ProgressEvent) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        simulated(tmp_path, callbacks=[ears], observe=stop)
    assert ears.ends == [None]
    with pytest.raises(ConfigError):
        sv.train(tmp_path / "none.toml", out=tmp_path / "run", callbacks=[ears])
    assert ears.ends == [None, None]


def test_mlflow_is_asked_for_in_one_line() -> None:
    """It is an extra, and this environment has none of it."""
    if importlib.util.find_spec("mlflow") is not None:
        pytest.skip("MLflow is installed here")
    make: Callable[[], object] = sv.callbacks.MLflow
    with pytest.raises(ConfigError, match=r"^callbacks\.MLflow: .*pip install 'securevfl\[mlflow"):
        make()
