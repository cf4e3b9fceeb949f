"""Rows averaged on CrypTen's shares: milliseconds a round, beside masked sums.

    python research/splitavg/on_shares.py --keep  # k = 2, 5, 10; 64 x 64 and 128 x 128; both lines
    python research/splitavg/on_shares.py --parties 2 --shapes 1024x64 --lines loopback

k secondaries and a primary, each its own process, over mutual TLS: on loopback, and over lines of
25 ms one way and 100 Mbit/s (``research/wan/wan.py``). ``masked`` and ``crypten`` are the values of
``mpc.engine``, both with noise. ``naive`` shares and adds up with CrypTen over gloo, on loopback
alone.
"""

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from itertools import combinations
from pathlib import Path
from typing import Any

import torch

sys.path.append(str(Path(__file__).parents[2]))

from research.common.figure_files import keep
from research.wan.wan import Line, proxied
from securevfl.core.memory import keep_freed_memory
from securevfl.dp.ring_noise import ExactDiscreteGaussian
from securevfl.federation import messages
from securevfl.federation.over_star import PrimaryWire, SecondaryWire
from securevfl.launch.spawn import reserved_port
from securevfl.mpc.codec import RingFormat, encode
from securevfl.mpc.crypten_bridge import CrypTenSumTo, crypten
from securevfl.mpc.masks import PairwiseMasks
from securevfl.mpc.on_shares import Seat, SharedSum
from securevfl.transport.identity import Identity, provision
from securevfl.transport.message import Done, StarKind
from securevfl.transport.star import PrimaryTransport, SecondaryTransport, new_session

WAIT_S, SIGMA = 300.0, 0.2
OURS = ("masked", "crypten")
LINES: dict[str, Line | None] = {
    "loopback": None,
    "50 ms": Line(delay_s=0.025, bytes_per_s=12.5e6, loss=0.0),
}


class Party:
    """One process of a run."""

    def __init__(self, job: dict[str, Any], rank: int) -> None:
        torch.set_num_threads(1)
        keep_freed_memory()
        self.job, self.rank, self.shape = job, rank, tuple(job["shape"])
        self.secondaries = tuple(range(1, job["parties"] + 1))
        self.names = dict(enumerate(job["names"]))
        self.ranks = {name: number for number, name in self.names.items()}
        self.identity = Identity.load(Path(job["folder"]) / self.names[rank], self.names[rank])
        self.ring = RingFormat.choose(clip_norm=1.0, noise_share_std=SIGMA, parties=job["parties"])
        self.clip = 2**self.ring.precision_bits

    def lead(self) -> dict[str, list[float]]:
        """Hold the star as the primary; return the seconds of each round by variant."""
        rows, numbers = self.shape
        address = ("127.0.0.1", self.job["port"])
        pinned = self.job["pinned"]
        found: dict[str, list[float]] = {variant: [] for variant in OURS}
        with PrimaryTransport(
            address, self.identity, pinned, new_session(), self.ranks
        ) as transport:
            transport.listen()
            transport.wait_for_parties(WAIT_S)
            names = [self.names[rank] for rank in self.secondaries]
            for number in range(1, len(OURS) * self.job["rounds"] + 1):
                variant = OURS[number % len(OURS)]
                wire = PrimaryWire(transport, self.names, WAIT_S)
                words = self.ring.words(rows * numbers)
                plan = messages.RoundPlan(
                    round_number=number,
                    active=self.secondaries,
                    purpose="train",
                    rows=torch.arange(rows).numpy(),
                )
                begin = time.monotonic()
                transport.broadcast(names, plan.to_message())
                zeros = torch.zeros(words, dtype=torch.int64)
                CrypTenSumTo(wire, None)(zeros, round_number=number, active=self.secondaries)
                found[variant].append(time.monotonic() - begin)
            transport.broadcast(names, Done().to_message())
        return found

    def follow(self) -> None:
        """Take part as a secondary."""
        job, rank = self.job, self.rank
        address = ("127.0.0.1", job["front"])
        with SecondaryTransport(address, self.identity, job["pinned"], self.ranks) as transport:
            transport.connect(WAIT_S)
            pairs = {
                other: bytes.fromhex(job["keys"][f"{min(rank, other)}-{max(rank, other)}"])
                for other in self.names
                if other not in (0, rank)
            }
            self._contribute(transport, pairs)

    def _contribute(self, transport: SecondaryTransport, pairs: dict[int, bytes]) -> None:
        rows, numbers = self.shape
        wire, masks = SecondaryWire(transport), PairwiseMasks(self.rank, pairs)
        masked = CrypTenSumTo(wire, masks)
        seat = Seat(rank=self.rank, world=self.secondaries, pair_keys=pairs, context=bytes(32))
        shared = SharedSum(wire, masks, seat)
        noise = ExactDiscreteGaussian(SIGMA * self.clip)
        units = torch.full((rows, numbers), int(self.clip / numbers**0.5), dtype=torch.int32)
        while True:
            message = transport.receive(
                (messages.RoundKind.PLAN, StarKind.DONE), round_number=None, deadline_s=WAIT_S
            )
            if message.kind is StarKind.DONE:
                return
            number = message.round_number
            words = encode(units + noise.sample(units.shape), self.ring)
            add_up = masked if OURS[number % len(OURS)] == "masked" else shared
            add_up(words, round_number=number, active=self.secondaries)

    def naive(self) -> dict[str, list[float]]:
        """Run CrypTen over gloo; return the seconds of each round by variant."""
        os.environ.update(
            RANK=str(self.rank),
            WORLD_SIZE=str(len(self.secondaries) + 1),
            RENDEZVOUS=f"tcp://127.0.0.1:{self.job['gloo']}",
            DISTRIBUTED_BACKEND="gloo",
        )
        crypten.init()
        link = crypten.communicator.get()
        x = torch.full(self.shape, self.shape[1] ** -0.5)
        found: dict[str, list[float]] = {"naive": []}
        for _ in range(self.job["rounds"]):
            link.barrier()
            begin = time.monotonic()
            shared = [crypten.cryptensor(x, src=rank) for rank in self.secondaries]
            sum(shared[1:], shared[0]).get_plain_text(dst=0)
            found["naive"].append(time.monotonic() - begin)
        return found


def _run(job: dict[str, Any], rank: int, end: Any, work: Callable[[Party], Any]) -> None:
    end.send(work(Party(job, rank)))


def measured(job: dict[str, Any], *, naive: bool) -> dict[str, list[float]]:
    """Run all parties; return what the primary has measured."""
    processes, ends = [], []
    fork = multiprocessing.get_context("fork")
    for rank in range(job["parties"] + 1):
        end, own = fork.Pipe(duplex=False)
        work = Party.naive if naive else Party.follow if rank else Party.lead
        processes.append(fork.Process(target=_run, args=(job, rank, own, work), daemon=True))
        processes[-1].start()
        ends.append(end)
    try:
        if not ends[0].poll(WAIT_S):
            raise SystemExit("the primary did not end in time")
        found: dict[str, list[float]] = ends[0].recv()
        return found
    finally:
        for process in processes:
            process.join(10)
            process.kill()


def run(parties: int, shape: tuple[int, int], line: str, rounds: int) -> list[dict[str, Any]]:
    """Run one setting; return a row of figures for each variant."""
    names = ["primary", *(f"secondary{rank}" for rank in range(1, parties + 1))]
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        port, gloo = (stack.enter_context(reserved_port()) for _ in range(2))
        slow = LINES[line]
        front = port if slow is None else stack.enter_context(proxied(slow, port))
        job = {
            "parties": parties,
            "shape": shape,
            "rounds": rounds,
            "names": names,
            "folder": folder,
            "pinned": provision(names, Path(folder)),
            "port": port,
            "front": front,
            "gloo": gloo,
            "keys": {
                f"{one}-{other}": os.urandom(32).hex()
                for one, other in combinations(range(1, len(names)), 2)
            },
        }
        found = measured(job, naive=False)
        if slow is None:
            found |= measured(job, naive=True)
    return [
        {
            "variant": variant,
            "parties": parties,
            "shape": "x".join(map(str, shape)),
            "line": line,
            # The first one loads.
            "ms": round(1000 * statistics.median(seconds[1:]), 1),
        }
        for variant, seconds in found.items()
    ]


def main() -> None:
    """Measure, print and keep."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parties", default="2,5,10")
    parser.add_argument("--shapes", default="64x64,128x128")
    parser.add_argument("--lines", default="loopback,50 ms")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--keep", action="store_true", help="write research/splitavg/figures/on-shares.json"
    )
    options = parser.parse_args()
    rows = []
    for parties in map(int, options.parties.split(",")):
        for text in options.shapes.split(","):
            for line in options.lines.split(","):
                one, other = map(int, text.split("x"))
                for row in run(parties, (one, other), line, options.rounds):
                    rows.append(row)
                    print(json.dumps(row), flush=True)
    if options.keep:
        keep("on-shares", {"rows": rows}, seeds=[], code=("securevfl/mpc", "securevfl/transport"))


if __name__ == "__main__":
    main()
