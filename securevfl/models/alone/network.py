"""A perceptron on all that the primary has, read as margins."""

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Float32, Float64, Int64, Shaped
from torch import Tensor

from securevfl.models.alone.margins import OwnInputs
from securevfl.models.baselines.baseline_config import BaselineConfig
from securevfl.models.baselines.fit import fit_table
from securevfl.models.mlp import MLP
from securevfl.models.tasks import TaskHead


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
