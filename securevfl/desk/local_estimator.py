"""The primary's best own model, behind the scikit-learn estimators."""

from dataclasses import dataclass

import numpy as np
import pandas as pd
import torch

from securevfl.config.sections import TrainingSettings
from securevfl.core.conventions import Task
from securevfl.core.errors import DataError
from securevfl.data.party_tables import new_rows
from securevfl.data.rows import split_rows
from securevfl.data.scaling import LabelScaler
from securevfl.data.tables import Labels, PartyTable
from securevfl.federation.party_inputs import label_scaler_of, own_inputs, targets_of
from securevfl.models.alone.choice import Alone, fit_alone
from securevfl.models.alone.perceptron import BaselineConfig
from securevfl.models.family import Family
from securevfl.models.tasks import TaskHead
from securevfl.runtime.predictions import Predictions, predictions_of


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
