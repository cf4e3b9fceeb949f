"""A perceptron on one table: settings, training with early stopping, and margins."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final

import numpy as np
import torch
from jaxtyping import Float, Float32, Float64, Int, Int64, Shaped
from torch import Tensor

from securevfl.core import checks
from securevfl.core.conventions import derive_seed
from securevfl.core.errors import DataError
from securevfl.models.alone.margins import OwnInputs
from securevfl.models.layers import MLP, initialise
from securevfl.models.optimisers import build_optimizer
from securevfl.models.tasks import TaskHead


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
