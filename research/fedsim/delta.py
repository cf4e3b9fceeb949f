"""Does FedSim's training-free estimate rank what training then finds?

    python research/fedsim/delta.py runs/fedsim/*

Takes folders that ``research/fedsim/tables.py`` has left. For each table, Delta ([FedSim],
Definition 1) of every simpler linkage is set beside what FedSim then gained over it, relative to
its metric; rank correlations are over tables, for each linkage by itself and for all together.
"""

import argparse
import json
import tempfile
from pathlib import Path

from scipy.stats import spearmanr

from securevfl.config.reading import read_federation
from securevfl.lab.links_alone import study_links

SIMPLER = ("top1sim", "avgsim", "exact")


def deltas(folder: Path) -> dict[str, float]:
    """Return Delta per link of a row, so that tables with other K can be compared."""
    config = read_federation(folder / "fed.toml")
    with tempfile.TemporaryDirectory() as links:
        study = study_links(config, folder, Path(links), estimate=True, observe=lambda _event: None)
    (secondary,) = study.figures["secondaries"].values()
    return {name: secondary["delta"][name] / config.model.neighbours for name in SIMPLER}


def measured(folder: Path) -> dict[str, float]:
    """Return FedSim's relative improvement over each linkage that was trained."""
    figures = json.loads((folder / "compare" / "comparison.json").read_text())
    if "fedsim" not in figures["methods"]:
        raise SystemExit(f"{folder}: compare fedsim there too")
    sign = 1 if figures["higher_is_better"] else -1
    ours = figures["methods"]["fedsim"]["mean"]
    theirs = {
        name: figures["methods"][name]["mean"] for name in SIMPLER if name in figures["methods"]
    }
    return {name: sign * (ours - mean) / mean for name, mean in theirs.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folders", nargs="+", type=Path)
    points: dict[str, list[tuple[float, float]]] = {}
    print("| table | over | Delta / K | measured improvement |\n| --- | --- | --- | --- |")
    for folder in parser.parse_args().folders:
        if not (folder / "compare" / "comparison.json").exists():
            continue
        estimate, found = deltas(folder), measured(folder)
        for name, gain in found.items():
            points.setdefault(name, []).append((estimate[name], gain))
            print(f"| {folder.name} | {name} | {estimate[name]:.3f} | {gain:+.2%} |")
    together = [pair for pairs in points.values() for pair in pairs]
    print("\n| over | tables | rank correlation | p |\n| --- | --- | --- | --- |")
    for name, pairs in {**points, "all": together}.items():
        if len(pairs) < 3:
            continue
        estimates, gains = zip(*pairs, strict=True)
        result = spearmanr(estimates, gains)
        print(f"| {name} | {len(pairs)} | {result.statistic:+.2f} | {result.pvalue:.3f} |")


if __name__ == "__main__":
    main()
