"""Serving on without a secondary that was lost."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.kept import kept

from securevfl import read_federation
from securevfl.core.errors import PartyFailedError
from securevfl.core.progress import ProgressEvent, Warned
from securevfl.federation.session.party_files import PartyFiles
from securevfl.runtime.party import PartySession
from securevfl.runtime.primary_party import PredictingPrimary
from securevfl.runtime.run_options import PartyJob
from securevfl.serving import server
from securevfl.testing import write_federation
from securevfl.transport.identity import Identity


def life(folder: Path, **sections: Any) -> PartySession:
    config = read_federation(write_federation(folder, rows=20, secondaries=3, **sections))
    job = PartyJob(
        config=config,
        name="agency",
        run_folder=folder,
        identity_folder=folder,
        data_root=folder,
        device=torch.device("cpu"),
        resume=True,
        serves=True,
    )
    return PartySession(
        job=job,
        identity=Identity.create("agency", valid_days=1),
        pinned={},
        files=PartyFiles(job.folder, config, party="agency", resume=True, simulated=True),
    )


def test_each_session_leaves_out_whom_the_last_one_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    primary = life(tmp_path, model={"party_dropout": 0.34})
    heard: list[ProgressEvent] = []
    begun: list[tuple[str, ...]] = []
    losses = iter([None, "bank-2", "agency", "bank-1", "bank-3"])

    @contextmanager
    def predicting(_life: Any, _model: Any, **named: Any) -> Iterator[PredictingPrimary]:
        begun.append(tuple(named["without"]))
        yield PredictingPrimary.__new__(PredictingPrimary)
        lost = next(losses)
        if lost is not None:
            error = PartyFailedError(f"{lost}: is gone")
            error.party = lost
            raise error

    monkeypatch.setattr(server, "predicting", predicting)
    sessions = server.WithoutLost(
        primary,
        kept(primary.config, "agency"),
        opened=lambda _transport: None,
        observe=heard.append,
    )
    with sessions.session():
        pass
    for _ in range(4):
        with pytest.raises(PartyFailedError), sessions.session():
            pass

    # Two must answer: without bank-2 there are two, and nobody else may go.
    assert begun == [(), (), ("bank-2",), ("bank-2",), ("bank-2",)]
    texts = [event.text for event in heard if isinstance(event, Warned)]
    assert texts[0] == "bank-2: lost; predictions go on without it and say so"
    assert all("too few secondaries are left" in text for text in texts[1:])
    assert len(texts) == 3
