"""Link tables of 10^4, 10^5 and 10^6 rows: CPU seconds, peak memory, and what was found.

    OMP_NUM_THREADS=1 python research/linkage/large_tables.py [--rows 10000 100000] [--only numbers]
        [--neighbours 50] [--json FILE]
    OMP_NUM_THREADS=1 python research/linkage/large_tables.py --only protected

Each line is ``securevfl link`` over two Parquet tables of that many rows, in a fresh process:
tables are read, linked, measured against the truth, and every party's lists are written, as for
users. Times are CPU seconds of all threads together, which other work on the machine changes
little. Peak memory is the process's own, with all that it has loaded.

- ``numbers``: points in the plane, each record a row's point moved by a little, K = 50.
- ``texts``: made-up people (given name, surname, postcode, date of birth), one of three records
  with one to three letters mistyped, K = 5, by edits, among the pairs of six blocking rules.
- ``fields``: the same people and rules, compared by weighted fields (``mixed``).
- ``ids``: ids of 16 digits under ``protection = "hashes"``, hashing and the coordinator included.
- ``protected`` (only where it is named): what one core does of each protection in a second, and
  the hours, computed from that, that a million rows by a million records would take it: points in
  the plane, K = 10, all pairs, and by grid cells (``linkage.cell``): for Paillier of the best of
  three widths, for shares as ``linkage.py --only cells`` measures them. Both parties' work and the
  coordinator's are in it, the wire is not.
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

sys.path.append(str(Path(__file__).parents[2]))


SEED = 0
# Two columns that are right find a pair, whatever is wrong with the others.
RULES = (
    "surname, left(given, 2)",
    "surname, postcode",
    "surname, born",
    "postcode, born",
    "given, postcode",
    "given, born",
)


def numbers(rows: int, folder: Path) -> dict[str, Any]:
    """Write two tables of points, and return how they are linked."""
    rng = np.random.default_rng(SEED)
    points = rng.random((rows, 2))
    order = rng.permutation(rows)
    moved = points[order] + rng.normal(0, 0.1 / np.sqrt(rows), (rows, 2))
    for name, values, who in (("shop", points, np.arange(rows)), ("bank", moved, order)):
        frame = pd.DataFrame({"x": values[:, 0], "y": values[:, 1], "who": who})
        frame.to_parquet(folder / f"{name}.parquet")
    return {"key": ["x", "y"], "linkage": {"metric": "euclidean"}}


def words(count: int, letters: tuple[int, int], rng: np.random.Generator) -> np.ndarray:
    """Different made-up names."""
    alphabet = np.array(list("abcdefghijklmnopqrstuvwxyz"))
    lengths = rng.integers(*letters, 2 * count)
    drawn = {"".join(rng.choice(alphabet, length)) for length in lengths}
    return np.array(sorted(drawn))[rng.permutation(len(drawn))[:count]]


def skewed(names: np.ndarray, count: int, rng: np.random.Generator) -> np.ndarray:
    """Draw names, the n-th about as often as 1 / (n + 20), as surnames are spread."""
    weights = 1 / (np.arange(len(names)) + 20)
    return rng.choice(names, count, p=weights / weights.sum())


def mistyped(text: str, rng: np.random.Generator) -> str:
    """Return a text with one letter changed, added or lost."""
    place, letter = int(rng.integers(0, len(text))), chr(97 + int(rng.integers(26)))
    kept = int(rng.integers(0, 2))
    return text[:place] + letter * int(rng.integers(1 - kept, 2)) + text[place + 1 - kept :]


def texts(rows: int, folder: Path) -> dict[str, Any]:
    """Write two tables of people, and return how they are linked."""
    rng = np.random.default_rng(SEED)
    days = pd.date_range("1930-01-01", "2009-12-31").strftime("%Y-%m-%d").to_numpy()
    people = {
        "given": skewed(words(2_000, (3, 9), rng), rows, rng),
        "surname": skewed(words(40_000, (4, 12), rng), rows, rng),
        "postcode": skewed(np.array([f"{code:05d}" for code in range(20_000)]), rows, rng),
        "born": rng.choice(days, rows),
    }
    pd.DataFrame({**people, "who": np.arange(rows)}).to_parquet(folder / "shop.parquet")
    order = rng.permutation(rows)
    copies = {name: values[order].astype(object) for name, values in people.items()}
    for row in np.flatnonzero(rng.random(rows) < 1 / 3):
        for _ in range(int(rng.integers(1, 4))):
            column = copies[list(copies)[int(rng.integers(4))]]
            column[row] = mistyped(column[row] or "a", rng)
    pd.DataFrame({**copies, "who": order}).to_parquet(folder / "bank.parquet")
    linkage = {"metric": "levenshtein", "blocking": list(RULES)}
    return {"key": list(people), "linkage": linkage}


def fields(rows: int, folder: Path) -> dict[str, Any]:
    """Write the people of :func:`texts`, to be compared field by field."""
    made = texts(rows, folder)
    compared = {name: {"kind": "text"} for name in made["key"]}
    return {**made, "linkage": {**made["linkage"], "metric": "mixed", "fields": compared}}


def ids(rows: int, folder: Path) -> dict[str, Any]:
    """Write two tables of ids, and return how they are linked."""
    rng = np.random.default_rng(SEED)
    for name, who in (("shop", np.arange(rows)), ("bank", rng.permutation(rows))):
        frame = pd.DataFrame({"id": [f"{number:016d}" for number in who], "who": who})
        frame.to_parquet(folder / f"{name}.parquet")
    (folder / "linkage.secret").write_text("5e" * 32)
    linkage = {"metric": "exact", "protection": "hashes"}
    return {"key": ["id"], "linkage": linkage, "helpers": ["coordinator"]}


TABLES = {
    "numbers": (numbers, 50),
    "texts": (texts, 5),
    "fields": (fields, 5),
    "ids": (ids, 1),
}


def linked(kind: str, rows: int, neighbours: int | None) -> dict[str, Any]:
    """Link one size in this process, and return what it took and found."""
    import securevfl as sv
    from securevfl.config.reading import parse_federation

    make, usual = TABLES[kind]
    k = neighbours or usual
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        made = make(rows, folder)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        config = parse_federation(
            {
                "federation": {"name": kind, "task": "regression"},
                "model": {"family": "fet", "neighbours": k},
                "privacy": {"mechanism": "none"},
                "linkage": {"protection": "none", "truth": "who", **made["linkage"]},
                "party": [
                    {
                        "name": "shop",
                        "role": "primary",
                        "data": "shop.parquet",
                        "key": made["key"],
                        "address": "127.0.0.1:0",
                    },
                    {
                        "name": "bank",
                        "role": "secondary",
                        "data": "bank.parquet",
                        "key": made["key"],
                    },
                    *({"name": role, "role": role} for role in made.get("helpers", ())),
                ],
            },
            file=kind,
            only_linkage=True,
        )
        wall, start = time.monotonic(), time.process_time()
        found = sv.link(config, data_root=folder, out=folder / "run").figures
        seconds, wall = time.process_time() - start, time.monotonic() - wall
    figures = found["secondaries"]["bank"]
    # ru_maxrss counts kibibytes on Linux.
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {
        "rows": rows,
        "neighbours": k,
        "cpu_seconds": round(seconds, 1),
        "wall_seconds": round(wall, 1),
        "peak_mib": round(peak / 1024),
        "peak_before_linking_mib": round(before / 1024),
        "links_mib": round(16 * rows * k / 2**20),
        "recall_at_1": figures["recall_at_1"],
        "recall_at_k": figures["recall_at_k"],
        **({"blocking": figures["blocking"]} if "blocking" in figures else {}),
    }


def protected(fast: bool) -> dict[str, Any]:
    """Measure what one core does of each protection, and compute what a million rows take."""
    from research.linkage.linkage import Sizes, cells, hamming, paillier

    sizes = Sizes(fast=fast)
    codes, shares, ciphers = hamming(sizes), cells(sizes), paillier(sizes)
    by_cell = [compared_by_cell(sizes(20_000, 500), held) for held in (4, 16, 64)]
    each = sum(ciphers["milliseconds_per_ciphertext"].values()) / 1000
    pairs = {
        "bloom, faiss": codes["faiss_pairs_per_second"],
        "bloom, numpy": codes["numpy_pairs_per_second"],
        "shares": shares["shares_pairs_per_second"],
        "paillier": ciphers["lanes"] / each,
    }
    fewest = {
        # Measured: setting up a block costs more than comparing the few pairs of one.
        "shares": sizes(20_000, 500) / pairs["shares"] / shares["times_faster_than_all_pairs"],
        "paillier": min(found["ciphertexts_a_row"] for found in by_cell) * each,
    }
    return {
        "bloom_codes_made_per_second": coded(sizes(2000, 50)),
        "pairs_per_second": pairs,
        "rows_per_second_by_cells": {name: 1 / seconds for name, seconds in fewest.items()},
        "by_cells": by_cell,
        "core_hours_of_a_million_by_a_million": {
            "all pairs": {name: 1e12 / speed / 3600 for name, speed in pairs.items()},
            "by cells": {name: 1e6 * seconds / 3600 for name, seconds in fewest.items()},
        },
    }


def coded(rows: int) -> float:
    """Return how many points of 2,048 bits are encoded in a second."""
    from securevfl.data.tables import KeyTable
    from securevfl.linkage.metrics.metric import KeySpec
    from securevfl.linkage.metrics.points import Euclidean
    from securevfl.linkage.spec import LinkageSecret
    from securevfl.stages.bloom.codes import encode

    points = np.random.default_rng(SEED).random((2, rows))
    keys = KeyTable(name="shop", columns={"x": points[0], "y": points[1]})
    spec = KeySpec(columns=("x", "y"), metric=Euclidean(), ranges=((0.0, 1.0), (0.0, 1.0)))
    start = time.process_time()
    encode(spec, keys, LinkageSecret.fresh())
    return rows / (time.process_time() - start)


def compared_by_cell(rows: int, held: int) -> dict[str, float]:
    """Count what is compared if a cell holds so many records: per row, whatever the rows are."""
    from securevfl.linkage.links import LinkTable
    from securevfl.linkage.metrics.points import EuclideanKeys
    from securevfl.stages.encrypted_linkage.block_search import CellBlock, cells_of, links_by_cell
    from securevfl.stages.encrypted_linkage.homomorphic import Lanes

    rng = np.random.default_rng(SEED)
    mine, theirs = (rng.integers(0, 2**16, (rows, 2)) for _ in range(2))
    width = max(1, round(2**16 * np.sqrt(held / rows)))
    lanes = Lanes(key_dim=2, key_bits=2048).count
    pairs = ciphertexts = 0

    def link(blocks: Sequence[CellBlock], k: int) -> Iterator[LinkTable]:
        nonlocal pairs, ciphertexts
        for block in blocks:
            pairs += len(block.rows) * len(block.records)
            ciphertexts += -(-len(block.rows) // lanes) * len(block.records)
            keys = EuclideanKeys(
                primary=mine[block.rows].astype(np.float64),
                records=theirs[block.records].astype(np.float64),
            )
            yield keys.nearest(None, min(k, len(block.records)))

    links_by_cell(cells_of(mine, width), cells_of(theirs, width), 10, width=width, link=link)
    return {
        "records_a_cell": held,
        "pairs_a_row": pairs / rows,
        "ciphertexts_a_row": ciphertexts / rows,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, nargs="+", default=[10_000, 100_000, 1_000_000])
    parser.add_argument("--only", choices=[*TABLES, "protected"])
    parser.add_argument("--neighbours", type=int, help="K, instead of 50 and 5")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.only == "protected":
        print(json.dumps(protected(fast=max(arguments.rows) < 1000), indent=2))
        return
    if arguments.here:
        print(json.dumps(linked(arguments.only, arguments.rows[0], arguments.neighbours)))
        return
    everything: dict[str, list[Any]] = {}
    for kind in [arguments.only] if arguments.only else TABLES:
        for rows in arguments.rows:
            command = [sys.executable, __file__, "--here", "--only", kind, "--rows", str(rows)]
            if arguments.neighbours:
                command += ["--neighbours", str(arguments.neighbours)]
            done = subprocess.run(command, check=True, capture_output=True, text=True)
            everything.setdefault(kind, []).append(json.loads(done.stdout))
            print(kind, json.dumps(everything[kind][-1]), flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(everything, indent=2) + "\n")


if __name__ == "__main__":
    main()
