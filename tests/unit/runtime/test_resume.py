"""A run that was cut off goes on as if it had not been: same draws, same weights, same best."""

from functools import partial
from pathlib import Path

import pandas as pd
import pytest
import torch
from helpers.secondaries import make_secondary

from securevfl import RunResult
from securevfl.core.errors import ConfigError, PrivacyError
from securevfl.core.progress import ProgressEvent, RoundDone
from securevfl.federation.checkpoint import Checkpoints
from securevfl.federation.messages import EpochMark
from securevfl.federation.rounds.secondary import EpochSaver
from securevfl.testing import run_in_process, write_federation

EPOCHS = 5
MODEL = {"party_dropout": 0.5, "average_positions_every": 2, "dropout": 0.2}
SHORT = {"rows": 90, "training": {"epochs": EPOCHS, "batch_size": 32, "schedule": "cosine"}}


class PowerCutError(Exception):
    """The simulated crash."""


def cut_at(epoch: int, done: int):
    def observe(event: ProgressEvent) -> None:
        if isinstance(event, RoundDone) and (event.epoch, event.done) == (epoch, done):
            raise PowerCutError

    return observe


def silent(event: ProgressEvent) -> None:
    del event


def run(path: Path, out: Path, *, resume: bool = False, observe=silent) -> RunResult:
    return run_in_process(path, out, resume=resume, observe=observe, with_alone=True)


@pytest.mark.parametrize(
    ("epoch", "done", "base"), [(1, 1, "none"), (2, 1, "none"), (3, 2, "linear"), (5, 2, "none")]
)
def test_interrupted_run_ends_like_an_undisturbed_one(
    epoch: int, done: int, base: str, tmp_path: Path
) -> None:
    """Every later loss is the same number, and with a base, which is fitted again, the choice too.

    With dropout, party dropout, averaged encodings, and steps that grow smaller.
    """
    path = write_federation(tmp_path, model=MODEL, base={"estimator": base}, **SHORT)
    once = run(path, tmp_path / "once")
    out = tmp_path / "cut"
    with pytest.raises(PowerCutError):
        run(path, out, observe=cut_at(epoch, done))
    again = run(path, out, resume=True)
    a_round = len(once.losses) // EPOCHS
    assert again.losses == once.losses[(epoch - 1) * a_round :]
    for figure in ("train", "validation", "test", "epochs", "best_epoch", "alone_test"):
        assert again.metrics[figure] == once.metrics[figure]
    assert again.metrics.get("base") == once.metrics.get("base")
    histories = [
        pd.read_csv(folder / "history.csv").drop(columns="seconds")
        for folder in (tmp_path / "once", out)
    ]
    assert histories[0].equals(histories[1])


def test_epochs_that_all_have_lost_are_no_place_to_go_on_from(tmp_path: Path) -> None:
    """What one party has lost of a run that was further than its first epoch does not begin again.

    Nor does a fresh run in its folder.
    """
    path = write_federation(tmp_path, **SHORT)
    out = tmp_path / "run"
    with pytest.raises(PowerCutError):
        run(path, out, observe=cut_at(3, 1))
    for epoch in (1, 2):
        (out / "parties" / "bank-1" / f"epoch-{epoch}.pt").unlink()
    with pytest.raises(ConfigError, match="nothing that every party has saved, though one has"):
        run(path, out, resume=True)
    with pytest.raises(ConfigError, match="holds a run already"):
        run(path, out)


def test_one_party_without_its_checkpoints(tmp_path: Path) -> None:
    """The federation goes on from what all parties hold, not from what the primary holds."""
    path = write_federation(tmp_path, **SHORT)
    out = tmp_path / "run"
    with pytest.raises(PowerCutError):
        run(path, out, observe=cut_at(4, 1))
    (out / "parties" / "bank-2" / "epoch-3.pt").unlink()
    result = run(path, out, resume=True)
    assert len(result.losses) == 3 * 2  # epochs 3 to 5 of two rounds
    assert result.metrics["epochs"] == EPOCHS


def test_best_epoch_is_the_one_that_all_agreed_on(tmp_path: Path) -> None:
    """A best epoch that only this party saw before a crash does not replace the common one."""
    secondary = make_secondary()
    checkpoints = Checkpoints(tmp_path, settings_digest="abc")
    checkpoints.begin("1" * 32)
    keeper = EpochSaver(secondary, checkpoints)

    def end(epoch: int, *, best: bool) -> None:
        with torch.no_grad():
            for parameter in secondary.bottom.parameters():
                parameter.fill_(float(epoch))
        keeper(EpochMark(epoch=epoch, best=best))

    def restored(best_epoch: int) -> float:
        keeper(EpochMark(epoch=best_epoch, best=False, restore_best=True))
        return float(next(secondary.bottom.parameters()).detach().flatten()[0])

    end(1, best=True)
    end(2, best=False)
    end(3, best=True)
    assert restored(3) == 3.0
    # The primary never saved epoch 3, and goes on from epoch 2 with epoch 1 as its best.
    checkpoints.load(2, partial(secondary.resume, 2))
    end(3, best=False)
    assert restored(1) == 1.0
    with pytest.raises(ConfigError, match=r"best-3\.pt: does not exist"):
        restored(3)


@pytest.mark.parametrize("party", ["agency", "bank-1"])
def test_a_ledger_that_lost_lines_stops_the_resumed_run(party: str, tmp_path: Path) -> None:
    """Weights were bought with releases: a ledger without them is refused, whoever's it is."""
    path = write_federation(tmp_path, model=MODEL, **SHORT)
    out = tmp_path / "cut"
    with pytest.raises(PowerCutError):
        run(path, out, observe=cut_at(3, 2))
    ledger = out / "parties" / party / "ledger.jsonl"
    lines = ledger.read_text(encoding="utf-8").splitlines(keepends=True)
    ledger.write_text("".join(lines[:2]), encoding="utf-8")

    with pytest.raises(PrivacyError, match="lacks releases that the checkpoint knows of"):
        run(path, out, resume=True)
