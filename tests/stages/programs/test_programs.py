"""CrypTen programs between parties, each in its own process, over mutual TLS."""

import json
import tempfile
import tomllib
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from helpers.command_line import securevfl

import securevfl as sv
from securevfl.core.errors import ConfigError, PrivacyError
from securevfl.federation.messages import RoundKind
from securevfl.federation.session.handshake import read_hello
from securevfl.ledger.ledger_file import summary_of
from securevfl.runtime.run_options import Program
from securevfl.stages.programs.session import with_program
from securevfl.testing import save_federation, write_federation
from securevfl.transport.message import Message

THREE = """
from securevfl.mpc import crypten

def program(party):
    shared = [
        crypten.cryptensor(party.column("x0", of=name), src=place)
        for place, name in enumerate(party.names)
    ]
    greatest = (shared[1] * shared[2]).max()
    return {
        "rank": party.rank,
        "all": shared[0].sum().get_plain_text(),
        "own": greatest.get_plain_text(dst=2),
    }
"""


def with_dealer(folder: Path, **sections: dict[str, object]) -> Path:
    path = write_federation(folder, rows=20, **sections)
    source = tomllib.loads(path.read_text(encoding="utf-8"))
    source["party"].append({"name": "dealer", "role": "dealer"})
    return save_federation(folder, {"mpc": {}, **source})


@pytest.mark.multiprocess
def test_three_parties_run_a_program(tmp_path, capfd):
    """By the command: three parties compute, a dealer helps, and one learns a result."""
    path, program = with_dealer(tmp_path), tmp_path / "program.py"
    program.write_text(THREE, encoding="utf-8")
    ended = securevfl(capfd, "mpc", path, program, "--out", tmp_path / "run", "--json")

    assert ended.code == 0, ended.err
    results = json.loads(ended.out)["results"]
    tables = [pd.read_csv(tmp_path / f"{name}.csv")["x0"] for name in results]
    assert list(results) == ["agency", "bank-1", "bank-2"]
    assert [one["rank"] for one in results.values()] == [0, 1, 2]
    assert [one["all"] for one in results.values()] == pytest.approx(
        [tables[0].sum()] * 3, abs=0.01
    )
    assert [one["own"] for one in results.values()][:2] == [None, None]
    largest = float(np.max(tables[1].to_numpy() * tables[2].to_numpy()))
    assert results["bank-2"]["own"] == pytest.approx(largest, abs=0.01)
    log = (tmp_path / "run/parties/dealer/log.jsonl").read_text(encoding="utf-8")
    assert '"event": "dealt"' in log


@pytest.mark.multiprocess
def test_frames_reach_a_program_without_a_file_and_a_failure_names_its_party(tmp_path, monkeypatch):
    """A frame's column keeps its type, a tensor is a table, and no file has a row of either."""
    private = tmp_path / "temporary"
    private.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(private))
    program = tmp_path / "program.py"
    program.write_text(
        "def program(party):\n"
        "    if party.name == 'shop':\n"
        "        when = party.table['when'].dt.year\n"
        "        party.column(f'nothing in {when[0]}')\n"
        "    return party.table.sum().sum()\n",
        encoding="utf-8",
    )
    when = pd.to_datetime(["2024-02-29", "2025-01-01"])
    frame = pd.DataFrame({"when": when, "name": ["a", "person 7"]})
    with pytest.raises(sv.SecureVflError, match="shop") as failed:
        sv.mpc.run({"bank": torch.ones(2, 3), "shop": frame}, program)
    assert "has no column 'nothing in 2024'" in str(failed.value)
    files = [path for path in private.rglob("*") if path.is_file()]
    assert len(files) > 3
    assert not [path for path in files if b"person 7" in path.read_bytes()]


@pytest.mark.multiprocess
def test_a_program_asks_the_tables_owner_and_leaves_a_line(tmp_path, capfd):
    """A limit refuses it before it runs; allowed, each table's ledger names it and its peers."""
    tables = {name: tmp_path / f"{name}.csv" for name in ("bank", "lab")}
    for path in tables.values():
        pd.DataFrame({"secret": [41.0, 42.0]}).to_csv(path, index=False)
    ran = tmp_path / "ran"
    program = tmp_path / "program.py"
    program.write_text(
        "from pathlib import Path\n"
        "from securevfl.mpc import crypten\n"
        "def program(party):\n"
        f"    Path({str(ran)!r} + party.name).touch()\n"
        "    column = party.column('secret', of='lab')\n"
        "    return crypten.cryptensor(column, src=1).get_plain_text()\n",
        encoding="utf-8",
    )
    ledgers = {name: Path(f"{path}.ledger.jsonl") for name, path in tables.items()}
    assert securevfl(capfd, "ledger", "limit", tables["lab"], "--epsilon", 0.1).code == 0
    with pytest.raises(PrivacyError, match="securevfl ledger limit TABLE --programs allow"):
        sv.mpc.run(tables, program)
    assert not Path(f"{ran}lab").exists()
    assert '"program"' not in ledgers["lab"].read_text(encoding="utf-8")

    ended = securevfl(capfd, "ledger", "limit", tables["lab"], "--programs", "allow")
    assert ended.code == 0, ended.err
    assert sv.mpc.run(tables, program) == {"bank": [41.0, 42.0], "lab": [41.0, 42.0]}
    uses = {name: summary_of(path).programs[-1] for name, path in ledgers.items()}
    assert {one.program for one in uses.values()} == {Program.of(program).digest}
    assert uses["lab"].run == uses["bank"].run
    assert list(uses["lab"].peers) == ["bank", "dealer"]
    assert (
        "with bank, dealer): without bound" in securevfl(capfd, "ledger", "show", tables["lab"]).out
    )


def test_programs_are_refused_beside_a_promise(tmp_path):
    """Unless the file says that they may run."""
    (tmp_path / "program.py").write_text("def program(party):\n    pass\n", encoding="utf-8")
    privacy = {"epsilon": 8.0, "encoder": "trained", "unit": "linked-row"}
    path = with_dealer(tmp_path, privacy=privacy, model={"average_positions_every": 0})

    with pytest.raises(sv.SecureVflError, match=r"mpc.programs: this file promises an epsilon"):
        sv.mpc.run(path, tmp_path / "program.py")
    source = tomllib.loads(path.read_text(encoding="utf-8"))
    path = save_federation(tmp_path, {**source, "mpc": {"programs": "always"}})
    program = Program.of(tmp_path / "program.py")
    allowed = with_program(sv.read_federation(path), program)
    assert allowed.mpc.program == program.digest


def test_a_program_needs_a_dealer_a_file_and_a_function(tmp_path):
    path, program = write_federation(tmp_path), tmp_path / "program.py"
    with pytest.raises(ConfigError, match="No such file"):
        sv.mpc.run(path, program)
    program.write_text("program = 3\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="deals random numbers"):
        sv.mpc.run(path, program)
    with pytest.raises(ConfigError, match="no function at the top of a file"):
        sv.mpc.run(path, lambda party: party)
    source = tomllib.loads(path.read_text(encoding="utf-8"))
    pinned = save_federation(tmp_path, {**source, "mpc": {"program": "0" * 64}})
    with pytest.raises(ConfigError, match=r"mpc.program: this file allows 0000"):
        sv.mpc.run(pinned, program)


def test_unequal_programs_do_not_meet(tmp_path):
    """Their digests are in what parties compare when they greet, and in every pair's key."""
    path, files = with_dealer(tmp_path), []
    for number in range(2):
        files.append(tmp_path / f"{number}.py")
        files[-1].write_text(f"def program(party):\n    return {number}\n", encoding="utf-8")
    one, other = (with_program(sv.read_federation(path), Program.of(file)) for file in files)
    greeting = Message(
        kind=RoundKind.HELLO, meta={"digest": other.digest, "protocol": 13}, sender="bank-1"
    )
    with pytest.raises(ConfigError, match="federation files or programs differ"):
        read_hello(one, greeting)
