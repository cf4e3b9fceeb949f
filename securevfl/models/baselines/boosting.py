"""Gradient-boosted trees on one table: the baseline that tables are usually measured against."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import TypeAlias

import numpy as np
import torch
from jaxtyping import Float, Int, Shaped
from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor
from torch import Tensor

from securevfl.core.errors import DataError
from securevfl.core.seeds import derive_seed
from securevfl.models.baselines.baseline_config import BoostingConfig
from securevfl.models.tasks import Metrics, TaskHead
from securevfl.models.threshold import HALF

_Trees: TypeAlias = HistGradientBoostingClassifier | HistGradientBoostingRegressor

# What a class that no training row has gets: less than any other, and still finite.
_NEVER = -1e9


@dataclass(frozen=True, kw_only=True, eq=False)
class BoostingResult:
    """Metrics of the chosen number of trees."""

    train: float
    """Like the next two, the metric that training goes by: of the training rows."""

    validation: float | None
    """None where no rows chose it."""

    test: float

    validation_metrics: Metrics | None
    """All metrics of the task, like the next ones; None where no rows chose it."""

    test_metrics: Metrics

    iterations: int
    """Rounds of boosting that are used."""

    grown: int
    """Rounds after which boosting ended."""

    outputs: Float[Tensor, "test_rows outputs"]
    """What :class:`TaskHead` reads of the test rows."""


def fit_boosting(
    inputs: Float[Tensor, "rows inputs"],
    targets: Shaped[Tensor, " rows"],
    *,
    head: TaskHead,
    train: Int[Tensor, " train_rows"],
    validation: Int[Tensor, " validation_rows"],
    test: Int[Tensor, " test_rows"],
    config: BoostingConfig,
    seed: int,
) -> BoostingResult:
    """Boost on the training rows until the validation rows no longer gain.

    The validation rows end boosting by their loss, and choose leaves and rounds by the metric.

    Args:
        inputs: One table, as :mod:`securevfl.models.baselines.tables` makes it.
        targets: As :class:`TaskHead` wants them.
        head: Loss and metrics.
        train: Rows to learn from.
        validation: Rows that choose; without any, the first number of leaves and all rounds.
        test: Rows that are reported.
        config: The trees.
        seed: Run seed.

    Raises:
        DataError: If there is no training or test row, only one class to learn, or a split for
            whose labels the metric that training goes by is not defined.
    """
    for name, rows in (("training", train), ("test", test)):
        if len(rows) == 0:
            raise DataError(f"the baseline has no {name} rows")
    table, labels = inputs.cpu().numpy(), targets.cpu().numpy()
    own, shown = train.cpu().numpy(), validation.cpu().numpy()
    if head.task != "regression" and len(np.unique(labels[own])) < 2:
        raise DataError("boosting: its training rows are all of one class")
    known = targets.cpu()

    def staged(model: _Trees, rows: Tensor) -> Iterator[Tensor]:
        return _staged(model, table[rows.cpu().numpy()], head)

    def of_round(rows: Tensor, number: int) -> Tensor:
        return next(islice(staged(model, rows), number - 1, None))

    # A class that no training row has says nothing of when to end.
    of_known = shown if head.task == "regression" else shown[np.isin(labels[shown], labels[own])]
    best, rounds, threshold = math.nan, config.iterations, HALF
    fitted = []
    for leaves in config.leaves if len(of_known) else config.leaves[:1]:
        one = _model(config, head, seed, leaves=leaves, stops=len(of_known) > 0)
        if len(of_known):
            one.fit(table[own], labels[own], X_val=table[of_known], y_val=labels[of_known])
        else:
            one.fit(table[own], labels[own])
        fitted.append(one)
    model = fitted[0]
    for one in fitted if len(validation) else ():
        for number, outputs in enumerate(staged(one, validation), 1):
            true = known[validation.cpu()]
            cut = head.choose_threshold(outputs, true)
            value = head.metric(outputs, true, threshold=cut)
            if head.is_better(value, best):
                model, best, rounds, threshold = one, value, number, cut
    validated = None
    if len(validation):
        validated = head.metrics(
            of_round(validation, rounds), known[validation.cpu()], threshold=threshold
        )
    outputs = of_round(test, rounds)
    tested = head.metrics(outputs, known[test.cpu()], threshold=threshold)
    return BoostingResult(
        train=head.metric(of_round(train, rounds), known[train.cpu()], threshold=threshold),
        validation=None if validated is None else head.headline(validated),
        test=head.headline(tested),
        validation_metrics=validated,
        test_metrics=tested,
        iterations=rounds,
        grown=model.n_iter_,
        outputs=outputs,
    )


def _model(
    config: BoostingConfig, head: TaskHead, seed: int, *, leaves: int, stops: bool
) -> _Trees:
    kind = (
        HistGradientBoostingRegressor
        if head.task == "regression"
        else HistGradientBoostingClassifier
    )
    return kind(
        max_iter=config.iterations,
        learning_rate=config.learning_rate,
        max_leaf_nodes=leaves,
        min_samples_leaf=config.smallest_leaf,
        early_stopping=stops,
        n_iter_no_change=config.patience,
        random_state=derive_seed(seed, "boosting") % 2**32,
    )


def _staged(
    model: _Trees,
    table: Float[np.ndarray, "rows inputs"],
    head: TaskHead,
) -> Iterator[Float[Tensor, "rows outputs"]]:
    """Yield the outputs after each round, as :class:`TaskHead` reads them."""
    if isinstance(model, HistGradientBoostingRegressor):
        for predicted in model.staged_predict(table):
            yield torch.as_tensor(predicted, dtype=torch.float32)[:, None]
        return
    known = torch.as_tensor(model.classes_.astype(np.int64))
    for decided in model.staged_decision_function(table):
        scores = torch.as_tensor(decided, dtype=torch.float32).reshape(len(table), -1)
        if head.task == "binary":
            yield scores
            continue
        if scores.shape[1] == 1:  # two classes of several: one score, of the second
            scores = torch.cat([-scores, scores], dim=1)
        outputs = torch.full((len(table), head.outputs), _NEVER)
        outputs[:, known] = scores
        yield outputs
