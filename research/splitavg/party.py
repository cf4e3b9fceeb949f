"""One party's process of the SplitAvg benchmark.

``python research/splitavg/party.py JOB RANK`` runs it.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.append(str(Path(__file__).parents[2]))

from research.splitavg.variants import (
    CLIP_NORM,
    DEADLINE_S,
    Bench,
    Measured,
    Variant,
    crypten,
    own_traffic,
)
from securevfl.core.conventions import PRIMARY_RANK, derive_seed
from securevfl.core.files import write_json
from securevfl.core.memory import keep_freed_memory
from securevfl.transport.connection import TransportLimits
from securevfl.transport.identity import Identity
from securevfl.transport.star import PrimaryTransport, SecondaryTransport, new_session


def bounded_rows(rank: int, *, rows: int, width: int) -> torch.Tensor:
    """Return a secondary's tensor, the same wherever it is made: rows of norm just below C."""
    generator = torch.Generator().manual_seed(derive_seed(0, "bench", rank))
    x = torch.randn(rows, width, generator=generator)
    return x * (0.99 * CLIP_NORM / x.norm(dim=1, keepdim=True))


def run_party(folder: Path, rank: int) -> None:
    """Run every variant as often as the job says, interleaved; write what this party measured.

    Reveals:
        What the variants reveal; the tensors are random.
    """
    job = json.loads((folder / "job.json").read_text())
    torch.set_num_threads(1)
    if job["keeps_memory"]:
        keep_freed_memory()
    os.environ.update(
        DISTRIBUTED_BACKEND="gloo",
        RENDEZVOUS=f"file://{folder}/gloo",
        WORLD_SIZE=str(len(job["names"])),
        RANK=str(rank),
    )
    crypten.init()
    names = dict(enumerate(job["names"]))
    transport = _connect(folder, job, rank)
    with transport:
        shape = {"rows": job["rows"], "width": job["width"]}
        held = torch.zeros(job["rows"], job["width"])
        bench = Bench(
            held if rank == PRIMARY_RANK else bounded_rows(rank, **shape),
            rank=rank,
            names=names,
            transport=transport,
            pair_keys={
                int(peer): bytes.fromhex(key) for peer, key in job["keys"][str(rank)].items()
            },
            noise_share_std=job["noise_share_std"],
        )
        exact = None
        if rank == PRIMARY_RANK:
            others = [bounded_rows(r, **shape).double() for r in bench.secondaries]
            exact = sum(others, start=torch.zeros(1)).reshape(-1) / len(others)
        rounds: dict[str, Callable[[int], Measured]] = {
            name: partial(_time_variant, variant, exact) for name, variant in bench.variants.items()
        }
        write_json(folder / f"result-{rank}.json", _measure(rounds, job["repeats"]))
        # Nobody leaves while another party still measures.
        dist.barrier()


def _connect(folder: Path, job: dict[str, Any], rank: int) -> PrimaryTransport | SecondaryTransport:
    name = job["names"][rank]
    identity = Identity.load(folder / name, name)
    ranks = {party: r for r, party in enumerate(job["names"])}
    address = ("127.0.0.1", job["port"])
    limits = TransportLimits(silence_timeout_s=DEADLINE_S)
    if rank == PRIMARY_RANK:
        primary = PrimaryTransport(
            address, identity, job["pinned"], new_session(), ranks, limits=limits
        )
        primary.listen()
        primary.wait_for_parties(DEADLINE_S)
        return primary
    secondary = SecondaryTransport(address, identity, job["pinned"], ranks, limits=limits)
    secondary.connect(DEADLINE_S)
    return secondary


def _measure(
    rounds: Mapping[str, Callable[[int], Measured]], repeats: int
) -> dict[str, dict[str, list[float]]]:
    """Run all in turns; return each one's figures, a list over repeats for every field."""
    results: dict[str, list[Measured]] = {name: [] for name in rounds}
    round_number = 0
    # The first repeat warms up and is not kept.
    for repeat in range(repeats + 1):
        for name, run in rounds.items():
            round_number += 1
            dist.barrier()
            measured = run(round_number)
            if repeat:
                results[name].append(measured)
    return {
        name: {field: [asdict(sample)[field] for sample in all_of] for field in asdict(all_of[0])}
        for name, all_of in results.items()
    }


def _time_variant(variant: Variant, exact: torch.Tensor | None, round_number: int) -> Measured:
    before = own_traffic()
    # All parties have looked by now.
    dist.barrier()
    wall, cpu = time.perf_counter(), time.process_time()
    mean = variant(round_number)
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    # The kernel may still be sending when a sender is done.
    dist.barrier()
    traffic = own_traffic().since(before)
    error = 0.0
    if mean is not None and exact is not None:
        error = float((mean.reshape(-1).double() - exact).abs().max())
    return Measured(
        wall_s=wall, cpu_s=cpu, sent=traffic.sent, received=traffic.received, max_error=error
    )


if __name__ == "__main__":
    run_party(Path(sys.argv[1]), int(sys.argv[2]))
