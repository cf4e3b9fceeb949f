"""The benchmark's round over SecretFlow's SPU; run by a Python that has the package ``spu``.

    PYTHON -I spu_process.py check           # its version
    PYTHON -I spu_process.py one FOLDER      # all parties in this process, without a network
    PYTHON -I spu_process.py party FOLDER RANK

That Python has its own versions of everything, so this file imports nothing of securevfl. For every
line on standard input it runs a round and writes one line of JSON.

As in SecretFlow, the k secondaries are the nodes of the SPU device (semi2k over 64 bits), and the
primary reads the result. In a round each secondary splits its numbers into k additive shares; each
node gets its share of all of them, and the device runs the compiled sum; the primary puts the k
shares of the sum together. Between processes shares travel over SPU's own link (brpc), without TLS,
which is its default. What can be made once (links, runtimes, the compiled sum) is.
"""

import json
import struct
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

TIMEOUT_MS = 120_000
RETRY_MS = 200

Share = Any
"""SPU's own: a description, and words in chunks."""


class Device:
    """What every node of the SPU device has."""

    def __init__(self, job: dict[str, Any]) -> None:
        self.nodes = job["parties"]
        self.config = libspu.RuntimeConfig(
            protocol=libspu.ProtocolKind.SEMI2K,
            field=libspu.FieldType.FM64,
            fxp_fraction_bits=job["fraction_bits"],
        )
        self.inputs = [f"in{node}" for node in range(self.nodes)]
        self.io = api.Io(self.nodes, self.config)

    def compiled(self, x: np.ndarray) -> Any:
        """Return the sum of all inputs as a program of SPU."""

        def total(*tensors: Any) -> Any:
            return sum(tensors[1:], start=tensors[0])

        executable, _ = frontend.compile(
            frontend.Kind.JAX,
            total,
            [x] * self.nodes,
            {},
            self.inputs,
            [libspu.Visibility.VIS_SECRET] * self.nodes,
            lambda _: ["out"],
        )
        return executable

    def split(self, x: np.ndarray) -> list[Share]:
        """Return one share for each node."""
        return self.io.make_shares(x, libspu.Visibility.VIS_SECRET)

    def run(self, runtime: Any, program: Any, shares: list[Share]) -> Share:
        """Return a node's share of the sum."""
        for name, share in zip(self.inputs, shares, strict=True):
            runtime.set_var(name, share)
        runtime.run(program)
        return runtime.get_var("out")

    def mean(self, shares: list[Share]) -> np.ndarray:
        """Return what the primary makes of all shares of the sum."""
        return self.io.reconstruct(shares) / self.nodes


class OneProcess:
    """All parties in this process, a thread for each node."""

    def __init__(self, folder: Path, job: dict[str, Any]) -> None:
        self.device = Device(job)
        self.xs = [np.load(folder / f"x-{rank}.npy") for rank in range(1, self.device.nodes + 1)]
        self.program = self.device.compiled(self.xs[0])
        links = libspu.link.Desc()
        for node in range(self.device.nodes):
            links.add_party(f"node{node}", f"thread{node}")

        def runtime(node: int) -> Any:
            return api.Runtime(libspu.link.create_mem(links, node), self.device.config)

        self.runtimes = self._at_all_nodes(runtime)
        self.sent = self.received = 0

    def __call__(self) -> np.ndarray:
        """Run a round and return the mean."""
        shares = [self.device.split(x) for x in self.xs]

        def run(node: int) -> Share:
            own = [of_one[node] for of_one in shares]
            return self.device.run(self.runtimes[node], self.program, own)

        return self.device.mean(self._at_all_nodes(run))

    def _at_all_nodes(self, work: Callable[[int], Any]) -> list[Any]:
        made: dict[int, Any] = {}

        def at(node: int) -> None:
            made[node] = work(node)

        threads = [threading.Thread(target=at, args=(node,)) for node in range(self.device.nodes)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return [made[node] for node in range(self.device.nodes)]


class Party:
    """One party of several processes: rank 0 is the primary, rank r the device's node r - 1."""

    def __init__(self, folder: Path, job: dict[str, Any], rank: int) -> None:
        self.device = Device(job)
        self.rank = rank
        self.link = _brpc("all", job["ports"], rank)
        self.sent = self.received = 0
        if rank:
            self.x = np.load(folder / f"x-{rank}.npy")
            self.program = self.device.compiled(self.x)
            nodes = _brpc("nodes", job["node_ports"], rank - 1)
            self.runtime = api.Runtime(nodes, self.device.config)

    def __call__(self) -> np.ndarray | None:
        """Take part in a round; return the mean at the primary."""
        nodes = range(1, self.device.nodes + 1)
        if not self.rank:
            return self.device.mean([self._receive(node) for node in nodes])
        shares = self.device.split(self.x)
        for node in nodes:
            if node != self.rank:
                self._send(node, shares[node - 1])
        own = shares[self.rank - 1]
        received = [own if node == self.rank else self._receive(node) for node in nodes]
        self._send(0, self.device.run(self.runtime, self.program, received))
        return None

    def _send(self, to: int, share: Share) -> None:
        parts = [share.meta, *share.share_chunks]
        raw = b"".join(struct.pack("<Q", len(part)) + part for part in parts)
        self.sent += len(raw)
        self.link.send_async(to, raw)

    def _receive(self, of: int) -> Share:
        raw = self.link.recv(of)
        self.received += len(raw)
        parts, at = [], 0
        while at < len(raw):
            (length,) = struct.unpack_from("<Q", raw, at)
            parts.append(raw[at + 8 : at + 8 + length])
            at += 8 + length
        share = libspu.Share()
        share.meta, share.share_chunks = parts[0], parts[1:]
        return share


def _brpc(name: str, ports: list[int], rank: int) -> Any:
    links = libspu.link.Desc()
    links.id = name
    links.recv_timeout_ms = links.http_timeout_ms = TIMEOUT_MS
    links.connect_retry_interval_ms = RETRY_MS
    links.connect_retry_times = TIMEOUT_MS // RETRY_MS
    for number, port in enumerate(ports):
        links.add_party(f"{name}{number}", f"127.0.0.1:{port}")
    return libspu.link.create_brpc(links, rank)


def serve(folder: Path, take_part: OneProcess | Party) -> None:
    """Run a round for every line that comes."""
    exact = np.load(folder / "mean.npy")
    _say({"ready": True})
    for _ in sys.stdin:
        sent, received = take_part.sent, take_part.received
        wall, cpu = time.perf_counter(), time.process_time()
        mean = take_part()
        cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
        error = 0.0 if mean is None else float(np.abs(mean.reshape(-1) - exact).max())
        _say(
            {
                "wall_s": wall,
                "cpu_s": cpu,
                "sent": take_part.sent - sent,
                "received": take_part.received - received,
                "max_error": error,
            }
        )


def _say(what: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


def main(what: str, *arguments: str) -> None:
    """Do what the command line says."""
    if what == "check":
        _say({"version": spu.__version__})
        return
    folder = Path(arguments[0])
    job = json.loads((folder / "job.json").read_text())["spu"]
    if what == "one":
        serve(folder, OneProcess(folder, job))
    else:
        serve(folder, Party(folder, job, int(arguments[1])))


if __name__ == "__main__":
    # Not above, so that the module can be read where there is no SPU.
    import spu
    from spu import api, libspu
    from spu.utils import frontend

    main(*sys.argv[1:])
