"""One training step of FeT between processes beside the same step simulated in one process.

The parties are real: the primary and every secondary is a process of its own, started as
``securevfl party`` starts it, with TLS, masks, noise and ledger. The simulation is one process
more. The two take turns of a few steps, so that their ratio holds on a busy machine too; figures
are medians over the steps of all turns but the first. A step runs from one finished round to the
next, which includes the secondaries' backward pass; the first step of a turn, which finds them
idle, is not counted. CPU is the sum over all parties, settling included.

Run: ``python research/training/step.py [--secondaries 4] [--threads 1] [--json]``
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import tomli_w
import torch

from securevfl.config.reading import read_federation
from securevfl.core.memory import keep_freed_memory
from securevfl.core.progress import ProgressEvent, RoundDone
from securevfl.launch.spawn import reserved_port
from securevfl.runtime.launching import run_party
from securevfl.runtime.run_options import PartyJob, RunOptions
from securevfl.runtime.run_tables import read_tables
from securevfl.runtime.simulation import simulate_federation
from securevfl.transport.identity import provision

KEYS = ["lon", "lat"]
FEATURES = 16
RECORDS = 2_000
BATCH = 128
TURNS = 6
PRIMARY = "agency"
CLOCK_TICKS = os.sysconf("SC_CLK_TCK")


def write_federation(folder: Path, options: argparse.Namespace, *, port: int) -> Path:
    """Write tables and ``fed.toml``; one epoch has as many rounds as all turns have steps."""
    random = np.random.default_rng(0)
    # A few rows more go to validation and test, which are not measured.
    train = TURNS * options.steps * BATCH
    rows = train + 2 * max(1, round(0.01 * train / 0.98))
    names = [PRIMARY, *(f"bank-{i}" for i in range(1, options.secondaries + 1))]
    pinned = provision(names, folder / "identities", valid_days=1)
    parties = []
    for number, name in enumerate(names):
        count = RECORDS if number else rows
        frame = pd.DataFrame(random.uniform(size=(count, len(KEYS))), columns=KEYS)
        for axis in range(FEATURES):
            frame[f"x{axis}"] = random.normal(size=count)
        party = {"name": name, "role": "secondary", "data": f"{name}.csv", "key": KEYS}
        if not number:
            frame["y"] = random.normal(size=count)
            party |= {"role": "primary", "label": "y", "address": f"127.0.0.1:{port}"}
        frame.to_csv(folder / f"{name}.csv", index=False)
        parties.append({**party, "identity": pinned[name]})
    source = {
        "federation": {"name": "training-step", "task": "regression", "seed": 0},
        "model": {
            "family": "fet",
            "neighbours": options.neighbours,
            "hidden": options.hidden,
        },
        "training": {
            "epochs": 1,
            "batch_size": BATCH,
            "validation_fraction": (rows - train) / 2 / rows,
            "test_fraction": (rows - train) / 2 / rows,
        },
        "base": {"estimator": "none"},
        "privacy": {"mechanism": "gaussian", "noise_multiplier": 1.0, "encoder": "trained"},
        "linkage": {"protection": "none"},
        "party": parties,
    }
    path = folder / "fed.toml"
    path.write_text(tomli_w.dumps(source), encoding="utf-8")
    return path


# --- a measured process: it stops after every turn, and waits for a line on stdin ---


class Turns:
    """Times rounds; after every turn, says so on stdout and waits to be told to go on."""

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._times: list[float] = []
        self._left = TURNS

    def __call__(self, event: ProgressEvent) -> None:
        """Hear of a run's progress."""
        if not isinstance(event, RoundDone) or not self._left:
            return
        self._times.append(time.perf_counter())
        if len(self._times) == self._steps:
            self._left -= 1
            self._wait()

    def _wait(self) -> None:
        steps = np.diff(self._times).tolist()
        print(json.dumps({"steps": steps}), flush=True)
        sys.stdin.readline()
        self._times = []


def run_measured(role: str, path: Path, options: argparse.Namespace) -> None:
    """Be the primary, or the whole simulation."""
    keep_freed_memory()
    torch.set_num_threads(options.threads)
    config = read_federation(path)
    device = torch.device("cpu")
    turns = Turns(options.steps)
    if role == "simulated":
        tables = read_tables(config, path.parent)
        simulate_federation(
            config, tables, RunOptions(run_folder=path.parent / role, device=device, observe=turns)
        )
        return
    job = PartyJob(
        config=config,
        name=PRIMARY,
        run_folder=path.parent / "run",
        identity_folder=path.parent / "identities" / PRIMARY,
        data_root=path.parent,
        device=device,
        resume=False,
    )
    run_party(replace(job, observe=turns))


# --- the benchmark's own process ---


class Measured:
    """A process that works in turns, and helpers that work for it."""

    def __init__(self, role: str, path: Path, arguments: list[str]) -> None:
        command = [sys.executable, __file__, *arguments, "--role", role, "--federation", str(path)]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.name = PRIMARY if role == "federated" else "all in one"
        self.helpers: dict[str, subprocess.Popen[bytes]] = {}
        self.steps: list[float] = []
        self.cpu_s = 0.0
        self.peak_bytes: dict[str, int] = {}

    def settle(self) -> None:
        """Wait until no process of this side computes any more."""
        before = -1.0
        while self._cpu() > before:
            before = self._cpu()
            time.sleep(0.2)

    def turn(self, *, first: bool) -> None:
        """Let it run for one turn."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        cpu = self._cpu()
        if not first:
            self.process.stdin.write("go\n")
            self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.name} ended early")
        self.settle()
        if not first:
            self.steps += json.loads(line)["steps"]
            self.cpu_s += self._cpu() - cpu

    def finish(self) -> None:
        """Let it run to its end, and note peak memory."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        processes: dict[str, subprocess.Popen[Any]] = {self.name: self.process, **self.helpers}
        for name, process in processes.items():
            _, status, usage = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
            if process.returncode:
                raise SystemExit(f"{name} ended with {process.returncode}")
            self.peak_bytes[name] = usage.ru_maxrss * 1024

    def kill(self) -> None:
        """End what still runs."""
        for process in self._processes():
            if process.returncode is None:
                process.kill()
                process.wait()

    def _cpu(self) -> float:
        return sum(_cpu_s(process.pid) for process in self._processes())

    def _processes(self) -> list[subprocess.Popen[Any]]:
        return [self.process, *self.helpers.values()]


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / CLOCK_TICKS


def start_secondary(name: str, path: Path, threads: int) -> "subprocess.Popen[bytes]":
    """Start one secondary as a user does."""
    folder = path.parent
    command = [
        *(sys.executable, "-m", "securevfl.cli.main", "party", str(path), "--name", name),
        *("--identity", str(folder / "identities" / name), "--out", str(folder / "run")),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    return subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)


def measure(options: argparse.Namespace, arguments: list[str]) -> dict[str, Any]:
    """Run both sides in turns and return their figures."""
    with (
        tempfile.TemporaryDirectory(prefix="securevfl-step-") as temporary,
        reserved_port() as port,
    ):
        path = write_federation(Path(temporary), options, port=port)
        sides = {role: Measured(role, path, arguments) for role in ("federated", "simulated")}
        try:
            sides["federated"].helpers = {
                party.name: start_secondary(party.name, path, options.threads)
                for party in read_federation(path).secondaries
            }
            for number in range(TURNS):
                for side in sides.values():
                    side.turn(first=number == 0)
            for side in sides.values():
                side.finish()
        finally:
            for side in sides.values():
                side.kill()
    return report(options, sides)


def report(options: argparse.Namespace, sides: Mapping[str, Measured]) -> dict[str, Any]:
    """Return the figures of both sides and their ratios."""
    rounds = (TURNS - 1) * options.steps
    figures = {
        role: {
            "wall_ms": 1e3 * statistics.median(side.steps),
            "cpu_ms": 1e3 * side.cpu_s / rounds,
            "steps": len(side.steps),
            "peak_mb": {name: round(peak / 1e6, 1) for name, peak in side.peak_bytes.items()},
        }
        for role, side in sides.items()
    }
    return {
        "batch": BATCH,
        "neighbours": options.neighbours,
        "hidden": options.hidden,
        "secondaries": options.secondaries,
        "threads": options.threads,
        "cores": os.cpu_count(),
        "machine": platform.machine(),
        "load_at_end": round(os.getloadavg()[0], 1),
        **figures,
        "wall_ratio": figures["federated"]["wall_ms"] / figures["simulated"]["wall_ms"],
        "cpu_ratio": figures["federated"]["cpu_ms"] / figures["simulated"]["cpu_ms"],
    }


def print_table(result: Mapping[str, Any]) -> None:
    """Print the figures as Markdown."""
    print("| side | wall ms a step | CPU ms a step | peak memory |")
    print("| --- | --- | --- | --- |")
    for role in ("simulated", "federated"):
        row = result[role]
        memory = ", ".join(f"{name} {peak:.0f} MB" for name, peak in row["peak_mb"].items())
        print(f"| {role} | {row['wall_ms']:.1f} | {row['cpu_ms']:.1f} | {memory} |")
    ratios = f"{result['wall_ratio']:.2f} | {result['cpu_ratio']:.2f}"
    print(f"| federated / simulated | {ratios} | |")


def main(arguments: list[str]) -> None:
    """Measure, or be one of the measured processes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--secondaries", type=int, default=4)
    parser.add_argument("--neighbours", type=int, default=50)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--steps", type=int, default=6, help="steps of a turn; one is not counted")
    parser.add_argument("--threads", type=int, default=1, help="of torch, in every process")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--role", choices=("federated", "simulated"), help=argparse.SUPPRESS)
    parser.add_argument("--federation", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.role:
        run_measured(options.role, options.federation, options)
        return
    result = measure(options, arguments)
    if options.json:
        print(json.dumps(result))
    else:
        print_table(result)


if __name__ == "__main__":
    main(sys.argv[1:])
