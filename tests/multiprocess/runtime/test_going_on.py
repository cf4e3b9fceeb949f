"""A run that goes on without secondaries: one that comes back, and one that is gone for good."""

import time
import tomllib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers.patience import PATIENCE_S
from helpers.warm import Program

from securevfl import read_federation
from securevfl.cli.results import print_results
from securevfl.core.progress import PresenceChanged, ProgressEvent, RoundDone
from securevfl.desk.report.verify import verify_run
from securevfl.ledger.ledger_file import lines_of_run
from securevfl.runtime.launching import run_party
from securevfl.runtime.run_folder import RunFigures, write_figures
from securevfl.runtime.run_options import PartyJob
from securevfl.testing import save_federation, write_federation
from securevfl.transport.identity import provision
from securevfl.transport.star import PrimaryTransport

pytestmark = pytest.mark.multiprocess

SECONDARIES = ("bank-1", "bank-2", "bank-3")
EPOCHS = 5
ROUNDS = 2
"""Training rounds of an epoch."""


def federation(folder: Path, port: int) -> Path:
    """Write a federation with identities, whose primary listens on the port."""
    path = write_federation(
        folder,
        secondaries=len(SECONDARIES),
        rows=60,
        training={"epochs": EPOCHS, "batch_size": 32},
        # Losses spend more than was planned, which the papers' accounting does not bound.
        privacy={
            "noise_multiplier": 2.0,
            "delta": 1e-4,
            "encoder": "trained",
            "accounting": "as-published",
        },
        runtime={
            "on_loss": "continue",
            "continue_after_s": 0.2,
            "least_secondaries": 2,
            "wait_s": PATIENCE_S,
        },
    )
    source = tomllib.loads(path.read_text(encoding="utf-8"))
    source["party"][0]["address"] = f"127.0.0.1:{port}"
    pinned = provision(["agency", *SECONDARIES], folder / "ids")
    for party in source["party"]:
        party["identity"] = pinned[party["name"]]
    return save_federation(folder, source)


class Parties:
    """Secondaries in processes of their own, and the primary in this one, which disturbs them."""

    def __init__(self, path: Path, at: dict[int, Callable[["Parties"], None]]) -> None:
        self.path, self.folder = path, path.parent
        self.out = self.folder / "run"
        self.at = at
        """By epoch: what happens when its first round is done."""
        self.processes: dict[str, Program] = {}
        self.told: list[PresenceChanged] = []
        self.awaited = False

    def start(self, name: str, *more: str) -> None:
        self.processes[name] = Program(
            "securevfl.cli.main",
            *("party", self.path, "--name", name, "--identity", self.folder / "ids" / name),
            *("--out", self.out, *more),
        )

    def lose(self, name: str) -> None:
        """Kill a secondary."""
        self.processes.pop(name).kill()

    def restart(self, name: str) -> None:
        """Start a secondary again; the epoch under way does not end before it calls."""
        self.start(name, "--resume")
        self.awaited = True

    def calling(self, transport: PrimaryTransport) -> tuple[str, ...]:
        """Return who calls, as the primary asks at the end of an epoch."""
        deadline = time.monotonic() + PATIENCE_S
        while not (names := _CALLING(transport)) and self.awaited and time.monotonic() < deadline:
            time.sleep(0.01)
        self.awaited = False
        return names

    def __call__(self, event: ProgressEvent) -> None:
        if isinstance(event, PresenceChanged):
            self.told.append(event)
        if isinstance(event, RoundDone) and event.done == 1 and event.epoch in self.at:
            self.at.pop(event.epoch)(self)

    def run(self) -> RunFigures:
        """Run all of them to the end of the primary."""
        for name in SECONDARIES:
            self.start(name)
        job = PartyJob(
            config=read_federation(self.path),
            name="agency",
            run_folder=self.out,
            identity_folder=self.folder / "ids" / "agency",
            data_root=self.folder,
            device=torch.device("cpu"),
            resume=False,
        )
        figures = run_party(replace(job, observe=self))
        assert isinstance(figures, RunFigures)
        return figures

    def ended(self, name: str) -> tuple[int, str]:
        """Return how a secondary's process ended, and what it said."""
        return self.processes[name].ended()

    def charged(self, name: str, run: str) -> int:
        """Return how many rounds a party's ledger has for the run."""
        lines = lines_of_run(self.folder / f"{name}.csv.ledger.jsonl", run)
        return sum(line["kind"] == "charge" for line in lines)

    def end(self) -> None:
        for process in self.processes.values():
            process.kill()


_CALLING = PrimaryTransport.calling


def test_one_comes_back_and_one_is_gone_for_good(
    tmp_path: Path, port: int, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """bank-3 is away in epochs 2 and 3, bank-2 leaves in epoch 5; every ledger has what left."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    parties = Parties(
        federation(tmp_path, port),
        {
            2: lambda here: here.lose("bank-3"),
            3: lambda here: here.restart("bank-3"),
            5: lambda here: here.lose("bank-2"),
        },
    )
    monkeypatch.setattr(PrimaryTransport, "calling", lambda star: parties.calling(star))
    try:
        figures = parties.run()
        ends = {name: parties.ended(name) for name in ("bank-1", "bank-3")}
    finally:
        parties.end()

    assert not parties.at
    assert [code for code, _ in ends.values()] == [0, 0]
    assert "from epoch 2 on bank-3 is absent; 2 secondaries take part" in ends["bank-1"][1]
    assert [(one.epoch, one.absent, one.back) for one in parties.told] == [
        (2, ("bank-3",), ()),
        (4, (), ("bank-3",)),
        (5, ("bank-2",), ()),
    ]
    assert figures.absences == [
        {"party": "bank-3", "from_epoch": 2, "to_epoch": 3},
        {"party": "bank-2", "from_epoch": 5, "to_epoch": None},
    ]
    assert figures.epochs == EPOCHS
    # The last change was after epoch 4: those who test have chosen the best epoch.
    assert figures.best_epoch == EPOCHS
    assert figures.bytes.keys() == {"agency", "bank-1", "bank-3"}

    # An epoch is two rounds and one for validation, and then there is one for test rows. At each
    # loss one round was done and the next one charged, at whomever it had reached.
    whole, charged = EPOCHS * (ROUNDS + 1) + 1, parties.charged
    assert charged("agency", figures.run) == whole + 4 == figures.privacy.releases
    assert charged("bank-1", figures.run) in range(whole + 2, whole + 5)
    assert charged("bank-2", figures.run) in (14, 15)
    assert charged("bank-3", figures.run) in (12, 13)
    assert figures.privacy.least_secondaries == 2

    write_figures(parties.out, figures)
    capfd.readouterr()
    print_results(figures.as_json(), parties.out, as_json=False)
    assert "absent: bank-3 was absent in epochs 2 to 3; bank-2 was" in capfd.readouterr().out
    found = verify_run(parties.out)
    assert not [one for one in found if one.good is False]
    assert [one.party for one in found if one.check == "end" and one.good is None] == ["bank-2"]
