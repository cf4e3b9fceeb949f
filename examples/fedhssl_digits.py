"""FedHSSL from Python: few labels, two parties, one half of every handwritten digit each.

The primary has the left halves and 50 labels, the secondary the right halves; rows are matched by a
key that both have. All 1,258 training digits are there without labels, and parties pretrain their
encoders on them before the labels are used: against each other's view of the same digit, and
against randomly corrupted copies of their own records. What that gains is printed.

Run: ``python examples/fedhssl_digits.py [--smoke] [--labels 50] [--seeds 1]``, or with
``--tables FOLDER`` to write the tables that fedhssl_digits.toml is about.
"""

import argparse
import statistics
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.datasets import load_digits

import securevfl as sv
from securevfl.lab.digits import write_tables

PIXELS = np.arange(64).reshape(8, 8)
HALVES = {"left": PIXELS[:, :4].ravel().tolist(), "right": PIXELS[:, 4:].ravel().tolist()}


def main(arguments: list[str] | None = None) -> dict[str, float]:
    """Train every method, print what came out, and return the mean test accuracies."""
    options = _parser().parse_args(arguments)
    if options.tables:
        write_tables(_parties(options, seed=0), options.tables)
        return {}
    models = {
        "fedsplitnn": sv.models.FedSplitNN(hidden=128, encoder_hidden=128),
        "fedlocalssl": sv.models.FedLocalSSL(hidden=128, encoder_hidden=128),
        "fedhssl": sv.models.FedHSSL(hidden=128, encoder_hidden=128),
    }
    channels: list[dict[str, Any]] = []
    found: dict[str, list[float]] = {name: [] for name in ("alone", *models)}
    for seed in range(options.seeds):
        for name, model in models.items():
            metrics = train(model, options, seed=seed)
            found[name].append(metrics["test"])
            if name == "fedhssl":
                found["alone"].append(metrics["alone_test"])
                channels = metrics["privacy"]["channels"]

    means = {name: statistics.mean(values) for name, values in found.items()}
    print(f"\ntest accuracy with {options.labels} labels, mean of {options.seeds} seeds:")
    for name, mean in means.items():
        print(f"  {name:<12} {mean:.3f}")
    print("\nwhat pretraining tells whom:")
    for row in channels:
        if row["channel"].startswith("pretraining"):
            print(f"- {row['channel']}: {row['reveals']} ({row['guarantee']})")
    return means


def train(
    model: sv.models.FamilySettings, options: argparse.Namespace, *, seed: int
) -> dict[str, Any]:
    """Pretrain and fine-tune one method in this process; return the run's metrics."""
    print(f"{type(model).__name__.removesuffix('Config')}, seed {seed}")
    run = sv.simulate(
        _parties(options, seed=seed),
        model,
        privacy=sv.dp.Privacy(mechanism="none"),
        pretraining=sv.PretrainingSettings(
            algorithm="byol",
            iterations=3 if options.smoke else 40,
            aligned=0.4,
            batch_size=128,
            projector=(128, 128, 128),
            predictor=64,
        ),
        training=sv.TrainingSettings(
            epochs=6 if options.smoke else 40,
            batch_size=16,
            patience=40,
            labelled_rows=options.labels,
            split="random",
        ),
        # Pixels count ink from 0 to 16.
        bounds=[0.0, 16.0],
        seed=seed,
        observe=_show,
    )
    return run.metrics


def _parties(options: argparse.Namespace, *, seed: int) -> list[sv.data.PartyTable]:
    X, y = load_digits(return_X_y=True)
    if options.smoke:
        X, y = X[:600], y[:600]
    # Keys without noise: both parties know which records belong together.
    return sv.datasets.split_views(X, y, views=HALVES, key_noise=0.0, seed=seed)


def _show(event: sv.progress.ProgressEvent) -> None:
    if isinstance(event, sv.progress.PretrainingIteration) and event.iteration % 10 == 0:
        steps = {
            "cross": (event.cross_loss, event.cross_spread),
            "local": (event.local_loss, event.local_spread),
        }
        parts = [
            f"{name} loss {loss:.3f}, spread {spread:.2f}"
            for name, (loss, spread) in steps.items()
            if loss is not None and spread is not None
        ]
        print(f"  pretraining {event.iteration:>2}: {'; '.join(parts)}")
    elif isinstance(event, sv.progress.Warned):
        print(f"  {event.text}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="FedHSSL on halves of digits, two parties.")
    parser.add_argument("--smoke", action="store_true", help="fewer rows, iterations and epochs")
    parser.add_argument("--labels", type=int, default=50, help="labelled training rows")
    parser.add_argument("--seeds", type=int, default=1, help="how many seeds to average over")
    parser.add_argument("--tables", type=Path, help="write both tables to this folder, no more")
    return parser


if __name__ == "__main__":
    main()
