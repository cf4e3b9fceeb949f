"""Measure what one secondary computes for an average as secondaries grow in number; print Markdown.

    python research/splitavg/growth.py                   # 640,000 numbers, 2 to 50 secondaries

One process plays one secondary, without a wire: from its clipped rows to masked words. Sending them
costs the same whatever the number of secondaries (``splitavg.py`` measures that). All lines
are measured in turns; figures are medians of the process's CPU time.
"""

import argparse
import math
import secrets
import statistics
import time

import torch
from torch import Tensor

from securevfl.config.rules import LARGEST_COMPLETE
from securevfl.core.memory import keep_freed_memory
from securevfl.dp.ring_noise import ExactDiscreteGaussian
from securevfl.mpc.codec import RingFormat, encode, quantise, require_row_norms
from securevfl.mpc.masks import PairwiseMasks, connectivity

PARTIES = (2, 5, 10, 25, 50)
ROW_WIDTH = 5000
CLIP_NORM = 1.0
NOISE_SHARE_STD = 1.0


class Secondary:
    """One of so many secondaries, which shares masks with ``degree`` others or with all."""

    def __init__(self, parties: int, degree: int | None) -> None:
        self.active = tuple(range(1, parties + 1))
        self.degree = degree
        rank = (parties + 1) // 2
        keys = {peer: secrets.token_bytes(32) for peer in self.active if peer != rank}
        self.masks = PairwiseMasks(rank, keys, degree=degree)
        self.formats = {
            std: RingFormat.choose(clip_norm=CLIP_NORM, noise_share_std=std, parties=parties)
            for std in (0.0, NOISE_SHARE_STD)
        }
        self.noise = ExactDiscreteGaussian(
            NOISE_SHARE_STD / self.formats[NOISE_SHARE_STD].granularity
        )
        self.rounds = 0
        self.figures: dict[str, list[float]] = {"masks": [], "plain": [], "noised": []}

    def average(self, x: Tensor) -> None:
        """Do what a release does, without noise and with it; note how long that takes."""
        for name, std in (("plain", 0.0), ("noised", NOISE_SHARE_STD)):
            fmt = self.formats[std]
            began = time.process_time()
            units = quantise(x, fmt)
            if std:
                require_row_norms(units, fmt, clip_norm=CLIP_NORM)
                units += self.noise.sample(units.shape)
            words = encode(units, fmt, reuse=True)
            encoded = time.process_time()
            self.rounds += 1
            self.masks.apply(words, round_number=self.rounds, active=self.active)
            done = time.process_time()
            self.figures[name].append(done - began)
            if not std:
                self.figures["masks"].append(done - encoded)

    def row(self) -> str:
        """Return its line of the table."""
        parties = len(self.active)
        graph = "complete" if self.degree is None else f"mask_degree = {self.degree}"
        withstands = connectivity(parties, self.degree) - 1
        milliseconds = " | ".join(
            f"{1e3 * statistics.median(values):.2f}" for values in self.figures.values()
        )
        return f"| {parties} | {graph} | {withstands} | {milliseconds} |"


def main() -> None:
    """Measure every number of secondaries, with all masks and where offered with few."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parties", type=int, nargs="+", default=PARTIES, help="secondaries")
    parser.add_argument("--elements", type=int, default=640_000, help="a multiple of 5,000")
    parser.add_argument("--repeats", type=int, default=41)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    x = torch.randn(arguments.elements // ROW_WIDTH, ROW_WIDTH)
    x *= 0.99 * CLIP_NORM / x.norm(dim=1, keepdim=True)
    secondaries = []
    for parties in arguments.parties:
        secondaries.append(Secondary(parties, None))
        if parties > LARGEST_COMPLETE:
            # The even number next above 2 log2 k.
            secondaries.append(Secondary(parties, 2 * math.ceil(math.log2(parties))))
    for _ in range(arguments.repeats):
        for secondary in secondaries:
            secondary.average(x)
    print("| k | masks | helpers withstood | masks, ms | without noise, ms | with noise, ms |")
    print("| --- | --- | --- | --- | --- | --- |")
    for secondary in secondaries:
        print(secondary.row())


if __name__ == "__main__":
    main()
