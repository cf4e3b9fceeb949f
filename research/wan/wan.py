"""Runs between processes over a slow line: seconds, rounds and where they go.

    python research/wan/wan.py                        # 25 ms one way, 100 Mbit/s, three turns
    python research/wan/wan.py --loss 0.01            # with stalls, see below
    python research/wan/wan.py --beside OTHER_CHECKOUT --turns 3
    python research/wan/wan.py --linking shares --cell 10 --encoders frozen    # with a coordinator

Three parties on made-up tables, each its own process, on loopback and over a line, in turns: with
trained encoders, where every round waits for the one before it, and with frozen ones. Under a
protection of linkage its third parties are processes too. Whoever is not the primary dials a proxy
of ours in its place. Each has a line of its own, which passes bytes on at so many bits a second, so
many milliseconds later; it takes in no more than one round trip's worth, so that senders feel the
rate.

A proxy above TCP loses no packets and has no slow start. ``--loss P`` stands in for losses: with
probability P, 1,448 bytes come a retransmission timeout (round trip, and 200 ms at least) late, and
all behind them waits, as behind a gap in TCP. A real sender would slow down besides.
"""

import argparse
import asyncio
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import tomli_w

from securevfl.launch.spawn import reserved_port
from securevfl.transport.identity import provision

DATA_PARTIES = ("primary", "secondary1", "secondary2")
HELPERS = {"none": (), "paillier": ("coordinator",), "shares": ("coordinator", "dealer")}
WIDTH = 100.0
PATIENCE_S = 300.0
SEGMENT = 1448
LEAST_TIMEOUT_S = 0.2
ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, kw_only=True)
class Line:
    """One way of a line; both ways are alike."""

    delay_s: float
    bytes_per_s: float
    loss: float

    @property
    def timeout_s(self) -> float:
        """Seconds until a lost segment is sent again."""
        return max(LEAST_TIMEOUT_S, 2 * self.delay_s)

    @property
    def in_flight(self) -> int:
        """Bytes of one round trip, and one read more."""
        return int(2 * self.delay_s * self.bytes_per_s) + (1 << 14)


class OneWay:
    """Bytes from one end of a connection to the other, late and at a rate."""

    def __init__(
        self, line: Line, source: asyncio.StreamReader, sink: asyncio.StreamWriter
    ) -> None:
        self.line, self.source, self.sink = line, source, sink
        self.chance = random.Random(1)
        self.flying: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()
        self.room = asyncio.Condition()
        self.waiting = 0

    async def run(self) -> None:
        """Pass bytes on until the source ends."""
        writer = asyncio.create_task(self._deliver())
        free = arrived = 0.0
        loop = asyncio.get_running_loop()
        raw = b" "
        while raw:
            try:
                raw = await self.source.read(1 << 14)
            except OSError:
                raw = b""
            free = max(free, loop.time()) + len(raw) / self.line.bytes_per_s
            late = self._lost(len(raw)) * self.line.timeout_s
            # In order, as TCP delivers: what was lost holds up all behind it.
            arrived = max(arrived, free + self.line.delay_s + late)
            async with self.room:
                await self.room.wait_for(lambda: self.waiting < self.line.in_flight)
                self.waiting += len(raw)
            self.flying.put_nowait((arrived, raw))
        await writer

    def _lost(self, size: int) -> bool:
        segments = -(-size // SEGMENT)
        return self.chance.random() > (1 - self.line.loss) ** segments

    async def _deliver(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            due, raw = await self.flying.get()
            await asyncio.sleep(max(0.0, due - loop.time()))
            async with self.room:
                self.waiting -= len(raw)
                self.room.notify()
            try:
                if not raw:
                    self.sink.close()
                    return
                self.sink.write(raw)
                await self.sink.drain()
            except OSError:
                return


@contextmanager
def proxied(line: Line, port: int) -> Iterator[int]:
    """Yield the port of a proxy before ``port`` of this machine."""
    loop = asyncio.new_event_loop()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there, back = await asyncio.open_connection("127.0.0.1", port)
        except OSError:
            # The primary is not there yet; who dialled dials again.
            writer.close()
            return
        ways = OneWay(line, reader, back), OneWay(line, there, writer)
        await asyncio.gather(*(way.run() for way in ways))

    server = loop.run_until_complete(asyncio.start_server(connected, "127.0.0.1", 0))
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        for task in asyncio.all_tasks(loop):
            task.cancel()


@dataclass(frozen=True, kw_only=True)
class Federation:
    """What is run."""

    encoder: str
    rows: int
    protection: str
    cell: float

    @property
    def names(self) -> tuple[str, ...]:
        """All parties."""
        return DATA_PARTIES + HELPERS[self.protection]


def write_federation(folder: Path, federation: Federation, *, port: int) -> Path:
    """Write made-up tables that link by two numbers, and their federation file."""
    chance = np.random.default_rng(0)
    rows, protection = federation.rows, federation.protection
    keys = chance.uniform(1, WIDTH - 1, (rows, 2))
    pinned = provision(federation.names, folder / "ids")
    parties: list[dict[str, Any]] = [
        {"name": role, "role": role, "identity": pinned[role]} for role in HELPERS[protection]
    ]
    for name in DATA_PARTIES:
        near = keys + chance.normal(scale=0.01, size=keys.shape)
        own = {"lon": near[:, 0], "lat": near[:, 1]}
        own |= {f"x{axis}": chance.normal(size=rows) for axis in range(6)}
        party: dict[str, Any] = {"name": name, "role": "secondary", "data": f"{name}.csv"}
        if name == "primary":
            own["y"] = (own["x0"] > 0).astype(int)
            party |= {"role": "primary", "label": "y", "address": f"127.0.0.1:{port}"}
        pd.DataFrame(own).to_csv(folder / f"{name}.csv", index=False)
        parties.append({**party, "key": ["lon", "lat"], "identity": pinned[name]})
    model = {"family": "fet", "neighbours": 4, "hidden": 32, "heads": 2, "release": "pooled"}
    if federation.encoder == "frozen":
        # Fitted in one go: how long the primary trains says nothing of the line.
        model["top"] = "linear"
    hiding: dict[str, Any] = {}
    if protection != "none":
        hiding["ranges"] = [[0.0, WIDTH], [0.0, WIDTH]]
        hiding |= {"cell": federation.cell} if federation.cell else {}
    source = {
        "federation": {"name": "wan", "task": "binary", "seed": 1},
        "model": model,
        "training": {"epochs": 1, "batch_size": 64},
        "base": {"estimator": "none"},
        "privacy": {"mechanism": "none", "encoder": federation.encoder},
        "linkage": {"protection": protection, **hiding},
        "party": parties,
    }
    path = folder / "fed.toml"
    path.write_text(tomli_w.dumps(source), encoding="utf-8")
    return path


def run(federation: Federation, line: Line | None, tree: Path) -> dict[str, Any]:
    """Run all parties once; return seconds by phase, rounds, and bytes."""
    with tempfile.TemporaryDirectory(prefix="securevfl-wan-") as text, reserved_port() as port:
        folder = Path(text)
        if line is None:
            path = write_federation(folder, federation, port=port)
            _run_parties(folder, path, federation.names, port, tree)
        else:
            with proxied(line, port) as front:
                path = write_federation(folder, federation, port=front)
                _run_parties(folder, path, federation.names, port, tree)
        return figures(folder / "run")


def _run_parties(folder: Path, path: Path, names: Sequence[str], port: int, tree: Path) -> None:
    processes = []
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(tree)}
    for name in names:
        command = [sys.executable, "-m", "securevfl.cli.main", "party", str(path), "--name", name]
        command += ["--identity", str(folder / "ids" / name), "--out", str(folder / "run")]
        if name == "primary":
            command += ["--listen", f"127.0.0.1:{port}"]
        with (folder / f"{name}.txt").open("wb") as said:
            processes.append(
                subprocess.Popen(command, stdout=said, stderr=said, env=environment, cwd=folder)
            )
    try:
        for name, process in zip(names, processes, strict=True):
            if process.wait(PATIENCE_S):
                said_last = (folder / f"{name}.txt").read_text()[-2000:]
                raise SystemExit(f"{name} ended with {process.returncode}: {said_last}")
    finally:
        for process in processes:
            process.kill()
            process.wait()


def figures(run_folder: Path) -> dict[str, Any]:
    """Read the phases of a run from the logs of the primary and of the first secondary."""
    primary, secondary = (
        [
            json.loads(text)
            for text in (run_folder / "parties" / name / "log.jsonl").read_text().splitlines()
        ]
        for name in DATA_PARTIES[:2]
    )
    joined = max(entry["seconds"] for entry in primary if entry["event"] == "joined")
    # What the primary does by itself behind that, such as measuring itself alone, is left out.
    end = next(entry["seconds"] for entry in primary if entry.get("point") == "end")
    # Each log counts from its own start, so seconds of two logs are never subtracted.
    connected, linked = (
        next(entry["seconds"] for entry in secondary if entry["event"] == event)
        for event in ("connected", "linked")
    )
    released = [entry for entry in secondary if entry["event"] == "released"]
    rounds = {
        purpose: [entry["seconds"] for entry in released if entry["purpose"] == purpose]
        for purpose in ("release", "train", "validation", "test")
    }
    last = released[-1]["seconds"]
    sent = json.loads((run_folder / "metrics.json").read_text())["bytes"]
    return {
        "all_s": round(end - joined, 2),
        "joining_and_linking_s": round(linked - connected, 2),
        "rounds_s": round(last - linked, 2),
        "the_rest_s": round(end - joined - (last - connected), 2),
        "rounds": {name: len(times) for name, times in rounds.items() if times},
        "ms_a_round": {
            name: round(1000 * _pace(times), 1) for name, times in rounds.items() if len(times) > 1
        },
        "bytes_sent": {name: sent[name]["sent"] for name in DATA_PARTIES},
    }


def _pace(times: list[float]) -> float:
    """Return seconds from one round of a purpose to the next; gaps between epochs are left out."""
    gaps = np.diff(times)
    return float(np.mean(gaps[gaps <= 20 * max(float(np.median(gaps)), 1e-3)]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--delay-ms", type=float, default=25.0, help="one way")
    parser.add_argument("--mbit", type=float, default=100.0, help="a second, each way")
    parser.add_argument("--loss", type=float, default=0.0, help="of segments; stalls, see above")
    parser.add_argument("--rows", type=int, default=6400)
    parser.add_argument("--linking", choices=HELPERS, default="none", help="the protection")
    parser.add_argument("--cell", type=float, default=0.0, help=f"linkage.cell; keys span {WIDTH}")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--encoders", nargs="+", default=["frozen", "trained"])
    parser.add_argument("--beside", type=Path, help="another checkout, in turns with this one")
    arguments = parser.parse_args()
    line = Line(
        delay_s=arguments.delay_ms / 1e3, bytes_per_s=arguments.mbit * 1e6 / 8, loss=arguments.loss
    )
    trees = {"this": ROOT} | ({"beside": arguments.beside.resolve()} if arguments.beside else {})
    for encoder in arguments.encoders:
        for _ in range(arguments.turns):
            for tree, path in trees.items():
                for where, over in (("loopback", None), ("line", line)):
                    load = os.getloadavg()[0]
                    federation = Federation(
                        encoder=encoder,
                        rows=arguments.rows,
                        protection=arguments.linking,
                        cell=arguments.cell,
                    )
                    found = run(federation, over, path)
                    said = {
                        "encoder": encoder,
                        "linking": arguments.linking,
                        "tree": tree,
                        "over": where,
                        "load": load,
                    }
                    print(json.dumps({**said, **found}), flush=True)


if __name__ == "__main__":
    main()
