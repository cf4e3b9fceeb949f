"""Models that need no federation: the primary alone, and combine (all in one place)."""

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor

from securevfl.config.federation import FederationConfig
from securevfl.config.link_spec import key_spec
from securevfl.core.errors import DataError
from securevfl.data.tables import PartyTable
from securevfl.federation.own_numbers import own_inputs, places_of
from securevfl.federation.rounds.primary import PrimaryData
from securevfl.models.alone.choice import Alone, fit_alone
from securevfl.models.alone.perceptron import (
    BaselineConfig,
    BaselineResult,
    combined_inputs,
    fit_table,
    solo_inputs,
)


def train_alone(
    config: FederationConfig,
    table: PartyTable,
    data: PrimaryData,
    *,
    settings: BaselineConfig | None = None,
) -> Alone:
    """Fit the candidates of the primary alone, on all that it has, and choose one.

    Args:
        config: The federation file.
        table: The primary's table.
        data: The same as tensors.
        settings: The network and its training; default: :class:`BaselineConfig`.

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
        network=settings,
    )


def train_solo(
    config: FederationConfig,
    data: PrimaryData,
    *,
    settings: BaselineConfig | None = None,
) -> BaselineResult:
    """Train the primary's own network on its features, and on its keys if the model has them."""
    return _fit(_own_inputs(config, data), config, data, settings)


def train_combined(
    config: FederationConfig,
    data: PrimaryData,
    *,
    primary: PartyTable,
    secondaries: Sequence[PartyTable],
    features: Sequence[Float[Tensor, "records features"]],
    settings: BaselineConfig | None = None,
) -> BaselineResult:
    """Train on all features and numeric keys, joined by the true match: the ceiling.

    Args:
        config: The federation file.
        data: The primary's tensors.
        primary: The primary's table, with the truth.
        secondaries: The secondaries' tables, with the truth.
        features: Their scaled features.
        settings: The perceptron and its training; default: :class:`BaselineConfig`.

    Raises:
        DataError: If a table has no truth, or some row has no match.
    """
    inputs = joined_inputs(
        config, data, primary=primary, secondaries=secondaries, features=features
    )
    if not config.model.keys_as_features and key_spec(config).are_numbers:
        # [FedSim] section 6.1, "Dataset": common features are inputs of this method alone.
        inputs = solo_inputs(inputs, places_of(primary, data.keys))
    return _fit(inputs, config, data, settings)


def joined_inputs(
    config: FederationConfig,
    data: PrimaryData,
    *,
    primary: PartyTable,
    secondaries: Sequence[PartyTable],
    features: Sequence[Float[Tensor, "records features"]],
) -> Float[Tensor, "rows inputs"]:
    """Return all features joined by the true match; arguments as of :func:`train_combined`.

    Raises:
        DataError: If a table has no truth, or some row has no match.
    """
    device = data.features.device
    matches = [
        torch.as_tensor(true_matches(primary, table), device=device) for table in secondaries
    ]
    return combined_inputs(_own_inputs(config, data), features, matches)


def true_matches(primary: PartyTable, secondary: PartyTable) -> Int64[np.ndarray, " rows"]:
    """Return the number of the record that truly belongs to each of the primary's rows.

    Raises:
        DataError: If a table has no truth, or some row has no match.
    """
    if primary.entities is None or secondary.entities is None:
        raise DataError("needs linkage.truth, the column that tells true matches")
    place = {int(entity): row for row, entity in enumerate(secondary.entities)}
    missing = [entity for entity in primary.entities.tolist() if entity not in place]
    if missing:
        raise DataError(
            f"{len(missing)} rows of {primary.name!r} have no match at {secondary.name!r}"
        )
    return np.array([place[int(entity)] for entity in primary.entities], dtype=np.int64)


def _own_inputs(config: FederationConfig, data: PrimaryData) -> Float[Tensor, "rows inputs"]:
    # Keys are inputs of all methods or of none: what they add would be taken for a partner's worth.
    return solo_inputs(data.features, data.keys if config.model.keys_as_features else None)


def _fit(
    inputs: Float[Tensor, "rows inputs"],
    config: FederationConfig,
    data: PrimaryData,
    settings: BaselineConfig | None,
) -> BaselineResult:
    device = inputs.device
    train, validation, test = (
        torch.as_tensor(rows, device=device)
        for rows in (data.split.train, data.split.validation, data.split.test)
    )
    return fit_table(
        inputs,
        data.targets,
        head=data.head,
        train=train,
        validation=validation,
        test=test,
        config=settings or BaselineConfig(),
        seed=config.federation.seed,
    )
