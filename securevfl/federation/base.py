"""The base of a run, which the joint model is averaged with, and the choice of who answers."""

import hashlib
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor

from securevfl.config.federation import FederationConfig
from securevfl.config.sections import OWN
from securevfl.core.errors import ConfigError
from securevfl.data.rows import RowSplit
from securevfl.data.tables import PartyTable
from securevfl.federation.party_inputs import own_inputs
from securevfl.federation.rounds.primary import Primary, PrimaryData
from securevfl.models.alone.choice import Alone, Decision, Model, fit_alone
from securevfl.models.alone.margins import CrossFitted, MarginModel, cross_fit
from securevfl.models.alone.perceptron import BaselineConfig
from securevfl.models.alone.saving import require_keepable
from securevfl.models.fitted_top import MixedTop
from securevfl.models.tasks import Metrics


def require_estimator(config: FederationConfig, base: Any, top: Any = None) -> None:
    """Refuse to train by a file whose estimators only Python could hand over.

    Args:
        config: The federation file.
        base: What was handed over as the base; None: nothing was.
        top: The same as the top model.

    Raises:
        ConfigError: Saying what to do.
    """
    if config.base.estimator == OWN and base is None:
        raise ConfigError(
            f'base.estimator: "python" is {config.base.described}, which this program was not '
            f"given; hand it to securevfl.simulate(base=...), or name another estimator"
        )
    if config.top is not None and config.top.name == OWN and top is None:
        raise ConfigError(
            f"model.top: is {config.top.described}, which this program was not given; hand it to "
            f'securevfl.simulate(top=...), or write "boosting" or "linear"'
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class Base:
    """What the joint model is averaged with."""

    model: Model
    """Fitted to all labelled training rows."""
    margins: Float[Tensor, "rows outputs"] = field(repr=False)
    """Margins of all rows, out of fold on training rows."""
    fitted_to: str
    """A digest of the rows that fitted and chose it."""
    alone: Alone | None = None
    """The models of the primary alone, where the base was chosen among them."""
    cpu_seconds: float = 0.0
    """That fitting it took."""


def fit_base(
    config: FederationConfig, table: PartyTable, data: PrimaryData, estimator: Any
) -> Base:
    """Fit the base to the labelled training rows, linked or not.

    Args:
        config: The federation file, which names an estimator.
        table: The primary's table.
        data: The same as tensors.
        estimator: Of scikit-learn, where Python handed one over.

    Raises:
        ConfigError: If the estimator is none for the task, or can't be saved.
        DataError: If it can't be fitted to these rows.
    """
    begin = time.process_time()
    inputs, targets = own_inputs(table), data.targets.cpu().numpy()
    split, seed, device = data.split, config.federation.seed, data.features.device
    name = config.base.estimator
    if name != "best":
        fitted = cross_fit(
            name if estimator is None else estimator,
            inputs,
            targets,
            data.head,
            train=split.train,
            seed=seed,
        )
        # Now, rather than when everything is trained.
        require_keepable(fitted.model)
        return Base(
            model=fitted.model,
            margins=torch.from_numpy(fitted.margins).to(device),
            fitted_to=digest_of_rows(split),
            cpu_seconds=time.process_time() - begin,
        )
    alone = train_alone(config, table, data, with_margins=True)
    margins = alone.best.margins
    assert margins is not None, "they were asked for"
    return Base(
        model=alone.best.model,
        margins=torch.from_numpy(margins).to(device),
        fitted_to=digest_of_rows(split),
        alone=alone,
        cpu_seconds=time.process_time() - begin,
    )


def digest_of_rows(split: RowSplit) -> str:
    """Return a digest of the training and validation rows, on which a base depends."""
    made = hashlib.sha256(np.ascontiguousarray(split.train).tobytes())
    made.update(b"validation" + np.ascontiguousarray(split.validation).tobytes())
    return made.hexdigest()


def train_alone(
    config: FederationConfig,
    table: PartyTable,
    data: PrimaryData,
    *,
    network: BaselineConfig | None = None,
    fitted: Mapping[str, CrossFitted] | None = None,
    with_margins: bool = False,
) -> Alone:
    """Fit the candidates of the primary alone, on all that it has, and choose one.

    Args:
        config: The federation file.
        table: The primary's table.
        data: The same as tensors.
        network: The network and its training; default: :class:`BaselineConfig`.
        fitted: Candidates that are fitted already, by name.
        with_margins: Whether margins of all rows are wanted.

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
        network=network,
        fitted=fitted,
        with_margins=with_margins,
    )


@dataclass(kw_only=True, eq=False)
class Choice:
    """Who answers: the joint model, or the best model of the primary alone."""

    base: Model
    """Model that the joint model is averaged with."""
    base_margins: Float[Tensor, "rows outputs"] = field(repr=False)
    """Its margins for all rows, out of fold on training rows."""
    alone: Alone
    decision: Decision
    validation: Metrics
    """Every metric of the validation rows, for the model that answers."""
    threshold: float
    """Decision threshold of the model that answers, for a binary task."""
    margins: Float[Tensor, "rows outputs"] = field(repr=False)
    """The local baseline's margins for all rows."""
    own: Primary | None = field(default=None, repr=False)
    """The primary's own network without partners, weighed with the base by its own lambda; None
    where the family has none."""
    mixed: dict[str, float] | None = None
    """Weight of trees in the top model, and their gain out of fold, where they were tried."""
    joint_test: Metrics | None = None
    """The joint model's metrics on test rows, also where the primary alone answers."""

    def asks(self, primary: Primary) -> bool:
        """Return whether the joint model's outputs for the test rows take the secondaries.

        Where lambda is 0, the joint model is the base, and nobody is asked;
        but that would tell something of labels, so where these have an epsilon all are asked.
        """
        return self.decision.scale > 0 or primary.always_asks

    def joint_outputs(self, primary: Primary) -> Float[Tensor, "rows outputs"]:
        """Return the joint model's outputs for the test rows, and measure it on them.

        Reveals:
            To the primary: one average a test row. To the secondaries: the rows' ids.
        """
        data = primary.data
        base = self.base_margins
        rows = torch.as_tensor(data.split.test, device=base.device)
        asked = self.asks(primary)
        joint = primary.predict(data.split.test, "test") if asked else base[rows]
        self.joint_test = data.head.metrics(joint, data.targets[rows], threshold=primary.threshold)
        return joint

    def select_outputs(
        self, joint: Float[Tensor, "rows outputs"], rows: Int64[np.ndarray, " rows"]
    ) -> Float[Tensor, "rows outputs"]:
        """Return the outputs of the model that answers, for rows that the joint one has seen."""
        if self.decision.used == "joint":
            return joint
        return self.margins[torch.as_tensor(rows, device=self.margins.device)]

    def as_json(self, config: FederationConfig) -> dict[str, Any]:
        """Return what ``metrics.json`` says of it."""
        return {
            "estimator": config.base.estimator,
            "alone": self.alone.chosen,
            **self.decision.as_json(),
            **({} if self.own is None else {"own_lambda": self.own.scale}),
            **({} if self.mixed is None else {"top": self.mixed}),
        }


def choose(
    config: FederationConfig,
    table: PartyTable,
    primary: Primary,
    base: Base,
    *,
    own: Primary | None = None,
) -> Choice:
    """Fit the local baseline, and decide who answers.

    The joint model has to be better than the local baseline, and than the primary's own network
    without partners, which is weighed with the base by the same rule.

    Args:
        config: The federation file.
        table: The primary's table.
        primary: At its best epoch; its lambda is set.
        base: What it is averaged with.
        own: The network without partners, at its best epoch; its lambda is set.

    Reveals:
        Nothing: nobody is asked.
    """
    data, alone = primary.data, base.alone
    if alone is None:
        assert isinstance(base.model, MarginModel), "others were chosen among all"
        before = CrossFitted(model=base.model, margins=base.margins.cpu().numpy())
        alone = train_alone(config, table, data, fitted={config.base.estimator: before})
    margins = torch.from_numpy(alone.margins(own_inputs(table))).to(data.features.device)
    decision = primary.decide(margins, base_is_alone=base.alone is not None)
    if own is not None:
        own.decide(margins, base_is_alone=base.alone is not None)
        if decision.used == "joint" and not primary.is_better_than(own):
            decision = replace(decision, used="alone")
    joint, top = decision.used == "joint", primary.top
    return Choice(
        base=base.model,
        base_margins=base.margins,
        alone=alone,
        decision=decision,
        validation=primary.best_validation if joint else alone.best.validation,
        threshold=primary.threshold if joint else alone.best.threshold,
        margins=margins,
        own=own,
        mixed=top.as_json() if isinstance(top, MixedTop) and primary.best_epoch else None,
    )
