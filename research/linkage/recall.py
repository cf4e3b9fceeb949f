"""How much of the truth, and of the exact links, each way to link finds on real tables.

    SECUREVFL_DATA=DIR python research/linkage/recall.py [--only NAME] [--rows 1500] [--json FILE]

febrl (5,000 x 5,000 people, true matches known): recall@1 and @5 by edits, by Bloom codes and by
weighted fields. house_kc and hdb (positions): share of the 50 Euclidean nearest among the 50
nearest codes, for some rows and three secrets; and share of rows whose nearest code is a nearest
record's.
"""

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from securevfl.lab.links_alone import link_quality
from securevfl.linkage.links import LinkTable
from securevfl.linkage.metrics.metric import Field
from securevfl.linkage.metrics.points import EuclideanKeys
from securevfl.linkage.spec import LinkageSecret
from securevfl.stages.bloom.codes import (
    Code,
    CodeKeys,
    NumberCode,
    PointCode,
    TextCode,
    encode_keys,
)
from securevfl.stages.fuzzy_keys.edits import TextKeys
from securevfl.stages.fuzzy_keys.mixed import MixedKeys

K = 50
SECRETS = tuple(LinkageSecret(bytes([byte]) * 32) for byte in range(3))


def febrl(folder: Path) -> dict[str, Any]:
    """People: all key columns as one text, and as fields."""
    tables = [
        pd.read_csv(folder / f"{name}.csv.gz", dtype=str, keep_default_na=False)
        for name in ("primary", "secondary")
    ]
    keys = [name for name in tables[0].columns if name.startswith("key_")]
    texts = [
        [" ".join(filter(None, row)) for row in table[keys].itertuples(index=False)]
        for table in tables
    ]
    columns = [{key: [value or None for value in table[key]] for key in keys} for table in tables]
    entities = [table["entity"].to_numpy(np.int64) for table in tables]
    found = {}

    def note(name: str, started: float, links: LinkTable) -> None:
        quality = link_quality(
            links,
            num_records=len(tables[1]),
            primary_entities=entities[0],
            record_entities=entities[1],
        )
        found[name] = {
            "recall_at_1": quality["recall_at_1"],
            "recall_at_5": quality["recall_at_k"],
            "seconds": time.perf_counter() - started,
        }
        print("febrl", name, found[name], flush=True)

    for q in (2, 3):
        start = time.perf_counter()
        code = {"all": TextCode(bits=1024, q=q)}
        mine, theirs = (encode_keys({"all": text}, code, SECRETS[0]) for text in texts)
        note(
            f"bloom, 1,024 bits, q = {q}",
            start,
            CodeKeys(primary=mine, records=theirs).nearest(None, 5),
        )
    start = time.perf_counter()
    note("levenshtein", start, TextKeys.of(texts[0], texts[1]).nearest(None, 5))
    start = time.perf_counter()
    fields = [Field(name=key, kind="text") for key in keys]
    note(
        "mixed, equal weights", start, MixedKeys.of(columns[0], columns[1], fields).nearest(None, 5)
    )
    return found


def positions(folder: Path, rows: int) -> dict[str, Any]:
    """Longitudes and latitudes: two numbers against points, at several lengths."""
    mine, theirs = (
        table[[name for name in table.columns if name.startswith("key_")]].to_numpy(np.float64)
        for table in (pd.read_csv(folder / f"{name}.csv.gz") for name in ("primary", "secondary"))
    )
    mine = mine[np.random.default_rng(0).choice(len(mine), rows, replace=False)]
    both = np.concatenate([mine, theirs])
    low, high = both.min(axis=0), both.max(axis=0)
    width = float((high - low).max())
    exact = EuclideanKeys(primary=mine, records=theirs).nearest(None, K)

    def recall(codes: dict[str, Code]) -> dict[str, list[float]]:
        every, first = [], []
        for secret in SECRETS:
            encoded = [
                encode_keys(
                    {"at": keys, "x": keys[:, 0].copy(), "y": keys[:, 1].copy()}, codes, secret
                )
                for keys in (mine, theirs)
            ]
            near = CodeKeys(primary=encoded[0], records=encoded[1]).nearest(None, K).indices
            every.append(
                float(
                    np.mean(
                        [np.isin(a, b).mean() for a, b in zip(exact.indices, near, strict=True)]
                    )
                )
            )
            distance = np.sqrt(((mine - theirs[near[:, 0]]) ** 2).sum(axis=1))
            first.append(float((distance <= exact.distances[:, 0]).mean()))
        return {"recall_at_50": every, "nearest_is_a_nearest": first}

    found: dict[str, Any] = {}
    for bits in (512, 1024):
        codes: dict[str, Code] = {
            name: NumberCode(low=float(start), high=float(start) + width, bits=bits)
            for name, start in zip("xy", low, strict=True)
        }
        found[f"two numbers of {bits} bits"] = recall(codes)
    for bits, directions in ((1024, 8), (2048, 8), (4096, 8), (8192, 16), (16_384, 8)):
        point = PointCode(
            low=tuple(low.tolist()), high=tuple(high.tolist()), bits=bits, directions=directions
        )
        found[f"a point, {directions} directions, {bits} bits"] = recall({"at": point})
    for name, values in found.items():
        print(folder.name, name, {key: np.round(part, 3) for key, part in values.items()})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=("house_kc", "hdb", "febrl"))
    parser.add_argument("--rows", type=int, default=1500)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    data = Path(os.environ["SECUREVFL_DATA"])
    found = {}
    for name in (arguments.only,) if arguments.only else ("house_kc", "hdb", "febrl"):
        part = data / name
        found[name] = febrl(part) if name == "febrl" else positions(part, arguments.rows)
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
