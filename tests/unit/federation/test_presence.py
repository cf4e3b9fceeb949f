"""Sessions without a secondary that is lost: what the primary remembers, and who believes what."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from securevfl import read_federation
from securevfl.config.federation import FederationConfig
from securevfl.config.sections import TrainingSettings
from securevfl.core.errors import ConfigError, ProtocolError
from securevfl.federation.checkpoint import PRESENCE, Checkpoints, StateFolder
from securevfl.federation.messages import EpochMark, Rejoin, RoundPlan
from securevfl.federation.rounds.network_primary import NetworkPrimary
from securevfl.federation.rounds.secondary import EpochSaver, Secondary
from securevfl.federation.run_plan import RunFacts, RunPlan, plan_run
from securevfl.federation.session.handshake import own_epoch, require_own_run
from securevfl.federation.session.membership import (
    Presence,
    SecondariesBackError,
    absences_in_words,
    least_secondaries,
    require_active,
)
from securevfl.federation.session.request_validator import RequestValidator, SessionLimits
from securevfl.models.tasks import TaskHead
from securevfl.testing import write_federation

NAMES = {1: "bank-1", 2: "bank-2", 3: "bank-3"}
RUN = "1" * 32
FACTS = RunFacts(rows=60, train_rows=42, validation_rows=6, test_rows=12, run=RUN)
NOISED = {"epsilon": 50.0, "delta": 1e-4, "encoder": "trained"}
LEAST = {"on_loss": "continue", "least_secondaries": 2}


def config_of(folder: Path, **sections: Any) -> FederationConfig:
    sections = {"privacy": NOISED, "runtime": LEAST, **sections}
    return read_federation(write_federation(folder, rows=60, secondaries=3, **sections))


def kept(folder: Path) -> Presence:
    files = StateFolder(folder, settings_digest="any")
    files.run = RUN
    return Presence(files, NAMES)


def test_who_was_absent_and_when_outlives_the_primary(tmp_path: Path) -> None:
    """Repeated sessions count once, a run that goes back forgets, and the last one may be open."""
    presence = kept(tmp_path)
    assert presence.current is None
    assert presence.since == 0
    presence.begin(after=0, active=(1, 2, 3))
    presence.begin(after=2, active=(1, 2))
    presence.begin(after=2, active=(1, 2, 3))  # back before an epoch was done without it
    presence.begin(after=3, active=(2, 3))
    assert not (tmp_path / "epoch-1.pt").exists()
    presence = kept(tmp_path)
    assert presence.current == (2, 3)
    assert presence.since == 3
    presence.begin(after=5, active=(1, 2, 3))
    presence.begin(after=6, active=(1, 3))
    presence = kept(tmp_path)
    found = presence.absences()
    assert found == [
        {"party": "bank-1", "from_epoch": 4, "to_epoch": 5},
        {"party": "bank-2", "from_epoch": 7, "to_epoch": None},
    ]
    assert absences_in_words(found, epochs=9) == (
        "bank-1 was absent in epochs 4 to 5; bank-2 was absent from epoch 7 on, test rows included"
    )
    assert absences_in_words(found[1:], epochs=6) == "bank-2 was absent from the test rows"
    assert absences_in_words([], epochs=6) == ""


def test_a_damaged_memory_leaves_nobody_out(tmp_path: Path) -> None:
    presence = kept(tmp_path)
    presence.begin(after=0, active=(1, 2))
    # Nor does what is left of a run that came to nothing.
    assert Presence(StateFolder(tmp_path, settings_digest="any"), NAMES).current is None
    (tmp_path / PRESENCE).write_bytes(b"x")
    assert kept(tmp_path).current is None


def test_who_is_waited_for(tmp_path: Path) -> None:
    """All at first; then who was there is given a while, but too few never are enough."""

    def enough(joined: list[str], waited_s: float, *, awaited: tuple[str, ...] = ()) -> bool:
        return presence.enough(least=2, patience_s=60.0, awaited=awaited)(joined, waited_s)

    presence = kept(tmp_path)
    assert not enough(["bank-1", "bank-2"], 1e9)
    presence.begin(after=0, active=(1, 2, 3))
    assert not enough(["bank-1", "bank-2"], 59.0)
    assert enough(["bank-1", "bank-2"], 60.0)
    assert enough(["bank-1", "bank-2", "bank-3"], 0.0)
    assert not enough(["bank-1"], 1e9)
    # A helper is none of those whose noise hides the others.
    assert not enough(["bank-1", "broker"], 1e9)
    presence.begin(after=2, active=(1, 2))
    assert enough(["bank-1", "bank-2"], 0.0)
    assert not enough(["bank-1", "bank-3"], 59.0)
    assert enough(["bank-1", "bank-3"], 60.0)
    assert not enough(["bank-1", "bank-2"], 59.0, awaited=("bank-3",))
    assert enough(["bank-1", "bank-2"], 60.0, awaited=("bank-3",))


def test_whoever_calls_breaks_a_session_off(tmp_path: Path) -> None:
    presence = kept(tmp_path)
    presence.let_back()
    presence.calling = lambda: ("bank-2",)
    with pytest.raises(SecondariesBackError) as caught:
        presence.let_back()
    assert caught.value.names == ("bank-2",)


def test_noise_is_made_for_the_fewest_from_the_first_round(tmp_path: Path) -> None:
    """Every session has one and the same plan, which any two of three secondaries can keep."""
    going_on = config_of(tmp_path)
    waiting = config_of(tmp_path, runtime={"on_loss": "wait"})
    whole, wait = plan_run(going_on, FACTS), plan_run(waiting, FACTS)
    fewer = plan_run(going_on, replace(FACTS, active=(1, 3)))

    assert (wait.releases.min_active, whole.releases.min_active) == (3, 2)
    # Two shares make up for three: each has 3/2 of the variance.
    assert whole.noise_share_std == pytest.approx(wait.noise_share_std * 1.5**0.5, rel=1e-6)
    assert fewer.noise_share_std == whole.noise_share_std
    assert fewer.releases == whole.releases
    assert fewer.cut == whole.cut
    assert (whole.active, fewer.active) == (3, 2)
    assert fewer.secondaries == {1: "bank-1", 3: "bank-3"}
    # What it costs is what the two noise shares that are left give: the epsilon that was asked for.
    two = replace(whole.releases, parties=2, min_active=2)
    assert two.epsilon(whole.noise_share_std) == pytest.approx(50.0, rel=1e-3)
    assert two.epsilon(whole.noise_share_std) <= 50.0
    dropped = config_of(tmp_path, model={"party_dropout": 0.5})
    assert plan_run(dropped, FACTS).releases.min_active == 1


def limits(plan: RunPlan) -> SessionLimits:
    return SessionLimits.of(plan, party="bank-1")


def test_a_round_has_all_who_are_there_and_nobody_else(tmp_path: Path) -> None:
    plan = plan_run(config_of(tmp_path), replace(FACTS, active=(1, 3)))
    for active in ((1,), (1, 2), (1, 2, 3), (3,)):
        asked = RoundPlan(round_number=1, rows=np.arange(4), active=active, purpose="train")
        with pytest.raises(ProtocolError, match=r"parties|take part"):
            RequestValidator(limits(plan)).validate_round(asked)
    RequestValidator(limits(plan)).validate_round(
        RoundPlan(round_number=1, rows=np.arange(4), active=(1, 3), purpose="train")
    )


@pytest.mark.parametrize(
    ("active", "said"),
    [
        ((1,), "training of 1 secondaries.*wants 2 at least .runtime.least_secondaries"),
        ((2, 3), "training without it"),
        ((1, 4), "impossible parties"),
    ],
)
def test_a_secondary_holds_the_primary_to_its_own_file(
    tmp_path: Path, active: tuple[int, ...], said: str
) -> None:
    """Too few, one that is there called absent, and one that nobody knows."""
    config = config_of(tmp_path)
    with pytest.raises(ProtocolError, match=said):
        require_active(config, active, rank=1, predicts=False)
    require_active(config, (1, 3), rank=1, predicts=False)
    waits = config_of(tmp_path, runtime={"on_loss": "wait"})
    with pytest.raises(ProtocolError, match=r"leaves out parties of a run.*'wait'"):
        require_active(waits, (1, 3), rank=1, predicts=False)


def test_predictions_may_lack_whom_training_lacked(tmp_path: Path) -> None:
    unnoised = {"mechanism": "none", "encoder": "trained"}
    assert least_secondaries(config_of(tmp_path, privacy=unnoised)) == 2
    waits = {"on_loss": "wait"}
    assert least_secondaries(config_of(tmp_path, privacy=unnoised, runtime=waits)) == 3


def test_who_was_away_goes_on_with_its_last_epoch(tmp_path: Path) -> None:
    """The others may be further; they may not be behind, nor of another run."""
    config, at = config_of(tmp_path), replace(FACTS, resume_epoch=7)
    assert own_epoch([2, 3], at) == 3
    assert own_epoch([6, 7], at) == 7
    assert own_epoch([7, 8], at) == 7
    assert own_epoch([], at) == 0
    for epochs in ([2, 3], [6, 7], []):
        require_own_run(config, at, run=RUN, epochs=epochs, stage_steps=[])
    with pytest.raises(ProtocolError, match="from epoch 7, which this party does not have"):
        require_own_run(config, at, run=RUN, epochs=[8, 9], stage_steps=[])
    with pytest.raises(ProtocolError, match="this party starts afresh"):
        require_own_run(config, at, run="", epochs=[], stage_steps=[])


def test_a_session_ends_for_others_between_epochs_alone(tmp_path: Path) -> None:
    validator = RequestValidator(limits(plan_run(config_of(tmp_path), FACTS)))
    validator.validate_rejoin()
    validator.validate_round(
        RoundPlan(round_number=1, rows=np.arange(4), active=(1, 2, 3), purpose="train")
    )
    with pytest.raises(ProtocolError, match="within epoch 1"):
        validator.validate_rejoin()
    over = RequestValidator(limits(plan_run(config_of(tmp_path), FACTS)))
    over.start_after(1)
    over.validate_epoch(EpochMark(epoch=1, best=False, restore_best=True))
    with pytest.raises(ProtocolError, match="within epoch"):
        over.validate_rejoin()


def test_who_missed_the_best_epoch_keeps_the_weights_that_it_has(tmp_path: Path) -> None:
    """Of an epoch before it came back; one of its own it must have, whatever the primary says."""
    checkpoints = Checkpoints(tmp_path, settings_digest="any")
    checkpoints.begin(RUN)
    secondary = object.__new__(Secondary)
    secondary.bottom = model = torch.nn.Linear(1, 1)
    before = model.weight.detach().clone()
    keep = EpochSaver(secondary, checkpoints, came_back=4)
    keep(EpochMark(epoch=4, best=False, restore_best=True))
    assert torch.equal(model.weight, before)
    with pytest.raises(ConfigError, match="does not exist"):
        keep(EpochMark(epoch=5, best=False, restore_best=True))


def test_only_who_is_absent_can_be_back() -> None:
    told = Rejoin(ranks=(2, 3)).to_message()
    assert Rejoin.from_message(told, absent=(2, 3, 4)) == Rejoin(ranks=(2, 3))
    for absent in ((), (2,), (3, 4)):
        with pytest.raises(ProtocolError, match="are back"):
            Rejoin.from_message(told, absent=absent)
    with pytest.raises(ProtocolError, match="are back"):
        Rejoin.from_message(Rejoin(ranks=()).to_message(), absent=(2,))


def test_the_best_epoch_is_one_of_those_who_are_there_now() -> None:
    """Patience begins anew with them; a run that was over stays as it was."""
    primary = object.__new__(NetworkPrimary)
    primary.head = TaskHead(task="multiclass", num_classes=3)
    primary.training = TrainingSettings(patience=2)
    primary.plan = SimpleNamespace(config=SimpleNamespace(training=SimpleNamespace(epochs=20)))
    primary.may_go_on = lambda: True
    primary.epoch, primary.since = 4, 0
    primary.best_metric, primary.best_epoch = 0.9, 3
    lines = enumerate((0.1, 0.2, 0.9, 0.3), 1)
    primary.history = [{"epoch": epoch, "validation": value} for epoch, value in lines]
    primary.continues_with_others(4)
    assert (primary.since, primary.best_metric) == (4, None)
    primary.best_metric, ended = 0.5, []
    for epoch, validation in enumerate((0.5, 0.4, 0.45), 5):
        primary.epoch = epoch
        primary.history.append({"epoch": epoch, "validation": validation})
        ended.append(primary.is_finished)
    assert ended == [False, False, True]
    primary.best_epoch = 5
    primary.continues_with_others(7)
    assert (primary.since, primary.best_metric) == (4, 0.5)
