"""Time exact linkage against the obvious ways, as ratios within one run.

    python benchmarks/linkage.py [--rows 2000] [--only NAME] [--json FILE]

Every measurement runs in a fresh process, so that its peak memory is its own. ``--rows`` primary
rows are linked to the whole secondary's table; times are per row, which makes slices comparable.
"""

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from securevfl.linkage.euclidean import nearest_records
from securevfl.linkage.hamming import nearest_codes
from securevfl.linkage.levenshtein import nearest_texts
from securevfl.linkage.paillier_distances import Keyholder, masked_distances, obfuscators
from securevfl.linkage.sampling import PoissonSampler, SampledLinker
from securevfl.linkage.shared_distances import deal, masked_keys, primary_share, secondary_share

SEED = 0
K = 50


def timed(action: Callable[[], Any]) -> tuple[float, Any]:
    start = time.perf_counter()
    result = action()
    return time.perf_counter() - start, result


def numeric(rows: int) -> dict[str, Any]:
    """Euclidean: rows x 100,000 at d = 4 against scikit-learn's KDTree and brute force."""
    from sklearn.neighbors import KDTree, NearestNeighbors

    rng = np.random.default_rng(SEED)
    mine, theirs = rng.random((rows, 4)), rng.random((100_000, 4))
    ours, links = timed(lambda: nearest_records(mine, theirs, K))
    tree, found = timed(lambda: KDTree(theirs).query(mine, K)[1])
    few = mine[:200]
    brute_index = NearestNeighbors(n_neighbors=K, algorithm="brute").fit(theirs)
    brute, exact = timed(lambda: brute_index.kneighbors(few, return_distance=False))
    return {
        "microseconds_per_row": 1e6 * ours / rows,
        "times_faster_than_sklearn_kdtree": tree / ours,
        "times_faster_than_brute_force": (brute / len(few)) / (ours / rows),
        "equal_sets_kdtree": float(
            np.mean([set(a) == set(b) for a, b in zip(links.indices, found, strict=True)])
        ),
        "equal_sets_brute": float(
            np.mean([set(a) == set(b) for a, b in zip(links.indices, exact, strict=False)])
        ),
    }


def titles(count: int, rng: np.random.Generator) -> list[str]:
    """Made-up titles: two to six words of a vocabulary of 5,000, as product names have."""
    letters = np.array(list("abcdefghijklmnopqrstuvwxyz"))
    words = np.array(["".join(rng.choice(letters, rng.integers(3, 10))) for _ in range(5000)])
    return [" ".join(rng.choice(words, rng.integers(2, 7))) for _ in range(count)]


def text(rows: int) -> dict[str, Any]:
    """Levenshtein: rows x 50,000 titles against a loop of ``process.extract``."""
    from rapidfuzz import process
    from rapidfuzz.distance import Levenshtein

    rng = np.random.default_rng(SEED)
    rows = min(rows, 1000)
    records = titles(50_000, rng)
    mine = titles(rows, rng)
    ours, links = timed(lambda: nearest_texts(mine, records, K))
    few = mine[: max(1, rows // 20)]
    loop, found = timed(
        lambda: [process.extract(one, records, scorer=Levenshtein.distance, limit=K) for one in few]
    )
    return {
        "pairs_per_second": rows * len(records) / ours,
        "times_faster_than_extract_loop": (loop / len(few)) / (ours / rows),
        "equal_distances": float(
            np.mean(
                [
                    a[:K].tolist() == [d for _, d, _ in b]
                    for a, b in zip(links.distances, found, strict=False)
                ]
            )
        ),
    }


def hamming(rows: int) -> dict[str, Any]:
    """Hamming: rows x 100,000 at 1,024 bits, numpy and faiss, against one numpy row at a time."""
    rng = np.random.default_rng(SEED)
    mine, theirs = (rng.integers(0, 256, (count, 128), dtype=np.uint8) for count in (rows, 100_000))

    def row_loop() -> list[np.ndarray]:
        return [
            np.argsort(np.bitwise_count(theirs ^ one).sum(axis=1), kind="stable")[:K]
            for one in mine[:20]
        ]

    plain, links = timed(lambda: nearest_codes(mine, theirs, K, backend="numpy"))
    faiss, others = timed(lambda: nearest_codes(mine, theirs, K, backend="faiss"))
    loop, exact = timed(row_loop)
    return {
        "numpy_pairs_per_second": rows * len(theirs) / plain,
        "faiss_pairs_per_second": rows * len(theirs) / faiss,
        "numpy_times_faster_than_row_loop": (loop / 20) / (plain / rows),
        "faiss_times_faster_than_row_loop": (loop / 20) / (faiss / rows),
        "backends_equal": bool(np.array_equal(links.indices, others.indices)),
        "loop_equal": bool(np.array_equal(links.indices[:20], np.array(exact))),
    }


def rounds(rows: int) -> dict[str, Any]:
    """A round of 128 rows in a sample of 20,000 records: filtered lists against a new search."""
    rng = np.random.default_rng(SEED)
    mine, theirs = rng.random((rows, 2)), rng.random((20_000, 2))
    figures = {}
    for rate in (0.02, 0.05, 0.1, 0.2, 0.5, 0.9):
        sampler = PoissonSampler(len(theirs), rate, insecure_seed=SEED)
        samples = [sampler.draw() for _ in range(20)]
        chosen = [rng.choice(rows, 128, replace=False) for _ in samples]
        cost = {}
        for method in ("list", "rebuild"):
            setup, linker = timed(
                lambda m=method, q=rate: SampledLinker(mine, theirs, K, rate=q, method=m)
            )
            each, _ = timed(lambda made=linker, c=chosen, s=samples: list(map(made.link, c, s)))
            cost[method] = (setup, each / len(samples))
        saved = cost["rebuild"][1] - cost["list"][1]
        figures[f"q={rate}"] = {
            "list_setup_s": cost["list"][0],
            "list_round_ms": 1e3 * cost["list"][1],
            "rebuild_round_ms": 1e3 * cost["rebuild"][1],
            "rounds_until_the_list_pays": cost["list"][0] / saved if saved > 0 else None,
        }
    return figures


def protected(rows: int) -> dict[str, Any]:
    """Paillier at 2,048 bits and d = 2 against one pair at a time with phe; and secret shares."""
    from phe import paillier

    rng = np.random.default_rng(SEED)
    mine = rng.integers(0, 2**16, (54, 2))
    theirs = rng.integers(0, 2**16, (max(10, min(rows // 100, 50)), 2))
    holder = Keyholder()
    packed = holder.encrypt(mine)
    prepare, fresh = timed(
        lambda: list(obfuscators(holder.modulus, len(packed.packs) * len(theirs)))
    )
    compute, (answers, shares) = timed(lambda: masked_distances(packed, theirs, iter(fresh)))
    decrypt, ours = timed(lambda: holder.share(mine, answers))
    exact = ((mine[:, None] - theirs[None]) ** 2).sum(axis=2)

    public, private = paillier.generate_paillier_keypair(n_length=2048)
    key = [public.encrypt(int(value)) for value in mine[0]]
    norm = public.encrypt(int((mine[0] ** 2).sum()))

    def one_by_one() -> list[float]:
        found = []
        for record in theirs[:10].tolist():
            products = [
                encrypted * (-2 * value) for encrypted, value in zip(key, record, strict=True)
            ]
            total = norm + products[0] + products[1] + sum(value**2 for value in record)
            total.obfuscate()
            found.append(private.decrypt(total))
        return found

    plain, plain_found = timed(one_by_one)
    pairs, all_in = exact.size, prepare + compute + decrypt
    blocks = rng.integers(0, 2**16, (200, 2)), rng.integers(0, 2**16, (20_000, 2))

    def share_block() -> np.ndarray:
        first, second = deal(200, 20_000, 2)
        return primary_share(blocks[0], first, masked_keys(blocks[1], second)) + secondary_share(
            blocks[1], second, masked_keys(blocks[0], first)
        )

    shared, _ = timed(share_block)
    return {
        "paillier_pairs_per_second_all_in": pairs / all_in,
        "paillier_pairs_per_second_online": pairs / (compute + decrypt),
        "phe_pairs_per_second": 10 / plain,
        "times_faster_than_phe_all_in": pairs / all_in / (10 / plain),
        "equal": bool(np.array_equal(ours + shares, exact.astype(np.uint64))),
        "phe_equal": bool(np.array_equal(plain_found, exact[0, :10])),
        "shares_pairs_per_second": 200 * 20_000 / shared,
    }


MEASUREMENTS = {
    "numeric": numeric,
    "text": text,
    "hamming": hamming,
    "rounds": rounds,
    "protected": protected,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=2000)
    parser.add_argument("--only", choices=MEASUREMENTS)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if arguments.only:
        figures = MEASUREMENTS[arguments.only](arguments.rows)
        # ru_maxrss counts kibibytes on Linux.
        figures["peak_memory_mib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(json.dumps(figures))
        return
    everything = {}
    for name in MEASUREMENTS:
        command = [sys.executable, __file__, "--rows", str(arguments.rows), "--only", name]
        done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=1800)
        everything[name] = json.loads(done.stdout)
        print(name, json.dumps(everything[name], indent=2), flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(everything, indent=2) + "\n")


if __name__ == "__main__":
    main()
