"""FedSim's training speed in the simulator, beside a literal rendering of the paper's in one run.

Samples per CPU-second of one thread, training rounds alone: gathering, both halves, clipping,
fixed point, ledger and both optimizer steps on our side. Beside it stands the plain way to write
the same network: K copies of the primary's row beside the K records in one float64 table, local
and aggregation models over all of them, a 2D convolution over the stacked outputs; no clipping,
no fixed point, no ledger. It has the same widths. The two take turns, so that their ratio holds
on a busy machine too. The published code itself reached 1,370 samples per CPU-second on hdb with
K = 50 and its own widths (measured once, at another time); it is no part of this repository.

Run: ``SECUREVFL_DATA=... python research/fedsim/speed.py [--rows 6000] [--turns 3] [--json]``
"""

import argparse
import contextlib
import dataclasses
import json
import statistics
import time

import numpy as np
import torch
from torch import Tensor, nn

import securevfl as sv
from research.common.folder_tables import load_folder
from securevfl.core.memory import keep_freed_memory
from securevfl.core.progress import ProgressEvent, RoundDone
from securevfl.data.tables import PartyTable
from securevfl.linkage.metrics.points import EuclideanKeys
from securevfl.models.fedsim import FedSimConfig

PUBLISHED = 1370.0
"""Samples per CPU-second of the published code: hdb, K = 50, one thread."""


PAPER_GATES = FedSimConfig(weight="learned", merge="convolution")
"""What the published code and the plain rendering have; the defaults do a little more."""


class PlainFedSim(nn.Module):
    """The network of the paper over joined rows, at our widths."""

    def __init__(self, own: int, theirs: int, config: FedSimConfig) -> None:
        super().__init__()
        wide, cut, places = config.layer_width, config.hidden, config.neighbours - config.step + 1
        self.config, self.own = config, own
        self.local_own = nn.Sequential(nn.Linear(own, wide), nn.ReLU(), nn.Linear(wide, cut))
        self.local_theirs = nn.Sequential(nn.Linear(theirs, wide), nn.ReLU(), nn.Linear(wide, cut))
        self.aggregation = nn.Sequential(
            nn.Linear(2 * cut, wide), nn.ReLU(), nn.Linear(wide, config.pair_outputs)
        )
        self.similarity = nn.Sequential(nn.Linear(1, 10), nn.Tanh(), nn.Linear(10, 1))
        self.convolution = nn.Conv2d(1, config.channels, (config.step, 1))
        self.merge = nn.Sequential(
            nn.ReLU(),
            nn.Flatten(),
            nn.Dropout(config.dropout_rate(classes=False)),
            nn.Linear(places * config.pair_outputs * config.channels, config.merge_width),
            nn.ReLU(),
            nn.Linear(config.merge_width, 1),
        )

    def forward(self, joined: Tensor, similarities: Tensor) -> Tensor:
        """Return the prediction of each row from its K joined rows."""
        own, theirs = joined.split([self.own, joined.shape[1] - self.own], dim=1)
        pairs = self.aggregation(torch.cat([self.local_own(own), self.local_theirs(theirs)], dim=1))
        weighed = pairs * self.similarity(similarities.reshape(-1, 1))
        image = weighed.view(-1, 1, self.config.neighbours, self.config.pair_outputs)
        order = similarities.argsort(dim=1, descending=True)[:, None, :, None].expand_as(image)
        out: Tensor = self.merge(self.convolution(image.gather(2, order)))
        return out


def plain_speed(parties: list[PartyTable], config: FedSimConfig, batch: int) -> float:
    """Train the plain network for one pass and return samples per CPU-second."""
    own, theirs = parties
    assert own.labels is not None, "the primary has labels"
    links = EuclideanKeys(primary=own.keys, records=theirs.keys).nearest(None, config.neighbours)
    similarities = torch.from_numpy(-links.distances / links.distances.std())
    joined = np.concatenate(
        [np.repeat(own.features, config.neighbours, 0), theirs.features[links.indices.ravel()]], 1
    ).reshape(own.num_rows, config.neighbours, -1)
    joined /= np.maximum(1e-9, np.abs(joined).max(axis=(0, 1)))
    targets = torch.from_numpy(own.labels / own.labels.std())
    model = PlainFedSim(own.num_features, theirs.num_features, config).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    table = torch.from_numpy(joined).double()
    start = time.process_time()
    for rows in torch.randperm(own.num_rows).split(batch):
        loss = (model(table[rows].flatten(0, 1), similarities[rows])[:, 0] - targets[rows]) ** 2
        optimizer.zero_grad()
        loss.mean().backward()
        optimizer.step()
    return own.num_rows / (time.process_time() - start)


class _SecondEpochDone(Exception):
    """Ends a simulation from within: nothing after its second epoch is measured."""


def our_speed(parties: list[PartyTable], config: FedSimConfig, batch: int) -> float:
    """Simulate two epochs and return samples per CPU-second of the second one's rounds."""
    marks: list[float] = []

    def observe(event: ProgressEvent) -> None:
        if isinstance(event, RoundDone) and event.epoch == 2:
            marks.append(time.process_time())
            if event.done == event.of:
                raise _SecondEpochDone

    with contextlib.suppress(_SecondEpochDone):
        sv.simulate(
            parties,
            config,
            privacy=sv.dp.Privacy(mechanism="none"),
            training=sv.TrainingSettings(epochs=2, batch_size=batch),
            base="none",
            observe=observe,
        )
    # The last batch is not full; the first mark comes after the first round.
    return (len(marks) - 2) * batch / (marks[-2] - marks[0])


def main() -> None:
    """Measure in turns and print medians of samples a CPU-second."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=6000, help="of hdb's 92,240")
    parser.add_argument("--turns", type=int, default=3, help="of both, alternating")
    parser.add_argument("--batch", type=int, default=128, help="rows a round")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()  # as every command does
    primary, secondary = load_folder("hdb")
    chosen = np.random.default_rng(0).permutation(primary.num_rows)[: options.rows]
    assert primary.labels is not None, "the primary has labels"
    primary = dataclasses.replace(
        primary,
        keys=primary.keys[chosen],
        features=primary.features[chosen],
        labels=primary.labels[chosen],
    )
    parties = [primary, secondary]
    turns = [
        (
            our_speed(parties, PAPER_GATES, options.batch),
            our_speed(parties, FedSimConfig(), options.batch),
            plain_speed(parties, PAPER_GATES, options.batch),
        )
        for _ in range(options.turns)
    ]
    paper, default, plain = (statistics.median(column) for column in zip(*turns, strict=True))
    figures = {
        "paper_gates": round(paper),
        "default_gates": round(default),
        "plain_float64_copies": round(plain),
        "ratio_to_plain": round(statistics.median(a / c for a, _, c in turns), 2),
        "published": PUBLISHED,
        "ratio_to_published": round(paper / PUBLISHED, 2),
        "default_to_published": round(default / PUBLISHED, 2),
    }
    if options.json:
        print(json.dumps(figures))
    else:
        print("\n".join(f"{name:<24} {value:>8g}" for name, value in figures.items()))


if __name__ == "__main__":
    main()
