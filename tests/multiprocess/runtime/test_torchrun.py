"""One party as several processes of its own machine, started by torchrun."""

import json
import tomllib
from pathlib import Path

import pytest
from helpers.command_line import securevfl
from helpers.federations import save, write_federation
from helpers.warm import Program

from securevfl.runtime.entry import simulate

pytestmark = pytest.mark.multiprocess

SHARED_ROWS = Path(__file__).parents[2] / "helpers" / "shared_rows.py"
TORCHRUN = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2")
DP_TRAINED = {
    "epsilon": 40.0,
    "delta": 1e-4,
    "encoder": "dp-trained",
    "links_per_record": 2,
    "gradient_clip_norm": 0.5,
}


def ended(runs: list[Program]) -> list[str]:
    """Return what each run wrote to its standard error; all have to end well."""
    try:
        outputs = [run.ended() for run in runs]
    finally:
        for run in runs:
            run.kill()
    assert [code for code, _ in outputs] == [0] * len(runs), outputs
    return [said for _, said in outputs]


def test_rows_over_two_processes_are_those_of_one(tmp_path: Path) -> None:
    """Outputs, gradients and clipped sums: also of odd batches, of one row, after every step."""
    ended([Program(*TORCHRUN, SHARED_ROWS, tmp_path)])
    assert (tmp_path / "compared").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["compared"]


@pytest.mark.parametrize("privacy", [None, DP_TRAINED], ids=["trained", "dp-trained"])
def test_parties_of_two_processes_train_as_those_of_one(tmp_path, capfd, port, privacy):
    """Equal losses where nothing is noised; the same epsilon, and as much in the ledger, where."""
    changes = {} if privacy is None else {"privacy": privacy}
    model = {"release": "pooled", "dropout": 0.0}
    path = write_federation(tmp_path, secondaries=1, rows=90, model=model, **changes)
    source = tomllib.loads(path.read_text(encoding="utf-8"))
    source["party"][0]["address"] = f"127.0.0.1:{port}"
    source["party"][1] |= {"scaling": "bounds", "bounds": [-4.0, 4.0]}
    save(tmp_path, source)
    made = securevfl(capfd, "identity", "create", path, "--out", tmp_path / "ids", "--json")
    assert made.code == 0, made.err
    identities = json.loads(made.out)["identities"]
    for party in source["party"]:
        party["identity"] = identities[party["name"]]
    save(tmp_path, source)
    out = tmp_path / "run"

    def party(name: str, *started: str) -> Program:
        given = ["--name", name, "--identity", tmp_path / "ids" / name, "--out", out]
        return Program(*started, "party", path, *given)

    several = (*TORCHRUN, "-m", "securevfl.cli.main")
    agency = ("securevfl.cli.main",) if privacy else several
    outputs = ended([party("agency", *agency), party("bank-1", *several)])
    assert "bank-1 is done" in outputs[1]
    alone = simulate(path, out=tmp_path / "alone")
    metrics = json.loads((out / "metrics.json").read_text(encoding="utf-8"))
    if privacy is None:
        history = (out / "history.csv").read_text(encoding="utf-8").splitlines()
        column = history[0].split(",").index("loss")
        losses = [float(line.split(",")[column]) for line in history[1:]]
        assert losses == pytest.approx([one["loss"] for one in alone.history], rel=1e-5)
    else:
        spent = metrics["privacy"]["epsilon"]
        assert spent == pytest.approx(alone.metrics["privacy"]["epsilon"], rel=1e-9)
        assert 0 < spent <= 40.0
    assert not list(out.glob("meeting-*"))


def test_what_cannot_be_shared_is_refused(tmp_path, capfd, monkeypatch):
    path = write_federation(tmp_path, secondaries=1)
    for name, value in (
        ("TORCHELASTIC_RUN_ID", "1"), ("TORCHELASTIC_RESTART_COUNT", "0"), ("MASTER_PORT", "1"),
        ("RANK", "0"), ("WORLD_SIZE", "2"), ("LOCAL_WORLD_SIZE", "2"),
    ):  # fmt: skip
        monkeypatch.setenv(name, value)

    def refused(*arguments: object) -> str:
        found = securevfl(capfd, *arguments)
        assert found.code == 2
        assert found.err.count("\n") == 1
        return found.err

    asked = ("party", path, "--name", "bank-1", "--identity", tmp_path)
    assert "only securevfl party can be several" in refused("train", path)
    assert "--out RUN" in refused(*asked)
    assert "--serve" in refused(*asked, "--serve", "--out", tmp_path / "run")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    assert "on one machine" in refused(*asked)
