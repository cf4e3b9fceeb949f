"""The benchmark of a GPU goes through without one."""

import json

import pytest
import torch
from helpers import labelled_runs
from helpers.labelled_cuda import labelled_cuda, operations
from helpers.scripts import run_script

from research.gpu import gpu


def test_smoke(capsys: pytest.CaptureFixture[str]) -> None:
    """On the CPU: time and SplitAvg's share are measured, what only a GPU has is left out."""
    run_script("gpu/gpu.py", "--smoke", "--json", "--runs", "hdb-100")
    rows = json.loads(capsys.readouterr().out)["rows"]

    assert [row["precision"] for row in rows] == ["float32", "bfloat16"]
    for found in rows:
        assert found["rounds"] == 6
        assert found["seconds"] > 0
        assert 0 < found["splitavg_share"] < 1
        assert found["utilisation"] is None
        assert found["peak_gb"] is None


def test_attention_beside_torchs(capsys: pytest.CaptureFixture[str]) -> None:
    """Two precisions, each with a bias that learns, one that does not, and without gradients."""
    run_script("fet/attention.py", "--links", "3", "--times", "1")
    assert capsys.readouterr().out.count("| 3 |") == 6


def test_on_the_device(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The same on what stands in for a GPU, noise included, as a table."""
    waits: list[None] = []
    for name, stub in {
        "synchronize": lambda: waits.append(None),
        "reset_peak_memory_stats": lambda: None,
        "max_memory_allocated": lambda: 3_210_000_000,
        "get_device_name": lambda: "a stand-in",
        "utilization": lambda: 50,
    }.items():
        monkeypatch.setattr(torch.cuda, name, stub)
    monkeypatch.setattr(gpu, "SETTINGS", gpu.SMOKE)
    arguments = ["--runs", "mnist-50", "--batch", "8", "--noise", "0.5", "--precisions", "float32"]
    monkeypatch.setattr("sys.argv", ["gpu.py", *arguments])
    with labelled_cuda():
        gpu.main()
        assert operations() > 20

    title, *_, line = capsys.readouterr().out.splitlines()
    assert title.startswith("a stand-in")
    assert "| 3.21 |" in line
    assert waits


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    """In one line."""
    with pytest.raises(SystemExit) as ended:
        run_script("gpu/gpu.py")

    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "no GPU" in line


def test_counts_without_a_gpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A line for each run: launches, and time on the CPU."""
    monkeypatch.setattr(labelled_runs, "ROUNDS", {"top1sim": labelled_runs.ROUNDS["top1sim"]})
    run_script("gpu/gpu.py", "--counts", "--epochs", "2")
    *_, line = capsys.readouterr().out.splitlines()
    _, name, operations, milliseconds, _ = line.split("|")
    assert name == " top1sim "
    assert float(operations) > 0
    assert float(milliseconds) > 0
