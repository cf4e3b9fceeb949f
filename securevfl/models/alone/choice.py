"""The local baseline: the best that the primary can do without partners.

Three models see all that the primary has (:class:`OwnInputs`): a linear model, boosted trees and a
perceptron. Those that validate alike are averaged, by the losses of rows that none of them was
fitted to. What a federation is worth is what it adds to that.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import torch
from jaxtyping import Float32, Int64, Shaped

from securevfl.models.alone.margins import (
    CrossFitted,
    MarginModel,
    OwnInputs,
    fit_margins,
    out_of_fold,
    refit,
)
from securevfl.models.alone.network import NetworkModel, fit_network
from securevfl.models.baselines.baseline_config import BaselineConfig
from securevfl.models.tasks import Metrics, TaskHead

CONSTANT: Final = "constant"
"""The one candidate of a primary without a number of its own: the mean, or the classes' shares."""

AVERAGE: Final = "average"
"""The candidate that averages others."""

LEVEL: Final = 2.0
"""Standard errors of the difference in loss within which two models are level on validation
rows."""

_STEPS: Final = 10
"""Of a weight in an average, from 0 to 1."""

_AS_GOOD: Final = 1.001
"""Times the least loss, up to which simpler weights are taken."""

Single = MarginModel | NetworkModel
"""One model, read as margins."""


@dataclass(frozen=True, kw_only=True, eq=False)
class AverageModel:
    """A weighted mean of models' margins."""

    parts: Mapping[str, Single]
    """By the candidates' names."""
    weights: Mapping[str, float]
    """Of each part; positive, and their sum is 1."""
    head: TaskHead

    def margins(self, inputs: OwnInputs) -> Float32[np.ndarray, "rows outputs"]:
        """Return the mean of the parts' margins of rows."""
        return _mean({name: one.margins(inputs) for name, one in self.parts.items()}, self.weights)


Model = Single | AverageModel
"""A candidate, read as margins."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Candidate:
    """One model of the primary alone."""

    model: Model
    validation: Metrics
    """Every metric of the validation rows."""
    threshold: float
    """Of a binary task, as the validation rows chose it."""
    margins: Float32[np.ndarray, "rows outputs"] | None = None
    """Of all rows, out of fold on training rows, where these were asked for to average it."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Alone:
    """The local baseline: its candidates, and which of them is the best."""

    head: TaskHead
    candidates: Mapping[str, Candidate]
    """By name, the simplest first: ``linear``, ``boosting``, ``network``, and ``average`` where
    several of them are level; or ``constant``."""
    chosen: str

    @property
    def best(self) -> Candidate:
        """The chosen candidate."""
        return self.candidates[self.chosen]

    @property
    def epochs(self) -> int:
        """Epochs that the network was trained for; 1 where there is no network."""
        network = self.candidates.get("network")
        return network.model.epochs if network and isinstance(network.model, NetworkModel) else 1

    def margins(self, inputs: OwnInputs) -> Float32[np.ndarray, "rows outputs"]:
        """Return what the head reads of the chosen model.

        Nothing here is out of fold: rows that it was fitted to look better than they are.
        """
        return self.best.model.margins(inputs)

    def measured(
        self, inputs: OwnInputs, targets: Shaped[np.ndarray, " rows"]
    ) -> dict[str, Metrics]:
        """Return every metric of labelled rows, by candidate.

        Args:
            inputs: The rows.
            targets: Their labels, as the head takes them.

        Raises:
            DataError: If the metric that training goes by is not defined for these labels.
        """
        known = torch.from_numpy(targets)
        return {
            name: self.head.metrics(
                torch.from_numpy(one.model.margins(inputs)), known, threshold=one.threshold
            )
            for name, one in self.candidates.items()
        }


def fit_alone(
    inputs: OwnInputs,
    targets: Shaped[np.ndarray, " rows"],
    head: TaskHead,
    *,
    train: Int64[np.ndarray, " train"],
    validation: Int64[np.ndarray, " validation"],
    seed: int,
    network: BaselineConfig | None = None,
    fitted: Mapping[str, CrossFitted] | None = None,
) -> Alone:
    """Fit every candidate to the training rows, and choose one or average several.

    Validation rows are few, so they only say which models are level with the best: within
    :data:`LEVEL` standard errors of the mean difference in loss, paired by rows. These are fitted
    to folds of the training rows too, and the weights of their average have the least mean loss
    over training rows, out of fold, and validation rows. A weight of 1 is that candidate.

    No other row is looked at. Of equals the simplest is chosen.

    Args:
        inputs: All rows.
        targets: Their labels as the head takes them.
        head: The task; its metric chooses among models that are not averaged.
        train: Rows to learn from.
        validation: Rows that choose: the models, the network's epoch, thresholds.
        seed: Run seed.
        network: The perceptron and its training; default: :class:`BaselineConfig`.
        fitted: Candidates that were fitted to these training rows before, by name; another name
            is one more candidate.

    Raises:
        DataError: If there are no training or validation rows, or the metric is not defined for
            one of them.

    References:
        van der Laan, Polley and Hubbard, Super Learner, 2007: weights that are positive and sum to
        1, chosen by loss out of fold.
    """
    config, known = network or BaselineConfig(), targets[validation]
    before = fitted or {}
    candidates: dict[str, Candidate] = {}
    models: dict[str, Single] = {}
    losses: dict[str, Shaped[np.ndarray, " validation"]] = {}
    names = dict.fromkeys(("linear", "boosting", "network", *before))
    for name in names if inputs.values.shape[1] else (CONSTANT,):
        model: Single
        if name in before:
            model = before[name].model
        elif name == "network":
            model = fit_network(
                inputs,
                targets,
                head,
                train=train,
                validation=validation,
                seed=seed,
                config=config,
            )
        else:
            model = fit_margins(name, inputs.take(train), targets[train], head, seed=seed)
        models[name], shown = model, model.margins(inputs.take(validation))
        candidates[name] = _candidate(model, head, shown, known)
        losses[name] = _losses(head, shown, known)
    chosen, *others = candidates
    for name in others:
        if head.is_better(
            head.headline(candidates[name].validation), head.headline(candidates[chosen].validation)
        ):
            chosen = name
    level = level_with_best(losses, also=chosen)
    if len(level) == 1:
        return Alone(head=head, candidates=candidates, chosen=chosen)
    margins: dict[str, Float32[np.ndarray, "rows outputs"]] = {}
    for name in level:
        margins[name] = (
            before[name].margins
            if name in before
            else cross_fitted(
                models[name],
                inputs,
                targets,
                head,
                train=train,
                validation=validation,
                seed=seed,
                config=config,
            )
        )
        candidates[name] = replace(candidates[name], margins=margins[name])
    rows = np.concatenate([train, validation])
    weights = best_weights({name: one[rows] for name, one in margins.items()}, targets[rows], head)
    if len(weights) == 1:
        return Alone(head=head, candidates=candidates, chosen=next(iter(weights)))
    average = AverageModel(
        parts={name: models[name] for name in weights}, weights=weights, head=head
    )
    mean = _mean({name: margins[name] for name in weights}, weights)
    whole = _candidate(average, head, mean[validation], known)
    candidates[AVERAGE] = replace(whole, margins=mean)
    return Alone(head=head, candidates=candidates, chosen=AVERAGE)


def _candidate(
    model: Model,
    head: TaskHead,
    margins: Float32[np.ndarray, "rows outputs"],
    targets: Shaped[np.ndarray, " rows"],
) -> Candidate:
    """Return a candidate, measured by its margins of the validation rows."""
    outputs, known = torch.from_numpy(margins), torch.from_numpy(targets)
    threshold = head.choose_threshold(outputs, known)
    return Candidate(
        model=model,
        validation=head.metrics(outputs, known, threshold=threshold),
        threshold=threshold,
    )


def level_with_best(
    losses: Mapping[str, Shaped[np.ndarray, " rows"]], *, also: str
) -> tuple[str, ...]:
    """Return the names of the models that are level with the one of least mean loss.

    Args:
        losses: Of the same rows, by model.
        also: A model that is level whatever its loss: the best by another metric.
    """
    least = min(losses, key=lambda name: float(losses[name].mean()))
    found = []
    for name, own in losses.items():
        worse = own - losses[least]
        error = float(worse.std(ddof=1)) / len(worse) ** 0.5 if len(worse) > 1 else 0.0
        if name == also or float(worse.mean()) <= LEVEL * error:
            found.append(name)
    return tuple(found)


def best_weights(
    margins: Mapping[str, Float32[np.ndarray, "rows outputs"]],
    targets: Shaped[np.ndarray, " rows"],
    head: TaskHead,
) -> dict[str, float]:
    """Return the positive weights, in tenths, whose average has the least mean loss.

    Of weights whose loss is within a thousandth of the least, the first: one model rather than an
    average, and the simpler one.

    Args:
        margins: Of rows that the models were not fitted to, by model, the simplest first.
        targets: The rows' labels, as the head takes them.
        head: The task.

    Returns:
        By name, without those of weight 0.
    """
    losses: list[tuple[float, dict[str, float]]] = []
    for weights in _simplex(len(margins)):
        some = {name: one for name, one in zip(margins, weights, strict=True) if one > 0}
        mean = _mean({name: margins[name] for name in some}, some)
        losses.append((float(_losses(head, mean, targets).mean()), some))
    enough = min(loss for loss, _ in losses) * _AS_GOOD
    return next(weights for loss, weights in losses if loss <= enough)


def _simplex(parts: int) -> Sequence[tuple[float, ...]]:
    """Return all weights of so many parts in steps: of fewer parts first, then of earlier ones."""
    steps = itertools.product(range(_STEPS, -1, -1), repeat=parts)
    whole = [some for some in steps if sum(some) == _STEPS]
    whole.sort(key=lambda some: sum(one > 0 for one in some))
    return [tuple(one / _STEPS for one in some) for some in whole]


def _mean(
    margins: Mapping[str, Float32[np.ndarray, "rows outputs"]], weights: Mapping[str, float]
) -> Float32[np.ndarray, "rows outputs"]:
    total = sum(weights[name] * one.astype(np.float64) for name, one in margins.items())
    return np.asarray(total, dtype=np.float32)


def _losses(
    head: TaskHead,
    margins: Float32[np.ndarray, "rows outputs"],
    targets: Shaped[np.ndarray, " rows"],
) -> Shaped[np.ndarray, " rows"]:
    return head.row_losses(torch.from_numpy(margins), torch.from_numpy(targets)).numpy()


def cross_fitted(
    model: Model,
    inputs: OwnInputs,
    targets: Shaped[np.ndarray, " rows"],
    head: TaskHead,
    *,
    train: Int64[np.ndarray, " train"],
    validation: Int64[np.ndarray, " validation"],
    seed: int,
    config: BaselineConfig,
) -> Float32[np.ndarray, "rows outputs"]:
    """Return a single model's margins of all rows, out of fold on training rows.

    Args:
        model: Fitted to all training rows.
        inputs: All rows.
        targets: Their labels as the head takes them.
        head: The task.
        train: The training rows.
        validation: Rows that chose a network's epoch.
        seed: Run seed.
        config: The perceptron and its training.
    """

    def again(rows: Int64[np.ndarray, " some"]) -> Single:
        if isinstance(model, NetworkModel):
            # Until it was best and no longer: what comes behind that is waiting in vain.
            epochs = max(1, model.epochs - config.patience)
            return fit_network(
                inputs,
                targets,
                head,
                train=rows,
                validation=validation,
                seed=seed,
                config=replace(config, epochs=epochs),
            )
        assert isinstance(model, MarginModel), "an average is made of single models' margins"
        return refit(model, inputs.take(rows), targets[rows])

    return out_of_fold(model, again, inputs, targets, head, train=train, seed=seed)
