"""Whole runs in processes that go wrong: what the user sees, and what is left behind."""

import json
import os
import signal
import socket
import sys
import time
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import tomli_w
from helpers.federations import FROZEN
from helpers.launched import processes_of
from helpers.patience import PATIENCE_S, SOON_S

from securevfl import SecureVflError, read_federation
from securevfl.core.errors import ConfigError, PartyFailedError, PrivacyError
from securevfl.core.progress import ProgressEvent, RoundDone, SpendingPlanned, Warned
from securevfl.dp.accountant import epsilon_of
from securevfl.federation.run_plan import RunFacts, plan_run, run_facts
from securevfl.launch.process import PartyCommand
from securevfl.launch.spawn import run_party_processes
from securevfl.ledger.book import Limit
from securevfl.ledger.chain import ChainedFile
from securevfl.ledger.ledger_file import ledger_of_table, set_limit, summary_of
from securevfl.runtime.launching import train_in_processes
from securevfl.runtime.run_options import RunOptions
from securevfl.testing import read_tables, run_in_process, save_federation, write_federation
from securevfl.transport.identity import provision

pytestmark = pytest.mark.multiprocess

NAMES = ("agency", "bank-1", "bank-2")


def train(
    path: Path, out: Path, *, resume: bool = False, observe: Callable[[Any], None] = lambda _: None
) -> dict[str, Any]:
    figures = train_in_processes(
        read_federation(path),
        RunOptions(run_folder=out, data_root=path.parent, resume=resume, observe=observe),
    )
    return figures.as_json()


def ledger_lines(out: Path, name: str) -> list[dict[str, Any]]:
    # A simulation's own, or the copy of a table's ledger.
    text = (out / "parties" / name / "ledger.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def charges(out: Path, name: str) -> int:
    """Return how many releases the table's ledger holds; one that was killed leaves no copy."""
    text = ledger_of_table(out.parent / f"{name}.csv").read_text()
    return sum(json.loads(line)["kind"] == "charge" for line in text.splitlines())


def last_log_line(out: Path, name: str) -> dict[str, Any]:
    lines = (out / "parties" / name / "log.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines][-1]


class KillAt:
    """Kills a party at a training round, and notes when."""

    def __init__(self, out: Path, name: str, *, epoch: int, done: int) -> None:
        self.out = out
        self.name = name
        self.place = (epoch, done)
        self.at: float | None = None

    def __call__(self, event: ProgressEvent) -> None:
        if self.at is not None or not isinstance(event, RoundDone):
            return
        if (event.epoch, event.done) == self.place:
            os.kill(processes_of(self.out)[self.name], signal.SIGKILL)
            self.at = time.monotonic()


def test_killed_secondary_and_resume(tmp_path: Path) -> None:
    """A killed secondary is named soon, nobody survives, and the run goes on afterwards.

    It goes on from the last epoch that all have saved and ends where an undisturbed run ends (in
    the simulator, which is the same run to rounding): with the same history of every epoch.
    """
    path = write_federation(tmp_path, rows=120, training={"epochs": 4, "batch_size": 32})
    out = tmp_path / "run"
    kill = KillAt(out, "bank-2", epoch=3, done=2)
    with pytest.raises(PartyFailedError, match=r"^bank-2: was ended by SIGKILL") as raised:
        train(path, out, observe=kill)
    assert kill.at is not None
    assert time.monotonic() - kill.at < SOON_S
    assert raised.value.exit_code == 3
    assert processes_of(out) == {}
    for name in ("agency", "bank-1"):
        last = last_log_line(out, name)
        assert last["event"] == "failed"
        assert "bank-2" in last["reason"]
        assert "Traceback" not in (out / "parties" / name / "output.log").read_text()
    assert last_log_line(out, "bank-2")["event"] == "released"
    assert not (out / "metrics.json").exists()
    before = {name: charges(out, name) for name in NAMES}

    rounds: list[tuple[int, int]] = []

    def note(event: ProgressEvent) -> None:
        if isinstance(event, RoundDone):
            rounds.append((event.epoch, event.done))

    metrics = train(path, out, resume=True, observe=note)
    assert rounds[0] == (3, 1)
    assert metrics["epochs"] == 4
    assert all(charges(out, name) > before[name] for name in NAMES)
    undisturbed = tmp_path / "undisturbed"
    run_in_process(path, undisturbed)
    again, once = (pd.read_csv(folder / "history.csv") for folder in (out, undisturbed))
    for column in ("epoch", "loss", "train", "validation"):
        assert again[column].tolist() == pytest.approx(once[column].tolist(), abs=2**-12)


def frozen_federation(folder: Path) -> Path:
    path = write_federation(
        folder,
        secondaries=1,
        rows=120,
        privacy=FROZEN,
        model={"release": "pooled"},
        training={"epochs": 3, "batch_size": 32},
    )
    source = tomllib.loads(path.read_text())
    for party in source["party"][1:]:
        party |= {"scaling": "bounds", "bounds": [-4.0, 4.0]}
    return save_federation(folder, source)


def test_frozen_run_releases_once(tmp_path: Path) -> None:
    """Resumed after its release pass, a frozen run charges nothing and reports what was spent."""
    path = frozen_federation(tmp_path)
    out = tmp_path / "run"
    with pytest.raises(SecureVflError, match="agency"):
        train(path, out, observe=KillAt(out, "agency", epoch=2, done=1))
    assert processes_of(out) == {}
    before = {name: charges(out, name) for name in NAMES[:2]}
    assert set(before.values()) == {4}  # 120 rows in batches of 32
    metrics = train(path, out, resume=True)
    assert {name: charges(out, name) for name in NAMES[:2]} == before
    assert metrics["epochs"] == 3
    assert metrics["privacy"]["releases"] == 4
    assert metrics["privacy"]["row_releases"] == 120
    assert metrics["privacy"]["epsilon"] <= FROZEN["epsilon"]
    assert metrics["privacy"]["epsilon"] == pytest.approx(FROZEN["epsilon"], rel=1e-6)


def test_bad_table_at_a_secondary(tmp_path: Path) -> None:
    """The user of a run on one machine reads the real message, and the exit code is 2."""
    path = write_federation(tmp_path, rows=120)
    frame = pd.read_csv(tmp_path / "bank-2.csv").rename(columns={"lat": "latt"})
    frame.to_csv(tmp_path / "bank-2.csv", index=False)
    out = tmp_path / "run"
    with pytest.raises(ConfigError, match=r"^bank-2: .*has no column 'lat'; did you mean"):
        train(path, out)
    assert processes_of(out) == {}
    # What quotes a table stays at home: the others learn that bank-2 is gone, not why.
    for name in ("agency", "bank-1"):
        assert "latt" not in (out / "parties" / name / "log.jsonl").read_text()


def party_commands(files: Mapping[str, Path], identities: Path, out: Path) -> list[PartyCommand]:
    return [
        PartyCommand(
            name=name,
            program=(sys.executable, "-m", "securevfl.cli.main"),
            fork_server="securevfl.cli.fork_server_program",
            arguments=[
                *(
                    "party",
                    str(path),
                    "--name",
                    name,
                    "--identity",
                    str(identities / name),
                    "--out",
                    str(out / name),
                ),
            ],
            log_path=out / f"{name}.log",
        )
        for name, path in files.items()
    ]


def pinned_file(folder: Path, identities: Path, port: int) -> tuple[Path, dict[str, Any]]:
    """Write a federation file as organisations would share it, with identities and a port."""
    path = write_federation(folder, rows=120)
    source = tomllib.loads(path.read_text())
    source["party"][0]["address"] = f"127.0.0.1:{port}"
    pinned = provision(NAMES, identities)
    for party in source["party"]:
        party["identity"] = pinned[party["name"]]
    return save_federation(folder, source), source


def test_files_that_differ(tmp_path: Path, port: int) -> None:
    """Both hashes are shown by whoever compares them, and nobody's keys were sent."""
    path, source = pinned_file(tmp_path, tmp_path / "ids", port)
    source["training"]["epochs"] += 1
    other = tmp_path / "other.toml"
    other.write_text(tomli_w.dumps(source))
    digests = [read_federation(file).digest for file in (path, other)]
    out = tmp_path / "runs"
    commands = party_commands(
        {"agency": path, "bank-1": path, "bank-2": other}, tmp_path / "ids", out
    )
    with pytest.raises(ConfigError, match=r"^agency: federation files differ") as raised:
        run_party_processes(commands, deadline_s=PATIENCE_S)
    for digest in digests:
        assert digest in str(raised.value)
    lines = (out / "bank-2.log").read_text().splitlines()
    said = [line for line in lines if line.startswith("securevfl: agency: ")]
    assert len(said) == 1
    assert all(digest in said[0] for digest in digests)
    assert not list(out.glob("*/parties/*/ledger.jsonl")) or all(
        '"charge"' not in file.read_text() for file in out.glob("*/parties/*/ledger.jsonl")
    )


def test_three_runs_on_one_table(tmp_path: Path) -> None:
    """Totals of every party are the composition of all runs; an owner's limit refuses the third.

    Then it is exit code 4 for all, before a key or a release is sent. Each run's own epsilon stays
    within its budget. Every party is told beforehand what it may spend; each secondary, which knows
    its own records, also warns of a delta above 1/n.
    """
    privacy = {"epsilon": 5.0, "delta": 1 / 120, "encoder": "trained"}
    path = write_federation(
        tmp_path, privacy=privacy, rows=120, training={"epochs": 1, "batch_size": 64}
    )
    set_limit(
        ledger_of_table(tmp_path / "bank-1.csv"),
        Limit(unit="secondary-record", epsilon=9.0, delta=1 / 120),
    )
    plan = plan_run(read_federation(path), run_facts_of(path)).releases
    release = plan.release(
        plan.noise_share_std(), rounds=plan.rounds, row_releases=plan.row_releases
    )
    told: list[Any] = []
    for count, out in enumerate(("first", "second"), 1):
        told.clear()
        figures = train(path, tmp_path / out, observe=told.append)["privacy"]
        together = epsilon_of([release] * count, delta=1 / 120)
        assert figures["epsilon"] == plan.epsilon(plan.noise_share_std()) <= 5.0
        assert figures["total_epsilon"] == together
        assert figures["table_runs"] == count
        for name in NAMES:
            (unit,) = summary_of(ledger_of_table(tmp_path / f"{name}.csv")).units
            assert (unit.epsilon, unit.runs) == (together, count)
            copy = tmp_path / out / "parties" / name / "ledger.jsonl"
            assert copy.read_bytes() == (tmp_path / f"{name}.csv.ledger.jsonl").read_bytes()
            assert copy.stat().st_mode & 0o777 == 0o600
        warned = [event.text for event in told if isinstance(event, Warned)]
        uncounted = "no secondary says how many rows are linked: without privacy.links_per_record"
        (of_links,) = [text for text in warned if text.startswith(uncounted)]
        warned.remove(of_links)
        assert sorted(text.split(": privacy.delta")[0] for text in warned) == ["bank-1", "bank-2"]
        said = {event.party: event for event in told if isinstance(event, SpendingPlanned)}
        assert set(said) == set(NAMES)
        assert {event.runs_before for event in said.values()} == {count - 1}
        assert {event.total for event in said.values()} == {together}
        assert [said[name].limit for name in NAMES] == [None, 9.0, None]
    assert 8.0 < together <= 9.0

    charged = {name: charges_of_table(tmp_path, name) for name in NAMES}
    out = tmp_path / "third"
    with pytest.raises(PrivacyError, match=r"^bank-1: .*over the limit of its owner, 9 ") as raised:
        train(path, out)
    assert raised.value.exit_code == 4
    assert processes_of(out) == {}
    assert charged == {name: charges_of_table(tmp_path, name) for name in NAMES}
    for name in ("agency", "bank-2"):
        log = (out / "parties" / name / "log.jsonl").read_text()
        assert "linked" not in log
        assert "released" not in log


def run_facts_of(path: Path) -> RunFacts:
    config = read_federation(path)
    _, facts = run_facts(config, read_tables(config, path.parent)["agency"])
    return facts


def charges_of_table(folder: Path, name: str) -> int:
    return (folder / f"{name}.csv.ledger.jsonl").read_text().count('"kind": "charge"')


def test_two_runs_at_a_time_on_one_table(tmp_path: Path) -> None:
    """They could each spend what is left: whoever comes second is refused, with exit code 2."""
    path = write_federation(tmp_path, secondaries=1, rows=120)
    ledger = ledger_of_table(tmp_path / "bank-1.csv")
    holder = ChainedFile(ledger)
    try:
        # A ledger is made, and held, with its first line.
        holder.append({"kind": "of another run"})
        with pytest.raises(ConfigError, match=r"^bank-1: .*in use by another run"):
            train(path, tmp_path / "run")
    finally:
        holder.close()
    ledger.unlink()
    assert train(path, tmp_path / "run")["test"] > 0


def test_address_in_use(tmp_path: Path) -> None:
    """A port that somebody has is named, with exit code 2, before any table is linked."""
    path = write_federation(tmp_path, secondaries=1, rows=120)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        source = tomllib.loads(path.read_text())
        source["party"][0]["address"] = f"127.0.0.1:{port}"
        save_federation(tmp_path, source)
        with pytest.raises(ConfigError, match=rf"^agency: address 127\.0\.0\.1:{port}"):
            train(path, tmp_path / "run")
    assert processes_of(tmp_path / "run") == {}
