"""Scikit-learn estimators over simulated parties: classifier and regressor."""

import hashlib
import textwrap
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, TypeVar, Unpack

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float64
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.utils import Tags, check_array, check_random_state, column_or_1d
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_consistent_length, check_is_fitted, validate_data

from securevfl.config.linkage import LinkageSettings
from securevfl.config.presets import PresetSettings
from securevfl.config.sections import BaseSettings, PredictionSettings, TrainingSettings
from securevfl.core.conventions import Task
from securevfl.core.errors import ConfigError, DataError
from securevfl.core.formatting import short_repr
from securevfl.core.progress import ProgressEvent, Warned
from securevfl.core.settings import read_settings
from securevfl.data.frames import as_pandas, from_frame
from securevfl.data.keys_and_labels import KeyKind
from securevfl.data.party_tables import new_rows
from securevfl.data.scaling import Bounds, ColumnSettings, LabelScaler
from securevfl.data.sources.read import read_frame
from securevfl.data.tables import Labels, PartyTable, split_rows
from securevfl.dp.privacy import Privacy
from securevfl.federation.base import label_scaler_of, own_inputs, targets_of
from securevfl.linkage.metrics.metric import KeySpec
from securevfl.linkage.stage.linkage_parts import METRICS
from securevfl.models.alone.choice import Alone, fit_alone
from securevfl.models.alone.margins import BaselineConfig
from securevfl.models.family import Family, PretrainingSettings
from securevfl.models.tasks import TaskHead
from securevfl.runtime.entry import simulate
from securevfl.runtime.prediction_session import NamedRows
from securevfl.runtime.predictions import Predictions, predictions_of
from securevfl.runtime.run_settings import given_fields, model_of
from securevfl.runtime.simulation import RunResult
from securevfl.runtime.trained_run import RunSource, TrainedRun, trained_run

_TRAINING: Final = (
    "epochs",
    "batch_size",
    "learning_rate",
    "patience",
    "validation_fraction",
    "metric",
)
"""Parameters of an estimator that are fields of ``[training]``, None by default."""

# Defined for any rows, where few rows are held out and each class may be rare.
_CHOOSES: Final[Mapping[Task, str]] = {
    "regression": "rmse",
    "binary": "log_loss",
    "multiclass": "log_loss",
}


def settings_of(params: Mapping[str, Any], *, task: Task, rows: int) -> PresetSettings:
    """Return a run's model and settings from an estimator's parameters.

    Args:
        params: The estimator's parameters, by name.
        task: Kind of label.
        rows: Number of training rows.

    Raises:
        ConfigError: If a setting is impossible.
    """
    fields = dict(params["model_settings"] or {})
    if params["neighbours"] is not None:
        fields["neighbours"] = params["neighbours"]
    base = model_of(params["model"], {name: plain_value(value) for name, value in fields.items()})
    if not isinstance(base, PresetSettings):
        base = PresetSettings(
            model=base,
            training=TrainingSettings(),
            pretraining=PretrainingSettings(),
            privacy=Privacy(mechanism="none"),
            base=BaseSettings().estimator,
        )
    kinds = {"training": TrainingSettings, "pretraining": PretrainingSettings, "privacy": Privacy}
    for name, kind in kinds.items():
        if not isinstance(params[name], kind | None):
            raise ConfigError(f"{name}: must be {kind.__name__}(...), got {params[name]!r:.60}")
    return replace(
        base,
        training=_training_of(params, params["training"] or base.training, task=task, rows=rows),
        pretraining=params["pretraining"] or base.pretraining,
        privacy=params["privacy"] or base.privacy,
    )


def linkage_of(linkage: Any) -> LinkageSettings:
    """Return linkage settings from a metric's name or from settings.

    Raises:
        ConfigError: If it is neither.
    """
    if isinstance(linkage, str):
        return LinkageSettings(metric=linkage, protection="none")
    if not isinstance(linkage, LinkageSettings):
        raise ConfigError(f"linkage: must be a metric or LinkageSettings(...), got {linkage!r:.60}")
    return linkage


def plain_value(value: Any) -> Any:
    """Return a NumPy number as a Python number; a search's grid may hold such."""
    return value.item() if isinstance(value, np.generic) else value


def _training_of(
    params: Mapping[str, Any], base: TrainingSettings, *, task: Task, rows: int
) -> TrainingSettings:
    given = {name: plain_value(params[name]) for name in _TRAINING if params[name] is not None}
    # scikit-learn holds rows out itself: of these, a run takes the one that it can't do without.
    tested = plain_value(params["test_fraction"] or 1 / rows)
    fields = {"metric": _CHOOSES[task], **given_fields(base), **given, "test_fraction": tested}
    training = read_settings(TrainingSettings, fields, where="training")
    asked = training.validation_fraction
    if asked is not None and asked * rows < 1:
        training = replace(training, validation_fraction=1 / rows)
    return training


PRIMARY: Final = "primary"
"""Name of the party whose rows ``X`` has."""


def frame_of(estimator: Any, X: Any, *, reset: bool) -> pd.DataFrame:
    """Return the rows of ``X``, checked as scikit-learn checks them.

    Args:
        estimator: Estimator with the required ``n_features_in_`` and ``feature_names_in_``.
        X: A frame of any library, or an array or nested lists of numbers, whose columns are then
            called ``x0``, ``x1`` and so on. Cells may be missing.
        reset: Whether the estimator takes its columns from these rows.

    Raises:
        ValueError: If they are no such rows, or have other columns.
    """
    if not hasattr(X, "columns"):
        values = validate_data(
            estimator, X, reset=reset, dtype="numeric", ensure_all_finite="allow-nan"
        )
        return pd.DataFrame(values, columns=[f"x{number}" for number in range(values.shape[1])])
    validate_data(estimator, X, reset=reset, skip_check_array=True)
    return plain_frame(X)


def plain_frame(X: Any) -> pd.DataFrame:
    """Return a frame of any library as pandas' own, without an index.

    Raises:
        DataError: If it is no frame.
        ValueError: If it is empty.
    """
    frame = as_pandas(X.reset_index(drop=True) if isinstance(X, pd.DataFrame) else X, where="X")
    for what, number in (("sample", len(frame)), ("feature", frame.shape[1])):
        if number == 0:
            raise ValueError(f"X has 0 {what}(s), while a minimum of 1 is required")
    return frame


def key_columns(
    key: Any, frame: pd.DataFrame, linkage: LinkageSettings
) -> Sequence[str] | dict[str, KeyKind]:
    """Return the names of the key columns, with their kinds where some are texts.

    Args:
        key: Key parameter of the estimator: a column, several, or None.
        frame: Rows of the primary.
        linkage: Settings of linkage, whose metric decides the kinds of keys.

    Raises:
        ConfigError: If a column is not there.
    """
    if isinstance(key, Mapping):
        return dict(key)
    columns = list(frame.columns)
    chosen = [] if key is None else [key] if isinstance(key, str | int) else list(key)
    names = []
    for choice in chosen:
        if isinstance(choice, str) and choice in columns:
            names.append(choice)
        elif isinstance(choice, int) and 0 <= choice < len(columns):
            names.append(columns[choice])
        else:
            raise ConfigError(f"key: X has no column {choice!r}; it has {', '.join(columns[:20])}")
    spec = KeySpec(
        columns=tuple(names),
        metric=METRICS[linkage.metric],
        fields=None if linkage.fields is None else linkage.field_list(),
    )
    kinds = dict(spec.kinds)
    return kinds if "text" in kinds.values() else names


def partner_tables(
    secondaries: Any, key: Sequence[str] | dict[str, KeyKind], *, declared: bool, bounds: Any
) -> list[PartyTable]:
    """Return the other parties' tables.

    Args:
        secondaries: A list, or a mapping by name, of frames, paths and tables. Frames and files
            have key columns of the same names as ``X``; a table says its own.
        key: Key columns of ``X``.
        declared: Whether a promise requires features that do not depend on the records.
        bounds: Declared ranges, as the estimator's parameter.

    Raises:
        ConfigError: If it is none of these.
        DataError: If a table can't be used.
    """
    if hasattr(secondaries, "columns") or isinstance(secondaries, str | Path | PartyTable):
        raise ConfigError("secondaries: must be a list of tables, or tables by name; put it in []")
    named = dict(secondaries) if isinstance(secondaries, Mapping) else _names(list(secondaries))
    tables = []
    for name, source in named.items():
        if isinstance(source, PartyTable):
            tables.append(replace(source, name=name))
            continue
        if not key:
            raise ConfigError('key: must name the columns that parties link by, such as key=["id"]')
        own: Bounds | None = bounds.get(name) if isinstance(bounds, Mapping) else bounds
        where = f"table {source} of {name!r}"
        frame = read_frame(Path(source), where=where) if isinstance(source, str | Path) else source
        settings = ColumnSettings(bounds=own, own_statistics=not declared)
        tables.append(from_frame(frame, name=name, key=key, columns=settings))
    return tables


def _names(sources: Sequence[Any]) -> dict[str, Any]:
    named = {
        source.name if isinstance(source, PartyTable) else f"secondary-{number}": source
        for number, source in enumerate(sources, 1)
    }
    if len(named) < len(sources):
        raise ConfigError("secondaries: two tables have one name")
    return named


@dataclass(frozen=True, kw_only=True, eq=False)
class LocalModel:
    """The primary's own model, with the reading of its columns."""

    alone: Alone
    """The fitted model."""
    table: PartyTable
    """One training row, whose schema new rows must have."""
    label_scaler: LabelScaler | None
    """Scaler of a regression's labels; None for classes."""

    def predict(self, frame: pd.DataFrame) -> Predictions:
        """Predict new rows.

        Raises:
            DataError: If their columns are not those of training.
        """
        schema = self.table.schema
        assert schema is not None, "it was made of a frame"
        table = new_rows(frame, schema, name=self.table.name, where="X")
        margins = self.alone.margins(own_inputs(table))
        return predictions_of(
            torch.from_numpy(margins),
            self.alone.head,
            classes=self.table.classes,
            label_scaler=self.label_scaler,
            threshold=self.alone.best.threshold,
            rows=range(1, len(margins) + 1),
        )


def train_alone_on(
    table: PartyTable, labels: Labels, *, task: Task, training: TrainingSettings, seed: int
) -> LocalModel:
    """Fit the primary's own models, and return the best on validation rows.

    Args:
        table: The primary's table, made of a frame, with the labels.
        labels: The labels.
        task: Kind of label.
        training: Fractions of the parts, and settings of the network.
        seed: Seed of the split, initialisation, shuffling and dropout.

    Raises:
        DataError: If there are too few rows.
    """
    kind = training.split_of(task)
    if kind not in ("random", "stratified"):
        raise DataError(f"training.split: {kind!r} needs a column of a table that is read")
    split = split_rows(
        table.num_rows,
        validation_fraction=training.validation_fraction,
        test_fraction=training.test_fraction,
        seed=seed,
        kind=kind,
        by=labels.astype(np.int64) if kind == "stratified" else None,
    )
    classes = len(table.classes or ()) if task == "multiclass" else 1
    head = TaskHead(
        task=task, num_classes=classes, chosen=training.metric, threshold=training.threshold
    )
    scaler = label_scaler_of(table, split, head)
    if scaler is not None:
        head = TaskHead(task=task, label_deviation=scaler.deviation, chosen=training.metric)
    alone = fit_alone(
        own_inputs(table),
        targets_of(table, split, head).numpy(),
        head,
        train=split.train,
        validation=split.validation,
        seed=seed,
        network=BaselineConfig(
            epochs=training.epochs,
            batch_size=training.batch_size,
            learning_rate=training.learning_rate or Family.learning_rate,
            weight_decay=training.weight_decay,
            patience=training.patience,
        ),
    )
    return LocalModel(alone=alone, table=table.take(np.arange(1)), label_scaler=scaler)


Own = TypeVar("Own", bound="FederatedEstimator")

_FEWEST: Final = 4
"""Rows of ``fit``: two to train on, one for each other part."""


@dataclass(frozen=True, kw_only=True)
class Target:
    """Labels of ``fit``, as a run takes them."""

    task: Task
    labels: Labels
    classes: tuple[int, ...] | None
    """Class numbers; None for a regression."""


@dataclass(eq=False)
class _AskedRun:
    """A trained run, and its predictions of the rows that were requested last."""

    run: TrainedRun
    _last: tuple[bytes, Predictions] | None = field(default=None, repr=False)

    def predict(self, frame: pd.DataFrame) -> Predictions:
        """Return predictions; rows equal to the last ones are not requested again.

        A score and a probability of the same rows so cost one request.
        """
        rows = _digest(self.run.name_rows(frame))
        if self._last is None or self._last[0] != rows:
            self._last = rows, self.run.predict(frame)
        return self._last[1]


class FederatedEstimator(BaseEstimator):  # type: ignore[misc]
    """A federation behind scikit-learn's methods; see its two subclasses."""

    # scikit-learn's rule: nothing is looked at before fit, not even what kind of thing it is.
    def __init__(
        self,
        model: Any = "fet",
        *,
        key: Any = None,
        secondaries: Any = None,
        neighbours: Any = None,
        model_settings: Any = None,
        exclude: Any = (),
        positive: Any = None,
        linkage: Any = "euclidean",
        bounds: Any = None,
        privacy: Any = None,
        base: Any = None,
        prediction_epsilon: Any = None,
        epochs: Any = None,
        batch_size: Any = None,
        learning_rate: Any = None,
        patience: Any = None,
        validation_fraction: Any = None,
        test_fraction: Any = None,
        metric: Any = None,
        training: Any = None,
        pretraining: Any = None,
        device: Any = "cpu",
        random_state: Any = None,
        verbose: Any = 0,
    ) -> None:
        given = locals()
        for name in self._get_param_names():
            setattr(self, name, given[name])

    def __repr__(self, N_CHAR_MAX: int = 400) -> str:
        """Return the changed parameters, in at most five lines."""
        defaults = type(self)().get_params(deep=False)
        changed = [
            f"{name}={short_repr(value)}"
            for name, value in self.get_params(deep=False).items()
            if value is not defaults[name] and short_repr(value) != short_repr(defaults[name])
        ]
        text = f"{type(self).__name__}({', '.join(changed)})"
        return "\n    ".join(textwrap.wrap(text, 96, max_lines=N_CHAR_MAX // 80))

    @classmethod
    def from_run(cls: type[Own], run: str | Path | RunResult, **source: Unpack[RunSource]) -> Own:
        """Return an estimator that predicts with the model of a run that has ended.

        The run may be one of parties on several machines: with ``identity``, this is the primary,
        and every call of a method that predicts is a session with the secondaries, which run
        ``securevfl party --serve``.

        Args:
            run: A run folder, or what :func:`securevfl.simulate` and :func:`securevfl.train`
                returned.
            **source: Where the run's parts are, if not in its folder; see :class:`RunSource`.

        Raises:
            ConfigError: If the run has kept no model, or that of another kind of task.
        """
        trained = run.trained if isinstance(run, RunResult) else trained_run(run, **source)
        if trained is None:
            raise ConfigError("run: has pretrained encoders, and there is no model to predict with")
        model = trained.model(trained.config.primary.name)
        part = model.primary_part
        made = cls(device=source.get("device", "cpu"))
        made._take(part.head.task, part.classes)
        made._fitted = _AskedRun(trained)
        return made

    def fit(
        self: Own, X: Any, y: Any, secondaries: Iterable[Any] | Mapping[str, Any] | None = None
    ) -> Own:
        """Train the federation, all parties of it in this process.

        Args:
            X: The primary's rows: a frame of pandas, polars or pyarrow, or an array of numbers.
            y: A label a row.
            secondaries: The other parties' tables, instead of those of the constructor.

        Raises:
            ConfigError: If a setting is impossible, or nobody said who the secondaries are.
            DataError: If a table can't be used.
            PrivacyError: If the promise does not hold for what would run.
            ValueError: If ``X`` or ``y`` is not what scikit-learn asks for.

        Reveals:
            Everything is in one process: a simulation protects nobody's table.
        """
        frame = frame_of(self, X, reset=True)
        if y is None:
            raise ValueError(
                f"{type(self).__name__} requires y to be passed, but the target y is None"
            )
        if len(frame) < _FEWEST:
            raise ValueError(
                f"X has n_samples={len(frame)}; rows to train on, to choose an epoch by and to "
                f"test take {_FEWEST}"
            )
        target = self._target(y)
        check_consistent_length(frame, target.labels)
        settings = settings_of(
            self.get_params(deep=False), task=target.task, rows=len(target.labels)
        )
        linkage, epsilon = linkage_of(self.linkage), plain_value(self.prediction_epsilon)
        promised = {} if epsilon is None else {"epsilon": epsilon}
        prediction = read_settings(PredictionSettings, promised, where="prediction")
        partners = self.secondaries if secondaries is None else secondaries
        if partners is None:
            raise ConfigError(
                "secondaries: give the other parties' tables, to the constructor or to fit; "
                "secondaries=() trains the primary alone"
            )
        key = key_columns(self.key, frame, linkage)
        if not set(frame.columns) - {*key, *self.exclude}:
            raise ValueError(
                f"X has {frame.shape[1]} feature(s), and they are all keys or excluded; the "
                f"primary needs one of its own"
            )
        own = replace(
            from_frame(frame, name=PRIMARY, key=key, exclude=self.exclude),
            labels=target.labels,
            classes=target.classes,
        )
        privacy = settings.privacy
        # A promise may rest on it that secondaries' features take nothing from records.
        declared = privacy.regime.caps_records and privacy.mechanism != "none"
        others = partner_tables(partners, key, declared=declared, bounds=self.bounds)
        state = self.random_state
        seed = state if isinstance(state, int) else int(check_random_state(state).randint(2**31))
        self.run_: RunResult | None = None
        if not others:
            local = train_alone_on(
                own, target.labels, task=target.task, training=settings.training, seed=seed
            )
            self._fitted: LocalModel | _AskedRun = local
            self.n_iter_ = local.alone.epochs
            self.alone_ = local.alone.chosen
            return self
        self.run_ = simulate(
            [own, *others],
            settings.model,
            training=settings.training,
            pretraining=settings.pretraining,
            privacy=privacy,
            base=settings.base if self.base is None else self.base,
            linkage=linkage,
            prediction=prediction,
            task=target.task,
            bounds=self.bounds,
            seed=seed,
            device=self.device,
            with_alone=False,
            progress=bool(self.verbose),
            observe=_warn,
        )
        assert self.run_.trained is not None, "it has trained"
        self._fitted = _AskedRun(self.run_.trained)
        self.n_iter_ = int(self.run_.metrics["epochs"])
        return self

    @property
    def epsilon_(self) -> float | None:
        """Epsilon that training has spent; None without a promise. Predictions come on top."""
        check_is_fitted(self)
        run = getattr(self, "run_", None)
        return None if run is None else run.metrics["privacy"]["epsilon"]

    def predictions(self, X: Any) -> Predictions:
        """Return predictions of rows: values, probabilities and their cost.

        Args:
            X: Rows with the columns of training.

        Raises:
            BudgetExceededError: If a party's ledger has no room for them; nothing was released
                then.
            DataError: If a column has another kind than in training.
            NotFittedError: If there is no model.
            ValueError: If the columns are not those of training.

        Reveals:
            Of a simulation, nothing; of :meth:`from_run`, what a request for predictions reveals.
        """
        check_is_fitted(self)
        # An estimator of a finished run has no columns of ``fit``.
        fitted = hasattr(self, "n_features_in_")
        return self._fitted.predict(frame_of(self, X, reset=False) if fitted else plain_frame(X))

    def __sklearn_is_fitted__(self) -> bool:
        """Return whether there is a model."""
        return hasattr(self, "_fitted")

    def __sklearn_tags__(self) -> Tags:
        """Return scikit-learn's tags: missing cells are allowed, and noise is never seeded."""
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = True
        tags.non_deterministic = getattr(self.privacy, "mechanism", "none") != "none"
        return tags

    def _target(self, y: Any) -> Target:
        """Return the labels as class numbers or numbers, and keep the classes' names."""
        raise NotImplementedError

    def _take(self, task: Task, classes: Sequence[Any] | None) -> None:
        """Take over the label's kind and classes from a saved model."""
        raise NotImplementedError


def _warn(event: ProgressEvent) -> None:
    if isinstance(event, Warned):
        warnings.warn(event.text, UserWarning, stacklevel=2)


def _digest(rows: NamedRows) -> bytes:
    table = rows.table
    digest = hashlib.sha256(np.ascontiguousarray(table.features).tobytes())
    digest.update(np.ascontiguousarray(table.keys).tobytes())
    digest.update(rows.linkable.tobytes())
    columns = {} if table.link_columns is None else table.link_columns.columns
    for column in columns.values():
        digest.update(repr(column.tolist()).encode())
    return digest.digest()


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
        positive: Of two classes, the one that F1, AUC, thresholds and calibration are about, such
            as ``"yes"``; None: the one that sorts last. ``classes_`` stays in sorted order.
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
        verbose: Above 0, ``fit`` shows its stages and epochs on standard error, as
            :func:`securevfl.simulate` does.

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
        answer = self.predictions(X)
        place = {value: number for number, value in enumerate(self._values)}
        chosen: np.ndarray = self.classes_[[place[value] for value in answer.values]]
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
        answer = self.predictions(X)
        if answer.probabilities is None or answer.classes is None:
            raise ConfigError("run: predicts numbers; take FederatedRegressor")
        return answer.probabilities[:, [answer.classes.index(value) for value in self._values]]

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
        self._values: tuple[Any, ...] = tuple(range(len(self.classes_)))
        """Class names of the run, in the order of ``classes_``."""
        task: Task = "binary" if len(self.classes_) == 2 else "multiclass"
        if self.positive is None:
            return Target(task=task, labels=numbers.astype(np.int64), classes=self._values)
        if task != "binary" or self.positive not in self.classes_.tolist():
            class_names = ", ".join(map(repr, self.classes_.tolist()))
            raise ConfigError(
                f"positive: must be one of two classes, got {self.positive!r}; y has {class_names}"
            )
        # The class of number 1 is the positive one, everywhere in a run.
        last = self.classes_[1] == self.positive
        return Target(
            task=task,
            labels=(numbers if last else 1 - numbers).astype(np.int64),
            classes=self._values if last else self._values[::-1],
        )

    def _take(self, task: Task, classes: Sequence[Any] | None) -> None:
        if classes is None:
            raise ConfigError(f"run: has learned a {task}; take FederatedRegressor")
        self.classes_, self._values = np.array(classes), tuple(classes)


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
        if self.positive is not None:
            raise ConfigError("positive: is one of two classes; leave it out of a regression")
        values = check_array(y, ensure_2d=False, dtype="numeric", input_name="y")
        numbers = column_or_1d(values, warn=True).astype(np.float64)
        if numbers.min() == numbers.max():
            raise ValueError(f"y is constant ({numbers[0]}); there is nothing to learn")
        return Target(task="regression", labels=numbers, classes=None)

    def _take(self, task: Task, classes: Sequence[Any] | None) -> None:
        if classes is not None:
            raise ConfigError(f"run: has learned classes ({task}); take FederatedClassifier")
