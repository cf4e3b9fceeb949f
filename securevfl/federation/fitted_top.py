"""What of a run differs where its top model is an estimator: how it is built, and what it reads."""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from securevfl.config.base import OWN
from securevfl.config.federation import FederationConfig
from securevfl.core.errors import ConfigError
from securevfl.data.tables import PartyTable
from securevfl.federation.own_numbers import own_inputs
from securevfl.models.fitted_top import FittedTop
from securevfl.models.tasks import TaskHead


def require_top(config: FederationConfig, estimator: Any) -> None:
    """Refuse to train by a file whose top model only Python could hand over.

    Args:
        config: The federation file.
        estimator: What was handed over; None: nothing was.

    Raises:
        ConfigError: Saying what to do.
    """
    if config.top is not None and config.top.name == OWN and estimator is None:
        raise ConfigError(
            f"model.top: is {config.top.described}, which this program was not given; hand it to "
            f'securevfl.simulate(top=...), or write "boosting" or "linear"'
        )


def build_fitted_top(config: FederationConfig, table: PartyTable, head: TaskHead) -> FittedTop:
    """Return a top model that is not fitted yet.

    Args:
        config: The federation file, which names an estimator.
        table: The primary's table, or new rows of it.
        head: The task.
    """
    positions, width = config.family.cut_shape(config.model)
    reads = config.family.needs_similarities(config.model)
    own = own_inputs(table)
    return FittedTop(
        head,
        words=own.words,
        own=own.values.shape[1],
        released=positions * width,
        similarities=len(config.secondaries) * config.model.neighbours if reads else 0,
    )


def read_by_top(
    config: FederationConfig,
    table: PartyTable,
    *,
    features: Float[Tensor, "rows features"],
    keys: Float[Tensor, "rows dimension"],
) -> tuple[Tensor, Tensor]:
    """Return the primary's own numbers as the top model reads them, as features and as keys.

    An estimator reads all of them unscaled, as features, and no keys.

    Args:
        config: The federation file.
        table: The rows.
        features: Scaled, as a network reads them.
        keys: Likewise.
    """
    if config.top is None or config.top.corrects:
        return features, keys
    own = torch.from_numpy(own_inputs(table).values).to(features.device)
    return own, own[:, :0]
