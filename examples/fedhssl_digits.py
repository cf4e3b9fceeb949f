"""FedHSSL from Python: few labels, two parties, one half of every handwritten digit each.

The primary has the left halves and 50 labels, the secondary the right halves; rows are matched by a
key that both have. All 1,258 training digits are there without labels, and parties pretrain their
encoders on them first: against each other's view of the same digit, and against randomly corrupted
copies of their own records. Nothing is promised; who sees what is printed.

Run: ``python examples/fedhssl_digits.py [--smoke] [--labels 50] [--device cuda]``; with ``--tables
FOLDER`` it writes the tables of fedhssl_digits.toml and no more.
"""

import argparse
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.datasets import load_digits

import securevfl as sv
from securevfl.lab.datasets import write_tables

PIXELS = np.arange(64).reshape(8, 8)
HALVES = {"left": PIXELS[:, :4].ravel().tolist(), "right": PIXELS[:, 4:].ravel().tolist()}
METHODS = (sv.models.FedSplitNN, sv.models.FedLocalSSL, sv.models.FedHSSL)


def main(arguments: list[str] | None = None) -> dict[str, float]:
    """Train every method in this process, and return the test accuracies."""
    parser = argparse.ArgumentParser(description="FedHSSL on halves of digits, two parties.")
    parser.add_argument("--smoke", action="store_true", help="fewer rows, iterations and epochs")
    parser.add_argument("--labels", type=int, default=50, help="labelled training rows")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--tables", type=Path, help="write both tables to this folder, no more")
    options = parser.parse_args(arguments)
    X, y = load_digits(return_X_y=True)
    rows, iterations, epochs = (600, 3, 6) if options.smoke else (len(y), 40, 40)
    # Keys without noise: both parties know which records belong together.
    parties = sv.datasets.split_views(X[:rows], y[:rows], views=HALVES, key_noise=0.0, seed=0)
    if options.tables:
        write_tables(parties, options.tables)
        return {}
    given: dict[str, Any] = {
        "privacy": sv.dp.Privacy(mechanism="none"),
        "pretraining": sv.PretrainingSettings(
            algorithm="byol",
            iterations=iterations,
            aligned=0.4,
            batch_size=128,
            projector=(128, 128, 128),
            predictor=64,
        ),
        "training": sv.TrainingSettings(
            epochs=epochs, batch_size=16, patience=40, labelled_rows=options.labels, split="random"
        ),
        "bounds": [0.0, 16.0],  # pixels count ink from 0 to 16
        "device": options.device,
    }
    found: dict[str, float] = {}
    channels: list[dict[str, str]] = []
    for method in METHODS:
        run = sv.simulate(parties, method(hidden=128, encoder_hidden=128), **given)
        found[run.metrics["family"]] = run.metrics["test"]
        found["alone"], channels = run.metrics["alone_test"], run.metrics["privacy"]["channels"]
    print(f"test accuracy with {options.labels} labels:")
    for name, accuracy in found.items():
        print(f"  {name:<12} {accuracy:.3f}")
    print("what pretraining tells whom:")
    for row in channels:
        if row["channel"].startswith("pretraining"):
            print(f"- {row['channel']}: {row['reveals']} ({row['guarantee']})")
    return found


if __name__ == "__main__":
    main()
