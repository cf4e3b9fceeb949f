"""What the federated classifier and regressor share: parameters, fitting, asking."""

import hashlib
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, TypeVar

import numpy as np
import pandas as pd
from sklearn.base import BaseEstimator
from sklearn.utils import Tags, check_random_state
from sklearn.utils.validation import check_consistent_length, check_is_fitted

from securevfl.core.errors import ConfigError
from securevfl.core.progress import ProgressEvent, Warned
from securevfl.core.task import Task
from securevfl.data.tables import Labels, PartyTable
from securevfl.estimators.alone import AloneAtWork, train_alone_on
from securevfl.estimators.inputs import (
    frame_of,
    key_columns,
    partner_tables,
    plain_frame,
    primary_table,
)
from securevfl.estimators.settings import settings_of
from securevfl.runtime.entry import FederationSource
from securevfl.runtime.in_memory import simulate
from securevfl.runtime.new_rows import NamedRows
from securevfl.runtime.prediction_entry import trained_run
from securevfl.runtime.predictions import Predictions
from securevfl.runtime.simulation import RunResult
from securevfl.runtime.trained_run import TrainedRun

Own = TypeVar("Own", bound="FederatedEstimator")

_FEWEST: Final = 4
"""Rows of ``fit``: two to train on, one for each other part."""


@dataclass(frozen=True, kw_only=True)
class Target:
    """What is to be learned."""

    task: Task
    labels: Labels
    classes: tuple[int, ...] | None
    """Class numbers; None for a regression."""


@dataclass(eq=False)
class Asked:
    """A trained run, and the rows that it was asked for last."""

    run: TrainedRun
    _last: tuple[bytes, Predictions] | None = field(default=None, repr=False)

    def predict(self, frame: pd.DataFrame) -> Predictions:
        """Return predictions, the last ones if the rows are the same.

        What was released once may be looked at again: a score and a probability of the same rows
        cost one request.
        """
        rows = _digest(self.run.named(frame))
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
    ) -> None:
        self.model = model
        self.key = key
        self.secondaries = secondaries
        self.neighbours = neighbours
        self.model_settings = model_settings
        self.exclude = exclude
        self.linkage = linkage
        self.bounds = bounds
        self.privacy = privacy
        self.base = base
        self.prediction_epsilon = prediction_epsilon
        self.epochs = epochs
        self.batch_size = batch_size
        self.learning_rate = learning_rate
        self.patience = patience
        self.validation_fraction = validation_fraction
        self.test_fraction = test_fraction
        self.metric = metric
        self.training = training
        self.pretraining = pretraining
        self.device = device
        self.random_state = random_state

    @classmethod
    def from_run(
        cls: type[Own],
        run: str | Path | RunResult,
        *,
        federation: FederationSource | None = None,
        parties: Iterable[PartyTable] | None = None,
        identity: str | Path | None = None,
        listen: str | None = None,
        data_root: Path | None = None,
        device: str = "cpu",
    ) -> Own:
        """Return an estimator that predicts with the model of a run that has ended.

        The run may be one of parties on several machines: with ``identity``, this is the primary,
        and every call of a method that predicts is a session with the secondaries, which run
        ``securevfl party --serve``.

        Args:
            run: A run folder, or what :func:`securevfl.simulate` and :func:`securevfl.train`
                returned.
            federation: The federation file; default: that of the run.
            parties: The secondaries' tables, of a run that was simulated on tables in memory.
            identity: The primary's own folder, as made by ``securevfl provision``.
            listen: Where the primary listens, if not at its address in the file.
            data_root: Where relative data paths start; default: the current folder.
            device: ``"cpu"`` or ``"cuda"``.

        Raises:
            ConfigError: If the run has kept no model, or that of another kind of task.
        """
        if isinstance(run, RunResult):
            trained = run.trained
        else:
            trained = trained_run(
                run,
                federation=federation,
                parties=parties,
                identity=identity,
                listen=listen,
                data_root=data_root,
                device=device,
            )
        if trained is None:
            raise ConfigError("run: has pretrained encoders, and there is no model to predict with")
        model = trained.model(trained.config.primary.name)
        assert model.primary is not None, "the primary's"
        made = cls(device=device)
        made._take(model.primary.head.task, model.primary.classes)
        made._alone, made._asked = None, Asked(trained)
        return made

    def fit(
        self: Own,
        X: Any,
        y: Any,
        secondaries: Iterable[Any] | Mapping[str, Any] | None = None,
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
        partners = self.secondaries if secondaries is None else secondaries
        if partners is None:
            raise ConfigError(
                "secondaries: give the other parties' tables, to the constructor or to fit; "
                "secondaries=() trains the primary alone"
            )
        key = key_columns(self.key, frame, settings.linkage)
        own = replace(
            primary_table(frame, key, exclude=self.exclude),
            labels=target.labels,
            classes=target.classes,
        )
        others = partner_tables(
            partners,
            key,
            declared=settings.declared,
            bounds=self.bounds,
        )
        state = self.random_state
        seed = state if isinstance(state, int) else int(check_random_state(state).randint(2**31))
        self._alone: AloneAtWork | None = None
        self._asked: Asked | None = None
        self.run_: RunResult | None = None
        if not others:
            self._alone = train_alone_on(
                own, task=target.task, training=settings.training, seed=seed
            )
            self.n_iter_ = self._alone.alone.epochs
            self.alone_ = self._alone.alone.chosen
            return self
        self.run_ = simulate(
            [own, *others],
            settings.model,
            privacy=settings.privacy,
            training=settings.training,
            pretraining=settings.pretraining,
            linkage=settings.linkage,
            prediction=settings.prediction,
            base=settings.base,
            task=target.task,
            bounds=self.bounds,
            seed=seed,
            device=self.device,
            with_alone=False,
            progress=False,
            observe=_warn,
        )
        assert self.run_.trained is not None, "it has trained"
        self._asked = Asked(self.run_.trained)
        self.n_iter_ = int(self.run_.metrics["epochs"])
        return self

    @property
    def epsilon_(self) -> float | None:
        """What training has spent; None: no bound, or nothing to bound. Predictions come on top."""
        check_is_fitted(self)
        run = getattr(self, "run_", None)
        return None if run is None else run.metrics["privacy"]["epsilon"]

    def predictions(self, X: Any) -> Predictions:
        """Return all that the model says of rows: values, probabilities, and what it cost.

        Args:
            X: Rows with the columns of training.

        Raises:
            BudgetExceededError: If a party's ledger has no room for them; nothing was released
                then.
            DataError: If a column is not what it was in training.
            NotFittedError: If there is no model.
            ValueError: If the columns are not those of training.

        Reveals:
            Of a simulation, nothing; of :meth:`from_run`, what a request for predictions reveals.
        """
        check_is_fitted(self)
        if self._asked is not None and not hasattr(self, "n_features_in_"):
            return self._asked.predict(plain_frame(X))
        frame = frame_of(self, X, reset=False)
        if self._asked is not None:
            return self._asked.predict(frame)
        assert self._alone is not None, "one of the two was fitted"
        return self._alone.predict(frame)

    def __sklearn_is_fitted__(self) -> bool:
        """Say whether there is a model."""
        return hasattr(self, "_asked")

    def __sklearn_tags__(self) -> Tags:
        """Say what scikit-learn may expect: missing cells are read, and noise is never seeded."""
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = True
        tags.non_deterministic = getattr(self.privacy, "mechanism", "none") != "none"
        return tags

    def _target(self, y: Any) -> Target:
        """Return the labels as the federation takes them, and keep what they are called."""
        raise NotImplementedError

    def _take(self, task: Task, classes: Sequence[Any] | None) -> None:
        """Take over the labels of a model that was kept."""
        raise NotImplementedError


def _warn(event: ProgressEvent) -> None:
    if isinstance(event, Warned):
        warnings.warn(event.text, UserWarning, stacklevel=2)


def _digest(rows: NamedRows) -> bytes:
    table = rows.table
    found = hashlib.sha256(np.ascontiguousarray(table.features).tobytes())
    found.update(np.ascontiguousarray(table.keys).tobytes())
    found.update(rows.linkable.tobytes())
    columns = {} if table.link_columns is None else table.link_columns.columns
    for column in columns.values():
        found.update(repr(column.tolist()).encode())
    return found.digest()
