"""Speed of FedHSSL's pretraining: samples per CPU-second, one thread, at the published settings.

A sample is one pass of one party's record through an iteration: an aligned row in cross-party
learning, or a record in local learning. The published code's networks and batches: encoders of two
layers of 512, projectors 512-512-512, a predictor of 128, batches of 512, SGD, SimSiam; guidance
off as its shipped command has it (``--guidance 0``), or on.

The baseline in the same run is the same arithmetic arranged as the published code arranges it:
records augmented one by one by a data loader, each view through each network by itself. The floor
is the matrix products of the linear layers alone, forward and back, as fast as this machine's
library does them: nothing that computes these networks in float32 takes less.

Run: ``SECUREVFL_DATA=... python research/fedhssl/speed.py [--data mfeat] [--json]``
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

sys.path.append(str(Path(__file__).parents[2]))

from research.common.full_tables import load_full
from securevfl.models.family import PretrainingSettings
from securevfl.models.fedhssl.encoders import FedHSSLConfig
from securevfl.stages.pretraining.augment import CorruptedFeatures
from securevfl.stages.pretraining.learner import PartyLearner, simsiam_loss, unit
from securevfl.stages.pretraining.learning import even_batches

CORRUPTION = 0.3


class RecordByRecord(Dataset[tuple[Tensor, Tensor]]):
    """Two corrupted views of one record at a time."""

    def __init__(self, table: np.ndarray, random: np.random.Generator) -> None:
        self.table = table
        self.random = random

    def __len__(self) -> int:
        return len(self.table)

    def __getitem__(self, place: int) -> tuple[Tensor, Tensor]:
        return self._view(place), self._view(place)

    def _view(self, place: int) -> Tensor:
        record = self.table[place].copy()
        chosen = self.random.random(len(record)) < CORRUPTION
        donors = self.random.integers(0, len(self.table), len(record))
        record[chosen] = self.table[donors, np.arange(len(record))][chosen]
        return torch.from_numpy(record)


def views_of(name: str, rows: int | None) -> list[Tensor]:
    table = load_full(name)
    X = table.X[:rows] if rows else table.X
    if name == "mnist":
        images = X.reshape(len(X), 28, 28)
        parts = [images[:, :, :14].reshape(len(X), -1), images[:, :, 14:].reshape(len(X), -1)]
    else:
        half = len(table.views) // 2
        groups = list(table.views.values())
        parts = [
            X[:, [column for view in part for column in view]]
            for part in (groups[:half], groups[half:])
        ]
    scaled = [(part - part.mean(axis=0)) / (part.std(axis=0) + 1e-9) for part in parts]
    return [torch.from_numpy(part.astype(np.float32)) for part in scaled]


def learners(views: list[Tensor], guidance: float) -> list[PartyLearner]:
    settings = PretrainingSettings(
        guidance=guidance, optimizer="sgd", learning_rate=0.02, corruption=CORRUPTION
    )
    return [
        PartyLearner(
            FedHSSLConfig(),
            settings,
            num_features=view.shape[1],
            records=len(view),
            augment=CorruptedFeatures(view, rate=CORRUPTION),
            party=f"party-{number}",
            seed=0,
            device=view.device,
        )
        for number, view in enumerate(views)
    ]


def ours(views: list[Tensor], parties: list[PartyLearner], iterations: int, aligned: int) -> None:
    random = np.random.default_rng(0)
    size = parties[0].settings.batch_size
    for _ in range(iterations):
        for rows in even_batches(random.permutation(len(views[0]))[:aligned], batch_size=size):
            index = torch.as_tensor(rows)
            sent = [
                unit(one.project(view[index])) for one, view in zip(parties, views, strict=True)
            ]
            parties[0].learn_cross([sent[1]])
            parties[1].learn_cross([sent[0]])
        for one, view in zip(parties, views, strict=True):
            for rows in even_batches(random.permutation(len(view)), batch_size=size):
                one.learn_local(view[torch.as_tensor(rows)])


def record_by_record(
    views: list[Tensor], parties: list[PartyLearner], iterations: int, aligned: int
) -> None:
    """The same losses and networks, arranged as the published code arranges them."""
    size, gamma = parties[0].settings.batch_size, parties[0].settings.guidance
    random = np.random.default_rng(0)
    loaders = [
        DataLoader(RecordByRecord(view.numpy(), random), batch_size=size, shuffle=True)
        for view in views
    ]
    for _ in range(iterations):
        for rows in np.array_split(
            random.permutation(len(views[0]))[:aligned], -(-aligned // size)
        ):
            batches = [torch.stack([view[int(row)] for row in rows]) for view in views]
            sent = [unit(one.project(batch)) for one, batch in zip(parties, batches, strict=True)]
            parties[0].learn_cross([sent[1]])
            parties[1].learn_cross([sent[0]])
        for one, loader in zip(parties, loaders, strict=True):
            tower, optimizer = one.towers["local"], one._optimizers["local"]
            for first, second in loader:
                z1, z2 = tower(first), tower(second)
                p1, p2 = tower.predictor(z1), tower.predictor(z2)
                loss = 0.5 * simsiam_loss(p1, unit(z2.detach()))
                loss = loss + 0.5 * simsiam_loss(p2, unit(z1.detach()))
                if gamma > 0:
                    c1, c2 = one.towers["cross"](first), one.towers["cross"](second)
                    loss = loss + gamma * simsiam_loss(p1, unit(c1.detach()))
                    loss = loss + gamma * simsiam_loss(p2, unit(c2.detach()))
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()


def products(
    views: list[Tensor], parties: list[PartyLearner], iterations: int, aligned: int
) -> None:
    """Nothing but the products: outputs, gradients of weights, gradients of inputs."""
    settings = parties[0].settings
    batches = {
        "cross": [len(part) for part in even_batches(np.arange(aligned), batch_size=512)],
        "local": [2 * len(part) for part in even_batches(np.arange(len(views[0])), batch_size=512)],
    }
    for party in parties:
        for name, sizes in batches.items():
            layers = [one for one in party.towers[name].modules() if isinstance(one, nn.Linear)]
            _learn(layers, sizes, iterations)
        if settings.guidance > 0:
            cross = party.towers["cross"]
            layers = [
                one
                for part in (cross.encoder, cross.projector)
                for one in part.modules()
                if isinstance(one, nn.Linear)
            ]
            _learn(layers, batches["local"], iterations, forward_only=True)


@torch.no_grad()
def _learn(
    layers: list[nn.Linear], sizes: list[int], iterations: int, *, forward_only: bool = False
) -> None:
    inputs = {
        (size, layer.in_features): torch.rand(size, layer.in_features)
        for size in sizes
        for layer in layers
    }
    for size in sizes * iterations:
        for number, layer in enumerate(layers):
            given = inputs[size, layer.in_features]
            made = given @ layer.weight.T
            if forward_only:
                continue
            made.T @ given
            if number:
                made @ layer.weight


def measure(name: str, options: argparse.Namespace) -> dict[str, Any]:
    views = views_of(name, options.rows)
    aligned = round(options.aligned * len(views[0]))
    samples = options.iterations * 2 * (len(views[0]) + aligned)
    ways = {"ours": ours, "record by record": record_by_record, "products alone": products}
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(options.repeats):
        for way, run in ways.items():
            parties = learners(views, options.guidance)
            start = time.process_time()
            run(views, parties, options.iterations, aligned)
            seconds[way].append(time.process_time() - start)
    medians = {way: statistics.median(times) for way, times in seconds.items()}
    return {
        "data": name,
        "rows": len(views[0]),
        "aligned": aligned,
        "iterations": options.iterations,
        "guidance": options.guidance,
        "cpu_seconds": medians,
        "samples_per_cpu_second": {way: samples / value for way, value in medians.items()},
        "times_faster": medians["record by record"] / medians["ours"],
        "times_the_floor": medians["ours"] / medians["products alone"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", default="mfeat,mnist")
    parser.add_argument("--rows", type=int, help="first rows of each set; default: all")
    parser.add_argument("--aligned", type=float, default=0.2, help="share of aligned rows")
    parser.add_argument("--iterations", type=int, default=10)
    parser.add_argument("--guidance", type=float, default=0.5)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    results = [measure(name, options) for name in options.data.split(",")]
    if options.json:
        print(json.dumps(results))
        return
    for row in results:
        print(
            f"{row['data']}: {row['rows']} rows, {row['iterations']} iterations, guidance "
            f"{row['guidance']:g}"
        )
        for way, value in row["cpu_seconds"].items():
            speed = row["samples_per_cpu_second"][way]
            print(f"  {way:<18} {value:7.2f} CPU-seconds  {speed:9.0f} samples/CPU-second")
        print(f"  {row['times_faster']:.2f} times faster; {row['times_the_floor']:.2f} floors")


if __name__ == "__main__":
    main()
