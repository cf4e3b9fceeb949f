"""Benchmark of SplitAvg and its baselines: wall time, CPU of all parties, bytes, error."""

import itertools
import json
import os
import secrets
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from securevfl.core import checks
from securevfl.core.errors import PartyFailedError, PartyTimeoutError
from securevfl.core.files import write_json
from securevfl.launch.spawn import reserved_port
from securevfl.transport.identity import provision

# Width of one row: L = 50 positions of H = 100, the cut of FeT.
_ROW_WIDTH: Final = 5000

_POLL_S: Final = 0.02


@dataclass(frozen=True, kw_only=True, slots=True)
class SplitAvgBenchmark:
    """What to measure."""

    parties: int = 5
    """Secondaries; the primary comes on top."""

    elements: int = 640_000
    """Numbers in each secondary's tensor; 640,000 are 128 rows of FeT's cut."""

    repeats: int = 15
    """Interleaved runs of every variant; medians are reported."""

    noise_share_std: float = 1.0
    """Noise of each secondary, in units of the clip norm."""

    keeps_memory: bool = True
    """True if all variants, CrypTen's too, keep freed memory as every party of a run does
    (:mod:`securevfl.core.memory`); without that, fresh blocks cost page faults each time."""

    timeout_s: float = 900.0
    """Seconds after which the processes are ended."""

    def __post_init__(self) -> None:
        checks.at_least(2, parties=self.parties)
        checks.at_least(1, elements=self.elements, repeats=self.repeats)
        checks.positive(noise_share_std=self.noise_share_std, timeout_s=self.timeout_s)


def measure(settings: SplitAvgBenchmark) -> dict[str, Any]:
    """Run all variants between real processes on this machine, interleaved.

    Returns:
        ``{"variants": {name: {"wall_ms", "cpu_ms", "bytes_sent": {party: n}, "bytes_received",
        "max_error"}}, ...}``: medians over repeats; wall is the slowest party's, CPU the sum over
        parties, bytes those that the kernel sent over TCP,
        and the error is against the mean in float64, noise included.

    Raises:
        PartyFailedError: If a process fails; its last lines are in the message.
        PartyTimeoutError: If they are not done in time.

    Reveals:
        Nothing but random tensors.
    """
    names = ["primary", *(f"secondary{rank}" for rank in range(1, settings.parties + 1))]
    whole_rows = settings.elements % _ROW_WIDTH == 0
    width = _ROW_WIDTH if whole_rows else settings.elements
    with (
        tempfile.TemporaryDirectory(prefix="securevfl-bench-") as text,
        reserved_port() as port,
    ):
        folder = Path(text)
        job = {
            "names": names,
            "pinned": provision(names, folder, valid_days=1),
            "port": port,
            "keys": _pair_keys(settings.parties),
            "rows": settings.elements // width,
            "width": width,
            "repeats": settings.repeats,
            "noise_share_std": settings.noise_share_std,
            "keeps_memory": settings.keeps_memory,
        }
        write_json(folder / "job.json", job)
        _run_processes(folder, len(names), settings.timeout_s)
        results = [
            json.loads((folder / f"result-{rank}.json").read_text()) for rank in range(len(names))
        ]
    return {
        "parties": settings.parties,
        "elements": settings.elements,
        "repeats": settings.repeats,
        "noise_share_std": settings.noise_share_std,
        "keeps_memory": settings.keeps_memory,
        "variants": {name: _summary(names, results, name) for name in results[0]},
    }


def _summary(names: Sequence[str], results: Sequence[Any], variant: str) -> dict[str, Any]:
    figures = [party[variant] for party in results]

    def median_over_repeats(field: str, combine: Any) -> float:
        repeats = zip(*(party[field] for party in figures), strict=True)
        return statistics.median(combine(values) for values in repeats)

    return {
        "wall_ms": round(1e3 * median_over_repeats("wall_s", max), 3),
        "cpu_ms": round(1e3 * median_over_repeats("cpu_s", sum), 3),
        "bytes_sent": {
            name: int(statistics.median(party["sent"]))
            for name, party in zip(names, figures, strict=True)
        },
        "bytes_received": {
            name: int(statistics.median(party["received"]))
            for name, party in zip(names, figures, strict=True)
        },
        "max_error": max(figures[0]["max_error"]),
    }


def _pair_keys(parties: int) -> dict[str, dict[str, str]]:
    keys: dict[str, dict[str, str]] = {str(rank): {} for rank in range(parties + 1)}
    for low, high in itertools.combinations(range(1, parties + 1), 2):
        keys[str(low)][str(high)] = keys[str(high)][str(low)] = secrets.token_hex(32)
    return keys


def _run_processes(folder: Path, count: int, timeout_s: float) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(count):
            with (folder / f"log-{rank}.txt").open("wb") as log:
                processes.append(
                    subprocess.Popen(
                        [
                            sys.executable,
                            Path(__file__).with_name("party.py"),
                            str(folder),
                            str(rank),
                        ],
                        stdout=log,
                        stderr=log,
                        stdin=subprocess.DEVNULL,
                        env=environment,
                    )
                )
        deadline = time.monotonic() + timeout_s
        while any(process.poll() is None for process in processes):
            _raise_if_one_failed(processes, folder)
            if time.monotonic() > deadline:
                raise PartyTimeoutError(f"the benchmark was not done within {timeout_s:g} s")
            time.sleep(_POLL_S)
        _raise_if_one_failed(processes, folder)
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _raise_if_one_failed(processes: Sequence[subprocess.Popen[bytes]], folder: Path) -> None:
    for rank, process in enumerate(processes):
        if process.poll():
            tail = (folder / f"log-{rank}.txt").read_text(errors="replace").strip()[-2000:]
            raise PartyFailedError(f"benchmark process {rank} ended with {process.poll()}: {tail}")
