"""Test accuracy on digits against epsilon: the demo's federation in the simulator, over seeds.

    python benchmarks/digits_privacy.py --seeds 5 --epsilons 8 16 24 32

Every row is the demo's own federation file with another epsilon; ``none`` adds no noise. Alone and
combine are trained on the same rows. Differences to alone are paired by seed.
"""

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch

from securevfl.cli.demo import combined
from securevfl.config.reading import parse_federation
from securevfl.runtime.simulation import simulate_federation
from securevfl.studies.digits import demo_federation, digits_tables


def run(epsilon: float | None, seed: int) -> dict[str, float]:
    source = demo_federation(seed=seed)
    if epsilon is None:
        kept = ("encoder", "links_per_record", "clip_norm")
        privacy = {name: source["privacy"][name] for name in kept if name in source["privacy"]}
        source["privacy"] = {"mechanism": "none", **privacy}
    else:
        source["privacy"]["epsilon"] = epsilon
    config = parse_federation(source, file="demo")
    tables = digits_tables(seed=seed)
    with tempfile.TemporaryDirectory() as folder:
        metrics = simulate_federation(
            config,
            {table.name: table for table in tables},
            Path(folder),
            device=torch.device("cpu"),
        ).metrics
    return {
        "joint": metrics["test"],
        "alone": metrics["alone_test"],
        "combine": combined(config, tables).test,
    }


def summary(rows: list[dict[str, float]]) -> dict[str, Any]:
    gains = [row["joint"] - row["alone"] for row in rows]
    columns = {name: [row[name] for row in rows] for name in rows[0]} | {"gain": gains}
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
    parser.add_argument("--epsilons", nargs="+", default=["8", "16", "24", "32", "none"])
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    result = {}
    if not options.json:
        print("| epsilon | joint | alone | gain over alone | gain by seed | combine |")
        print("| --- | --- | --- | --- | --- | --- |")
    for word in options.epsilons:
        epsilon = None if word == "none" else float(word)
        found = summary([run(epsilon, seed) for seed in range(options.seeds)])
        result[word] = found
        if not options.json:
            cells = [f"{found[n]['mean']:.3f} ± {found[n]['std']:.3f}" for n in ("joint", "alone")]
            cells.append(f"{found['gain']['mean']:+.3f} ± {found['gain']['std']:.3f}")
            cells.append(" ".join(f"{gain:+.3f}" for gain in found["gain"]["seeds"]))
            cells.append(f"{found['combine']['mean']:.3f} ± {found['combine']['std']:.3f}")
            print(f"| {word} | {' | '.join(cells)} |", flush=True)
    if options.json:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
