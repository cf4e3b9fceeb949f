"""The local baseline against each of its models over seeds: what choosing and averaging cost.

    python research/local_baseline/local_baseline.py [--seeds 20] [--rows 5000]
        [--tables credit,prices]

Each seed splits a made table anew. ``credit``: skewed amounts with gaps, a weak binary label.
``prices``: a regression of smooth and stepped parts. A run falls short where the baseline's test
metric is worse than the best single model's by more than one deviation of that model over seeds.
"""

import argparse
import statistics

import numpy as np

from securevfl.data.tables import split_rows
from securevfl.models.alone.choice import fit_alone
from securevfl.models.alone.margins import OwnInputs
from securevfl.models.tasks import TaskHead


def credit(rows: int) -> tuple[OwnInputs, np.ndarray, TaskHead]:
    """Return clients with skewed amounts, a fifth of them missing, and who defaulted."""
    drawn = np.random.default_rng(0)
    amounts = np.exp(drawn.normal(size=(rows, 8)) * 1.2 + 3)
    counts = drawn.poisson(2.0, size=(rows, 4)).astype(float)
    standard = (np.log(amounts) - 3) / 1.2
    odds = 0.5 * standard[:, 0] - 0.4 * standard[:, 1] * (counts[:, 0] > 2) + 0.3 * counts[:, 1]
    label = (odds - 1.6 + 1.8 * drawn.logistic(size=rows) > 0).astype(np.float32)
    gaps = drawn.random(size=amounts.shape) < 0.2
    amounts[gaps] = np.median(amounts)
    values = np.hstack([amounts, gaps.astype(float), counts])
    return OwnInputs(values=values), label, TaskHead(task="binary", chosen="auc")


def prices(rows: int) -> tuple[OwnInputs, np.ndarray, TaskHead]:
    """Return flats and their prices, standardised."""
    drawn = np.random.default_rng(1)
    values = drawn.normal(size=(rows, 10))
    label = values[:, :4].sum(axis=1) + 2 * (values[:, 4] > 0.5) + np.sin(3 * values[:, 5])
    label = label + 1.5 * drawn.normal(size=rows)
    standard = ((label - label.mean()) / label.std()).astype(np.float32)
    return OwnInputs(values=values), standard, TaskHead(task="regression", label_deviation=1.0)


TABLES = {"credit": credit, "prices": prices}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--rows", type=int, default=5000)
    parser.add_argument("--tables", default=",".join(TABLES))
    options = parser.parse_args()
    for name in options.tables.split(","):
        inputs, labels, head = TABLES[name](options.rows)
        tested: dict[str, list[float]] = {}
        chosen = []
        for seed in range(options.seeds):
            split = split_rows(
                options.rows, validation_fraction=0.1, test_fraction=0.2, seed=seed, kind="random"
            )
            found = fit_alone(
                inputs, labels, head, train=split.train, validation=split.validation, seed=seed
            )
            measured = found.measure(inputs.take(split.test), labels[split.test])
            for model in ("linear", "boosting", "network"):
                tested.setdefault(model, []).append(head.headline(measured[model]))
            tested.setdefault("baseline", []).append(head.headline(measured[found.chosen]))
            chosen.append(found.chosen)
        sign = 1 if head.higher_is_better else -1
        singles = [model for model in tested if model != "baseline"]
        short, worst = 0, 0.0
        for seed, own in enumerate(tested["baseline"]):
            best = max(singles, key=lambda model: sign * tested[model][seed])
            below = sign * (tested[best][seed] - own)
            short += below > statistics.stdev(tested[best])
            worst = max(worst, below)
        print(f"{name}: test {head.metric_name} over {options.seeds} seeds")
        for model, values in tested.items():
            print(f"  {model:9} {statistics.mean(values):.4f} ± {statistics.stdev(values):.4f}")
        counts = {one: chosen.count(one) for one in dict.fromkeys(chosen)}
        print(f"  chosen: {counts}; below the best single model by more than a deviation: {short}")
        print(f"  most that a run is below the best single model of its seed: {worst:.4f}")


if __name__ == "__main__":
    main()
