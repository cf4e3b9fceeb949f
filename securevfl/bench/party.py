"""One party's process of the SplitAvg benchmark: ``python -m securevfl.bench.party JOB RANK``."""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from securevfl.bench.traffic import own_traffic
from securevfl.bench.variants import CLIP_NORM, DEADLINE_S, Bench, crypten
from securevfl.core.files import write_json
from securevfl.core.memory import keep_freed_memory
from securevfl.core.ranks import PRIMARY_RANK
from securevfl.core.seeds import derive_seed
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
        write_json(folder / f"result-{rank}.json", _measure(bench, job["repeats"], exact))
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


def _measure(bench: Bench, repeats: int, exact: torch.Tensor | None) -> dict[str, Any]:
    results: dict[str, Any] = {
        name: {"wall_s": [], "cpu_s": [], "sent": [], "received": [], "max_error": 0.0}
        for name in bench.variants
    }
    round_number = 0
    # The first repeat warms up and is not kept.
    for repeat in range(repeats + 1):
        for name, variant in bench.variants.items():
            round_number += 1
            before = own_traffic()
            dist.barrier()
            wall, cpu = time.perf_counter(), time.process_time()
            mean = variant(round_number)
            cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
            # The kernel may still be sending when a sender is done.
            dist.barrier()
            traffic = own_traffic().since(before)
            if repeat == 0:
                continue
            figures = results[name]
            figures["wall_s"].append(wall)
            figures["cpu_s"].append(cpu)
            figures["sent"].append(traffic.sent)
            figures["received"].append(traffic.received)
            if mean is not None and exact is not None:
                error = float((mean.reshape(-1).double() - exact).abs().max())
                figures["max_error"] = max(figures["max_error"], error)
    return results


if __name__ == "__main__":
    run_party(Path(sys.argv[1]), int(sys.argv[2]))
