"""Baselines that need no federation: solo (the primary alone) and combine (all in one place)."""

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from securevfl.core.errors import DataError
from securevfl.data.tables import PartyTable
from securevfl.federation.config import FederationConfig
from securevfl.federation.primary import PrimaryData
from securevfl.models.baselines.config import BaselineConfig
from securevfl.models.baselines.fit import fit_table
from securevfl.models.baselines.tables import combined_inputs, solo_inputs
from securevfl.models.tasks import TaskHead


def train_solo(config: FederationConfig, data: PrimaryData, head: TaskHead) -> float:
    """Train the primary's own network on its features and keys; return its test metric."""
    return _fit(solo_inputs(data.features, data.keys), config, data, head)


def train_combined(
    config: FederationConfig,
    data: PrimaryData,
    head: TaskHead,
    *,
    primary: PartyTable,
    secondaries: Sequence[PartyTable],
    features: Sequence[Float[Tensor, "records features"]],
) -> float:
    """Train on all features joined by the true match; return the test metric: the ceiling.

    Args:
        config: The federation file.
        data: The primary's tensors.
        head: The task.
        primary: The primary's table, with the truth.
        secondaries: The secondaries' tables, with the truth.
        features: Their scaled features.

    Raises:
        DataError: If a table has no truth, or some row has no match.
    """
    matches = [torch.as_tensor(_matches(primary, table)) for table in secondaries]
    return _fit(
        combined_inputs(solo_inputs(data.features, data.keys), features, matches),
        config,
        data,
        head,
    )


def _matches(primary: PartyTable, secondary: PartyTable) -> np.ndarray:
    if primary.entities is None or secondary.entities is None:
        raise DataError("combine: needs linkage.truth, the column that tells true matches")
    place = {int(entity): row for row, entity in enumerate(secondary.entities)}
    missing = [entity for entity in primary.entities.tolist() if entity not in place]
    if missing:
        raise DataError(
            f"combine: {len(missing)} rows of {primary.name!r} have no match at {secondary.name!r}"
        )
    return np.array([place[int(entity)] for entity in primary.entities], dtype=np.int64)


def _fit(
    inputs: Float[Tensor, "rows inputs"],
    config: FederationConfig,
    data: PrimaryData,
    head: TaskHead,
) -> float:
    device = inputs.device
    train, validation, test = (
        torch.as_tensor(rows, device=device)
        for rows in (data.split.train, data.split.validation, data.split.test)
    )
    return fit_table(
        inputs,
        data.targets,
        head=head,
        train=train,
        validation=validation,
        test=test,
        config=BaselineConfig(),
        seed=config.federation.seed,
    ).test
