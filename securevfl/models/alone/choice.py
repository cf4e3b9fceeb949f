"""The local baseline: boosted trees, linear models and networks, and the choice among them.

The local baseline is chosen among a linear model, boosted trees and a perceptron on all of the
primary's inputs; models with similar validation losses are averaged, with weights from rows that
none of them was fitted to. The value of a federation is its improvement on that baseline.

A joint prediction is a mean of two models' margins (:mod:`securevfl.models.alone.margins`):
(1 - lambda) of the base, lambda of the joint model. lambda, and whether the joint model or the
local baseline is used, are chosen by the task's loss, paired by rows, on rows that none of the
models was fitted to. This is model selection, not a guarantee: on other rows the joint model may
still be the worse one.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final, Literal

import numpy as np
import torch
from jaxtyping import Float, Float32, Int64, Shaped
from torch import Tensor
from torch.nn import functional

from securevfl.core.devices import few_threads
from securevfl.models.alone.margins import (
    BaselineConfig,
    CrossFitted,
    MarginModel,
    NetworkModel,
    OwnInputs,
    fit_margins,
    fit_network,
    out_of_fold,
    refit,
)
from securevfl.models.tasks import Metrics, TaskHead

Used = Literal["joint", "alone"]
"""Model whose predictions are used: the joint one, or the local baseline."""

_RULE_STEPS: Final = 20
"""Steps of lambda from 0 to 1."""

ERRORS_OF_CHOOSING_ROWS: Final = 1.5
"""Standard errors that a gain must exceed on rows that chose the joint model's epoch too
(research/local_baseline/README.md)."""

_FRESH_ERROR: Final = 0.3
"""Standard error of a gain in loss times the root of the number of rows, about."""

_CLEARLY: Final = 0.01
"""Gain in loss per row that is worth having; a regression's loss is in units of the variance."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """Choice between the joint model and the local baseline, and the evidence for it."""

    used: Used
    """The chosen model."""
    scale: float
    """lambda, the joint model's weight against the base, in [0, 1]."""
    gain: float
    """Mean loss of the local baseline minus that of the joint model, per row."""
    error: float
    """One standard error of ``gain``; 0 for a single row."""
    rows: int
    """Number of rows that decided."""
    errors: float = 1.0
    """Standard errors that ``gain`` had to exceed."""
    optimism: float = 0.0
    """Mean over these rows of what was added to the joint loss, at lambda = 1."""

    @property
    def too_few_rows(self) -> bool:
        """Whether the local baseline is used although the joint model may be clearly better."""
        clear = self.gain > self.errors * self.error
        return not clear and max(self.gain + 2 * self.error, self.optimism) > _CLEARLY

    def as_json(self) -> dict[str, Any]:
        """Return the fields by name, ``scale`` as ``lambda``."""
        fields = asdict(self)
        return {"lambda" if name == "scale" else name: value for name, value in fields.items()}


def optimism_of_seen(
    head: TaskHead,
    base: Float[Tensor, "rows outputs"],
    targets: Shaped[Tensor, " rows"],
    *,
    columns: int,
    surviving: float,
    keys: int | None = None,
) -> float:
    """Return how much lower the joint loss of seen rows is expected to be than that of fresh ones.

    Directions were fitted to the rows' labels, over ``columns`` numbers of their records. For a
    joint model with outputs f, fitted to n labels y, losses on these rows are lower than on fresh
    ones by ``sum of cov(f, y) / n`` in a log loss, and by twice that in a squared one [Efron04].
    For one free output and records that know nothing that is at most ``s r^2 v d / n``: v is what
    survives of a score; s is 1 in a log loss, twice the residual variance in a squared one; r is
    the correlation of what directions are fitted to with the residuals of the base, at most 1.
    Where rows share a key, one of them is fitted to, and what labels leave of the others may be
    all the same: n is then the number of keys.

    It is linear in lambda. A gain less lambda times this is above zero at some lambda if the gain
    at lambda = 1 is above half of it, which is what records that know nothing gain there.

    Args:
        head: The task.
        base: Margins of the base for the seen rows, out of fold.
        targets: Their labels, as the head takes them.
        columns: d, over all secondaries.
        surviving: v.
        keys: Number of their different keys, where rows of one key share a record; None: of rows.

    References:
        [Efron04] Efron, The estimation of prediction error: covariance penalties and
        cross-validation, equations 2.9 and 6.4; the rest is derived in "Which rows decide".
    """
    if head.task == "regression":
        # Directions are fitted to halves, which may be all that is left.
        unit = 2 * float(head.row_losses(base, targets).mean())
    else:
        margins = base.double()
        odds = margins if head.outputs > 1 else torch.cat([-margins, margins], dim=1) / 2
        classes = functional.one_hot(targets.long(), odds.shape[1]).double()
        left = (classes - odds.softmax(dim=1)).square().sum()
        unit = min(1.0, float(left / (classes - classes.mean(dim=0)).square().sum()))
    return unit * surviving * columns * max(1, head.outputs - 1) / (keys or len(targets))


def fresh_rows_decide(*, columns: int, surviving: float, seen: int, fresh: int) -> bool:
    """Return whether fresh rows alone say more than all rows less the optimism of those seen.

    All rows ask for more than half of the optimism, ``r^2 v d / (2 n)`` with r at most 1; ``fresh``
    rows alone for one standard error, about ``0.3 / sqrt(fresh)`` where the gain is a few
    hundredths. No row has a say in which it is.

    Args:
        columns: d, as in :func:`optimism_of_seen`.
        surviving: v.
        seen: n, rows whose labels directions were fitted to.
        fresh: Rows whose labels nothing was fitted to.
    """
    return surviving * columns / (2 * seen) > _FRESH_ERROR / math.sqrt(max(1, fresh))


def decide(
    head: TaskHead,
    *,
    base: Float[Tensor, "rows outputs"],
    joint: Float[Tensor, "rows outputs"],
    alone: Float[Tensor, "rows outputs"],
    targets: Shaped[Tensor, " rows"],
    scale: float | None = None,
    optimism: Float[Tensor, " rows"] | float = 0.0,
    errors: float = 1.0,
    keys: Int64[Tensor, " rows"] | None = None,
) -> Decision:
    """Choose lambda, and whether the joint model is used.

    lambda is chosen by :func:`choose_scale`. The joint model is used if lambda is not 0 and the
    mean of loss(alone) - loss(joint) over the rows is more than ``errors`` standard errors of it.

    Args:
        head: The task.
        base: Margins of the base, for rows that it was not fitted to.
        joint: Margins of the joint model.
        alone: Margins of the local baseline.
        targets: The rows' labels, as the head takes them.
        scale: lambda, if it was chosen on more rows than these; None chooses it on these.
        optimism: Added to each row's joint loss, times lambda; see :func:`optimism_of_seen`.
        errors: Standard errors.
        keys: A number for each row's key, where rows of one key share a record: keys are then what
            is independent. None: rows are.

    References:
        A rule of this project's own; research/local_baseline/README.md has its measurements.
    """
    if scale is None:
        scale = choose_scale(head, base=base, joint=joint, targets=targets, optimism=optimism)
    losses = head.row_losses(mix_outputs(base, joint, scale), targets) + scale * optimism
    gain, error = _gain(head.row_losses(alone, targets) - losses, keys)
    return Decision(
        used="joint" if scale > 0 and gain > errors * error else "alone",
        scale=scale,
        gain=gain,
        error=error,
        rows=len(targets),
        errors=errors,
        optimism=float(torch.as_tensor(optimism).mean()),
    )


def choose_scale(
    head: TaskHead,
    *,
    base: Float[Tensor, "rows outputs"],
    joint: Float[Tensor, "rows outputs"],
    targets: Shaped[Tensor, " rows"],
    optimism: Float[Tensor, " rows"] | float = 0.0,
) -> float:
    """Return the lambda in 0, 0.05, ..., 1 with the smallest mean loss; of equals, the smallest.

    Args:
        head: As in :func:`decide`.
        base: As in :func:`decide`.
        joint: As in :func:`decide`.
        targets: As in :func:`decide`.
        optimism: As in :func:`decide`.
    """
    scales = [step / _RULE_STEPS for step in range(_RULE_STEPS + 1)]
    means = {
        scale: float(
            (head.row_losses(mix_outputs(base, joint, scale), targets) + scale * optimism).mean()
        )
        for scale in scales
    }
    # A joint model with outputs that are not finite gets no weight.
    finite = {scale: mean for scale, mean in means.items() if mean < float("inf")}
    return min(finite, key=lambda scale: finite[scale], default=0.0)


def who_answers(
    head: TaskHead,
    *,
    joint: Float[Tensor, "rows outputs"],
    alone: Float[Tensor, "rows outputs"],
    targets: Shaped[Tensor, " rows"],
    errors: float,
) -> Used:
    """Return the model to use at a given lambda, by the rule of :func:`decide`."""
    gain, error = _gain(head.row_losses(alone, targets) - head.row_losses(joint, targets))
    return "joint" if gain > errors * error else "alone"


def _gain(
    differences: Float[Tensor, " rows"], keys: Int64[Tensor, " rows"] | None = None
) -> tuple[float, float]:
    """Return the mean of the differences and its standard error, which is 0 for a single row.

    Where rows share keys, the error is that of sums over independent keys.
    """
    rows, mean = len(differences), float(differences.mean())
    if keys is None:
        return mean, float(differences.std()) / rows**0.5 if rows > 1 else 0.0
    _, places = torch.unique(keys, return_inverse=True)
    sums = torch.bincount(places, weights=differences - mean)
    if len(sums) < 2:
        return mean, 0.0
    return mean, float(sums.square().sum() * len(sums) / (len(sums) - 1)) ** 0.5 / rows


def mix_outputs(
    base: Float[Tensor, "rows outputs"], joint: Float[Tensor, "rows outputs"], scale: float
) -> Float[Tensor, "rows outputs"]:
    """Return (1 - lambda) base + lambda joint; a part with weight 0 may hold any values."""
    if scale in (0, 1):
        return joint if scale else torch.clone(base)
    return base + scale * (joint - base)


CONSTANT: Final = "constant"
"""The only candidate of a primary without inputs: the mean label, or the class shares."""

AVERAGE: Final = "average"
"""The candidate that averages other candidates."""

LEVEL: Final = 2.0
"""Largest difference in validation loss of two level models, in standard errors."""

_STEPS: Final = 10
"""Steps of a weight in an average, from 0 to 1."""

_AS_GOOD: Final = 1.001
"""Largest loss of simpler weights that are preferred, over the smallest loss."""

Single = MarginModel | NetworkModel
"""Model of a single candidate, not averaged."""


@dataclass(frozen=True, kw_only=True, eq=False)
class AverageModel:
    """A weighted mean of models' margins."""

    parts: Mapping[str, Single]
    """Models by the candidates' names."""
    weights: Mapping[str, float]
    """Weight of each part; positive, with sum 1."""
    head: TaskHead

    def margins(self, inputs: OwnInputs) -> Float32[np.ndarray, "rows outputs"]:
        """Return the weighted mean of the parts' margins for rows."""
        return _mean(
            {name: part.margins(inputs) for name, part in self.parts.items()}, self.weights
        )


Model = Single | AverageModel
"""Model of a candidate."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Candidate:
    """One candidate for the local baseline."""

    model: Model
    validation: Metrics
    """Every metric of the validation rows."""
    threshold: float
    """Threshold of a binary task, chosen on the validation rows."""
    margins: Float32[np.ndarray, "rows outputs"] | None = None
    """Margins for all rows, out of fold on training rows; None if they were not needed."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Alone:
    """The local baseline: its candidates, and the chosen one."""

    head: TaskHead
    candidates: Mapping[str, Candidate]
    """Candidates by name, simplest first: ``linear``, ``boosting``, ``network``, and ``average``
    if several of them are level; or ``constant``."""
    chosen: str
    """Name of the chosen candidate."""

    @property
    def best(self) -> Candidate:
        """The chosen candidate."""
        return self.candidates[self.chosen]

    @property
    def epochs(self) -> int:
        """Epochs of the network's training; 1 without a network."""
        network = self.candidates.get("network")
        return network.model.epochs if network and isinstance(network.model, NetworkModel) else 1

    def margins(self, inputs: OwnInputs) -> Float32[np.ndarray, "rows outputs"]:
        """Return the chosen model's margins for rows.

        They are not out of fold, so they are too good for rows that it was fitted to.
        """
        return self.best.model.margins(inputs)

    def measure(
        self, inputs: OwnInputs, targets: Shaped[np.ndarray, " rows"]
    ) -> dict[str, Metrics]:
        """Return every metric on labelled rows, for each candidate.

        Args:
            inputs: The rows.
            targets: Their labels, as the head takes them.

        Raises:
            DataError: If the metric that training optimises is not defined for these labels.
        """
        known = torch.from_numpy(targets)
        return {
            name: self.head.metrics(
                torch.from_numpy(candidate.model.margins(inputs)),
                known,
                threshold=candidate.threshold,
            )
            for name, candidate in self.candidates.items()
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
    with_margins: bool = False,
) -> Alone:
    """Fit every candidate to the training rows; choose one, or average several.

    Validation rows are few, so they only decide which models are level with the best: within
    :data:`LEVEL` standard errors of the mean difference in loss, paired by rows. Level models are
    also fitted to folds of the training rows, and averaged with the weights of least mean loss over
    training rows (out of fold) and validation rows. A weight of 1 selects that candidate. Other
    rows are not used. Of equal candidates the simplest is chosen.

    Args:
        inputs: All rows.
        targets: Their labels as the head takes them.
        head: The task; its metric chooses among models that are not averaged.
        train: Rows to train on.
        validation: Rows that choose models, the network's epoch and thresholds.
        seed: Run seed.
        network: The perceptron and its training; default: :class:`BaselineConfig`.
        fitted: Candidates that were already fitted to these training rows, by name; a new name is
            an additional candidate.
        with_margins: Whether the chosen candidate must have margins out of fold.

    Raises:
        DataError: If there are no training or validation rows, or the metric is not defined for
            them.

    References:
        van der Laan, Polley and Hubbard, Super Learner, 2007: weights that are positive and sum to
        1, chosen by loss out of fold.
    """
    fits = _Fits(
        inputs=inputs,
        targets=targets,
        head=head,
        train=train,
        validation=validation,
        seed=seed,
        network=network or BaselineConfig(),
        fitted=fitted or {},
    )
    with few_threads(inputs.values.size):
        return _chosen(fits, with_margins=with_margins)


def _chosen(fits: "_Fits", *, with_margins: bool) -> Alone:
    """Fit every candidate and choose, as :func:`fit_alone` describes."""
    inputs, targets, head = fits.inputs, fits.targets, fits.head
    train, validation = fits.train, fits.validation
    known = targets[validation]
    candidates: dict[str, Candidate] = {}
    models: dict[str, Single] = {}
    losses: dict[str, Shaped[np.ndarray, " validation"]] = {}
    names = dict.fromkeys(("linear", "boosting", "network", *fits.fitted))
    for name in names if inputs.values.shape[1] else (CONSTANT,):
        models[name] = fits.model(name)
        shown = models[name].margins(inputs.take(validation))
        candidates[name] = _candidate(models[name], head, shown, known)
        losses[name] = _losses(head, shown, known)
    chosen, *others = candidates
    for name in others:
        if head.is_better(
            head.headline(candidates[name].validation), head.headline(candidates[chosen].validation)
        ):
            chosen = name
    level = level_with_best(losses, also=chosen)
    if len(level) == 1 and not with_margins:
        return Alone(head=head, candidates=candidates, chosen=chosen)
    margins = {name: fits.margins(name, models[name]) for name in level}
    for name in level:
        candidates[name] = replace(candidates[name], margins=margins[name])
    if len(level) == 1:
        return Alone(head=head, candidates=candidates, chosen=chosen)
    rows = np.concatenate([train, validation])
    weights = best_weights(
        {name: margin[rows] for name, margin in margins.items()}, targets[rows], head
    )
    if len(weights) == 1:
        return Alone(head=head, candidates=candidates, chosen=next(iter(weights)))
    average = AverageModel(
        parts={name: models[name] for name in weights}, weights=weights, head=head
    )
    mean = _mean({name: margins[name] for name in weights}, weights)
    whole = _candidate(average, head, mean[validation], known)
    candidates[AVERAGE] = replace(whole, margins=mean)
    return Alone(head=head, candidates=candidates, chosen=AVERAGE)


@dataclass(frozen=True, kw_only=True, eq=False)
class _Fits:
    """Models of one table, fitted to its training rows or to folds of them.

    Fields are the arguments of :func:`fit_alone`.
    """

    inputs: OwnInputs
    targets: Shaped[np.ndarray, " rows"]
    head: TaskHead
    train: Int64[np.ndarray, " train"]
    validation: Int64[np.ndarray, " validation"]
    seed: int
    network: BaselineConfig
    fitted: Mapping[str, CrossFitted]

    def model(self, name: str) -> Single:
        """Return a candidate, fitted to all training rows."""
        if name in self.fitted:
            return self.fitted[name].model
        if name == "network":
            return self._perceptron(self.train, self.network)
        inputs, targets = self.inputs.take(self.train), self.targets[self.train]
        return fit_margins(name, inputs, targets, self.head, seed=self.seed)

    def margins(self, name: str, model: Single) -> Float32[np.ndarray, "rows outputs"]:
        """Return a candidate's margins for all rows, out of fold for training rows."""
        if name in self.fitted:
            return self.fitted[name].margins

        def again(rows: Int64[np.ndarray, " some"]) -> Single:
            if isinstance(model, MarginModel):
                return refit(model, self.inputs.take(rows), self.targets[rows])
            # The epochs after its best one were patience.
            return self._perceptron(rows, replace(self.network, epochs=model.best_epoch))

        return out_of_fold(
            model, again, self.inputs, self.targets, self.head, train=self.train, seed=self.seed
        )

    def _perceptron(self, rows: Int64[np.ndarray, " some"], config: BaselineConfig) -> NetworkModel:
        return fit_network(
            self.inputs,
            self.targets,
            self.head,
            train=rows,
            validation=self.validation,
            seed=self.seed,
            config=config,
        )


def _candidate(
    model: Model,
    head: TaskHead,
    margins: Float32[np.ndarray, "rows outputs"],
    targets: Shaped[np.ndarray, " rows"],
) -> Candidate:
    """Return a candidate with its metrics, from its margins for the validation rows."""
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
    """Return the models that are level with the one of smallest mean loss.

    Args:
        losses: Losses of the same rows, by model.
        also: A model that counts as level in any case: the best by another metric.
    """
    least = min(losses, key=lambda name: float(losses[name].mean()))
    names = []
    for name, own in losses.items():
        worse = own - losses[least]
        error = float(worse.std(ddof=1)) / len(worse) ** 0.5 if len(worse) > 1 else 0.0
        if name == also or float(worse.mean()) <= LEVEL * error:
            names.append(name)
    return tuple(names)


def best_weights(
    margins: Mapping[str, Float32[np.ndarray, "rows outputs"]],
    targets: Shaped[np.ndarray, " rows"],
    head: TaskHead,
) -> dict[str, float]:
    """Return the positive weights, in tenths, whose average has the smallest mean loss.

    Among weights with a loss within 0.1 % of the smallest, fewer models are preferred, then simpler
    ones.

    Args:
        margins: Margins for rows that the models were not fitted to, by model, simplest first.
        targets: The rows' labels, as the head takes them.
        head: The task.

    Returns:
        Weights by name, without those that are 0.
    """
    losses: list[tuple[float, dict[str, float]]] = []
    for weights in _simplex(len(margins)):
        some = {name: weight for name, weight in zip(margins, weights, strict=True) if weight > 0}
        mean = _mean({name: margins[name] for name in some}, some)
        losses.append((float(_losses(head, mean, targets).mean()), some))
    enough = min(loss for loss, _ in losses) * _AS_GOOD
    return next(weights for loss, weights in losses if loss <= enough)


def _simplex(parts: int) -> Sequence[tuple[float, ...]]:
    """Return all weights of ``parts`` models in tenths, those of fewer models first."""
    steps = itertools.product(range(_STEPS, -1, -1), repeat=parts)
    whole = [some for some in steps if sum(some) == _STEPS]
    whole.sort(key=lambda some: sum(weight > 0 for weight in some))
    return [tuple(weight / _STEPS for weight in some) for some in whole]


def _mean(
    margins: Mapping[str, Float32[np.ndarray, "rows outputs"]], weights: Mapping[str, float]
) -> Float32[np.ndarray, "rows outputs"]:
    total = sum(weights[name] * margin.astype(np.float64) for name, margin in margins.items())
    return np.asarray(total, dtype=np.float32)


def _losses(
    head: TaskHead,
    margins: Float32[np.ndarray, "rows outputs"],
    targets: Shaped[np.ndarray, " rows"],
) -> Shaped[np.ndarray, " rows"]:
    return head.row_losses(torch.from_numpy(margins), torch.from_numpy(targets)).numpy()


# Serialisation: estimators by skops, the perceptron by safetensors. Neither runs code when it is
# read; skops loads only types of a list.
