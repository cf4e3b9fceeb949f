"""The local baseline: boosted trees, linear models and networks, and the choice among them.

What answers jointly is a mean of two models' margins: (1 - lambda) of the base, lambda of the joint
model. Both choices are made on rows that none of the models was fitted to, by the task's loss,
paired by rows: what makes a row hard for both models cancels.

It is a rule of selection, not a guarantee: on rows of a kind that was not there, or by bad luck,
the joint model may still be the worse one.

A margin is what :class:`securevfl.models.tasks.TaskHead` reads of a model: a number in units of the
standardised label (regression), log odds of the second class (binary), or the logarithm of each
class's probability. Probabilities are kept within [1e-4, 1 - 1e-4], so that no row starts so far
out that nothing averaged with it could bring it back.

Three models see all that the primary has (:class:`OwnInputs`): a linear model, boosted trees and a
perceptron. Those that validate alike are averaged, by the losses of rows that none of them was
fitted to. What a federation is worth is what it adds to that.
"""

import itertools
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final, Literal, Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float, Float32, Float64, Int64, Shaped
from torch import Tensor

from securevfl.core.conventions import derive_seed
from securevfl.core.errors import ConfigError, DataError
from securevfl.models.baselines.fit import fit_table
from securevfl.models.baselines.settings import BaselineConfig
from securevfl.models.layers import MLP
from securevfl.models.tasks import Metrics, TaskHead

# Whether a joint model is used, or the best model of the primary alone answers.

Used = Literal["joint", "alone"]
"""Which model answers."""

_RULE_STEPS: Final = 20
"""Of lambda, from 0 to 1."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """What was decided, and by how much."""

    used: Used
    scale: float
    """lambda: the joint model's weight beside the base's, in [0, 1]."""
    gain: float
    """Mean loss of the primary alone less that of the joint model, a row."""
    error: float
    """One standard error of ``gain``; 0 for a single row."""
    rows: int
    """So many decided."""

    def as_json(self) -> dict[str, Any]:
        """Return it by name, the scale as ``lambda``."""
        fields = asdict(self)
        return {"lambda" if name == "scale" else name: value for name, value in fields.items()}


def decide(
    head: TaskHead,
    *,
    base: Float[Tensor, "rows outputs"],
    joint: Float[Tensor, "rows outputs"],
    alone: Float[Tensor, "rows outputs"],
    targets: Shaped[Tensor, " rows"],
    scale: float | None = None,
) -> Decision:
    """Choose lambda, and who answers.

    lambda is what :func:`choose_scale` says. The joint model is used if lambda is not 0 and the
    mean of loss(alone) - loss(joint) over the rows is more than one standard error of that mean.

    Args:
        head: The task.
        base: Margins of the base, of rows that it was not fitted to.
        joint: Margins of the joint model.
        alone: Margins of the best model of the primary alone.
        targets: The rows' labels, as the head takes them.
        scale: lambda, where more rows than these have chosen it; None: these do.

    References:
        A rule of this project's own; notebook/local-baseline.md has what was measured of it.
    """
    if scale is None:
        scale = choose_scale(head, base=base, joint=joint, targets=targets)
    losses = head.row_losses(scaled(base, joint, scale), targets)
    gain, error = _gain(head.row_losses(alone, targets) - losses)
    return Decision(
        used="joint" if scale > 0 and gain > error else "alone",
        scale=scale,
        gain=gain,
        error=error,
        rows=len(targets),
    )


def choose_scale(
    head: TaskHead,
    *,
    base: Float[Tensor, "rows outputs"],
    joint: Float[Tensor, "rows outputs"],
    targets: Shaped[Tensor, " rows"],
) -> float:
    """Return lambda, the one of 0, 0.05, ..., 1 with the least mean loss, the least of equals.

    Args:
        head: The task.
        base: As of :func:`decide`.
        joint: As of :func:`decide`.
        targets: As of :func:`decide`.
    """
    means = {
        step: float(head.row_losses(scaled(base, joint, step / _RULE_STEPS), targets).mean())
        for step in range(_RULE_STEPS + 1)
    }
    # A joint model that is not finite has no mean, and counts for nothing.
    finite = {step: mean for step, mean in means.items() if mean < float("inf")}
    return min(finite, key=lambda step: finite[step], default=0) / _RULE_STEPS


def who_answers(
    head: TaskHead,
    *,
    joint: Float[Tensor, "rows outputs"],
    alone: Float[Tensor, "rows outputs"],
    targets: Shaped[Tensor, " rows"],
) -> Used:
    """Return who answers where lambda was chosen before; by the rule of :func:`decide`."""
    gain, error = _gain(head.row_losses(alone, targets) - head.row_losses(joint, targets))
    return "joint" if gain > error else "alone"


def _gain(differences: Float[Tensor, " rows"]) -> tuple[float, float]:
    """Return the mean of rows' differences, and one standard error of it; 0 for a single row."""
    rows = len(differences)
    error = float(differences.std()) / rows**0.5 if rows > 1 else 0.0
    return float(differences.mean()), error


def scaled(
    base: Float[Tensor, "rows outputs"], joint: Float[Tensor, "rows outputs"], scale: float
) -> Float[Tensor, "rows outputs"]:
    """Return (1 - lambda) base + lambda joint; what counts for nothing may be anything."""
    if scale in (0, 1):
        return joint if scale else torch.clone(base)
    return base + scale * (joint - base)


# Estimators of scikit-learn as margins: numbers to which a network's outputs can be added.

Named = Literal["boosting", "linear"]
"""Estimators that have a name; any other is an object of scikit-learn."""

FOLDS: Final = 5
"""Parts of the training rows, each of which gets margins of models that never saw it."""

LEAST_PROBABILITY: Final = 1e-4
"""What a margin stands for at least, and less than 1 by at most."""

_MOST_WORDS: Final = 254
"""Words that scikit-learn's trees take as one column, less the place for none of them."""

_ROWS_TO_STOP_BY: Final = 1000
"""From so many training rows on, a tenth of them says when to stop growing trees."""

MOST_ROUNDS: Final = 5000
"""Rounds of boosting that nobody is expected to reach: early stopping ends them."""

ROUNDS_WITHOUT_GAIN: Final = 20
"""Rounds without a better validation loss after which boosting stops."""

LEAVES: Final = (31, 63)
"""Leaves of a tree, of which the rows that stop boosting choose."""


@dataclass(frozen=True, kw_only=True, eq=False)
class OwnInputs:
    """All that the primary has of its rows, unscaled: one column an input."""

    values: Float64[np.ndarray, "rows inputs"]
    words: tuple[tuple[int, ...], ...] = ()
    """Columns that are the 0/1 features of one column of words, a tuple for each such column."""

    def take(self, rows: Int64[np.ndarray, " taken"]) -> "OwnInputs":
        """Return some of the rows."""
        return OwnInputs(values=self.values[rows], words=self.words)


@runtime_checkable
class Fitted(Protocol):
    """A model that is read as margins."""

    def margins(self, inputs: OwnInputs) -> Float32[np.ndarray, "rows outputs"]:
        """Return the margins of rows, as the head reads them."""
        ...


@dataclass(frozen=True, kw_only=True, eq=False)
class MarginModel:
    """A fitted estimator, read as margins."""

    estimator: Any
    """Of scikit-learn, fitted."""
    head: TaskHead
    words_as_one: bool
    """Whether it was given each column of words as one column of categories."""

    def margins(self, inputs: OwnInputs) -> Float32[np.ndarray, "rows outputs"]:
        """Return the margins of rows, as the head reads them."""
        if not len(inputs.values):
            return np.zeros((0, self.head.outputs), dtype=np.float32)
        table = _categories(inputs)[0] if self.words_as_one else inputs.values
        if self.head.task == "regression":
            predicted = np.asarray(self.estimator.predict(table), dtype=np.float32)
            return predicted.reshape(len(table), 1)
        share = np.zeros((len(table), max(2, self.head.outputs)))
        share[:, self.estimator.classes_.astype(np.int64)] = self.estimator.predict_proba(table)
        share = share.clip(LEAST_PROBABILITY, 1 - LEAST_PROBABILITY)
        logarithms = np.log(share).astype(np.float32)
        if self.head.task == "binary":
            return logarithms[:, 1:] - logarithms[:, :1]
        return logarithms


def fit_margins(
    estimator: Named | Any,
    inputs: OwnInputs,
    targets: Shaped[np.ndarray, " rows"],
    head: TaskHead,
    *,
    seed: int,
    where: str = "base.estimator",
) -> MarginModel:
    """Fit an estimator to rows; without a column, or a label that differs, it is a constant.

    Args:
        estimator: Its name, or one of scikit-learn, which is cloned; a classifier needs
            ``predict_proba``.
        inputs: The rows.
        targets: As the head takes them.
        head: The task.
        seed: Run seed.
        where: What the estimator is called in messages.

    Raises:
        ConfigError: If it is no estimator for the task.
        DataError: If it can't be fitted to these rows.
    """
    # scikit-learn takes a second to load, and secondaries never use it.
    from sklearn.base import clone

    labels = targets if head.task == "regression" else targets.astype(np.int64)
    model = _constant(inputs, labels, head)
    if model is None:
        model = _unfitted(estimator, inputs, labels, head, seed=seed, where=where)
    words_as_one = estimator == "boosting" and bool(inputs.words)
    table = _categories(inputs)[0] if words_as_one else inputs.values
    _fit_estimator(model, table, labels, where=where)
    if estimator == "boosting" and getattr(model, "do_early_stopping_", False):
        for leaves in LEAVES[1:]:
            other = clone(model).set_params(max_leaf_nodes=leaves)
            _fit_estimator(other, table, labels, where=where)
            # The same rows stop all of them: the seed draws them.
            if max(other.validation_score_) > max(model.validation_score_):
                model = other
    return MarginModel(estimator=model, head=head, words_as_one=words_as_one)


def refit(
    model: MarginModel, inputs: OwnInputs, targets: Shaped[np.ndarray, " rows"]
) -> MarginModel:
    """Fit a model of the same settings to other rows: what was chosen once is not chosen again.

    Args:
        model: Fitted to rows of the same columns.
        inputs: The rows.
        targets: As the head takes them.

    Raises:
        DataError: If it can't be fitted to these rows.
    """
    from sklearn.base import clone

    labels = targets if model.head.task == "regression" else targets.astype(np.int64)
    again = _constant(inputs, labels, model.head) or clone(model.estimator)
    if getattr(again, "early_stopping", None) is True and _has_single(labels, model.head):
        # The rows that stop boosting are drawn by class, which takes two rows of each.
        again.set_params(early_stopping=False, max_iter=model.estimator.n_iter_)
    table = _categories(inputs)[0] if model.words_as_one else inputs.values
    _fit_estimator(again, table, labels, where="base.estimator")
    return replace(model, estimator=again)


def _constant(inputs: OwnInputs, labels: Shaped[np.ndarray, " rows"], head: TaskHead) -> Any | None:
    """Return a constant where rows leave nothing to fit: no column, one class, or one number."""
    from sklearn.dummy import DummyClassifier, DummyRegressor

    blind = not inputs.values.shape[1]
    if head.task == "regression":
        return DummyRegressor() if blind or len(labels) < 2 else None
    one_class = len(np.unique(labels)) < 2
    return DummyClassifier(strategy="prior") if blind or one_class else None


def _has_single(labels: Shaped[np.ndarray, " rows"], head: TaskHead) -> bool:
    """Whether a class has one row alone."""
    return head.task != "regression" and int(np.unique(labels, return_counts=True)[1].min()) < 2


def _fit_estimator(
    model: Any, table: np.ndarray, labels: Shaped[np.ndarray, " rows"], *, where: str
) -> None:
    from sklearn.exceptions import ConvergenceWarning

    try:
        with warnings.catch_warnings():
            # A linear model that is nearly there is as good as one that is.
            warnings.simplefilter("ignore", ConvergenceWarning)
            model.fit(table, labels)
    except ValueError as error:
        line = str(error).splitlines()[0]
        raise DataError(f"{where}: {model!r} can't be fitted: {line}") from error


@dataclass(frozen=True, kw_only=True, eq=False)
class CrossFitted:
    """An estimator fitted to all training rows, and margins of which none saw its own label."""

    model: MarginModel
    margins: Float32[np.ndarray, "rows outputs"]
    """Of all rows: of training rows from models that were fitted to the other parts of them, of
    every other row from :attr:`model`."""


def cross_fit(
    estimator: Named | Any,
    inputs: OwnInputs,
    targets: Shaped[np.ndarray, " rows"],
    head: TaskHead,
    *,
    train: Int64[np.ndarray, " train"],
    seed: int,
    where: str = "base.estimator",
) -> CrossFitted:
    """Fit an estimator to the training rows, with margins out of fold.

    Args:
        estimator: As of :func:`fit_margins`.
        inputs: All rows.
        targets: Their labels as the head takes them; of training rows alone they are read.
        head: The task.
        train: The training rows.
        seed: Run seed, of folds and estimator.
        where: What the estimator is called in messages.

    Raises:
        ConfigError: If it is no estimator for the task.
        DataError: If it can't be fitted to these rows.
    """
    model = fit_margins(estimator, inputs.take(train), targets[train], head, seed=seed, where=where)

    def again(rows: Int64[np.ndarray, " some"]) -> MarginModel:
        return refit(model, inputs.take(rows), targets[rows])

    margins = out_of_fold(model, again, inputs, targets, head, train=train, seed=seed)
    return CrossFitted(model=model, margins=margins)


def out_of_fold(
    model: Fitted,
    fitted: Callable[[Int64[np.ndarray, " some"]], Fitted],
    inputs: OwnInputs,
    targets: Shaped[np.ndarray, " rows"],
    head: TaskHead,
    *,
    train: Int64[np.ndarray, " train"],
    seed: int,
) -> Float32[np.ndarray, "rows outputs"]:
    """Return margins of all rows, of which none comes of a model that saw the row's label to learn.

    Args:
        model: Fitted to all training rows.
        fitted: Returns such a model of some of them.
        inputs: All rows.
        targets: Their labels; see :func:`cross_fit`.
        head: The task.
        train: The training rows.
        seed: Run seed, of the folds.
    """
    margins = model.margins(inputs)
    for rest, held_out in _folds(targets[train], head, seed=seed):
        rows = train[held_out]
        margins[rows] = fitted(train[rest]).margins(inputs.take(rows))
    return margins


def _folds(
    labels: Shaped[np.ndarray, " train"], head: TaskHead, *, seed: int
) -> Iterator[tuple[Int64[np.ndarray, " rest"], Int64[np.ndarray, " held_out"]]]:
    from sklearn.model_selection import KFold, StratifiedKFold

    number = min(FOLDS, len(labels))
    if number < 2:
        return iter(())
    state = derive_seed(seed, "folds") % 2**32
    if head.task != "regression" and np.bincount(labels.astype(np.int64)).max() >= number:
        with warnings.catch_warnings():
            # A class of fewer rows than parts is in some of them, which is all that it can be.
            warnings.simplefilter("ignore", UserWarning)
            by_class = StratifiedKFold(number, shuffle=True, random_state=state)
            return iter(list(by_class.split(labels, labels)))
    parts = KFold(number, shuffle=True, random_state=state)
    return iter(list(parts.split(labels)))


def _unfitted(
    estimator: Named | Any,
    inputs: OwnInputs,
    labels: Shaped[np.ndarray, " rows"],
    head: TaskHead,
    *,
    seed: int,
    where: str,
) -> Any:
    from sklearn.base import clone
    from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor
    from sklearn.impute import SimpleImputer
    from sklearn.linear_model import LogisticRegression, RidgeCV
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    numbers = head.task == "regression"
    if estimator == "boosting":
        kind = HistGradientBoostingRegressor if numbers else HistGradientBoostingClassifier
        rows = len(labels)
        stops = rows >= _ROWS_TO_STOP_BY and not _has_single(labels, head)
        return kind(
            # Few rows are too few to spare a tenth of them.
            max_iter=MOST_ROUNDS if stops else 100,
            learning_rate=0.1 if stops else 0.06,
            max_leaf_nodes=LEAVES[0],
            early_stopping=stops,
            n_iter_no_change=ROUNDS_WITHOUT_GAIN,
            # scikit-learn's own 20 can't split twenty labelled rows.
            min_samples_leaf=min(20, max(3, rows // 50)),
            categorical_features=_categories(inputs)[1],
            random_state=derive_seed(seed, "boosting") % 2**32,
        )
    if estimator == "linear":
        last = RidgeCV(np.logspace(-3, 3, 13)) if numbers else LogisticRegression(max_iter=300)
        # Rows of training have every key, and a row that cannot be linked lacks one.
        filled = SimpleImputer(keep_empty_features=True)
        return make_pipeline(filled, StandardScaler(), last)
    if isinstance(estimator, str):
        raise ConfigError(f'{where}: must be "boosting" or "linear", got {estimator!r}')
    if not hasattr(estimator, "fit") or not hasattr(
        estimator, "predict" if numbers else "predict_proba"
    ):
        needs = "fit and predict" if numbers else "fit and predict_proba"
        raise ConfigError(
            f"{where}: {type(estimator).__name__} needs {needs} for a {head.task} task"
        )
    own = clone(estimator)
    # What draws at random draws the same when a run is fitted again.
    drawn = [name for name in own.get_params() if name.endswith("random_state")]
    state = derive_seed(seed, "estimator") % 2**32
    return own.set_params(
        **{name: state for name in drawn if own.get_params()[name] is None},
    )


def _categories(
    inputs: OwnInputs,
) -> tuple[Float64[np.ndarray, "rows columns"], Sequence[int] | None]:
    """Return inputs with each column of words as one, and which columns these are."""
    groups = [group for group in inputs.words if len(group) <= _MOST_WORDS]
    if not groups:
        return inputs.values, None
    of_words = {column for group in groups for column in group}
    numbers = [i for i in range(inputs.values.shape[1]) if i not in of_words]
    columns = [inputs.values[:, numbers]]
    for group in groups:
        marks = inputs.values[:, list(group)]
        # A row without any of the words is of one more category.
        columns.append(np.where(marks.any(axis=1), marks.argmax(axis=1), len(group))[:, None])
    table = np.concatenate(columns, axis=1)
    return table, list(range(len(numbers), table.shape[1]))


# A perceptron on all that the primary has, read as margins.


@dataclass(frozen=True, kw_only=True, eq=False)
class NetworkModel:
    """A trained perceptron, with how its inputs are standardised."""

    network: MLP
    """In float64: no digit that anybody sees depends on which rows are asked for together."""
    hidden: tuple[int, ...]
    """Widths of its hidden layers."""
    mean: Float64[np.ndarray, " inputs"]
    """Of the training rows."""
    deviation: Float64[np.ndarray, " inputs"]
    """Of the training rows, 1 where an input is constant."""
    head: TaskHead
    epochs: int
    """Epochs run."""

    @torch.no_grad()
    def margins(self, inputs: OwnInputs) -> Float32[np.ndarray, "rows outputs"]:
        """Return the outputs for rows, as the head reads them."""
        standard = (inputs.values - self.mean) / self.deviation
        # Rows of training have every key; one that cannot be linked gets the mean.
        table = torch.from_numpy(np.where(np.isnan(standard), 0.0, standard))
        outputs: Float[Tensor, "rows outputs"] = self.network(table)
        return outputs.float().numpy()


def fit_network(
    inputs: OwnInputs,
    targets: Shaped[np.ndarray, " rows"],
    head: TaskHead,
    *,
    train: Int64[np.ndarray, " train"],
    validation: Int64[np.ndarray, " validation"],
    seed: int,
    config: BaselineConfig,
) -> NetworkModel:
    """Train a perceptron; the validation rows choose its epoch.

    Args:
        inputs: All rows.
        targets: Their labels as the head takes them.
        head: The task.
        train: Rows to learn from, and to standardise by.
        validation: Rows that choose the epoch.
        seed: Run seed of initialisation, shuffling and dropout.
        config: The perceptron and its training.

    Raises:
        DataError: If there are no training or validation rows, or the metric is not defined for
            one of them.
    """
    own = inputs.values[train]
    mean = own.mean(axis=0) if len(own) else np.zeros(own.shape[1])
    deviation = own.std(axis=0) if len(own) else np.ones(own.shape[1])
    # What differs by rounding alone does not differ.
    deviation = np.where(deviation > 1e-9 * np.abs(mean), deviation, 1.0)
    used = np.concatenate([train, validation])
    table = torch.from_numpy(((inputs.values[used] - mean) / deviation).astype(np.float32))
    places = torch.arange(len(used))
    result = fit_table(
        table,
        torch.from_numpy(targets[used]),
        head=head,
        train=places[: len(train)],
        validation=places[len(train) :],
        test=places[len(train) :],  # nobody reads these figures: who asks for them has test rows
        config=config,
        seed=seed,
    )
    return NetworkModel(
        network=result.model.double().eval(),
        hidden=config.hidden,
        mean=mean,
        deviation=deviation,
        head=head,
        epochs=result.epochs,
    )


# The local baseline: the best that the primary can do without partners.

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
