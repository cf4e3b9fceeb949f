"""Two torch modules of your own: one at every secondary, one at the primary.

Where something is promised, a secondary's module must treat each row alone: BatchNorm is refused.
This run promises nothing: on the tables of ``class_means_digits.py`` such modules gained nothing at
epsilon 8 in three tries, where the settings shown there gain.

Run: ``python examples/own_family.py [--device cuda]``, which prints::

    test accuracy 0.958; alone 0.799
    refused: the bottom model's layer 'module.1' is a BatchNorm1d, which mixes the rows of a
      batch: one record then changes all of them, and the guarantee of encoder = 'dp-trained'
      would not hold; use LayerNorm or GroupNorm
"""

import argparse
from typing import Any

import numpy as np
from torch import nn

import securevfl as sv

PIXELS = np.arange(64).reshape(8, 8)
HALVES = {"left": PIXELS[:, :3].ravel().tolist(), "right": PIXELS[:, 3:].ravel().tolist()}


def bottom(inputs: int, outputs: int) -> nn.Module:
    """Return a secondary's half."""
    return nn.Sequential(nn.Linear(inputs, 32), nn.LayerNorm(32), nn.ReLU(), nn.Linear(32, outputs))


def normalised(inputs: int, outputs: int) -> nn.Module:
    """Return one that mixes the rows of a batch."""
    return nn.Sequential(nn.Linear(inputs, 32), nn.BatchNorm1d(32), nn.Linear(32, outputs))


def main(rows: int = 1797, epochs: int = 30, device: str = "cpu") -> dict[str, Any]:
    """Train without a promise, and show what a promise refuses; return the run's figures."""
    digits = sv.datasets.load_builtin("digits")
    table = digits.X[:rows], digits.y[:rows]
    parties = sv.datasets.split_views(*table, views=HALVES, key_noise=0.0, seed=0)
    model = sv.models.split_model(bottom, nn.Linear, width=16)
    free = sv.dp.Privacy(mechanism="none", encoder="trained")
    training = sv.TrainingSettings(epochs=epochs, learning_rate=0.01)
    run = sv.train(parties, model, privacy=free, training=training, device=device)
    print(f"test accuracy {run.metrics['test']:.3f}; alone {run.metrics['alone_test']:.3f}")
    promise = sv.dp.Privacy(epsilon=8.0, delta=1e-5, encoder="dp-trained", links_per_record=1)
    mixing = sv.models.split_model(normalised, nn.Linear)
    try:
        sv.simulate(parties, mixing, privacy=promise, bounds=[0.0, 16.0], device=device)
    except sv.SecureVflError as refused:
        print(f"refused: {refused}")
    return run.metrics


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Two torch modules as a model.")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    main(device=parser.parse_args().device)
