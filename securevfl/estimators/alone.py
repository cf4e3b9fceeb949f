"""The primary without partners: its own network, which a federation is to be compared with."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from securevfl.config.sections import TrainingSettings
from securevfl.core.errors import DataError
from securevfl.core.task import Task
from securevfl.data.party_tables import new_rows
from securevfl.data.rows import split_rows
from securevfl.data.scaling import FeatureScaler, KeyScaler, LabelScaler
from securevfl.data.tables import PartyTable
from securevfl.federation.own_numbers import label_scaler_of, targets_of
from securevfl.models.baselines.baseline_config import BaselineConfig
from securevfl.models.baselines.fit import fit_table
from securevfl.models.baselines.tables import solo_inputs
from securevfl.models.mlp import MLP
from securevfl.models.tasks import TaskHead
from securevfl.runtime.predictions import Predictions, predictions_of


@dataclass(frozen=True, kw_only=True, eq=False)
class Alone:
    """A perceptron on the primary's own columns, trained."""

    network: MLP
    head: TaskHead
    table: PartyTable
    """One row of training, for how its columns were read."""
    features: FeatureScaler
    keys: KeyScaler | None
    """How keys are scaled; None where they are no inputs."""
    labels: LabelScaler | None
    threshold: float
    epochs: int
    """Epochs run."""

    def predict(self, frame: pd.DataFrame) -> Predictions:
        """Predict new rows.

        Raises:
            DataError: If their columns are not those of training.
        """
        schema = self.table.schema
        assert schema is not None, "it was made of a frame"
        table = new_rows(frame, schema, name=self.table.name, where="X")
        outputs = _outputs(self.network, _inputs(table, self.features, self.keys))
        return predictions_of(
            outputs,
            self.head,
            classes=self.table.classes,
            label_scaler=self.labels,
            threshold=self.threshold,
            rows=range(1, len(outputs) + 1),
        )


def fit_alone(
    table: PartyTable,
    *,
    task: Task,
    training: TrainingSettings,
    keys_as_features: bool,
    seed: int,
) -> Alone:
    """Train the primary's own network.

    Args:
        table: Its table, made of a frame, with labels.
        task: What the label is.
        training: Of which epochs, batches, step size, patience and parts count.
        keys_as_features: Whether numeric keys are inputs.
        seed: Of split, initialisation, shuffling and dropout.

    Raises:
        DataError: If there are too few rows.
    """
    assert table.labels is not None, "given by fit"
    kind = training.split_of(task)
    if kind not in ("random", "stratified"):
        raise DataError(f"training.split: {kind!r} needs a column of a table that is read")
    split = split_rows(
        table.num_rows,
        validation_fraction=training.validation_fraction,
        test_fraction=training.test_fraction,
        seed=seed,
        kind=kind,
        by=table.labels.astype(np.int64) if kind == "stratified" else None,
    )
    classes = len(table.classes or ()) if task == "multiclass" else 1
    head = TaskHead(
        task=task, num_classes=classes, chosen=training.metric, threshold=training.threshold
    )
    labels = label_scaler_of(table, split, head)
    if labels is not None:
        head = TaskHead(task=task, label_deviation=labels.deviation, chosen=training.metric)
    features = FeatureScaler.standard(table.features)
    keys = KeyScaler.fit(table.keys) if keys_as_features and table.key_dim else None
    inputs, targets = _inputs(table, features, keys), targets_of(table, split, head)
    train, validation = torch.from_numpy(split.train), torch.from_numpy(split.validation)
    result = fit_table(
        inputs,
        targets,
        head=head,
        train=train,
        validation=validation,
        test=validation,  # scikit-learn tests on rows of its own
        config=BaselineConfig(
            epochs=training.epochs,
            batch_size=training.batch_size,
            learning_rate=training.learning_rate,
            weight_decay=training.weight_decay,
            patience=training.patience,
        ),
        seed=seed,
    )
    outputs = _outputs(result.model, inputs[validation])
    return Alone(
        network=result.model,
        head=head,
        table=table.take(np.arange(1)),
        features=features,
        keys=keys,
        labels=labels,
        threshold=head.choose_threshold(outputs, targets[validation]),
        epochs=result.epochs,
    )


@torch.no_grad()
def _outputs(network: MLP, inputs: Tensor) -> Tensor:
    # In float64 no digit that anybody sees depends on which rows are asked for together.
    network.double().eval()
    outputs: Tensor = network(inputs.double())
    return outputs


def _inputs(
    table: PartyTable, features: FeatureScaler, keys: KeyScaler | None
) -> Float[Tensor, "rows inputs"]:
    own = torch.from_numpy(features.apply(table.features))
    scaled: Any = None if keys is None else torch.from_numpy(keys.apply(table.keys))
    return solo_inputs(own, scaled)
