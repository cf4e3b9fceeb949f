"""Test accuracy on digits against epsilon: the demo's federation in the simulator, over seeds.

    python research/results/digits_privacy.py --seeds 5 --epsilons 8 4 2 1
    python research/results/digits_privacy.py --family fet --epsilons 8 4 2

Every row is the demo's own federation file with another epsilon; ``none`` adds no noise.
``--family`` takes one of the papers' families in the place of class means: frozen encoders, whose
releases the family's own top model reads. The local baseline and combine are trained on the same
rows. Gains over the local baseline, and what of them
is the partners' (over the same run with partners' rows permuted), are paired by seed. ``--keep``
writes them to ``research/results/figures/``.
"""

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

sys.path.append(str(Path(__file__).parents[2]))

from research.common.figure_files import keep
from securevfl.config.reading import parse_federation
from securevfl.federation.base import Base
from securevfl.lab.datasets import demo_federation, digits_tables
from securevfl.lab.pooled_methods import train_in_one_place
from securevfl.models.alone.margins import BaselineConfig
from securevfl.runtime.run_options import RunOptions
from securevfl.runtime.simulation import simulate_federation

FAMILIES: dict[str, dict[str, Any]] = {
    "fet": {"neighbours": 4, "hidden": 10, "release": "pooled", "keys_as_features": False},
    "fedsplitnn": {"norm": "layer"},
    "avgsim": {"neighbours": 4, "keys_as_features": False},
}
"""Settings of the papers' families, as far as an epsilon covers them. FedSim's gates need
similarities and FedHSSL's encoders learn from private records: AvgSim and FedSplitNN are these
networks without them."""


def federation_of(family: str, *, seed: int) -> dict[str, Any]:
    """Return the demo's federation file with another family.

    FeT pools what class-mean encoders release. Those that pool nothing have random encoders, whose
    rows choose their links, and no dealer is left to mask labels for.
    """
    source = demo_federation(seed=seed)
    if family == "class-means":
        return source
    source["model"] = {"family": family, **FAMILIES[family]}
    source["training"]["batch_size"] = 128
    if family != "fet":
        del source["encoder"], source["linkage"]["choose"]
        source["party"] = [party for party in source["party"] if party["role"] != "dealer"]
    return source


class Seed:
    """One seed's tables, with the base that its first run has fitted."""

    def __init__(self, seed: int, family: str) -> None:
        self._seed = seed
        self._family = family
        self._tables = digits_tables(seed=seed)
        self._base: Base | None = None
        self._combine: float | None = None

    def run(self, epsilon: float | None) -> dict[str, float]:
        """Return the test accuracies at an epsilon, or without noise."""
        source = federation_of(self._family, seed=self._seed)
        if epsilon is None:
            kept = ("encoder", "links_per_record", "clip_norm", "delta")
            privacy = {name: source["privacy"][name] for name in kept if name in source["privacy"]}
            source["privacy"] = {"mechanism": "none", **privacy}
        else:
            source["privacy"]["epsilon"] = epsilon
        config = parse_federation(source, file="demo")
        with tempfile.TemporaryDirectory() as folder:
            result = simulate_federation(
                config,
                {table.name: table for table in self._tables},
                RunOptions(run_folder=Path(folder), fitted_base=self._base),
                with_placebo=True,
            )
        self._base = result.base
        if self._combine is None:
            named, cpu = {table.name: table for table in self._tables}, torch.device("cpu")
            settings = BaselineConfig()
            self._combine = train_in_one_place(config, named, "combine", settings, cpu)[0].test
        metrics = result.metrics
        placebo = metrics["placebos"]["permuted"]["accuracy"]
        joint = metrics["gain"]["used"] == "joint"
        return {
            "joint": metrics["test"],
            "alone": metrics["alone_test"],
            "gain": metrics["test"] - metrics["alone_test"],
            "partners": metrics["test"] - max(placebo, metrics["alone_test"]) if joint else 0.0,
            "combine": self._combine,
        }


def summary(rows: list[dict[str, float]]) -> dict[str, Any]:
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    return {
        name: {
            "mean": statistics.mean(values),
            "std": statistics.stdev(values) if len(values) > 1 else 0.0,
            "seeds": values,
        }
        for name, values in columns.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--epsilons", nargs="+", default=["1", "2", "4", "8", "16", "none"])
    parser.add_argument("--family", choices=["class-means", *FAMILIES], default="class-means")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--keep", action="store_true", help="write to figures/")
    options = parser.parse_args()
    seeds = [Seed(seed, options.family) for seed in range(options.seeds)]
    result = {}
    if not options.json:
        print(
            "| epsilon | joint | local baseline | gain | the partners' | gain by seed | combine |"
        )
        print("| --- | --- | --- | --- | --- | --- | --- |")
    for word in options.epsilons:
        epsilon = None if word == "none" else float(word)
        found = summary([seed.run(epsilon) for seed in seeds])
        result[word] = found
        if not options.json:
            cells = [f"{found[n]['mean']:.3f} ± {found[n]['std']:.3f}" for n in ("joint", "alone")]
            cells += [
                f"{found[name]['mean']:+.3f} ± {found[name]['std']:.3f}"
                for name in ("gain", "partners")
            ]
            cells.append(" ".join(f"{gain:+.3f}" for gain in found["gain"]["seeds"]))
            cells.append(f"{found['combine']['mean']:.3f} ± {found['combine']['std']:.3f}")
            print(f"| {word} | {' | '.join(cells)} |", flush=True)
    if options.keep:
        figures = {
            word: {name: of["seeds"] for name, of in found.items()}
            for word, found in result.items()
        }
        name = "privacy" if options.family == "class-means" else options.family
        keep(f"digits-{name}", figures, seeds=list(range(options.seeds)))
    if options.json:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
