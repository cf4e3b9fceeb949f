"""Estimates of a run's costs: bytes on the wire, time and memory."""

import time
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch

from securevfl.config.federation import FederationConfig
from securevfl.core.memory import peak_memory_bytes
from securevfl.data.tables import KeyTable, PartyTable
from securevfl.federation.build import build_top
from securevfl.federation.run_plan import RunPlan
from securevfl.models.alone.perceptron import BaselineConfig
from securevfl.models.tasks import TaskHead
from securevfl.stages.assist.local_models import cross_fit
from securevfl.stages.assist.settings import AssistConfig

_STEPS: Final = 8
_WARM_UP: Final = 2
# Of a round: headers of frames, a plan, a signature of the ledger's head.
_ROUND_BYTES: Final = 600
# A perceptron's step beside one of the top model, which holds about such a perceptron.
_NETWORK_STEP: Final = 0.6
# The optimizer's part of a step beside forward and backward; loading one takes longer than a check.
_UPDATE: Final = 0.3
_FITTED_ROWS: Final = 200


@dataclass(frozen=True, kw_only=True, slots=True)
class Costs:
    """Estimated costs of a run; a real run stops early, waits for others and shares its machine."""

    bytes_received: int
    """Bytes of releases that the primary receives from all secondaries."""

    bytes_sent: int
    """Bytes that the primary sends to all secondaries: row numbers, gradients of trained bottom
    models, and shown keys."""

    step_seconds: float
    """Measured seconds of one training step of the primary's model on this machine; with assisted
    boosting, of one round of all secondaries' models on tables like the primary's."""

    seconds: float
    """Upper bound on the seconds of all epochs and the local baseline, without linking."""

    memory_bytes: int | None
    """Peak memory of this process with all tables on this machine; None if the system has no
    figure."""


def estimate_costs(plan: RunPlan, table: PartyTable, keys: KeyTable | None) -> Costs:
    """Estimate a run's costs.

    Args:
        plan: The run.
        table: The primary's table.
        keys: The primary's keys; None if they are not shown.

    Raises:
        ConfigError: If the family can't build its top model.
    """
    config, releases = plan.config, plan.releases
    secondaries = len(config.secondaries)
    per_row = 8 * plan.cut.words(1024) / 1024
    received = secondaries * releases.row_releases * per_row + releases.rounds * _ROUND_BYTES
    sent = secondaries * (8 * releases.row_releases + releases.rounds * _ROUND_BYTES)
    steps: float = config.epochs * -(-plan.facts.train_rows // config.training.batch_size)
    if plan.regime.learns:
        positions, width = config.family.cut_shape(config.model)
        trained = config.epochs * plan.facts.train_rows
        sent += secondaries * 4 * positions * width * trained
    if keys is not None:
        sent += secondaries * _key_bytes(keys)
    # Of the primary alone, the network: trees take a few seconds where it takes a minute.
    network = BaselineConfig()
    network_steps = network.epochs * -(-plan.facts.train_rows // network.batch_size)
    parties = 1 + secondaries if plan.regime.learns else 1
    if isinstance(config.model, AssistConfig):
        # Beside a fit it is not known what a step of a network takes, which is little.
        step, steps = secondaries * _fit_seconds(config.model, table, plan), config.epochs
    else:
        step = _step_seconds(config, table, plan)
        steps = steps * parties + _NETWORK_STEP * network_steps
    return Costs(
        bytes_received=round(received),
        bytes_sent=round(sent),
        step_seconds=step,
        seconds=step * steps,
        memory_bytes=peak_memory_bytes(),
    )


def _key_bytes(keys: KeyTable) -> int:
    total = 0
    for column in keys.columns.values():
        if column.dtype == object:
            total += sum(len(str(text).encode()) + 4 for text in column if text is not None)
        else:
            total += 8 * len(column)
    return total


def _fit_seconds(settings: AssistConfig, table: PartyTable, plan: RunPlan) -> float:
    """Time the fit of one local model to some made-up rows, and scale it to all of them."""
    rows = min(_FITTED_ROWS, plan.facts.train_rows)
    random = np.random.default_rng(0)
    inputs = random.normal(size=(rows, settings.neighbours * max(1, table.num_features)))
    residuals = random.normal(size=(rows, settings.outputs)).astype(np.float32)
    started = time.perf_counter()
    cross_fit(settings, inputs, residuals, seed=0)
    return (time.perf_counter() - started) * plan.facts.train_rows / rows


def _step_seconds(config: FederationConfig, table: PartyTable, plan: RunPlan) -> float:
    """Time the primary's part of a training step, on made-up numbers."""
    if config.top is not None:
        return 0.0  # an estimator is fitted once, in about the time that solo takes
    rows = min(config.training.batch_size, plan.facts.train_rows)
    classes = len(table.classes or ()) if config.federation.task == "multiclass" else 1
    top = build_top(config, table, TaskHead(task=config.federation.task, num_classes=classes))
    random = torch.Generator().manual_seed(0)

    def numbers(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=random)

    features, keys = numbers(rows, table.num_features), numbers(rows, table.key_dim)
    aggregate = numbers(rows, *config.family.cut_shape(config.model))
    similarities = None
    if config.family.needs_similarities(config.model):
        similarities = numbers(rows, len(config.secondaries), config.model.neighbours)
    started = 0.0
    for step in range(_WARM_UP + _STEPS):
        if step == _WARM_UP:
            started = time.perf_counter()
        loss = top(features, keys, aggregate, similarities).square().mean()
        loss.backward()
    return (1 + _UPDATE) * (time.perf_counter() - started) / _STEPS
