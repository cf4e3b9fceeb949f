"""``FederatedClassifier`` and ``FederatedRegressor``."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Float64
from sklearn.base import ClassifierMixin, RegressorMixin
from sklearn.utils import check_array, column_or_1d
from sklearn.utils.multiclass import check_classification_targets

from securevfl.core.errors import ConfigError
from securevfl.core.task import Task
from securevfl.estimators.base import FederatedEstimator, Target


class FederatedClassifier(ClassifierMixin, FederatedEstimator):  # type: ignore[misc]
    """A classifier that several parties train together, simulated in this process.

    ``X`` are the primary's rows, key columns among them; the secondaries' tables come with the
    constructor, so that ``cross_val_score``, ``GridSearchCV`` and pipelines reach them, or with
    ``fit``. Every ``fit`` is a run of its own with ledgers of its own. **Under a promise, every
    method that predicts asks the secondaries, and is charged**: what training and predictions have
    spent adds up, and so do the folds of a search (docs/python.md). A simulation protects nobody's
    table: it shows what a federation under that promise would be worth.

    Args:
        model: A family's name, ``"fet"`` or ``"fedsim"``; a preset's, ``"fedsim-paper"``; or what
            ``securevfl.models.FeT(...)`` and :func:`securevfl.preset` return.
        key: Columns of ``X`` that parties link by: names, or places. Secondaries' frames and files
            have columns of the same names. A mapping says what each one holds, ``"number"`` or
            ``"text"``; otherwise the metric of ``linkage`` does.
        secondaries: The other parties' tables: a list, or a mapping by name, of frames, paths of
            files, and tables of :func:`securevfl.data.from_frame`. scikit-learn copies parameters
            with every clone, and a path is the smallest. ``()`` trains the primary alone: the
            best on validation rows of a linear model, boosted trees and a perceptron, which a
            federation is to be compared with. None leaves it to ``fit``.
        neighbours: K, links of a row at every secondary; None: the model's own.
        model_settings: Further fields of the ``[model]`` table, such as ``{"hidden": 32}``.
        exclude: Columns of ``X`` that are neither keys nor features.
        linkage: A metric of keys, such as ``"euclidean"`` or ``"exact"``, or
            :class:`securevfl.LinkageSettings`.
        bounds: Declared ranges, as :func:`securevfl.simulate` takes them.
        privacy: What is promised, ``securevfl.dp.Privacy(...)``; None promises nothing.
        base: What the joint model is averaged with, as :func:`securevfl.simulate` takes
            it; None: the preset's, or ``"boosting"``.
        prediction_epsilon: What all predictions of one fitted model may spend; None: as much as
            training.
        epochs: Passes over the training rows, at most. Like the next five, None is the value of
            ``training``, of the preset or the default of ``[training]``.
        batch_size: Rows of a round.
        learning_rate: Step size of every party's optimizer.
        patience: Epochs without a better metric before training stops.
        validation_fraction: Share of the rows of ``fit`` that choose the best epoch.
        metric: What chooses it; default: ``log_loss``, of regressions ``rmse``.
        test_fraction: Share of the rows of ``fit`` that the run holds out, for
            ``run_.metrics["test_metrics"]``. None: one row, the least that a run takes, since
            scikit-learn holds rows out itself. A metric that one row does not define, such as
            ``auc``, needs more.
        training: Further settings of ``[training]``, :class:`securevfl.TrainingSettings`.
        pretraining: For families that pretrain, :class:`securevfl.PretrainingSettings`.
        device: ``"cpu"`` or ``"cuda"``.
        random_state: Of splits, initialisation, shuffling and dropout, never of noise.

    Attributes:
        classes_: The labels, in sorted order.
        run_: The run that ``fit`` simulated, :class:`securevfl.RunResult`; None of the primary
            alone.
        alone_: Of the primary alone, which model it is: ``"linear"``, ``"boosting"`` or
            ``"network"``.
        n_iter_: Epochs that were run; of the primary alone, by its network.
        n_features_in_: Columns of ``X``.
        feature_names_in_: Their names, if all are texts.

    Examples:
        >>> search = GridSearchCV(  # doctest: +SKIP
        ...     sv.FederatedClassifier("fedsim", key=["id"], secondaries=[bureau], epochs=5),
        ...     {"neighbours": [5, 10]},
        ... ).fit(bank.drop(columns="y"), bank["y"])
    """

    def predict(self, X: Any) -> np.ndarray:
        """Return the most probable class of each row, as ``classes_`` spells it.

        Args:
            X: Rows with the columns of training; see :meth:`predictions` for what is raised.

        Returns:
            Shape (rows,).

        Raises:
            BudgetExceededError: If a party's ledger has no room for the rows.

        Reveals:
            See :meth:`predictions`.
        """
        found = self.predictions(X)
        assert found.classes is not None, "of a classifier"
        place = {value: number for number, value in enumerate(found.classes)}
        chosen: np.ndarray = self.classes_[[place[value] for value in found.values]]
        return chosen

    def predict_proba(self, X: Any) -> Float64[np.ndarray, "rows classes"]:
        """Return the probability of each class, in the order of ``classes_``.

        Args:
            X: Rows with the columns of training; see :meth:`predictions` for what is raised.

        Raises:
            BudgetExceededError: If a party's ledger has no room for the rows.

        Reveals:
            See :meth:`predictions`.
        """
        found = self.predictions(X)
        assert found.probabilities is not None, "of a classifier"
        return found.probabilities

    def _target(self, y: Any) -> Target:
        values = column_or_1d(
            check_array(y, ensure_2d=False, dtype=None, input_name="y"), warn=True
        )
        check_classification_targets(values)
        self.classes_, numbers = np.unique(values, return_inverse=True)
        if len(self.classes_) < 2:
            raise ValueError(
                f"y has one class, {self.classes_[0]!r}; a classifier needs two at least"
            )
        return Target(
            task="binary" if len(self.classes_) == 2 else "multiclass",
            labels=numbers.astype(np.int64),
            classes=tuple(range(len(self.classes_))),
        )

    def _take(self, task: Task, classes: Sequence[Any] | None) -> None:
        if classes is None:
            raise ConfigError(f"run: has learned a {task}; take FederatedRegressor")
        self.classes_ = np.array(classes)


class FederatedRegressor(RegressorMixin, FederatedEstimator):  # type: ignore[misc]
    """A regressor that several parties train together, simulated in this process.

    Parameters and attributes are those of :class:`FederatedClassifier`, but for ``classes_``. Every
    method that predicts is a request that is charged, as there.
    """

    def predict(self, X: Any) -> Float64[np.ndarray, " rows"]:
        """Return a number for each row, in the label's unit.

        Args:
            X: Rows with the columns of training; see :meth:`predictions` for what is raised.

        Raises:
            BudgetExceededError: If a party's ledger has no room for the rows.

        Reveals:
            See :meth:`predictions`.
        """
        return self.predictions(X).values

    def _target(self, y: Any) -> Target:
        values = check_array(y, ensure_2d=False, dtype="numeric", input_name="y")
        numbers = column_or_1d(values, warn=True).astype(np.float32)
        if numbers.min() == numbers.max():
            raise ValueError(f"y is constant ({numbers[0]}); there is nothing to learn")
        return Target(task="regression", labels=numbers, classes=None)

    def _take(self, task: Task, classes: Sequence[Any] | None) -> None:
        if classes is not None:
            raise ConfigError(f"run: has learned classes ({task}); take FederatedClassifier")
