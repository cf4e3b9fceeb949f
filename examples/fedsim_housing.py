"""FedSim on house prices: what similar records are worth when no record matches.

House sales (the primary) and short lets nearby (the secondary) share nothing but a position. FedSim
links each sale to its 50 nearest lets, and learns from their distances how much each one counts.
Top1Sim, which trusts the nearest let alone, and the primary alone are trained beside it. Positions
serve the federations for linking only; the primary alone has them as inputs.

Run: ``SECUREVFL_DATA=... python examples/fedsim_housing.py [--rows 2000] [--epochs 4] [--out RUN]``
"""

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

import securevfl as sv


def main(arguments: list[str] | None = None) -> dict[str, float]:
    """Train, print what came out, and return the test RMSE of each method, in thousand USD."""
    options = _parser().parse_args(arguments)
    parties = [_sample(table, options.rows) for table in sv.datasets.load_folder("house_kc")]
    neighbours = min(50, parties[1].num_rows)
    # No noise, no promise: this shows what the model is worth.
    given: dict[str, Any] = {
        "privacy": sv.dp.Privacy(mechanism="none"),
        "training": sv.TrainingSettings(epochs=options.epochs, batch_size=128),
        "device": options.device,
    }
    models: dict[str, Any] = {
        "fedsim": sv.models.FedSim(neighbours=neighbours),
        "top1sim": "top1sim",
    }
    errors = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.out or Path(temporary)
        for name, model in models.items():
            run = sv.simulate(parties, model, out=folder / name, **given)
            errors[name], errors["alone"] = run.metrics["test"], run.metrics["alone_test"]
        learned = folder / "fedsim" / "explanation.json"
        explanation = json.loads(learned.read_text()) if learned.exists() else None

    print("test RMSE in thousand USD")
    for name, error in errors.items():
        print(f"  {name:<8} {error:7.1f}")
    if explanation is None:
        print("\nno epoch of FedSim's was better than the primary alone: it takes more rows")
        return errors
    print("\nwhat FedSim has learned of a link's similarity (deviations from the mean)")
    similarity, weight = explanation["similarity"], explanation["weight"]
    for place in range(0, len(weight), len(weight) // 6):
        print(f"  {similarity[place]:+5.1f}  weight {weight[place]:5.2f}")
    places = np.sum(explanation["merge_importance"], axis=1)
    tenth = max(1, len(places) // 10)
    share = places[:tenth].sum() / max(places.sum(), 1e-12)
    print(f"\nof what the merge gate reads, {share:.0%} is of the {tenth} nearest links")
    return errors


def _sample(table: sv.data.PartyTable, rows: int | None) -> sv.data.PartyTable:
    if rows is None or rows >= table.num_rows:
        return table
    return table.take(np.random.default_rng(0).permutation(table.num_rows)[:rows])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="FedSim on house prices, two parties.")
    parser.add_argument("--rows", type=int, help="rows of each table; default: all")
    parser.add_argument("--epochs", type=int, default=8, help="passes over the training rows")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--out", type=Path, help="keep run folders there")
    return parser


if __name__ == "__main__":
    main()
