"""Models on one table, estimators and a perceptron, and their margins.

A network's outputs can be added to a margin.

A margin is a model's output as :class:`securevfl.models.tasks.TaskHead` defines it: a standardised
label (regression), the log odds of the second class (binary), or the logarithm of each class's
probability. Probabilities are clipped to [1e-4, 1 - 1e-4], so that an average with another model
can still change any row.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, Literal, Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float, Float32, Float64, Int, Int64, Shaped
from torch import Tensor

from securevfl.core import checks
from securevfl.core.conventions import derive_seed
from securevfl.core.errors import ConfigError, DataError
from securevfl.models.layers import MLP, initialise
from securevfl.models.optimisers import build_optimizer
from securevfl.models.tasks import TaskHead

Named = Literal["boosting", "linear"]
"""Estimators by name; others are scikit-learn objects."""

FOLDS: Final = 5
"""Folds of the training rows; margins of each fold come from models fitted to the others."""

FOLDS_OF_MANY: Final = 3
"""Folds from :data:`MANY_ROWS` training rows on, where two thirds of them fit nearly as well."""

MANY_ROWS: Final = 10_000

LEAST_PROBABILITY: Final = 1e-4
"""Smallest probability of a margin, and smallest distance of one from 1."""

_MOST_WORDS: Final = 254
"""Most words of one categorical column of scikit-learn's trees; one category is for no word."""

_ROWS_TO_STOP_BY: Final = 1000
"""Training rows from which on a tenth of them is held out for early stopping."""

MOST_ROUNDS: Final = 5000
"""Most rounds of boosting; early stopping is expected to end them sooner."""

ROUNDS_WITHOUT_GAIN: Final = 20
"""Rounds without a better validation loss after which boosting stops."""

LEAVES: Final = (31, 63)
"""Numbers of leaves of a tree; the rows held out for early stopping choose one."""


@dataclass(frozen=True, kw_only=True, eq=False)
class OwnInputs:
    """All of the primary's inputs, unscaled, one column each."""

    values: Float64[np.ndarray, "rows inputs"]
    words: tuple[tuple[int, ...], ...] = ()
    """Groups of columns that are the 0/1 features of one column of words."""

    def take(self, rows: Int64[np.ndarray, " taken"]) -> "OwnInputs":
        """Return some of the rows."""
        return OwnInputs(values=self.values[rows], words=self.words)


@runtime_checkable
class Fitted(Protocol):
    """A fitted model with margins."""

    def margins(self, inputs: OwnInputs) -> Float32[np.ndarray, "rows outputs"]:
        """Return the margins of rows, as the head reads them."""
        ...


@dataclass(frozen=True, kw_only=True, eq=False)
class MarginModel:
    """A fitted estimator of scikit-learn with margins."""

    estimator: Any
    """The fitted estimator."""
    head: TaskHead
    words_as_one: bool
    """True if each column of words is one column of categories in the inputs."""

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
    """Fit an estimator to rows; without columns or with equal labels, fit a constant.

    Args:
        estimator: A name, or an object of scikit-learn, which is cloned; a classifier needs
            ``predict_proba``.
        inputs: The rows.
        targets: Their labels, as the head takes them.
        head: The task.
        seed: Run seed.
        where: Name of the setting in messages.

    Raises:
        ConfigError: If the estimator does not fit the task.
        DataError: If it can't be fitted to these rows.
    """
    # scikit-learn takes a second to load, and secondaries never use it.
    from sklearn.base import clone

    labels = targets if head.task == "regression" else targets.astype(np.int64)
    model = _constant(inputs, labels, head)
    if model is None:
        model = _build_estimator(estimator, inputs, labels, head, seed=seed, where=where)
    words_as_one = estimator == "boosting" and bool(inputs.words)
    table = _categories(inputs)[0] if words_as_one else inputs.values
    _fit_estimator(model, table, labels, where=where)
    if estimator == "boosting" and getattr(model, "do_early_stopping_", False):
        for leaves in LEAVES[1:]:
            other = clone(model).set_params(max_leaf_nodes=leaves)
            _fit_estimator(other, table, labels, where=where)
            # The seed draws the same rows for early stopping in all of them.
            if max(other.validation_score_) > max(model.validation_score_):
                model = other
    return MarginModel(estimator=model, head=head, words_as_one=words_as_one)


def refit(
    model: MarginModel, inputs: OwnInputs, targets: Shaped[np.ndarray, " rows"]
) -> MarginModel:
    """Fit a model of the same settings, including those chosen by data, to other rows.

    Boosting has the model's number of rounds, which early stopping chose.

    Args:
        model: A model fitted to rows with the same columns.
        inputs: The rows.
        targets: As the head takes them.

    Raises:
        DataError: If it can't be fitted to these rows.
    """
    from sklearn.base import clone

    labels = targets if model.head.task == "regression" else targets.astype(np.int64)
    again = _constant(inputs, labels, model.head) or clone(model.estimator)
    if getattr(again, "early_stopping", None) is True:
        again.set_params(early_stopping=False, max_iter=model.estimator.n_iter_)
    table = _categories(inputs)[0] if model.words_as_one else inputs.values
    _fit_estimator(again, table, labels, where="base.estimator")
    return replace(model, estimator=again)


def _constant(inputs: OwnInputs, labels: Shaped[np.ndarray, " rows"], head: TaskHead) -> Any | None:
    """Return a constant estimator if there are no columns, one class, or one row; else None."""
    from sklearn.dummy import DummyClassifier, DummyRegressor

    blind = not inputs.values.shape[1]
    if head.task == "regression":
        return DummyRegressor() if blind or len(labels) < 2 else None
    one_class = len(np.unique(labels)) < 2
    return DummyClassifier(strategy="prior") if blind or one_class else None


def _has_single(labels: Shaped[np.ndarray, " rows"], head: TaskHead) -> bool:
    """Return whether some class has a single row."""
    return head.task != "regression" and int(np.unique(labels, return_counts=True)[1].min()) < 2


def _fit_estimator(
    model: Any, table: np.ndarray, labels: Shaped[np.ndarray, " rows"], *, where: str
) -> None:
    from sklearn.exceptions import ConvergenceWarning

    try:
        with warnings.catch_warnings():
            # A linear model that has nearly converged is good enough.
            warnings.simplefilter("ignore", ConvergenceWarning)
            model.fit(table, labels)
    except ValueError as error:
        line = str(error).splitlines()[0]
        raise DataError(f"{where}: {model!r} can't be fitted: {line}") from error


@dataclass(frozen=True, kw_only=True, eq=False)
class CrossFitted:
    """An estimator fitted to all training rows, and margins out of fold."""

    model: MarginModel
    margins: Float32[np.ndarray, "rows outputs"]
    """Margins for all rows: for a training row from a model fitted to the other folds, for any
    other row from :attr:`model`."""


def cross_fit(
    estimator: Named | Any,
    inputs: OwnInputs,
    targets: Shaped[np.ndarray, " rows"],
    head: TaskHead,
    *,
    train: Int64[np.ndarray, " train"],
    seed: int,
    where: str = "base.estimator",
    groups: Int64[np.ndarray, " rows"] | None = None,
) -> CrossFitted:
    """Fit an estimator to the training rows, with margins out of fold.

    Args:
        estimator: As in :func:`fit_margins`.
        inputs: All rows.
        targets: Their labels as the head takes them; only those of training rows are read.
        head: The task.
        train: The training rows.
        seed: Run seed, of folds and estimator.
        where: Name of the setting in messages.
        groups: A number for each row; rows of equal ones are in one fold. None: no two are.

    Raises:
        ConfigError: If the estimator does not fit the task.
        DataError: If it can't be fitted to these rows.
    """
    model = fit_margins(estimator, inputs.take(train), targets[train], head, seed=seed, where=where)

    def again(rows: Int64[np.ndarray, " some"]) -> MarginModel:
        return refit(model, inputs.take(rows), targets[rows])

    margins = out_of_fold(
        model, again, inputs, targets, head, train=train, seed=seed, groups=groups
    )
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
    groups: Int64[np.ndarray, " rows"] | None = None,
) -> Float32[np.ndarray, "rows outputs"]:
    """Return margins for all rows, each from a model that was not fitted to the row's label.

    Args:
        model: The model fitted to all training rows.
        fitted: Returns the model fitted to some of them.
        inputs: All rows.
        targets: Their labels; see :func:`cross_fit`.
        head: The task.
        train: The training rows.
        seed: Run seed, of the folds.
        groups: As in :func:`cross_fit`.
    """
    margins = model.margins(inputs)
    for rest, held_out in _folds(
        targets[train], head, seed=seed, groups=None if groups is None else groups[train]
    ):
        rows = train[held_out]
        margins[rows] = fitted(train[rest]).margins(inputs.take(rows))
    return margins


def _folds(
    labels: Shaped[np.ndarray, " train"],
    head: TaskHead,
    *,
    seed: int,
    groups: Int64[np.ndarray, " train"] | None,
) -> Iterator[tuple[Int64[np.ndarray, " rest"], Int64[np.ndarray, " held_out"]]]:
    from sklearn.model_selection import GroupKFold, KFold, StratifiedGroupKFold, StratifiedKFold

    number = min(FOLDS if len(labels) < MANY_ROWS else FOLDS_OF_MANY, len(labels))
    if groups is not None:
        number = min(number, len(np.unique(groups)))
    if number < 2:
        return iter(())
    state = derive_seed(seed, "folds") % 2**32
    if groups is not None:
        kind = GroupKFold if head.task == "regression" else StratifiedGroupKFold
        apart = kind(number, shuffle=True, random_state=state)
        return iter(list(apart.split(labels, labels, groups)))
    if head.task != "regression" and np.bincount(labels.astype(np.int64)).max() >= number:
        with warnings.catch_warnings():
            # A class with fewer rows than parts can only be in some of the parts.
            warnings.simplefilter("ignore", UserWarning)
            by_class = StratifiedKFold(number, shuffle=True, random_state=state)
            return iter(list(by_class.split(labels, labels)))
    parts = KFold(number, shuffle=True, random_state=state)
    return iter(list(parts.split(labels)))


def _build_estimator(
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
        # Training rows have every key; a row that cannot be linked lacks one.
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
    # Random estimators draw the same numbers when a run is fitted again.
    drawn = [name for name in own.get_params() if name.endswith("random_state")]
    state = derive_seed(seed, "estimator") % 2**32
    return own.set_params(
        **{name: state for name in drawn if own.get_params()[name] is None},
    )


def _categories(
    inputs: OwnInputs,
) -> tuple[Float64[np.ndarray, "rows columns"], Sequence[int] | None]:
    """Return inputs with each group of words as one column, and the indices of these columns."""
    groups = [group for group in inputs.words if len(group) <= _MOST_WORDS]
    if not groups:
        return inputs.values, None
    of_words = {column for group in groups for column in group}
    numbers = [i for i in range(inputs.values.shape[1]) if i not in of_words]
    columns = [inputs.values[:, numbers]]
    for group in groups:
        marks = inputs.values[:, list(group)]
        # Rows without any of the words form another category.
        columns.append(np.where(marks.any(axis=1), marks.argmax(axis=1), len(group))[:, None])
    table = np.concatenate(columns, axis=1)
    return table, list(range(len(numbers), table.shape[1]))


@dataclass(frozen=True, kw_only=True, slots=True)
class BaselineConfig:
    """A perceptron on one table, and its training."""

    hidden: tuple[checks.Width, ...] = (128, 64)
    """Widths of the hidden layers."""

    dropout: checks.Fraction = 0.1
    """Share of hidden units dropped in training."""

    epochs: checks.Times = 200
    """Passes over the training rows, at most."""

    batch_size: checks.Times = 128
    """Rows an optimizer step."""

    learning_rate: checks.Positive = 3e-3
    """Step size of AdamW."""

    weight_decay: checks.NonNegative = 1e-4
    """Decoupled weight decay."""

    patience: checks.Times = 40
    """Epochs without a better validation metric before training stops."""

    def __post_init__(self) -> None:
        checks.require_limits(self)
        checks.within(0, checks.MOST_LAYERS, layers_of_hidden=len(self.hidden))


_STEPS_TO_WAIT: Final = 2000
"""Optimizer steps that a network of the local baseline waits for a better metric, at least."""


def patience_after(best_epoch: int, *, rows: int, config: BaselineConfig) -> int:
    """Return how many epochs the local baseline's network trains on after its best epoch.

    This is half the best epoch's number, since slow improvement comes late, but at least
    :data:`_STEPS_TO_WAIT` optimizer steps, and at most ``config.patience`` epochs.

    Args:
        best_epoch: Counted from 1.
        rows: Training rows.
        config: The training.
    """
    steps = max(1, -(-rows // config.batch_size))
    return min(config.patience, max(-(-_STEPS_TO_WAIT // steps), best_epoch // 2))


@torch.no_grad()
def perceptron_outputs(
    model: MLP, inputs: Float[Tensor, "rows inputs"]
) -> Float[Tensor, "rows outputs"]:
    """Return the outputs of a perceptron for rows, without dropout."""
    model.eval()
    outputs: Tensor = model(inputs)
    return outputs


def train_perceptron(
    inputs: Float[Tensor, "rows inputs"],
    targets: Shaped[Tensor, " rows"],
    head: TaskHead,
    *,
    train: Int[Tensor, " train_rows"],
    validation: Int[Tensor, " validation_rows"],
    config: BaselineConfig,
    seed: int,
    patience: Callable[[int], int] | None = None,
) -> tuple[MLP, int, int]:
    """Train with early stopping on the validation rows.

    Args:
        inputs: All rows.
        targets: Their labels as the head takes them.
        head: The task.
        train: Rows to learn from.
        validation: Rows that choose the epoch.
        config: The perceptron and its training.
        seed: Run seed of initialisation, shuffling and dropout.
        patience: Epochs to wait after a given best epoch; default: always ``config.patience``.

    Returns:
        The perceptron with the best epoch's weights, that epoch, and the epochs run.

    Raises:
        DataError: If there are no training or validation rows, or the metric is not defined for the
            validation rows.
    """
    for name, rows in (("training", train), ("validation", validation)):
        if len(rows) == 0:
            raise DataError(f"the baseline has no {name} rows")
    order = torch.Generator().manual_seed(derive_seed(seed, "shuffle", "baseline"))
    best, best_epoch, epoch = 0.0, 0, 0
    weights: dict[str, Tensor] = {}
    # Layers and dropout draw from torch's global generator: seeded inside, restored outside.
    with torch.random.fork_rng(devices=[]):
        torch.random.manual_seed(derive_seed(seed, "dropout", "baseline"))
        model = MLP(inputs.shape[1], config.hidden, head.outputs, dropout=config.dropout)
        initialise(model, seed=derive_seed(seed, "init", "baseline"), positions_seed=0)
        model.to(inputs.device)
        optimizer = build_optimizer(
            "adamw",
            model.parameters(),
            learning_rate=config.learning_rate,
            weight_decay=config.weight_decay,
        )
        wait = config.patience
        while epoch < config.epochs and epoch - best_epoch < wait:
            epoch += 1
            model.train()
            shuffled = train[torch.randperm(len(train), generator=order).to(train.device)]
            batches = (tensor[shuffled].split(config.batch_size) for tensor in (inputs, targets))
            for features, labels in zip(*batches, strict=True):
                # The gradients' memory is kept: allocating it takes a tenth of a step.
                optimizer.zero_grad(set_to_none=False)
                head.loss(model(features), labels).backward()
                optimizer.step()
            outputs, known = perceptron_outputs(model, inputs[validation]), targets[validation]
            metric = head.metric(outputs, known, threshold=head.choose_threshold(outputs, known))
            if best_epoch == 0 or head.is_better(metric, best):
                best, best_epoch = metric, epoch
                wait = config.patience if patience is None else patience(epoch)
                weights = {name: value.clone() for name, value in model.state_dict().items()}
    model.load_state_dict(weights)
    return model, best_epoch, epoch


@dataclass(frozen=True, kw_only=True, eq=False)
class NetworkModel:
    """A trained perceptron, and the standardisation of its inputs."""

    network: MLP
    """The perceptron, in float64 so that outputs hardly depend on the other rows of a batch."""
    hidden: tuple[int, ...]
    """Widths of its hidden layers."""
    mean: Float64[np.ndarray, " inputs"]
    """Means of the training rows."""
    deviation: Float64[np.ndarray, " inputs"]
    """Standard deviations of the training rows, 1 where an input is constant."""
    head: TaskHead
    best_epoch: int
    """The epoch whose weights it has."""
    epochs: int
    """Epochs run."""

    @torch.no_grad()
    def margins(self, inputs: OwnInputs) -> Float32[np.ndarray, "rows outputs"]:
        """Return the margins of rows."""
        standard = (inputs.values - self.mean) / self.deviation
        # Training rows have every key; a row that cannot be linked gets the mean.
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
    """Train a perceptron and keep the epoch that is best on the validation rows.

    Args:
        inputs: All rows.
        targets: Their labels as the head takes them.
        head: The task.
        train: Rows to train on, whose means and deviations standardise inputs.
        validation: Rows that choose the epoch.
        seed: Run seed of initialisation, shuffling and dropout.
        config: The perceptron and its training.

    Raises:
        DataError: If there are no training or validation rows, or the metric is not defined for
            them.
    """
    own = inputs.values[train]
    mean = own.mean(axis=0) if len(own) else np.zeros(own.shape[1])
    deviation = own.std(axis=0) if len(own) else np.ones(own.shape[1])
    # A deviation that is only rounding counts as zero.
    deviation = np.where(deviation > 1e-9 * np.abs(mean), deviation, 1.0)
    used = np.concatenate([train, validation])
    table = torch.from_numpy(((inputs.values[used] - mean) / deviation).astype(np.float32))
    places = torch.arange(len(used))
    model, best_epoch, epochs = train_perceptron(
        table,
        torch.from_numpy(targets[used]),
        head,
        train=places[: len(train)],
        validation=places[len(train) :],
        config=config,
        seed=seed,
        patience=partial(patience_after, rows=len(train), config=config),
    )
    # Raises if outputs are not finite.
    head.metrics(
        perceptron_outputs(model, table[len(train) :]), torch.from_numpy(targets[validation])
    )
    return NetworkModel(
        network=model.double().eval(),
        hidden=config.hidden,
        mean=mean,
        deviation=deviation,
        head=head,
        best_epoch=best_epoch,
        epochs=epochs,
    )
