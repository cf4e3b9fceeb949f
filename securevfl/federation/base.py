"""The base of a run: margins of the primary alone, which the joint model corrects."""

from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from securevfl.config.base import OWN
from securevfl.config.federation import FederationConfig
from securevfl.core.errors import ConfigError
from securevfl.data.tables import PartyTable
from securevfl.federation.own_numbers import own_inputs
from securevfl.federation.primary import Primary, PrimaryData
from securevfl.models.alone.choice import Alone, fit_alone
from securevfl.models.alone.keeping import require_keepable
from securevfl.models.alone.margins import CrossFitted, MarginModel, cross_fit
from securevfl.models.alone.rule import Decision
from securevfl.models.tasks import Metrics


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
    fitted = cross_fit(
        config.base.estimator if estimator is None else estimator,
        own_inputs(table),
        data.targets.cpu().numpy(),
        data.head,
        train=data.split.train,
        seed=config.federation.seed,
    )
    # Now, rather than when everything is trained.
    require_keepable(fitted.model)
    return fitted


@dataclass(kw_only=True, eq=False)
class Choice:
    """Who answers: the joint model, or the best model of the primary alone."""

    base: MarginModel
    """What corrections are added to."""
    alone: Alone
    decision: Decision
    validation: Metrics
    """Of the model that answers, every metric of the validation rows."""
    threshold: float
    """Of the model that answers, of a binary task."""
    margins: Float[Tensor, "rows outputs"] = field(repr=False)
    """Of the primary alone, of all rows."""
    joint_test: Metrics | None = None
    """Of the joint model, every metric of the test rows, whoever answers."""

    def tested(self, primary: Primary) -> Float[Tensor, "rows outputs"]:
        """Return the outputs for the test rows, and measure the joint model on them.

        Where the correction counts for nothing, the joint model is the base, and nobody is asked.

        Reveals:
            To the primary: one average a test row. To the secondaries: the rows' ids.
        """
        data = primary.data
        assert data.base is not None, "outputs are added to it"
        rows = torch.as_tensor(data.split.test, device=data.base.device)
        counts = self.decision.scale > 0
        joint = primary.predict(data.split.test, "test") if counts else data.base[rows]
        targets = data.targets[rows]
        self.joint_test = data.head.metrics(joint, targets, threshold=primary.threshold)
        return joint if self.decision.used == "joint" else self.margins[rows]

    def as_json(self, config: FederationConfig) -> dict[str, Any]:
        """Return what ``metrics.json`` says of it."""
        return {
            "estimator": config.base.estimator,
            "alone": self.alone.chosen,
            **self.decision.as_json(),
        }


def choose(
    config: FederationConfig, table: PartyTable, primary: Primary, base: MarginModel
) -> Choice:
    """Fit the models of the primary alone, and decide by the validation rows who answers.

    Args:
        config: The federation file.
        table: The primary's table.
        primary: At its best epoch; how it counts corrections is set.
        base: What they are added to.

    Reveals:
        Nothing: nobody is asked.
    """
    data, inputs = primary.data, own_inputs(table)
    alone = fit_alone(
        inputs,
        data.targets.cpu().numpy(),
        data.head,
        train=data.split.train,
        validation=data.split.validation,
        seed=config.federation.seed,
        fitted={config.base.estimator: base},
    )
    margins = torch.from_numpy(alone.margins(inputs)).to(data.features.device)
    decision = primary.decide(margins)
    joint = decision.used == "joint"
    return Choice(
        base=base,
        alone=alone,
        decision=decision,
        validation=primary.best_validation if joint else alone.best.validation,
        threshold=primary.threshold if joint else alone.best.threshold,
        margins=margins,
    )
