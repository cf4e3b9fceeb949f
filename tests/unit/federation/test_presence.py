"""Who takes part: all in training, fewer in predictions, and each from the epoch that all have."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from securevfl import read_federation
from securevfl.config.federation import FederationConfig
from securevfl.core.errors import ConfigError, ProtocolError
from securevfl.federation.checkpoint import Checkpoints
from securevfl.federation.messages import EpochMark
from securevfl.federation.rounds.secondary import EpochSaver, Secondary
from securevfl.federation.run_plan import RunFacts, plan_run
from securevfl.federation.session.handshake import require_own_run
from securevfl.federation.session.membership import least_secondaries, require_active
from securevfl.testing import write_federation

RUN = "1" * 32
FACTS = RunFacts(rows=60, train_rows=42, validation_rows=6, test_rows=12, run=RUN)


def config_of(folder: Path, **sections: Any) -> FederationConfig:
    privacy = {"epsilon": 50.0, "delta": 1e-4, "encoder": "trained"}
    sections = {"privacy": privacy, **sections}
    return read_federation(write_federation(folder, rows=60, secondaries=3, **sections))


def test_noise_is_made_for_as_few_as_answer_a_round(tmp_path: Path) -> None:
    assert plan_run(config_of(tmp_path), FACTS).releases.min_active == 3
    dropped = config_of(tmp_path, model={"party_dropout": 0.5})
    assert plan_run(dropped, FACTS).releases.min_active == 2


def test_training_leaves_nobody_out(tmp_path: Path) -> None:
    """Whatever the primary says; of predictions it is held to this party's own file."""
    config = config_of(tmp_path, prediction={"least_secondaries": 2})
    with pytest.raises(ProtocolError, match="leaves out parties of a run that trains"):
        require_active(config, (1, 3), rank=1, predicts=False)
    require_active(config, None, rank=1, predicts=False)
    require_active(config, (1, 3), rank=1, predicts=True)
    for active, told in {
        (1,): "of 1 secondaries.*wants 2 at least",
        (2, 3): "predictions without it",
        (1, 4): "impossible parties",
    }.items():
        with pytest.raises(ProtocolError, match=told):
            require_active(config, active, rank=1, predicts=True)


def test_predictions_without_noise_take_all(tmp_path: Path) -> None:
    unnoised = {"mechanism": "none", "encoder": "trained"}
    assert least_secondaries(config_of(tmp_path, privacy=unnoised)) == 3


def test_a_run_goes_on_from_an_epoch_that_this_party_has(tmp_path: Path) -> None:
    config, at = config_of(tmp_path), replace(FACTS, resume_epoch=7)
    require_own_run(config, at, run=RUN, epochs=[6, 7], stage_steps=[])
    for epochs in ([2, 3], [8, 9], []):
        with pytest.raises(ProtocolError, match="from epoch 7, which this party does not have"):
            require_own_run(config, at, run=RUN, epochs=epochs, stage_steps=[])
    with pytest.raises(ProtocolError, match="this party starts afresh"):
        require_own_run(config, at, run="", epochs=[], stage_steps=[])


def test_the_best_epochs_weights_must_be_there(tmp_path: Path) -> None:
    """Whatever epoch the primary calls the best."""
    checkpoints = Checkpoints(tmp_path, settings_digest="any")
    checkpoints.begin(RUN)
    secondary = object.__new__(Secondary)
    secondary.bottom = torch.nn.Linear(1, 1)
    with pytest.raises(ConfigError, match="does not exist"):
        EpochSaver(secondary, checkpoints)(EpochMark(epoch=5, best=False, restore_best=True))
