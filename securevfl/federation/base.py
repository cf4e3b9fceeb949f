"""The base of a run, which the joint model is averaged with, and the choice of who answers."""

import hashlib
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Float32, Int64
from torch import Tensor

from securevfl.config.federation import FederationConfig
from securevfl.config.sections import OWN, PartySettings
from securevfl.core.errors import ConfigError, DataError, PrivacyError
from securevfl.data.scaling import Bounds, FeatureScaler, LabelScaler, feature_scaler
from securevfl.data.tables import PartyTable, RowSplit
from securevfl.federation.rounds.primary import Primary, PrimaryData
from securevfl.federation.saved_model import SavedModel
from securevfl.linkage.spec import LinkedPrimary
from securevfl.models.alone.choice import Alone, Decision, Model, fit_alone
from securevfl.models.alone.margins import (
    BaselineConfig,
    CrossFitted,
    MarginModel,
    OwnInputs,
    cross_fit,
)
from securevfl.models.alone.saving import require_keepable
from securevfl.models.fitted_top import MixedTop
from securevfl.models.tasks import Metrics, TaskHead


def features_of(
    party: PartySettings, table: PartyTable, model: SavedModel | None = None
) -> Float32[np.ndarray, "rows features"]:
    """Return a party's features, scaled as the federation file says or as its kept model is.

    Raises:
        DataError: If the kept model has other features.
    """
    if model is None:
        return scaler_of(party, table).apply(table.features)
    if table.feature_names != model.features:
        missing = [name for name in model.features if name not in table.feature_names]
        more = [name for name in table.feature_names if name not in model.features]
        what = f"lacks {missing[0]!r}" if missing else f"has {more[0]!r}" if more else "differs"
        raise DataError(
            f"table of {table.name!r}: {what}, and the model was trained on the features "
            f"{', '.join(model.features[:20])}, in this order"
        )
    return model.feature_scaler.apply(table.features)


def own_inputs(table: PartyTable) -> OwnInputs:
    """Return all that a party has of its rows, features and numeric keys, for models of its own.

    A key that is an id (:attr:`securevfl.data.schema.KeyColumn.is_id`) is left out: a model of it
    would learn where rows lie in the file, which new rows do not.
    """
    columns = np.hstack([table.features.astype(np.float64), table.keys[:, place_keys(table)]])
    return OwnInputs(values=columns, words=places_of_words(table))


def place_keys(table: PartyTable) -> list[int]:
    """Return which of a table's numeric key columns are places or times, and no ids."""
    ids = [] if table.schema is None else [key.name for key in table.schema.keys if key.is_id]
    return [axis for axis, name in enumerate(table.key_names) if name not in ids]


def places_of_words(table: PartyTable) -> tuple[tuple[int, ...], ...]:
    """Return the places of the features of each column of words."""
    if table.schema is None:
        return ()
    places = []
    for column in table.schema.columns:
        if column.kind == "words":
            names = column.own_features
            places.append(tuple(table.feature_names.index(name) for name in names))
    return tuple(places)


def scaler_of(party: PartySettings, table: PartyTable) -> FeatureScaler:
    """Return how a party's features are scaled when training begins."""
    bounds: Bounds | None = party.bounds
    if bounds is not None and table.schema is not None:
        bounds = table.schema.feature_bounds(bounds)
    return feature_scaler(table.features, table.feature_names, scaling=party.scaling, bounds=bounds)


def require_declared_features(table: PartyTable, *, encoder: str) -> None:
    """Refuse a table whose features depend on its records where that breaks the promise.

    Raises:
        PrivacyError: Saying what to declare.
    """
    if table.data_dependent:
        first = table.data_dependent[0]
        more = len(table.data_dependent) - 1
        raise PrivacyError(
            f"table of {table.name!r}: column {first.column!r}: {first.what} depends on the "
            f"records, so a {encoder} encoder's epsilon would not hold; declare {first.declare}, "
            f"or exclude the column" + (f" (and {more} more of this kind)" if more else "")
        )


def task_head(config: FederationConfig, table: PartyTable, split: RowSplit) -> TaskHead:
    """Return the task with the numbers of the primary's training labels.

    Raises:
        DataError: If the labels are constant in the training rows.
    """
    if config.federation.task == "regression":
        scaler = LabelScaler.fit(table.known_labels[split.train])
        return TaskHead(
            task="regression", label_deviation=scaler.deviation, chosen=config.training.metric
        )
    classes = len(table.classes or ()) if config.federation.task == "multiclass" else 1
    return TaskHead(
        task=config.federation.task,
        num_classes=classes,
        chosen=config.training.metric,
        threshold=config.training.threshold,
    )


def label_scaler_of(table: PartyTable, split: RowSplit, head: TaskHead) -> LabelScaler | None:
    """Return how a regression's labels are standardised: by the training rows. None for classes."""
    return LabelScaler.fit(table.known_labels[split.train]) if head.task == "regression" else None


def targets_of(table: PartyTable, split: RowSplit, head: TaskHead) -> torch.Tensor:
    """Return the labels as losses take them; regression labels are standardised."""
    labels = table.known_labels
    if head.task == "regression":
        labels = LabelScaler.fit(labels[split.train]).apply(labels)
    targets = torch.from_numpy(labels)
    return targets if head.task == "multiclass" else targets.to(torch.float32)


def aligned_rows(
    config: FederationConfig, linked: LinkedPrimary, split: RowSplit
) -> Bool[np.ndarray, " rows"] | None:
    """Return which of the primary's rows training rounds may have; None for all.

    Raises:
        DataError: If none of the labelled training rows is aligned where only such rows may train.
    """
    if config.training.rows == "all" or linked.alignment is None:
        return None
    aligned = linked.alignment.everywhere
    if not aligned[split.train].any():
        raise DataError(
            f"training.rows: none of the {len(split.train)} labelled training rows is linked at "
            f'every secondary; set it to "all", or look at linkage.max_distance'
        )
    return aligned


def require_estimator(config: FederationConfig, base: Any, top: Any = None) -> None:
    """Refuse to train by a file whose estimators only Python could hand over.

    Args:
        config: The federation file.
        base: What was handed over as the base; None: nothing was.
        top: The same as the top model.

    Raises:
        ConfigError: Saying what to do.
    """
    if config.base.estimator == OWN and base is None:
        raise ConfigError(
            f'base.estimator: "python" is {config.base.described}, which this program was not '
            f"given; hand it to securevfl.simulate(base=...), or name another estimator"
        )
    if config.top is not None and config.top.name == OWN and top is None:
        raise ConfigError(
            f"model.top: is {config.top.described}, which this program was not given; hand it to "
            f'securevfl.simulate(top=...), or write "boosting" or "linear"'
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class Base:
    """What the joint model is averaged with."""

    model: Model
    """Fitted to all labelled training rows."""
    margins: Float[Tensor, "rows outputs"] = field(repr=False)
    """Margins of all rows, out of fold on training rows."""
    fitted_to: str
    """A digest of the rows that fitted and chose it."""
    alone: Alone | None = None
    """The models of the primary alone, where the base was chosen among them."""
    cpu_seconds: float = 0.0
    """That fitting it took."""


def fit_base(
    config: FederationConfig, table: PartyTable, data: PrimaryData, estimator: Any
) -> Base:
    """Fit the base to the labelled training rows, linked or not.

    Args:
        config: The federation file, which names an estimator.
        table: The primary's table.
        data: The same as tensors.
        estimator: Of scikit-learn, where Python handed one over.

    Raises:
        ConfigError: If the estimator is none for the task, or can't be saved.
        DataError: If it can't be fitted to these rows.
    """
    begin = time.process_time()
    inputs, targets = own_inputs(table), data.targets.cpu().numpy()
    split, seed, device = data.split, config.federation.seed, data.features.device
    name = config.base.estimator
    if name != "best":
        fitted = cross_fit(
            name if estimator is None else estimator,
            inputs,
            targets,
            data.head,
            train=split.train,
            seed=seed,
        )
        # Now, rather than when everything is trained.
        require_keepable(fitted.model)
        return Base(
            model=fitted.model,
            margins=torch.from_numpy(fitted.margins).to(device),
            fitted_to=digest_of_rows(split),
            cpu_seconds=time.process_time() - begin,
        )
    alone = train_alone(config, table, data, with_margins=True)
    margins = alone.best.margins
    assert margins is not None, "they were asked for"
    return Base(
        model=alone.best.model,
        margins=torch.from_numpy(margins).to(device),
        fitted_to=digest_of_rows(split),
        alone=alone,
        cpu_seconds=time.process_time() - begin,
    )


def digest_of_rows(split: RowSplit) -> str:
    """Return a digest of the training and validation rows, on which a base depends."""
    made = hashlib.sha256(np.ascontiguousarray(split.train).tobytes())
    made.update(b"validation" + np.ascontiguousarray(split.validation).tobytes())
    return made.hexdigest()


def train_alone(
    config: FederationConfig,
    table: PartyTable,
    data: PrimaryData,
    *,
    network: BaselineConfig | None = None,
    fitted: Mapping[str, CrossFitted] | None = None,
    with_margins: bool = False,
) -> Alone:
    """Fit the candidates of the primary alone, on all that it has, and choose one.

    Args:
        config: The federation file.
        table: The primary's table.
        data: The same as tensors.
        network: The network and its training; default: :class:`BaselineConfig`.
        fitted: Candidates that are fitted already, by name.
        with_margins: Whether margins of all rows are wanted.

    Raises:
        DataError: If the metric that training goes by is not defined for a split's labels.
    """
    return fit_alone(
        own_inputs(table),
        data.targets.cpu().numpy(),
        data.head,
        train=data.split.train,
        validation=data.split.validation,
        seed=config.federation.seed,
        network=network,
        fitted=fitted,
        with_margins=with_margins,
    )


@dataclass(kw_only=True, eq=False)
class Choice:
    """Who answers: the joint model, or the best model of the primary alone."""

    base: Model
    """Model that the joint model is averaged with."""
    base_margins: Float[Tensor, "rows outputs"] = field(repr=False)
    """Its margins for all rows, out of fold on training rows."""
    alone: Alone
    decision: Decision
    validation: Metrics
    """Every metric of the validation rows, for the model that answers."""
    threshold: float
    """Decision threshold of the model that answers, for a binary task."""
    margins: Float[Tensor, "rows outputs"] = field(repr=False)
    """The local baseline's margins for all rows."""
    own: Primary | None = field(default=None, repr=False)
    """The primary's own network without partners, weighed with the base by its own lambda; None
    where the family has none."""
    mixed: dict[str, float] | None = None
    """Weight of trees in the top model, and their gain out of fold, where they were tried."""
    joint_test: Metrics | None = None
    """The joint model's metrics on test rows, also where the primary alone answers."""

    def asks(self) -> bool:
        """Return whether the joint model's outputs for the test rows take the secondaries.

        Where lambda is 0, the joint model is the base, and nobody is asked.
        """
        return self.decision.scale > 0

    def joint_outputs(self, primary: Primary) -> Float[Tensor, "rows outputs"]:
        """Return the joint model's outputs for the test rows, and measure it on them.

        Reveals:
            To the primary: one average a test row. To the secondaries: the rows' ids.
        """
        data = primary.data
        base = self.base_margins
        rows = torch.as_tensor(data.split.test, device=base.device)
        asked = self.asks()
        joint = primary.predict(data.split.test, "test") if asked else base[rows]
        self.joint_test = data.head.metrics(joint, data.targets[rows], threshold=primary.threshold)
        return joint

    def select_outputs(
        self, joint: Float[Tensor, "rows outputs"], rows: Int64[np.ndarray, " rows"]
    ) -> Float[Tensor, "rows outputs"]:
        """Return the outputs of the model that answers, for rows that the joint one has seen."""
        if self.decision.used == "joint":
            return joint
        return self.margins[torch.as_tensor(rows, device=self.margins.device)]

    def as_json(self, config: FederationConfig) -> dict[str, Any]:
        """Return what ``metrics.json`` says of it."""
        return {
            "estimator": config.base.estimator,
            "alone": self.alone.chosen,
            **self.decision.as_json(),
            **({} if self.own is None else {"own_lambda": self.own.scale}),
            **({} if self.mixed is None else {"top": self.mixed}),
        }


def choose(
    config: FederationConfig,
    table: PartyTable,
    primary: Primary,
    base: Base,
    *,
    own: Primary | None = None,
) -> Choice:
    """Fit the local baseline, and decide who answers.

    The joint model has to be better than the local baseline, and than the primary's own network
    without partners, which is weighed with the base by the same rule.

    Args:
        config: The federation file.
        table: The primary's table.
        primary: At its best epoch; its lambda is set.
        base: What it is averaged with.
        own: The network without partners, at its best epoch; its lambda is set.

    Reveals:
        Nothing: nobody is asked.
    """
    data, alone = primary.data, base.alone
    if alone is None:
        assert isinstance(base.model, MarginModel), "others were chosen among all"
        before = CrossFitted(model=base.model, margins=base.margins.cpu().numpy())
        alone = train_alone(config, table, data, fitted={config.base.estimator: before})
    margins = torch.from_numpy(alone.margins(own_inputs(table))).to(data.features.device)
    decision = primary.decide(margins, base_is_alone=base.alone is not None)
    if own is not None:
        own.decide(margins, base_is_alone=base.alone is not None)
        if decision.used == "joint" and not primary.is_better_than(own):
            decision = replace(decision, used="alone")
    joint, top = decision.used == "joint", primary.top
    return Choice(
        base=base.model,
        base_margins=base.margins,
        alone=alone,
        decision=decision,
        validation=primary.best_validation if joint else alone.best.validation,
        threshold=primary.threshold if joint else alone.best.threshold,
        margins=margins,
        own=own,
        mixed=top.as_json() if isinstance(top, MixedTop) and primary.best_epoch else None,
    )
