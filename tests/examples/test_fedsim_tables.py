"""The benchmarks of FedSim's tables run: a few rows, one seed, then the check of Delta."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.patience import PATIENCE_S

ROOT = Path(__file__).resolve().parents[2]


def run(script: str, *arguments: object) -> str:
    done = subprocess.run(
        [sys.executable, ROOT / "research" / "fedsim" / script, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_synthetic_table_and_delta(tmp_path: Path) -> None:
    """The paper's synthetic needs no data of ours; every method and ablation trains on it."""
    methods = ["solo", "combine", "exact", "top1sim", "avgsim", "fedsim", "fedsim-no-gates"]
    out = run(
        *("tables.py", "sklearn", "--out", tmp_path, "--rows", 200, "--neighbours", 5),
        *("--epochs", 1, "--seeds", 1, "--methods", ",".join(methods), "--json"),
    )
    assert list(json.loads(out)["methods"]) == methods
    table = run("delta.py", tmp_path / "sklearn")
    for name in ("exact", "top1sim", "avgsim"):
        assert f"| sklearn | {name} |" in table


@pytest.mark.slow
def test_table_2_and_table_9(tmp_path: Path) -> None:
    """Each party by itself, and how large the networks are."""
    common = ("tables.py", "sklearn", "--out", tmp_path, "--rows", 300, "--seeds", 1)
    alone = run(*common, "--of", "secondary").splitlines()
    assert [line.split(" | ")[0] for line in alone[2:]] == [
        "| primary",
        "| secondary",
        "| primary better by",
    ]
    sizes = run(*common, "--of", "parameters", "--methods", "top1sim,fedsim").splitlines()[2:]
    counts = [[int(cell.replace(",", "")) for cell in line.split(" | ")[1:3]] for line in sizes]
    assert counts[0][1] == counts[1][1] > 0
    assert counts[1][0] > counts[0][0] > 0
