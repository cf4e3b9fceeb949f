"""Time exact linkage against the obvious ways, as ratios within one run.

    python research/linkage/linkage.py [--fast] [--only NAME] [--json FILE]

Every measurement runs in a fresh process, ours before its baseline, so that peak memory is ours.
Times are CPU seconds of all threads together, which other work on the machine changes little.
Baselines that would take hours are timed on a few rows, which ``baseline_rows`` counts, and
compared per row or pair. ``--fast`` takes small tables: it shows that the script runs, no more.
"""

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from securevfl.linkage.links import LinkTable
from securevfl.linkage.metrics.points import EuclideanKeys
from securevfl.linkage.sampling import PoissonSampler, RoundLinker
from securevfl.stages.bloom.codes import CodeKeys
from securevfl.stages.encrypted_linkage.block_search import (
    CellBlock,
    cells_of,
    links_by_cell,
    links_from_shares,
)
from securevfl.stages.encrypted_linkage.homomorphic import (
    Keyholder,
    masked_distances,
    prepared_obfuscators,
)
from securevfl.stages.encrypted_linkage.shares import (
    deal,
    masked_keys,
    primary_share,
    secondary_share,
)
from securevfl.stages.fuzzy_keys.edits import TextKeys

SEED = 0
K = 50
MIB = 2**20


@dataclass(frozen=True)
class Sizes:
    """How much is linked: all of it, or little in the fast mode."""

    fast: bool

    def __call__(self, full: int, fast: int) -> int:
        """Choose one of two sizes."""
        return fast if self.fast else full


def timed(action: Callable[[], Any]) -> tuple[float, Any]:
    """Return CPU seconds, which other work on the machine changes little, and the result."""
    start = time.process_time()
    result = action()
    return time.process_time() - start, result


def measured(action: Callable[[], Any]) -> tuple[float, float, Any]:
    """Return CPU seconds, the MiB by which the process grew at its peak, and the result."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    seconds, result = timed(action)
    # ru_maxrss counts kibibytes on Linux.
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return seconds, most - pages * resource.getpagesize() / MIB, result


def links_mib(links: LinkTable) -> float:
    return 2 * links.indices.nbytes / MIB


def numeric(size: Sizes) -> dict[str, Any]:
    """Euclidean, 200,000 x 100,000, d = 4, K = 50: scikit-learn's KDTree and brute force."""
    from sklearn.neighbors import KDTree, NearestNeighbors

    rng = np.random.default_rng(SEED)
    rows, records, few = size(200_000, 2000), size(100_000, 1000), size(500, 20)
    mine, theirs = rng.random((rows, 4)), rng.random((records, 4))
    ours, peak, links = measured(
        lambda: EuclideanKeys(primary=mine, records=theirs).nearest(None, K)
    )
    tree, found = timed(lambda: KDTree(theirs).query(mine, K)[1])
    brute_index = NearestNeighbors(n_neighbors=K, algorithm="brute").fit(theirs)
    brute, exact = timed(lambda: brute_index.kneighbors(mine[:few], return_distance=False))
    return {
        "seconds": ours,
        "microseconds_per_row": 1e6 * ours / rows,
        "times_faster_than_kdtree": tree / ours,
        "times_faster_than_brute_force": (brute / few) / (ours / rows),
        "baseline_rows": {"kdtree": rows, "brute": few},
        "equal_sets_kdtree": equal_sets(links.indices, found),
        "equal_sets_brute": equal_sets(links.indices, exact),
        "peak_mib": peak,
        # Twice the links, and 2^19 candidates of 16 bytes and 24 a dimension.
        "bound_mib": 2 * links_mib(links) + 2**19 * (16 + 24 * 4) / MIB,
    }


def equal_sets(ours: np.ndarray, theirs: np.ndarray) -> float:
    return float(np.mean([set(a) == set(b) for a, b in zip(ours, theirs, strict=False)]))


def titles(count: int, rng: np.random.Generator) -> list[str]:
    """Made-up titles: two to six words of a vocabulary of 5,000, as product names have."""
    letters = np.array(list("abcdefghijklmnopqrstuvwxyz"))
    words = np.array(["".join(rng.choice(letters, rng.integers(3, 10))) for _ in range(5000)])
    return [" ".join(rng.choice(words, rng.integers(2, 7))) for _ in range(count)]


def mistyped(titles: list[str], count: int, rng: np.random.Generator) -> list[str]:
    """Copies of some titles, each with up to three letters changed, added or lost."""
    copies = []
    for number in rng.integers(0, len(titles), count):
        text = list(titles[number])
        for _ in range(rng.integers(0, 4)):
            place, letter = rng.integers(0, len(text)), chr(97 + rng.integers(26))
            text[place : place + rng.integers(0, 2)] = [letter] * rng.integers(0, 2)
        copies.append("".join(text))
    return copies


def text(size: Sizes) -> dict[str, Any]:
    """Levenshtein, 27,000 x 50,000 titles: a ``process.extract`` loop."""
    from rapidfuzz import process
    from rapidfuzz.distance import Levenshtein

    rng = np.random.default_rng(SEED)
    records = titles(size(50_000, 300), rng)
    mine = mistyped(records, size(27_000, 200), rng)
    few = mine[: size(50, 5)]
    ours, peak, links = measured(lambda: TextKeys.of(mine, records).nearest(None, K))
    loop, found = timed(
        lambda: [process.extract(one, records, scorer=Levenshtein.distance, limit=K) for one in few]
    )

    return {
        "seconds": ours,
        "pairs_per_second": len(mine) * len(records) / ours,
        "times_faster_than_extract_loop": (loop / len(few)) / (ours / len(mine)),
        "baseline_rows": len(few),
        "equal_distances": float(
            np.mean(
                [
                    a.tolist() == [d for _, d, _ in b]
                    for a, b in zip(links.distances, found, strict=False)
                ]
            )
        ),
        "peak_mib": peak,
        "bound_mib": 112 + 2 * links_mib(links),
    }


def hamming(size: Sizes) -> dict[str, Any]:
    """Hamming, 20,000 x 100,000, 1,024 bits: one numpy row at a time; numpy and faiss are ours."""
    rng = np.random.default_rng(SEED)
    rows, records, few = size(20_000, 100), size(100_000, 500), size(20, 5)
    mine, theirs = (rng.integers(0, 256, (count, 128), dtype=np.uint8) for count in (rows, records))

    def row_loop() -> list[np.ndarray]:
        return [
            np.argsort(np.bitwise_count(theirs ^ one).sum(axis=1), kind="stable")[:K]
            for one in mine[:few]
        ]

    part = mine[: size(4_000, 100)]
    plain, peak, links = measured(
        lambda: CodeKeys(primary=part, records=theirs, backend="numpy").nearest(None, K)
    )
    faiss, others = timed(
        lambda: CodeKeys(primary=mine, records=theirs, backend="faiss").nearest(None, K)
    )
    loop, exact = timed(row_loop)
    return {
        "faiss_seconds": faiss,
        "numpy_pairs_per_second": len(part) * records / plain,
        "faiss_pairs_per_second": rows * records / faiss,
        "numpy_times_faster_than_row_loop": (loop / few) / (plain / len(part)),
        "faiss_times_faster_than_row_loop": (loop / few) / (faiss / rows),
        "rows": {"faiss": rows, "numpy": len(part), "baseline": few},
        "backends_equal": bool(np.array_equal(links.indices, others.indices[: len(part)])),
        "loop_equal": bool(np.array_equal(links.indices[:few], np.array(exact))),
        "peak_mib": peak,
        "bound_mib": 112 + 2 * links_mib(links),
    }


def rounds(size: Sizes) -> dict[str, Any]:
    """A round of 128 rows in a sample of 20,000 records: filtered lists against a new search."""
    rng = np.random.default_rng(SEED)
    mine, theirs = rng.random((size(20_000, 500), 2)), rng.random((size(20_000, 600), 2))
    keys = EuclideanKeys(primary=mine, records=theirs)
    figures: dict[str, Any] = {}
    for rate in (0.02, 0.05, 0.1, 0.2, 0.5, 0.9):
        sampler = PoissonSampler(len(theirs), rate, insecure_seed=SEED)
        samples = [sampler.draw() for _ in range(size(20, 2))]
        chosen = [rng.choice(len(mine), 128, replace=False) for _ in samples]
        cost, answers = {}, {}
        for method in ("list", "rebuild"):
            setup, linker = timed(partial(RoundLinker, keys, K, rate=rate, method=method))
            # The map links as the list is made.
            each, answers[method] = timed(partial(list, map(linker.link, chosen, samples)))
            cost[method] = (setup, each / len(samples))
        saved = cost["rebuild"][1] - cost["list"][1]
        figures[f"q={rate}"] = {
            "list_setup_s": cost["list"][0],
            "list_round_ms": 1e3 * cost["list"][1],
            "rebuild_round_ms": 1e3 * cost["rebuild"][1],
            "rounds_until_the_list_pays": cost["list"][0] / saved if saved > 0 else None,
            "equal": all(
                np.array_equal(a.indices, b.indices) for a, b in zip(*answers.values(), strict=True)
            ),
        }
    return figures


def paillier(size: Sizes) -> dict[str, Any]:
    """Paillier, 2,048 bits, d = 2, one core: one pair at a time with phe."""
    from phe import paillier as phe

    rng = np.random.default_rng(SEED)
    bits = size(2048, 512)
    mine, theirs = (rng.integers(0, 2**16, (count, 2)) for count in (54, size(1000, 10)))
    holder = Keyholder(bits=bits, insecure_short_key=size.fast)
    encrypt, packed = timed(lambda: holder.encrypt([mine])[0])
    wanted = len(packed.packs) * len(theirs)
    prepare, peak, fresh = measured(lambda: prepared_obfuscators(holder.modulus, wanted))
    compute, found = timed(lambda: masked_distances([(packed, theirs)], iter(fresh)))
    answers, shares = found[0]
    decrypt, (ours,) = timed(lambda: holder.share([(mine, answers)]))
    exact = ((mine[:, None] - theirs[None]) ** 2).sum(axis=2)

    public, private = phe.generate_paillier_keypair(n_length=bits)
    key = [public.encrypt(int(value)) for value in mine[0]]
    norm = public.encrypt(int((mine[0] ** 2).sum()))
    few = theirs[: size(50, 3)]

    def one_by_one() -> list[float]:
        found = []
        for record in few.tolist():
            products = [
                encrypted * (-2 * value) for encrypted, value in zip(key, record, strict=True)
            ]
            total = norm + products[0] + products[1] + sum(value**2 for value in record)
            total.obfuscate()
            found.append(private.decrypt(total))
        return found

    plain, plain_found = timed(one_by_one)
    pairs, all_in, online = exact.size, encrypt + prepare + compute + decrypt, compute + decrypt
    return {
        "pairs": pairs,
        "lanes": packed.lanes.count,
        "pairs_per_second_all_in": pairs / all_in,
        "pairs_per_second_online": pairs / online,
        "phe_pairs_per_second": len(few) / plain,
        "times_faster_than_phe_all_in": pairs / all_in / (len(few) / plain),
        "times_faster_than_phe_online": pairs / online / (len(few) / plain),
        "milliseconds_per_ciphertext": {
            "prepare": 1e3 * prepare / wanted,
            "compute": 1e3 * compute / wanted,
            "decrypt": 1e3 * decrypt / wanted,
        },
        "baseline_pairs": len(few),
        "equal": bool(np.array_equal(ours + shares, exact.astype(np.uint64))),
        "phe_equal": bool(np.array_equal(plain_found, exact[0, : len(few)])),
        "peak_mib": peak,
    }


def cells(size: Sizes) -> dict[str, Any]:
    """Secret shares, 5,000 x 20,000, d = 2, K = 10: neighbouring cells against all pairs."""
    rng = np.random.default_rng(SEED)
    mine, theirs = (
        rng.integers(0, 2**16, (count, 2)) for count in (size(5000, 200), size(20_000, 500))
    )

    def link_blocks(blocks: Sequence[CellBlock], k: int) -> Iterator[LinkTable]:
        return (link(b.rows, b.records, min(k, len(b.records))) for b in blocks)

    tried = 0

    def link(rows: np.ndarray, records: np.ndarray, k: int) -> LinkTable:
        nonlocal tried
        tried += len(rows) * len(records)
        first, second = deal(len(rows), len(records), 2)
        one = primary_share(mine[rows], first, masked_keys(theirs[records], second))
        other = secondary_share(theirs[records], second, masked_keys(mine[rows], first))
        return links_from_shares(one, other, k, key_dim=2)

    width = size(1024, 8192)
    by_cell, peak, found = measured(
        lambda: links_by_cell(
            cells_of(mine, width), cells_of(theirs, width), 10, width=width, link=link_blocks
        )
    )
    share = tried / (len(mine) * len(theirs))
    everyone, some = np.arange(len(theirs)), np.arange(size(500, 50))
    whole, expected = timed(lambda: link(some, everyone, 10))
    return {
        "share_of_pairs": share,
        "shares_pairs_per_second": len(some) * len(theirs) / whole,
        "times_faster_than_all_pairs": (whole / len(some)) / (by_cell / len(mine)),
        "baseline_rows": len(some),
        "equal": bool(np.array_equal(found.indices[some], expected.indices)),
        "peak_mib": peak,
    }


MEASUREMENTS = {
    "numeric": numeric,
    "text": text,
    "hamming": hamming,
    "rounds": rounds,
    "paillier": paillier,
    "cells": cells,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fast", action="store_true")
    parser.add_argument("--only", choices=MEASUREMENTS)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if arguments.only:
        print(json.dumps(MEASUREMENTS[arguments.only](Sizes(fast=arguments.fast))))
        return
    everything = {}
    for name in MEASUREMENTS:
        command = [sys.executable, __file__, "--only", name]
        command += ["--fast"] if arguments.fast else []
        done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=1800)
        everything[name] = json.loads(done.stdout)
        print(name, json.dumps(everything[name], indent=2), flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(everything, indent=2) + "\n")


if __name__ == "__main__":
    main()
