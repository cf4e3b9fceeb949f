"""What a run shows of its progress where stderr is no terminal."""

import pytest

from securevfl.cli import progress
from securevfl.cli.progress import RunProgress
from securevfl.core.progress import CiphertextsMade, EpochDone, LinksMade


def test_long_steps_of_linking_tell_the_time_left(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of the step that is on, and of nothing else; without an estimate there is no line."""
    monkeypatch.setattr(progress, "_QUIET_SECONDS", 0.0)
    with RunProgress(metric="rmse") as show:
        show(CiphertextsMade(name="lab", done=0, of=90, seconds_left=3700.4))
        show(LinksMade(name="bank", done=0, of=60))
        show(LinksMade(name="bank", done=30, of=60, seconds_left=61.0))
        show(EpochDone(epoch=1, epochs=2, loss=0.5, train=0.5, validation=0.25, seconds=1.0))
    assert capsys.readouterr().err.splitlines() == [
        "lab prepares ciphertexts 0/90: 1:01:40 left",
        "linking bank 30/60: 0:01:01 left",
        "epoch 1/2: loss 0.5000  validation rmse 0.2500",
    ]
