"""Methods of a comparison that train on pooled tables."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeAlias

import numpy as np
import torch
from jaxtyping import Float, Int, Int64, Shaped
from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor
from torch import Tensor

from securevfl.config.federation import FederationConfig, key_spec, link_spec
from securevfl.core.conventions import derive_seed
from securevfl.core.errors import DataError
from securevfl.data.tables import PartyTable
from securevfl.federation.base import features_of, own_inputs, place_keys, train_alone
from securevfl.federation.build import primary_data
from securevfl.federation.rounds.primary import PrimaryData
from securevfl.federation.run_plan import run_facts
from securevfl.lab.methods import ALONE, JOINED, BoostingConfig, Settings
from securevfl.linkage.spec import LinkedSecondary
from securevfl.linkage.stage.linking import Linker
from securevfl.linkage.stage.party_keys import keys_of
from securevfl.models.alone.margins import BaselineConfig, perceptron_outputs, train_perceptron
from securevfl.models.layers import MLP
from securevfl.models.tasks import HALF, Metrics, TaskHead


@dataclass(frozen=True, kw_only=True, slots=True)
class MethodFigures:
    """Results of one method."""

    train: float
    """Metric of training on training rows; NaN if they lack a class that it needs."""
    validation: float
    test: float
    validation_metrics: Metrics
    """All metrics of the task, like the next ones."""
    test_metrics: Metrics
    epochs: int
    """Epochs, or rounds of boosting, that were run."""
    best_epoch: int
    """Epoch of the measured model."""
    chosen: str | None = None
    """Name of the primary's chosen local model; None for other methods."""
    candidates: Mapping[str, Metrics] | None = None
    """Test metrics of each local model of the primary; None for other methods."""


def fit_table(
    inputs: Float[Tensor, "rows inputs"],
    targets: Shaped[Tensor, " rows"],
    *,
    head: TaskHead,
    train: Int[Tensor, " train_rows"],
    validation: Int[Tensor, " validation_rows"],
    test: Int[Tensor, " test_rows"],
    config: BaselineConfig,
    seed: int,
) -> tuple[MethodFigures, MLP]:
    """Train a perceptron with early stopping on the validation rows, and measure all three splits.

    Args:
        inputs: One table, float32.
        targets: As :class:`TaskHead` wants them.
        head: Loss and metrics.
        train: Rows to learn from.
        validation: Rows that choose the epoch.
        test: Rows that are reported.
        config: The perceptron and its training.
        seed: Run seed of initialisation, shuffling and dropout.

    Returns:
        The figures, and the perceptron with the weights of the epoch that validated best.

    Raises:
        DataError: If a group of rows is empty, or the metric that training goes by is not defined
            for its labels.
    """
    if len(test) == 0:
        raise DataError("the baseline has no test rows")
    model, best_epoch, epochs = train_perceptron(
        inputs, targets, head, train=train, validation=validation, config=config, seed=seed
    )
    threshold = head.choose_threshold(
        perceptron_outputs(model, inputs[validation]), targets[validation]
    )
    validated, tested = (
        head.metrics(perceptron_outputs(model, inputs[rows]), targets[rows], threshold=threshold)
        for rows in (validation, test)
    )
    learned = math.nan
    if head.is_defined(targets[train]):
        learned = head.metric(
            perceptron_outputs(model, inputs[train]), targets[train], threshold=threshold
        )
    figures = MethodFigures(
        train=learned,
        validation=head.headline(validated),
        test=head.headline(tested),
        validation_metrics=validated,
        test_metrics=tested,
        epochs=epochs,
        best_epoch=best_epoch,
    )
    return figures, model


def true_matches(primary: PartyTable, secondary: PartyTable) -> Int64[np.ndarray, " rows"]:
    """Return the number of the record that truly belongs to each of the primary's rows.

    Raises:
        DataError: If a table has no truth, or some row has no match.
    """
    if primary.entities is None or secondary.entities is None:
        raise DataError("needs linkage.truth, the column with the true matches")
    place = {int(entity): row for row, entity in enumerate(secondary.entities)}
    missing = [entity for entity in primary.entities.tolist() if entity not in place]
    if missing:
        raise DataError(
            f"{len(missing)} rows of {primary.name!r} have no match at {secondary.name!r}"
        )
    return np.array([place[int(entity)] for entity in primary.entities], dtype=np.int64)


_Trees: TypeAlias = HistGradientBoostingClassifier | HistGradientBoostingRegressor

# What a class that no training row has gets: less than any other, and still finite.
_NEVER = -1e9


def fit_boosting(
    inputs: Float[Tensor, "rows inputs"],
    targets: Shaped[Tensor, " rows"],
    *,
    head: TaskHead,
    train: Int[Tensor, " train_rows"],
    validation: Int[Tensor, " validation_rows"],
    test: Int[Tensor, " test_rows"],
    config: BoostingConfig,
    seed: int,
) -> tuple[MethodFigures, Float[Tensor, "test_rows outputs"]]:
    """Boost on the training rows until the validation rows no longer gain.

    The validation rows end boosting by their loss, and choose leaves and rounds by the metric.

    Args:
        inputs: One table, as :func:`fit_table` makes it.
        targets: As :class:`TaskHead` wants them.
        head: Loss and metrics.
        train: Rows to learn from.
        validation: Rows that choose; without any, the first number of leaves and all rounds.
        test: Rows that are reported.
        config: The trees.
        seed: Run seed.

    Returns:
        The figures of the chosen number of trees, and the outputs on test rows, as
        :class:`TaskHead` reads them.

    Raises:
        DataError: If there is no training or test row, only one class to learn, or a split for
            whose labels the metric that training goes by is not defined.
    """
    for name, rows in (("training", train), ("test", test)):
        if len(rows) == 0:
            raise DataError(f"the baseline has no {name} rows")
    table, labels = inputs.cpu().numpy(), targets.cpu().numpy()
    own, shown = train.cpu().numpy(), validation.cpu().numpy()
    if head.task != "regression" and len(np.unique(labels[own])) < 2:
        raise DataError("boosting: its training rows are all of one class")
    known = targets.cpu()

    def outputs_by_round(model: _Trees, rows: Tensor) -> Iterator[Tensor]:
        return _outputs_by_round(model, table[rows.cpu().numpy()], head)

    def of_round(rows: Tensor, number: int) -> Tensor:
        return next(islice(outputs_by_round(model, rows), number - 1, None))

    # A class that no training row has says nothing of when to end.
    of_known = shown if head.task == "regression" else shown[np.isin(labels[shown], labels[own])]
    best, rounds, threshold = math.nan, config.iterations, HALF
    fitted = []
    for leaves in config.leaves if len(of_known) else config.leaves[:1]:
        candidate = _model(config, head, seed, leaves=leaves, stops=len(of_known) > 0)
        if len(of_known):
            candidate.fit(table[own], labels[own], X_val=table[of_known], y_val=labels[of_known])
        else:
            candidate.fit(table[own], labels[own])
        fitted.append(candidate)
    model = fitted[0]
    for candidate in fitted if len(validation) else ():
        for number, outputs in enumerate(outputs_by_round(candidate, validation), 1):
            true = known[validation.cpu()]
            cut = head.choose_threshold(outputs, true)
            value = head.metric(outputs, true, threshold=cut)
            if head.is_better(value, best):
                model, best, rounds, threshold = candidate, value, number, cut
    validated: Metrics = {}
    if len(validation):
        validated = head.metrics(
            of_round(validation, rounds), known[validation.cpu()], threshold=threshold
        )
    outputs = of_round(test, rounds)
    tested = head.metrics(outputs, known[test.cpu()], threshold=threshold)
    figures = MethodFigures(
        train=head.metric(of_round(train, rounds), known[train.cpu()], threshold=threshold),
        validation=head.headline(validated) if validated else math.nan,
        test=head.headline(tested),
        validation_metrics=validated,
        test_metrics=tested,
        epochs=model.n_iter_,
        best_epoch=rounds,
    )
    return figures, outputs


def _model(
    config: BoostingConfig, head: TaskHead, seed: int, *, leaves: int, stops: bool
) -> _Trees:
    kind = (
        HistGradientBoostingRegressor
        if head.task == "regression"
        else HistGradientBoostingClassifier
    )
    return kind(
        max_iter=config.iterations,
        learning_rate=config.learning_rate,
        max_leaf_nodes=leaves,
        min_samples_leaf=config.smallest_leaf,
        early_stopping=stops,
        n_iter_no_change=config.patience,
        random_state=derive_seed(seed, "boosting") % 2**32,
    )


def _outputs_by_round(
    model: _Trees, table: Float[np.ndarray, "rows inputs"], head: TaskHead
) -> Iterator[Float[Tensor, "rows outputs"]]:
    """Yield the outputs after each round, as :class:`TaskHead` reads them."""
    if isinstance(model, HistGradientBoostingRegressor):
        for predicted in model.staged_predict(table):
            yield torch.as_tensor(predicted, dtype=torch.float32)[:, None]
        return
    known = torch.as_tensor(model.classes_.astype(np.int64))
    for decided in model.staged_decision_function(table):
        scores = torch.as_tensor(decided, dtype=torch.float32).reshape(len(table), -1)
        if head.task == "binary":
            yield scores
            continue
        if scores.shape[1] == 1:  # two classes of several: one score, of the second
            scores = torch.cat([-scores, scores], dim=1)
        outputs = torch.full((len(table), head.outputs), _NEVER)
        outputs[:, known] = scores
        yield outputs


def train_in_one_place(
    config: FederationConfig,
    tables: Mapping[str, PartyTable],
    family: str,
    settings: Settings,
    device: torch.device,
) -> tuple[MethodFigures, TaskHead]:
    """Train a method on pooled tables, on the rows that a federation would have.

    Args:
        config: The federation file, with the method's own settings.
        tables: The primary's table; and for methods that join, every party's, with the truth.
        family: One of :data:`securevfl.lab.methods.IN_ONE_PLACE`.
        settings: Settings of the method.
        device: Device of the models.

    Raises:
        DataError: If a table has no truth, or some row has no match.
    """
    primary = tables[config.primary.name]
    split, _ = run_facts(config, primary)
    spec = link_spec(config)
    link = Linker(spec, keys_of(spec.keys, primary))
    data = primary_data(config, primary, split, link.primary, device=device)
    if family == "alone":
        assert isinstance(settings, BaselineConfig)
        return _alone(config, primary, data, settings), data.head
    inputs = method_inputs(config, tables, family, data, link)
    rows = {
        part: torch.as_tensor(getattr(split, part), device=device)
        for part in ("train", "validation", "test")
    }
    common: dict[str, Any] = {"head": data.head, **rows, "seed": config.federation.seed}
    if isinstance(settings, BoostingConfig):
        return fit_boosting(inputs, data.targets, config=settings, **common)[0], data.head
    return fit_table(inputs, data.targets, config=settings, **common)[0], data.head


def method_inputs(
    config: FederationConfig,
    tables: Mapping[str, PartyTable],
    family: str,
    data: PrimaryData,
    link: Linker,
) -> Float[Tensor, "rows inputs"]:
    """Return the columns that a method on pooled tables learns from, one row of the primary each.

    Args:
        config: The federation file.
        tables: As of :func:`train_in_one_place`.
        family: One of :data:`securevfl.lab.methods.IN_ONE_PLACE`.
        data: The primary's tensors.
        link: Links the primary's keys with a secondary's.

    Raises:
        DataError: If a table has no truth, or some row has no match.
    """
    primary, features = tables[config.primary.name], data.features
    # Columns of numeric keys that are places or times.
    places = data.keys[:, torch.as_tensor(place_keys(primary), device=data.keys.device)]
    # Keys are inputs of all methods or of none: what they add would be taken for a partner's worth.
    keys = [data.keys] if config.model.keys_as_features else []
    secondaries = () if family in ALONE else config.secondaries
    others, spec = [tables[party.name] for party in secondaries], link_spec(config)
    if family in ("boosting", "boosting-links"):
        # All that the primary has, keys too, whatever joint models read: its usual model.
        parts = [features, places]
        if family == "boosting-links":
            parts += [_linked_inputs(link(keys_of(spec.keys, other)), other) for other in others]
    else:
        parts = [features, *keys]
    if family in JOINED:
        for party, other in zip(secondaries, others, strict=True):
            parts.append(torch.from_numpy(features_of(party, other)[true_matches(primary, other)]))
        if family == "combine" and not keys and key_spec(config).are_numbers:
            # [FedSim] section 6.1, "Dataset": common features are inputs of this method alone.
            parts.append(places)
    return torch.cat([part.to(features) for part in parts], dim=1)


def _alone(
    config: FederationConfig, table: PartyTable, data: PrimaryData, settings: BaselineConfig
) -> MethodFigures:
    """Fit the candidates of the primary alone, and measure the one that validates best."""
    alone = train_alone(config, table, data, network=settings)
    head, targets = data.head, data.targets.cpu().numpy()

    def measure(rows: Int64[np.ndarray, " rows"]) -> dict[str, Metrics]:
        return alone.measure(own_inputs(table).take(rows), targets[rows])

    trained, candidates = measure(data.split.train)[alone.chosen], measure(data.split.test)
    tested = candidates[alone.chosen]
    return MethodFigures(
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
    """Return inputs from a row's links: nearest record, mean record, number and distance.

    They are NaN, which trees accept, if a row has no link.
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
