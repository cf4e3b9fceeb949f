"""Which rows may decide whether a joint model answers, where directions have seen labels: a study.

    python research/class_means/which_rows.py [--runs 40] [--rows 400,1500] [--columns 6,40]
        [--surviving 0.99,0.6] [--signals 0,0.4,0.8]

One partner with normal columns; the primary's own margin is known. A direction is fitted to noised
class sums of the training rows, and released as a score of which a share survives. The product
corrects the margin and decides; rows that decide, and what is taken off, differ:

    10 %, 25 %   validation rows alone
    all          all rows as they are
    less         all rows, less lambda times the optimism of seen rows (the product)
    folds        all rows, with directions by two folds (each record in one fold's sums)

A line a cell: how often the joint model answers, and what answering gains on fresh rows in
thousandths of log loss (0 where the local baseline answers), under each rule.
"""

import argparse
import itertools
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from securevfl.dp.class_sums import SumFormat
from securevfl.models.alone.choice import decide, mix_outputs, optimism_of_seen
from securevfl.models.fitted_top import TiedTop, fit_tied
from securevfl.models.tasks import TaskHead

HEAD = TaskHead(task="binary")
FRESH = 4000
FOLDS = 5
RULES = ("10 %", "25 %", "all", "less", "folds")


def direction(records: np.ndarray, labels: np.ndarray, *, multiplier: float) -> np.ndarray:
    """Return the difference of two noised class means, with noise of records and of labels."""
    format_ = SumFormat.choose(
        features=records.shape[1], bins=3, links_per_record=1, noise_multiplier=multiplier
    )
    vectors = format_.row_vectors(records, np.arange(len(records))[:, None])
    sums = format_.by_bins(vectors, labels)
    sums += format_.noise(multiplier * format_.change_of_record)
    sums += format_.noise(2 * format_.change_of_label())
    _, means = format_.means(sums.astype(np.float64))
    return means[1] - means[0]


def released(scores: np.ndarray, surviving: float, draw: np.random.Generator) -> Tensor:
    """Return scores of deviation 1, of whose variance a share is theirs."""
    standard = (scores - scores.mean()) / max(scores.std(), 1e-12)
    noise = draw.normal(size=scores.shape)
    return torch.from_numpy(surviving**0.5 * standard + (1 - surviving) ** 0.5 * noise)[:, None]


def fitted(seen: Tensor, base: Tensor, targets: Tensor) -> tuple[TiedTop, Tensor]:
    """Return the correction of the margin, and outputs out of fold."""
    folds = torch.arange(len(seen)) % FOLDS
    top, added = fit_tied(
        lambda: TiedTop(width=1, outputs=1), seen, base, targets, HEAD, folds=folds
    )
    return top, base + added


def outcomes(
    *, rows: int, columns: int, surviving: float, signal: float, multiplier: float, seed: int
) -> Iterator[tuple[bool, float]]:
    """Yield whether the joint model answers, and what that gains on fresh rows, by each rule."""
    draw = np.random.default_rng(seed)
    records = draw.normal(size=(rows + FRESH, columns)) / 2
    way = draw.normal(size=columns)
    known = draw.normal(size=rows + FRESH)
    whole = known + 2 * signal * records @ (way / np.linalg.norm(way))
    labels = (whole + draw.logistic(size=rows + FRESH) > 0).astype(np.int64)
    base, targets = torch.from_numpy(known)[:, None], torch.from_numpy(labels).double()
    fresh = slice(rows, None)

    def answers(
        read: Tensor, train: slice, known: slice, *optimisms: float
    ) -> Iterator[tuple[bool, float]]:
        top, out_of_fold = fitted(read[train], base[train], targets[train])
        with torch.no_grad():
            joint = base + top.correct(read)
        joint[train] = out_of_fold
        for optimism in optimisms:
            decision = decide(
                HEAD,
                base=base[known],
                joint=joint[known],
                alone=base[known],
                targets=targets[known],
                optimism=optimism,
            )
            mixed = mix_outputs(base[fresh], joint[fresh], decision.scale)
            losses = [HEAD.row_losses(outputs, targets[fresh]) for outputs in (base[fresh], mixed)]
            used = decision.used == "joint"
            yield used, float((losses[0] - losses[1]).mean()) if used else 0.0

    def one_fit(train: slice) -> Tensor:
        found = direction(records[train], labels[train], multiplier=multiplier)
        return released(records @ found, surviving, draw)

    everything = slice(0, rows)
    for share in (0.1, 0.25):
        held_out = int(share * rows)
        train = slice(held_out, rows)
        yield from answers(one_fit(train), train, slice(0, held_out), 0.0)
    optimism = optimism_of_seen(
        HEAD, base[everything], targets[everything], columns=columns, surviving=surviving
    )
    yield from answers(one_fit(everything), everything, everything, 0.0, optimism)
    fold = np.arange(rows) % 2
    ways = [
        direction(records[:rows][fold == one], labels[:rows][fold == one], multiplier=multiplier)
        for one in (1, 0)
    ]
    scores = records @ (ways[0] + ways[1]) / 2
    scores[:rows] = np.where(fold == 0, records[:rows] @ ways[0], records[:rows] @ ways[1])
    yield from answers(released(scores, surviving, draw), everything, everything, 0.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=40)
    parser.add_argument("--rows", default="400,1500")
    parser.add_argument("--columns", default="6,40")
    parser.add_argument("--surviving", default="0.99,0.6")
    parser.add_argument("--signals", default="0,0.4,0.8")
    options = parser.parse_args()
    names = " | ".join(RULES)
    print(f"| rows, columns, surviving, signal | {names} | gain: {names} |")
    print("| --- |" + " --- |" * 2 * len(RULES))
    cells = itertools.product(
        *(
            [float(value) for value in text.split(",")]
            for text in (options.rows, options.columns, options.surviving, options.signals)
        )
    )
    for rows, columns, surviving, signal in cells:
        found = np.array(
            [
                list(
                    outcomes(
                        rows=int(rows),
                        columns=int(columns),
                        surviving=surviving,
                        signal=signal,
                        # As auto fits at epsilon 8 and 2, with one partner.
                        multiplier=4.6 if surviving > 0.8 else 15.0,
                        seed=seed,
                    )
                )
                for seed in range(options.runs)
            ]
        )
        used = " | ".join(f"{value:.2f}" for value in found[:, :, 0].mean(axis=0))
        gains = " | ".join(f"{1000 * value:+.1f}" for value in found[:, :, 1].mean(axis=0))
        print(
            f"| {rows:g}, {columns:g}, {surviving:g}, {signal:g} | {used} | {gains} |", flush=True
        )


if __name__ == "__main__":
    main()
