"""Who may be absent from predictions, as the primary asks and as every secondary checks."""

import contextlib
import tomllib
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from helpers.federations import FROZEN

from securevfl import read_federation
from securevfl.config.federation import FederationConfig
from securevfl.core.errors import ConfigError, PrivacyError, ProtocolError
from securevfl.data.tables import PartyTable
from securevfl.federation.messages import PredictRequest, Welcome
from securevfl.federation.run_plan import RunFacts, new_run, plan_prediction
from securevfl.federation.saved_model import SavedModel
from securevfl.federation.session.handshake import Joined
from securevfl.federation.session.membership import (
    absent_names,
    active_without,
    least_secondaries,
    require_active,
)
from securevfl.federation.session.party_files import PartyFiles
from securevfl.runtime import party, secondary_party
from securevfl.runtime.party import PartySession
from securevfl.runtime.run_options import PartyJob
from securevfl.testing import save_federation, write_federation
from securevfl.transport.star import SecondaryTransport

PREDICTS = RunFacts(rows=0, train_rows=0, validation_rows=0, test_rows=0, predicts=True)


def config_of(folder: Path, **sections: Any) -> FederationConfig:
    return read_federation(
        write_federation(
            folder,
            rows=20,
            secondaries=3,
            **sections,
            of_secondaries={"scaling": "bounds", "bounds": [-4.0, 4.0]},
        )
    )


def test_how_few_may_answer_follows_from_what_protects(tmp_path: Path) -> None:
    def least(**sections: Any) -> int:
        return least_secondaries(config_of(tmp_path, **sections))

    frozen = {"mechanism": "none", "encoder": "frozen"}
    pooled = {"release": "pooled", "top": "additive", "hidden": 6}
    assert least() == 3
    assert least(model={"party_dropout": 0.34}) == 2
    assert least(privacy=frozen, model={"party_dropout": 0.34}) == 3
    assert least(privacy=frozen, model=pooled, encoder={"method": "random"}) == 1
    assert least(privacy=FROZEN) == 1
    assert least(privacy={**FROZEN, "colluding": 1}) == 2
    assert least(privacy={**FROZEN, "colluding": 1}, prediction={"least_secondaries": 3}) == 3
    assert least(prediction={"least_secondaries": 1}) == 1


def test_the_primary_names_who_is_absent(tmp_path: Path) -> None:
    config = config_of(tmp_path, model={"party_dropout": 0.34})

    assert active_without(config, []) is None
    assert active_without(config, ["bank-2"]) == (1, 3)
    assert absent_names(config, (1, 3)) == ("bank-2",)
    # Where all are absent nobody is asked.
    assert active_without(config, ["bank-3", "bank-1", "bank-2"]) == ()
    for without, why in (
        (["bnk-2"], "no secondary 'bnk-2'.*did you mean 'bank-2'"),
        (["agency"], "no secondary 'agency'"),
        (["bank-1", "bank-1"], "twice"),
        (["bank-1", "bank-2"], "leaves 1 of 3.*least_secondaries = 1"),
    ):
        with pytest.raises(ConfigError, match=why):
            active_without(config, without)


@pytest.mark.parametrize(
    ("active", "rank", "why"),
    [
        ((), 1, "impossible"),
        ((1, 1), 1, "impossible"),
        ((3, 1), 1, "impossible"),
        ((1, 4), 1, "impossible"),
        ((0, 1), 1, "impossible"),
        ((2, 3), 1, "without it"),
        ((1,), 1, "wants 2 at least"),
    ],
)
def test_a_secondary_believes_no_list_of_parties(
    tmp_path: Path, active: tuple[int, ...], rank: int, why: str
) -> None:
    config = config_of(tmp_path, model={"party_dropout": 0.34})

    with pytest.raises(ProtocolError, match=why):
        require_active(config, active, rank=rank, predicts=True)
    require_active(config, (1, 3), rank=rank, predicts=True)
    require_active(config, None, rank=rank, predicts=True)


def test_messages_carry_ranks_and_nothing_else() -> None:
    asked = PredictRequest(run=new_run(), rows=4, predicted_rows=2, active=(1, 3))
    assert PredictRequest.from_message(asked.to_message()) == asked
    assert asked.facts.active == (1, 3)
    for active in ("1,3", [1, True], [1.0], None):
        told = asked.to_message()
        told.meta["active"] = active
        with pytest.raises(ProtocolError):
            PredictRequest.from_message(told)

    welcome = Welcome(facts=replace(PREDICTS, active=(1, 3)), keys={})
    assert Welcome.from_message(welcome.to_message(), callers=lambda _facts: []) == welcome


def test_fewer_secondaries_cost_what_their_noise_protects(tmp_path: Path) -> None:
    config = config_of(tmp_path, privacy=FROZEN)
    asked = replace(PREDICTS, rows=8, predicted_rows=8)

    def cost(active: tuple[int, ...] | None) -> float:
        plan = plan_prediction(config, replace(asked, active=active), noise_share_std=2.0)
        assert tuple(plan.secondaries) == (active or (1, 2, 3))
        return plan.releases.epsilon(plan.noise_share_std)

    everybody, two, one = cost(None), cost((1, 3)), cost((3,))
    assert everybody < two < one
    assert cost((1, 2, 3)) == everybody
    # As much noise as one more than two: the sum of variances decides, not who adds them.
    assert cost((1, 2)) == two
    colluding = config_of(tmp_path, privacy={**FROZEN, "colluding": 1})
    with pytest.raises(PrivacyError):
        plan_prediction(colluding, replace(asked, active=(3,)), noise_share_std=2.0)


@pytest.mark.parametrize(
    ("session", "active"), [((1, 2), (1, 2, 3)), ((1, 2), (1, 3)), ((1, 2), (1,)), (None, (1, 2))]
)
@pytest.mark.parametrize("who", ["bank-1", "dealer"])
def test_a_request_to_others_than_the_sessions_parties_is_refused(
    who: str,
    session: tuple[int, ...] | None,
    active: tuple[int, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Noise is counted for those who were checked when the session began; nothing is booked."""
    path = write_federation(
        tmp_path,
        rows=20,
        secondaries=3,
        linkage={"protection": "shares", "ranges": [[-1.0, 11.0], [-1.0, 11.0]]},
    )
    source = tomllib.loads(path.read_text())
    source["party"] += [{"name": name, "role": name} for name in ("coordinator", "dealer")]
    config = read_federation(save_federation(tmp_path, source))
    asked = PredictRequest(run=new_run(), rows=4, predicted_rows=2, active=active)
    star = mock.Mock(spec=Joined, facts=replace(PREDICTS, active=session))
    star.transport = mock.Mock(spec=SecondaryTransport)
    star.transport.receive.return_value = asked.to_message()
    job = mock.Mock(spec=PartyJob, serves_on=False)
    job.name, job.config, job.device = who, config, torch.device("cpu")
    life = mock.Mock(spec=PartySession, config=config, job=job, files=mock.Mock(spec=PartyFiles))
    life.identity = life.pinned = None
    serve: Callable[[], None] = partial(party.serve_as_helper, life)
    if who == "bank-1":
        model, table = mock.Mock(spec=SavedModel), mock.Mock(spec=PartyTable)
        serve = secondary_party._Requests(
            secondary_party.SecondarySession(life, star), model, table
        ).serve
    monkeypatch.setattr(party, "join_session", lambda *_, **__: contextlib.nullcontext(star))

    with pytest.raises(ProtocolError, match=r"asks for predictions of the parties .*session has"):
        serve()
    star.transport.send.assert_not_called()
    life.files.open_prediction.assert_not_called()
