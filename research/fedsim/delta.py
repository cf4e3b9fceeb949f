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
from typing import Literal, get_args

import numpy as np
from jaxtyping import Bool, Float64
from scipy.stats import spearmanr

from securevfl.config.reading import read_federation
from securevfl.core import checks
from securevfl.core.errors import DataError
from securevfl.lab.links_alone import study_links
from securevfl.linkage.links import LinkTable

Simpler = Literal["exact", "top1sim", "avgsim"]
"""Methods that FedSim is compared with, by which links they use as matches."""

SIMPLER: tuple[Simpler, ...] = ("top1sim", "avgsim", "exact")


def estimated_improvement(links: LinkTable, *, over: Simpler) -> float:
    """Return Delta: the similarity that a simpler method loses or blurs, per row.

    ``Delta_i = sum_(matches) (1 - s_ij) + sum_(others) s_ij``, averaged over the rows i. A match
    that is not quite similar is redundant information, a similar record that is no match is lost.

    Args:
        links: K links a row, with their distances. Records beyond the K-th count nothing: FedSim
            does not use them either.
        over: ``exact`` matches links of distance 0, ``top1sim`` the first link, ``avgsim`` all K.

    Returns:
        A number from 0 to K.

    Raises:
        ConfigError: If ``over`` is another method.
        DataError: If there are no links.

    References:
        [FedSim] Definition 1. The paper says "scaled similarity" and not how: here s is 1 for the
        nearest link of all and 0 for the farthest.
    """
    checks.one_of(get_args(Simpler), over=over)
    present = links.present
    if not present.any():
        raise DataError("Delta: there are no links")
    similarity = scaled_similarities(links)
    matches = present.copy()
    if over == "top1sim":
        matches[:, 1:] = False
    elif over == "exact":
        matches &= links.distances == 0
    parts = np.where(matches, 1 - similarity, similarity)
    return float(np.where(present, parts, 0).sum() / links.num_rows)


def scaled_similarities(links: LinkTable) -> Float64[np.ndarray, "rows links"]:
    """Return similarities in [0, 1]: 1 for the nearest link of all, 0 for the farthest and none."""
    present: Bool[np.ndarray, "rows links"] = links.present
    distances = links.distances[present]
    spread = distances.max() - distances.min()
    scaled = np.zeros(links.distances.shape)
    scaled[present] = (distances.max() - distances) / spread if spread > 0 else 1.0
    return scaled


def deltas(folder: Path) -> dict[str, float]:
    """Return Delta per link of a row, so that tables with other K can be compared."""
    config = read_federation(folder / "fed.toml")
    with tempfile.TemporaryDirectory() as links:
        study_links(config, folder, Path(links), observe=lambda _event: None)
        (secondary,) = config.secondaries
        with np.load(Path(links) / "parties" / secondary.name / "lists.npz") as lists:
            table = LinkTable(indices=lists["indices"], distances=lists["distances"])
    links_per_row = config.model.neighbours
    return {name: estimated_improvement(table, over=name) / links_per_row for name in SIMPLER}


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
