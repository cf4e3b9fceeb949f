"""Memory and CPU time of a party's process: what it loads, and the peak of a small run, by role.

    python research/memory/party_memory.py [--secondaries 2] [--runs trained frozen] [--json FILE]

First what is loaded before anything is read, each in a process of its own, in turns, medians:
torch alone, torch with CrypTen's bridge, and what ``securevfl party`` loads for each role. Then
small runs between processes, of numeric tables:

``trained``: encoders that train, no noise, keys shown;
``frozen``: a promise of epsilon 8 for a secondary's record, links by shares, so with two helpers.

``private`` is what one process holds that is no file (the system's RssAnon); the rest of its
resident memory is files, torch's library first, of which a machine has one copy for all processes.
Parties of one machine are forks of one process and share much of what is no file too.
``together`` is the largest sum over all parties at one time in which what is shared counts once
(the system's Pss). Needs Linux.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from securevfl.config.reading import parse_federation
from securevfl.runtime.launching import train_in_processes
from securevfl.runtime.run_options import RunOptions

_PARTY = (
    "with loading(): "
    "import securevfl.cli.main, securevfl.desk.command_results, securevfl.runtime.party"
)
LOADED = {
    "torch alone": "import torch",
    "torch and CrypTen": "import securevfl.mpc.crypten_bridge",
    "coordinator, dealer": _PARTY,
    "secondary": f"{_PARTY}, securevfl.runtime.secondary_party",
    "primary": f"{_PARTY}, securevfl.runtime.primary_party",
}
_MEASURED = """
import json, os
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
kilobytes = {name: int(status[name].split()[0]) for name in ("VmRSS", "RssAnon")}
print(json.dumps({**kilobytes, "cpu": sum(os.times()[:2])}))
"""

KEYS = ["lon", "lat"]
LOW, HIGH = -5.0, 5.0
RANGES = [[0.0, 10.0], [0.0, 10.0]]
RUNS: dict[str, dict[str, Any]] = {
    "trained": {
        "privacy": {"mechanism": "none", "encoder": "trained"},
        "linkage": {"protection": "none"},
    },
    "frozen": {
        "privacy": {
            "mechanism": "gaussian",
            "epsilon": 8.0,
            "delta": 1e-5,
            "encoder": "frozen",
            "unit": "secondary-record",
            "links_per_record": 2,
        },
        "linkage": {"protection": "shares", "ranges": RANGES},
    },
}
_EVERY_S = 0.05
_TOGETHER_EVERY_S = 0.5
_TICKS = os.sysconf("SC_CLK_TCK")


def importing(repeats: int) -> dict[str, dict[str, float]]:
    """Return memory in MiB and CPU seconds after loading, a process each."""
    found: dict[str, list[dict[str, float]]] = defaultdict(list)
    for _ in range(repeats):
        for name, program in LOADED.items():
            done = subprocess.run(
                [
                    sys.executable,
                    "-c",
                    f"from securevfl.core.memory import loading\n{program}\n{_MEASURED}",
                ],
                check=True,
                capture_output=True,
                text=True,
                timeout=300,
            )
            one = json.loads(done.stdout)
            found[name].append(
                {
                    "resident": one["VmRSS"] / 1024,
                    "private": one["RssAnon"] / 1024,
                    "cpu": one["cpu"],
                }
            )
    return {
        name: {figure: statistics.median(one[figure] for one in ones) for figure in ones[0]}
        for name, ones in found.items()
    }


def write_federation(folder: Path, name: str, secondaries: int, rows: int) -> dict[str, Any]:
    """Write tables of numbers, and return the federation file."""
    random = np.random.default_rng(0)
    places = random.uniform(0.5, 9.5, (rows, len(KEYS)))
    parties: list[dict[str, Any]] = []
    for number in range(secondaries + 1):
        keys = places + random.normal(scale=0.01, size=places.shape)
        columns = dict(zip(KEYS, keys.T, strict=True))
        columns |= {f"x{axis}": random.uniform(LOW, HIGH, rows) for axis in range(8)}
        owner = f"bank-{number}" if number else "agency"
        party: dict[str, Any] = {
            "name": owner,
            "data": f"{owner}.csv",
            "role": "secondary" if number else "primary",
            "key": KEYS,
            "scaling": "bounds",
            "bounds": [LOW, HIGH],
        }
        if not number:
            columns["y"] = columns["x0"] + random.normal(size=rows)
            party |= {"label": "y", "address": "127.0.0.1:0"}
        pd.DataFrame(columns).to_csv(folder / f"{owner}.csv", index=False)
        parties.append(party)
    if RUNS[name]["linkage"]["protection"] == "shares":
        parties += [{"name": role, "role": role} for role in ("coordinator", "dealer")]
    # Fifty processes on two cores take their time to start.
    patience = 1800
    return {
        "federation": {"name": f"memory-{name}", "task": "regression", "seed": 0},
        "model": {"family": "fet", "neighbours": 4, "hidden": 16, "heads": 2},
        "training": {"epochs": 2, "batch_size": 128},
        "base": {"estimator": "none"},
        "runtime": {"join_timeout_s": patience, "round_timeout_s": patience},
        **RUNS[name],
        "party": parties,
    }


class Watch:
    """What the processes that this one has started hold and have computed, by party."""

    def __init__(self) -> None:
        self.peaks: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
        self.together = 0.0
        self._ended = threading.Event()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Look at the processes until the block ends."""
        thread = threading.Thread(target=self._watch, daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._ended.set()
            thread.join()

    def _watch(self) -> None:
        summed = 0.0
        while not self._ended.wait(_EVERY_S):
            sums = time.monotonic() - summed > _TOGETHER_EVERY_S
            total = sum(self._look(pid, sums=sums) for pid in _descendants())
            if sums:
                self.together = max(self.together, total)
                summed = time.monotonic()

    def _look(self, pid: int, *, sums: bool) -> float:
        """Take a process's figures; return its share of what all hold together, in MiB."""
        place = Path(f"/proc/{pid}")
        try:
            share = _fields(place / "smaps_rollup")["Pss"] if sums else 0.0
            log = (place / "fd" / "1").readlink()
            if log.parent.parent.name != "parties":
                return share  # the process that parties are forked from
            own = self.peaks[log.parent.name]
            status = _fields(place / "status")
            ran = (place / "stat").read_text().rpartition(")")[2].split()
            held = {"resident": status["VmHWM"], "private": status["RssAnon"]}
        except (OSError, KeyError):  # it has ended meanwhile
            return 0.0
        held["cpu"] = (int(ran[11]) + int(ran[12])) / _TICKS
        for figure, value in held.items():
            own[figure] = max(own[figure], value)
        return share


def _descendants() -> list[int]:
    parents = {}
    for place in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            parents[int(place.parent.name)] = int(place.read_text().rpartition(")")[2].split()[1])
    own = {os.getpid()}
    found: set[int] = set()
    while own:
        own = {pid for pid, parent in parents.items() if parent in own}
        found |= own
    return sorted(found)


def _fields(path: Path) -> dict[str, float]:
    """Return a status file's lines in kB as MiB."""
    found = {}
    for line in path.read_text().splitlines():
        name, _, value = line.partition(":")
        if value.endswith(" kB"):
            found[name] = int(value.split()[0]) / 1024
    return found


def running(name: str, secondaries: int, rows: int) -> dict[str, Any]:
    """Train a small federation; return the largest figures of each role, and those together."""
    watch = Watch()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        config = parse_federation(write_federation(folder, name, secondaries, rows), file=name)
        begin = time.monotonic()
        with watch.watching():
            train_in_processes(
                config,
                RunOptions(
                    run_folder=folder / "run", data_root=folder, observe=lambda _event: None
                ),
            )
        seconds = time.monotonic() - begin
    roles: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for party, own in watch.peaks.items():
        role = roles[config.party(party).role]
        for figure, value in own.items():
            role[figure] = max(role[figure], value)
    return {
        "roles": {role: dict(own) for role, own in roles.items()},
        "together": watch.together,
        "seconds": seconds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--secondaries", type=int, default=2)
    parser.add_argument("--rows", type=int, default=1000)
    parser.add_argument("--repeats", type=int, default=3, help="of importing")
    parser.add_argument("--runs", nargs="*", choices=RUNS, default=list(RUNS))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    found: dict[str, Any] = {"load": os.getloadavg()[0], "importing": importing(options.repeats)}
    print(f"load {found['load']:.1f}; resident MiB, private MiB, CPU seconds")
    for name, one in found["importing"].items():
        print(f"loaded, {name}: {_line(one)}", flush=True)
    found["runs"] = {}
    for name in options.runs:
        ran = running(name, options.secondaries, options.rows)
        found["runs"][name] = ran
        for role, one in ran["roles"].items():
            print(f"{name}, peak of a {role}: {_line(one)}")
        print(
            f"{name}, {options.secondaries} secondaries: together {ran['together']:.0f} MiB, "
            f"{ran['seconds']:.0f} s",
            flush=True,
        )
    if options.json:
        options.json.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


def _line(one: dict[str, float]) -> str:
    return f"{one['resident']:.0f}, {one['private']:.0f}, {one['cpu']:.2f}"


if __name__ == "__main__":
    main()
