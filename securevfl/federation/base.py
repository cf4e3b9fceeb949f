"""The base of a run: margins of the primary alone, which the joint model corrects."""

from typing import Any

from securevfl.config.base import OWN
from securevfl.config.federation import FederationConfig
from securevfl.core.errors import ConfigError
from securevfl.data.tables import PartyTable
from securevfl.federation.own_numbers import own_inputs
from securevfl.federation.primary import PrimaryData
from securevfl.models.alone.margins import CrossFitted, cross_fit


def require_estimator(config: FederationConfig, estimator: Any) -> None:
    """Refuse to train by a file whose estimator only Python could hand over.

    Args:
        config: The federation file.
        estimator: What was handed over; None: nothing was.

    Raises:
        ConfigError: Saying what to do.
    """
    if config.base.estimator == OWN and estimator is None:
        raise ConfigError(
            f'base.estimator: "python" is {config.base.described}, which this program was not '
            f"given; hand it to securevfl.simulate(base=...), or name another estimator"
        )


def fit_base(
    config: FederationConfig, table: PartyTable, data: PrimaryData, estimator: Any
) -> CrossFitted:
    """Fit the base to the labelled training rows, linked or not.

    Args:
        config: The federation file, which names an estimator.
        table: The primary's table.
        data: The same as tensors.
        estimator: Of scikit-learn, where Python handed one over.

    Raises:
        ConfigError: If the estimator is none for the task.
        DataError: If it can't be fitted to these rows.
    """
    require_estimator(config, estimator)
    return cross_fit(
        config.base.estimator if estimator is None else estimator,
        own_inputs(table),
        data.targets.cpu().numpy(),
        data.head,
        train=data.split.train,
        seed=config.federation.seed,
    )
