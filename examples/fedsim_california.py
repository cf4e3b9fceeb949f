"""FedSim on places: what similar records are worth when no record matches.

An agency (the primary) has prices of some Californian block groups, a bureau (the secondary) has
incomes of others: no place is in both tables. FedSim links each block to the 50 nearest ones of the
bureau, and learns from order and distance how much each counts. AvgSim counts all 50 alike, Top1Sim
trusts the nearest alone. The agency alone has the positions as inputs; federations link by them.
The table is the census of 1990 (Pace and Barry 1997), which scikit-learn downloads once and checks.

Run: ``python examples/fedsim_california.py [--rows 2000] [--epochs 8] [--seed 0]``
"""

import argparse
from typing import Any

from sklearn.datasets import fetch_california_housing

import securevfl as sv

PLACE = ["Longitude", "Latitude"]


def main(arguments: list[str] | None = None) -> dict[str, float]:
    """Train, print what came out, and return the test RMSE of each method, in thousand USD."""
    options = _parser().parse_args(arguments)
    blocks = fetch_california_housing(as_frame=True).frame
    blocks["price"] = 100 * blocks.pop("MedHouseVal")
    blocks = blocks.sample(frac=1, random_state=options.seed, ignore_index=True)
    rows = min(options.rows, len(blocks) // 2)
    agency = blocks[[*PLACE, "HouseAge", "AveRooms", "AveBedrms", "price"]][:rows]
    bureau = blocks[[*PLACE, "MedInc", "Population", "AveOccup"]][len(blocks) // 2 :]
    tables: dict[str, Any] = {"primary": agency, "secondaries": {"bureau": bureau}}
    tables |= {"label": "price", "key": PLACE}
    models: dict[str, sv.models.FedSim | sv.models.AvgSim | sv.models.Top1Sim] = {
        "fedsim": sv.models.FedSim(neighbours=50),
        "avgsim": sv.models.AvgSim(neighbours=50),
        "top1sim": sv.models.Top1Sim(),
    }
    errors = {}
    for name, model in models.items():
        run = sv.simulate(
            **tables,
            model=model,
            seed=options.seed,
            privacy=sv.dp.Privacy(mechanism="none"),  # what the model is worth without noise
            training=sv.TrainingSettings(epochs=options.epochs, batch_size=128),
            device=options.device,
        )
        errors[name], errors["alone"] = run.metrics["test"], run.metrics["alone_test"]
    print("test RMSE in thousand USD")
    for name, error in errors.items():
        print(f"  {name:<8} {error:7.1f}")
    return errors


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="FedSim on house prices, two parties.")
    parser.add_argument("--rows", type=int, default=2000, help="the agency's rows")
    parser.add_argument("--epochs", type=int, default=8, help="passes over the training rows")
    parser.add_argument("--seed", type=int, default=0, help="who has which block, and the run's")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    return parser


if __name__ == "__main__":
    main()
