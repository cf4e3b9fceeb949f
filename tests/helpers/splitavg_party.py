"""One party of a real SplitAvg, over TLS and CrypTen.

Run in ``tests`` as ``python -m helpers.splitavg_party FOLDER RANK``.
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch
from helpers.ring_keys import bounded_values

from securevfl.dp.ring_noise import ExactDiscreteGaussian
from securevfl.federation.over_star import PrimaryWire, SecondaryWire
from securevfl.mpc.codec import RingFormat, decode_sum, encode, quantise
from securevfl.mpc.crypten_bridge import CrypTenSumTo
from securevfl.mpc.masks import PairwiseMasks
from securevfl.transport.identity import Identity
from securevfl.transport.star import PrimaryTransport, SecondaryTransport, new_session

WAIT_S = 300.0


def main(folder: Path, rank: int) -> None:
    """Take part in every round of the job; the primary saves the sums, in ring units."""
    torch.set_num_threads(1)
    job = json.loads((folder / "job.json").read_text())
    names = dict(enumerate(job["names"]))
    identity = Identity.load(folder / names[rank], names[rank])
    ranks = {name: r for r, name in names.items()}
    address = ("127.0.0.1", job["port"])
    active = tuple(r for r in names if r)
    formats = [
        RingFormat.choose(clip_norm=1.0, noise_share_std=std, parties=len(active))
        for std in job["noise_share_std"]
    ]
    if rank == 0:
        with PrimaryTransport(address, identity, job["pinned"], new_session(), ranks) as primary:
            primary.listen()
            primary.wait_for_parties(WAIT_S)
            sum_to = CrypTenSumTo(PrimaryWire(primary, names, deadline_s=WAIT_S), None)
            sums = []
            for round_number, fmt in enumerate(formats, start=1):
                zeros = torch.zeros(fmt.words(job["elements"]), dtype=torch.int64)
                total = sum_to(zeros, round_number=round_number, active=active)
                assert total is not None
                units = decode_sum(total, fmt, elements=job["elements"], parties_active=len(active))
                sums.append(units.numpy())
        np.save(folder / "sums.npy", np.stack(sums))
        return
    with SecondaryTransport(address, identity, job["pinned"], ranks) as secondary:
        secondary.connect(WAIT_S)
        keys = {int(peer): bytes.fromhex(key) for peer, key in job["keys"][str(rank)].items()}
        sum_to = CrypTenSumTo(SecondaryWire(secondary), PairwiseMasks(rank, keys))
        noise = {
            std: ExactDiscreteGaussian(std / fmt.granularity)
            for std, fmt in zip(job["noise_share_std"], formats, strict=True)
            if std
        }
        for round_number, fmt in enumerate(formats, start=1):
            units = quantise(bounded_values(rank, job["elements"]), fmt)
            std = job["noise_share_std"][round_number - 1]
            if std:
                units += noise[std].sample(units.shape)
            sum_to(encode(units, fmt), round_number=round_number, active=active)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
