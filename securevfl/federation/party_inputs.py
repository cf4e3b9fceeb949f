"""Features and targets that a party's models take."""

import numpy as np
import torch
from jaxtyping import Bool, Float32

from securevfl.config.federation import FederationConfig
from securevfl.config.sections import PartySettings
from securevfl.core.errors import DataError, PrivacyError
from securevfl.data.rows import RowSplit
from securevfl.data.scaling import Bounds, FeatureScaler, LabelScaler, feature_scaler
from securevfl.data.tables import PartyTable
from securevfl.federation.saved_model import SavedModel
from securevfl.linkage.spec import LinkedPrimary
from securevfl.models.alone.margins import OwnInputs
from securevfl.models.tasks import TaskHead


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
    return OwnInputs(values=columns, words=_places_of_words(table))


def place_keys(table: PartyTable) -> list[int]:
    """Return which of a table's numeric key columns are places or times, and no ids."""
    ids = [] if table.schema is None else [key.name for key in table.schema.keys if key.is_id]
    return [axis for axis, name in enumerate(table.key_names) if name not in ids]


def _places_of_words(table: PartyTable) -> tuple[tuple[int, ...], ...]:
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
