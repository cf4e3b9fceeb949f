"""Runs of a comparison that need no federation: all that they need is in one place."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor

from securevfl.config.federation import FederationConfig
from securevfl.config.link_spec import link_spec
from securevfl.config.methods import JOINED, Settings
from securevfl.core.errors import ConfigError
from securevfl.data.tables import PartyTable
from securevfl.federation.build import primary_data
from securevfl.federation.own_numbers import features_of, own_inputs, places_of
from securevfl.federation.primary import PrimaryData
from securevfl.federation.run_plan import run_facts
from securevfl.linkage.linked import LinkedSecondary
from securevfl.linking.in_process import Linker
from securevfl.linking.keys import keys_of
from securevfl.models.baselines.baseline_config import BaselineConfig, BoostingConfig
from securevfl.models.baselines.boosting import fit_boosting
from securevfl.models.baselines.fit import BaselineResult
from securevfl.models.baselines.tables import solo_inputs
from securevfl.models.fedcvt.fedcvt_config import FedCVTConfig
from securevfl.models.fedcvt.fit import KnownRows, fit_fedcvt
from securevfl.models.fedhssl.encoders import EncoderConfig
from securevfl.models.tasks import Metrics, TaskHead
from securevfl.runtime.baselines import (
    joined_inputs,
    train_alone,
    train_combined,
    train_solo,
    true_matches,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Figures:
    """The results of one method."""

    train: float
    """Like the next two, the metric that training goes by."""
    validation: float
    test: float
    validation_metrics: Metrics
    """All metrics of the task, like the next ones."""
    test_metrics: Metrics
    epochs: int
    """Epochs, or rounds of boosting, that were run."""
    best_epoch: int
    """The epoch whose model is measured."""
    chosen: str | None = None
    """Which model the primary alone is; None of other methods."""
    candidates: Mapping[str, Metrics] | None = None
    """Of the primary alone, each model's metrics of the test rows; None of other methods."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Joined:
    """Everything that a method in one place may read."""

    config: FederationConfig
    data: PrimaryData
    head: TaskHead
    primary: PartyTable
    secondaries: Sequence[PartyTable]
    features: Sequence[Float[Tensor, "records _"]]


def train_in_one_place(
    config: FederationConfig,
    tables: Mapping[str, PartyTable],
    family: str,
    settings: Settings,
    device: torch.device,
) -> tuple[Figures, TaskHead]:
    """Train a method that needs no federation, on the rows that a federation would have.

    Args:
        config: The federation file, with the method's own settings.
        tables: The primary's table; and for methods that join, every party's, with the truth.
        family: One of :data:`securevfl.config.methods.IN_ONE_PLACE`.
        settings: How it is trained.
        device: Where to compute.

    Raises:
        DataError: If a table has no truth, or some row has no match.
    """
    primary = tables[config.primary.name]
    split, _ = run_facts(config, primary)
    spec = link_spec(config)
    link = Linker(spec, keys_of(spec.keys, primary))
    data = primary_data(config, primary, split, link.primary, device=device)
    head = data.head
    if family == "alone":
        assert isinstance(settings, BaselineConfig)
        return _alone(config, primary, data, settings), head
    if family == "solo":
        assert isinstance(settings, BaselineConfig)
        solo = train_solo(config, data, settings=settings)
        return _figures(solo), head
    if family == "boosting":
        assert isinstance(settings, BoostingConfig)
        # All that the primary has, keys too, whatever joint models read: its usual model.
        own = solo_inputs(data.features, places_of(primary, data.keys))
        return _boosted(config, data, own, settings), head
    if family == "boosting-links":
        assert isinstance(settings, BoostingConfig)
        own = solo_inputs(data.features, places_of(primary, data.keys))
        parts = [
            _linked_inputs(link(keys_of(spec.keys, tables[party.name])), tables[party.name])
            for party in config.secondaries
        ]
        inputs = torch.cat([own, *(part.to(own) for part in parts)], dim=1)
        return _boosted(config, data, inputs, settings), head
    joined = _Joined(
        config=config,
        data=data,
        head=head,
        primary=primary,
        secondaries=[tables[party.name] for party in config.secondaries],
        features=[
            torch.from_numpy(features_of(party, tables[party.name])).to(device)
            for party in config.secondaries
        ],
    )
    if isinstance(settings, BoostingConfig):
        inputs = joined_inputs(
            config,
            data,
            primary=primary,
            secondaries=joined.secondaries,
            features=joined.features,
        )
        return _boosted(config, data, inputs, settings), head
    if isinstance(settings, FedCVTConfig):
        return _cross_view(joined, settings), head
    combined = train_combined(
        config,
        data,
        primary=primary,
        secondaries=joined.secondaries,
        features=joined.features,
        settings=settings,
    )
    return _figures(combined), head


def require_fitting(
    config: FederationConfig, family: str, tables: Mapping[str, PartyTable]
) -> None:
    """Refuse a method in one place that does not go with the task, the parties or the tables.

    Args:
        config: The federation file.
        family: One of :data:`securevfl.config.methods.IN_ONE_PLACE`.
        tables: The primary's table; and for methods that join, every party's.

    Raises:
        ConfigError: If the method does not fit the task or the number of parties.
        DataError: If a table has no truth, or some row has no match.
    """
    if family == "fedcvt" and config.federation.task == "regression":
        raise ConfigError("is a method for classes, not for numbers to predict")
    if family == "fedcvt" and len(config.secondaries) != 1:
        raise ConfigError(f"needs one secondary, got {len(config.secondaries)}")
    if family in JOINED:
        for party in config.secondaries:
            true_matches(tables[config.primary.name], tables[party.name])


def _alone(
    config: FederationConfig, table: PartyTable, data: PrimaryData, settings: BaselineConfig
) -> Figures:
    """Fit the candidates of the primary alone, and measure the one that validates best."""
    alone = train_alone(config, table, data, settings=settings)
    head, targets = data.head, data.targets.cpu().numpy()

    def measured(rows: Int64[np.ndarray, " rows"]) -> dict[str, Metrics]:
        return alone.measured(own_inputs(table).take(rows), targets[rows])

    trained, candidates = measured(data.split.train)[alone.chosen], measured(data.split.test)
    tested = candidates[alone.chosen]
    return Figures(
        train=head.headline(trained),
        validation=head.headline(alone.best.validation),
        test=head.headline(tested),
        validation_metrics=alone.best.validation,
        test_metrics=tested,
        epochs=alone.epochs,
        best_epoch=alone.epochs,
        chosen=alone.chosen,
        candidates=candidates,
    )


def _linked_inputs(linked: LinkedSecondary, table: PartyTable) -> Float[Tensor, "rows inputs"]:
    """Return what a row's links give: the nearest record, the mean of all, how many and how far.

    NaN, which trees take, where a row has no link.
    """
    links = linked.source.link(np.arange(linked.primary_rows, dtype=np.int64))
    present = torch.from_numpy(links.present)
    number = present.sum(dim=1, keepdim=True)
    records = torch.from_numpy(table.features)[torch.from_numpy(links.indices)]
    records = torch.where(present.unsqueeze(-1), records, 0.0)
    mean = records.sum(dim=1) / number
    nearest = torch.where(number > 0, records[:, 0], torch.nan)
    distance = torch.from_numpy(links.distances[:, :1])
    return torch.cat([nearest, mean, number, torch.where(number > 0, distance, torch.nan)], dim=1)


def _boosted(
    config: FederationConfig,
    data: PrimaryData,
    inputs: Float[Tensor, "rows inputs"],
    settings: BoostingConfig,
) -> Figures:
    split, head = data.split, data.head
    fit = fit_boosting(
        inputs,
        data.targets,
        head=head,
        train=torch.as_tensor(split.train),
        validation=torch.as_tensor(split.validation),
        test=torch.as_tensor(split.test),
        config=settings,
        seed=config.federation.seed,
    )
    assert fit.validation is not None, "a federation has validation rows"
    assert fit.validation_metrics is not None, "a federation has validation rows"
    return Figures(
        train=fit.train,
        validation=fit.validation,
        test=fit.test,
        validation_metrics=fit.validation_metrics,
        test_metrics=fit.test_metrics,
        epochs=fit.grown,
        best_epoch=fit.iterations,
    )


def _cross_view(joined: _Joined, settings: FedCVTConfig) -> Figures:
    """Train FedCVT: rows without labels count as aligned, and no row is held back unaligned."""
    head, split, device = joined.head, joined.data.split, joined.data.features.device
    match = torch.as_tensor(true_matches(joined.primary, joined.secondaries[0]), device=device)
    views = (joined.data.features, joined.features[0][match])
    known = torch.as_tensor(split.train, device=device)
    all_rows = torch.cat([known, torch.as_tensor(split.unlabelled, device=device)])
    network = fit_fedcvt(
        views,
        joined.data.targets.long(),
        classes=2 if head.task == "binary" else head.outputs,
        rows=KnownRows(labelled=known, aligned=all_rows, local=all_rows),
        encoder=EncoderConfig(hidden=settings.hidden, width=settings.width),
        config=settings,
        seed=joined.config.federation.seed,
    )
    epochs = settings.passes(len(known))

    @torch.no_grad()
    def outputs_of(rows: Tensor) -> tuple[Tensor, Tensor]:
        outputs = network(views[0][rows], views[1][rows])
        if head.task == "binary":
            outputs = outputs[:, 1:] - outputs[:, :1]
        return outputs, joined.data.targets[rows]

    def measure(rows: Tensor) -> Metrics:
        return head.metrics(*outputs_of(rows), threshold=threshold)

    validation = torch.as_tensor(split.validation, device=device)
    threshold = head.choose_threshold(*outputs_of(validation))
    validated = measure(validation)
    tested = measure(torch.as_tensor(split.test, device=device))
    return Figures(
        train=head.headline(measure(known)),
        validation=head.headline(validated),
        test=head.headline(tested),
        validation_metrics=validated,
        test_metrics=tested,
        epochs=epochs,
        best_epoch=epochs,
    )


def _figures(fit: BaselineResult) -> Figures:
    return Figures(
        train=fit.train,
        validation=fit.validation,
        test=fit.test,
        validation_metrics=fit.validation_metrics,
        test_metrics=fit.test_metrics,
        epochs=fit.epochs,
        best_epoch=fit.best_epoch,
    )
