"""Methods of a comparison that train on pooled tables."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
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
from securevfl.lab.methods import JOINED, BoostingConfig, Settings
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


def solo_inputs(
    features: Float[Tensor, "rows features"], keys: Float[Tensor, "rows dimension"] | None
) -> Float[Tensor, "rows inputs"]:
    """Return the primary's own inputs; ``keys`` is None if they are no inputs."""
    if keys is None:
        return features
    return torch.cat([features, keys.to(features.dtype)], dim=1)


def combined_inputs(
    primary: Float[Tensor, "rows inputs"],
    secondaries: Sequence[Float[Tensor, "_ _"]],
    matches: Sequence[Int[Tensor, " _"]],
) -> Float[Tensor, "rows all_inputs"]:
    """Join the true match of every row at every secondary to the primary's own inputs.

    Args:
        primary: Result of :func:`solo_inputs`.
        secondaries: Each secondary's features, its own rows in its own order.
        matches: For each secondary, the number of the record that truly belongs to each row.

    Raises:
        DataError: If a match points outside its table, or their numbers differ.
    """
    if len(secondaries) != len(matches):
        raise DataError(f"combine: {len(secondaries)} tables but {len(matches)} lists of matches")
    columns = [primary]
    for number, (features, match) in enumerate(zip(secondaries, matches, strict=True), 1):
        if len(match) != len(primary):
            raise DataError(
                f"combine: secondary {number} has {len(match)} matches for {len(primary)} rows"
            )
        if not bool(((match >= 0) & (match < len(features))).all()):
            raise DataError(
                f"combine: secondary {number} has no true match for some rows; "
                f"combine needs one for every row"
            )
        columns.append(features[match].to(primary.dtype))
    return torch.cat(columns, dim=1)


@dataclass(frozen=True, kw_only=True)
class BaselineResult:
    """A perceptron with the weights of the epoch that validated best, and its figures."""

    figures: MethodFigures
    model: MLP = field(repr=False)


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
) -> BaselineResult:
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
    return BaselineResult(figures=figures, model=model)


def train_solo(
    config: FederationConfig, data: PrimaryData, *, settings: BaselineConfig | None = None
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


def places_of(table: PartyTable, keys: Float[Tensor, "rows keys"]) -> Float[Tensor, "rows places"]:
    """Return the columns of a table's numeric keys that are places or times."""
    return keys[:, torch.as_tensor(place_keys(table), device=keys.device, dtype=torch.int64)]


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
        raise DataError("needs linkage.truth, the column with the true matches")
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


_Trees: TypeAlias = HistGradientBoostingClassifier | HistGradientBoostingRegressor

# What a class that no training row has gets: less than any other, and still finite.
_NEVER = -1e9


@dataclass(frozen=True, kw_only=True, eq=False)
class BoostingResult:
    """Figures of the chosen number of trees, and outputs on test rows."""

    figures: MethodFigures
    outputs: Float[Tensor, "test_rows outputs"]
    """Outputs on the test rows, as :class:`TaskHead` reads them."""


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
) -> BoostingResult:
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
    return BoostingResult(figures=figures, outputs=outputs)


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
    head = data.head
    if family == "alone":
        assert isinstance(settings, BaselineConfig)
        return _alone(config, primary, data, settings), head
    if family == "solo":
        assert isinstance(settings, BaselineConfig)
        return train_solo(config, data, settings=settings).figures, head
    if family in ("boosting", "boosting-links"):
        assert isinstance(settings, BoostingConfig)
        # All that the primary has, keys too, whatever joint models read: its usual model.
        inputs = solo_inputs(data.features, places_of(primary, data.keys))
        if family == "boosting-links":
            parts = [
                _linked_inputs(link(keys_of(spec.keys, tables[party.name])), tables[party.name])
                for party in config.secondaries
            ]
            inputs = torch.cat([inputs, *(part.to(inputs) for part in parts)], dim=1)
        return _train_boosting(config, data, inputs, settings), head
    joined: dict[str, Any] = {
        "primary": primary,
        "secondaries": [tables[party.name] for party in config.secondaries],
        "features": [
            torch.from_numpy(features_of(party, tables[party.name])).to(device)
            for party in config.secondaries
        ],
    }
    if isinstance(settings, BoostingConfig):
        return _train_boosting(config, data, joined_inputs(config, data, **joined), settings), head
    return train_combined(config, data, **joined, settings=settings).figures, head


def require_fitting(
    config: FederationConfig, family: str, tables: Mapping[str, PartyTable]
) -> None:
    """Refuse a method on pooled tables that does not fit them.

    Args:
        config: The federation file.
        family: One of :data:`securevfl.lab.methods.IN_ONE_PLACE`.
        tables: The primary's table; and for methods that join, every party's.

    Raises:
        DataError: If a table has no truth, or some row has no match.
    """
    if family in JOINED:
        for party in config.secondaries:
            true_matches(tables[config.primary.name], tables[party.name])


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


def _train_boosting(
    config: FederationConfig,
    data: PrimaryData,
    inputs: Float[Tensor, "rows inputs"],
    settings: BoostingConfig,
) -> MethodFigures:
    split, head = data.split, data.head
    return fit_boosting(
        inputs,
        data.targets,
        head=head,
        train=torch.as_tensor(split.train),
        validation=torch.as_tensor(split.validation),
        test=torch.as_tensor(split.test),
        config=settings,
        seed=config.federation.seed,
    ).figures
