"""Requests for predictions of a saved model: messages, new rows, and the answer."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import torch
from jaxtyping import Bool, Float32, Int64
from torch import Tensor, nn

from securevfl.config.federation import FederationConfig, link_spec
from securevfl.core.errors import ConfigError, DataError
from securevfl.core.memory import loading
from securevfl.core.progress import Observer, Warned, unheard
from securevfl.data.scaling import KeyScaler
from securevfl.data.tables import KeyTable, PartyTable
from securevfl.federation.base import features_of, own_inputs
from securevfl.federation.build import build_top
from securevfl.federation.rounds.exchanges import Exchange, PresentBlocks
from securevfl.federation.rounds.primaries import read_by_top
from securevfl.federation.rounds.primary import CorrectingTopModel, PrimaryInputs, TopModel
from securevfl.federation.run_plan import PredictionBudget, RunFacts, new_run, prediction_facts
from securevfl.federation.saved_model import SavedModel
from securevfl.federation.session.membership import absent_names, in_blocks
from securevfl.linkage.spec import LinkedPrimary, LinkedSecondary, LinkSpec
from securevfl.runtime.predictions import NO_KEY, Predictions, predictions_of

# New rows, as a request takes them.


@dataclass(frozen=True, kw_only=True, eq=False)
class NamedRows:
    """New rows with their names."""

    table: PartyTable
    """Encoded as the model's schema says; labels are not needed."""
    names: Sequence[Any] | None = None
    """None numbers them from 1 on."""
    row_name: str = "row"
    """The heading of the names."""
    linkable: Bool[np.ndarray, " rows"]
    """Which rows have a key. The others are predicted without the secondaries, and cost nothing;
    where keys are numbers, they have a substitute that nothing is linked by."""

    @classmethod
    def all_of(cls, table: PartyTable) -> "NamedRows":
        """Return the rows of a table that all have keys."""
        return cls(table=table, linkable=np.ones(table.num_rows, dtype=np.bool_))


# Finite outputs: rows whose own values drive the model's output to infinity are refused early.

_ORDINARY: Final = 1e9
"""Values up to here, scaled and as they are, are not looked at further."""

_LARGEST: Final = 1e30
"""Of an output without partners; their average adds what float32 still holds."""


class NotFiniteError(DataError):
    """The model has no finite output for a row; the message quotes no cell."""


def require_finite_outputs(
    table: PartyTable,
    features: Float32[np.ndarray, "rows features"],
    outputs: Callable[[PartyTable], Tensor],
) -> None:
    """Refuse rows for which the primary's half of the model alone has no finite output.

    Args:
        table: The rows.
        features: Theirs, as the model takes them.
        outputs: Returns what the half computes of rows that nothing is linked to.

    Raises:
        NotFiniteError: Naming the first such row.
    """
    # Written so that NaN, which scaling makes of what it cannot hold, is looked at.
    values = np.hstack([features, table.features, table.keys])
    suspects = np.flatnonzero(~(np.abs(values) <= _ORDINARY).all(axis=1))
    if not len(suspects):
        return
    found = outputs(table.take(suspects))
    good = torch.all(found.abs() <= _LARGEST, dim=1).cpu().numpy()
    if not good.all():
        row = int(suspects[~good][0])
        raise NotFiniteError(
            f"row {row + 1}: the model has no finite prediction for it; a number in it is far "
            f"beyond those of training"
        )


# What every request for predictions of a kept model does, wherever its parties are.

# Of fewer new rows it means nothing if none has a record.
_MANY_ROWS: Final = 20


@dataclass(frozen=True, kw_only=True, eq=False)
class Request:
    """New rows, and how they are to be linked."""

    facts: RunFacts
    """How many rows are linked and predicted, under the request's own id."""
    keys: KeyTable
    """Keys of all rows that are linked: first those of the training table, where it is kept, but
    for those that are asked for again."""

    @property
    def rows(self) -> Int64[np.ndarray, " predicted"]:
        """Ids of the predicted rows."""
        return np.arange(self.facts.rows - self.facts.predicted_rows, self.facts.rows)


def request_of(
    config: FederationConfig, model: SavedModel, new: KeyTable, *, active: tuple[int, ...] | None
) -> Request:
    """Return the request for predictions of new rows.

    A key of the training table that a new row has too is linked once, as the new row's: which keys
    are shown follows from keys alone, and never from how rows were split or labelled.

    Args:
        config: The federation file.
        model: The primary's.
        new: Keys of the new rows.
        active: Ranks of the secondaries that answer; None: all.
    """
    assert model.primary is not None, "the primary asks"
    kept = model.primary.keys
    keys = new if kept is None else _joined(kept.take(_not_again(kept, new)), new)
    everybody = tuple(config.ranks[party.name] for party in config.secondaries)
    facts = prediction_facts(
        run=new_run(),
        rows=keys.num_rows,
        predicted_rows=new.num_rows,
        active=everybody if active is None else active,
    )
    return Request(facts=facts, keys=keys)


def prediction_spec(
    config: FederationConfig, model: SavedModel, *, active: tuple[int, ...] | None = None
) -> LinkSpec:
    """Return how a party links new rows: as in training, scaled as then, and kept nowhere.

    Args:
        config: The federation file.
        model: The party's.
        active: Ranks of the secondaries that take part; None: all.
    """
    spec = link_spec(config)
    return replace(
        spec,
        # Of one row, a refusal would tell the primary that it has no link.
        choice=replace(spec.choice, least_linked=None),
        roles=replace(spec.roles, absent=frozenset(absent_names(config, active))),
        key_scale=model.key_scale,
        similarity_scale=model.similarity_scale,
        cache=None,
    )


def warn_of_few_links(
    name: str, linked: LinkedSecondary, *, predicted: int, least: float, observe: Observer
) -> None:
    """Warn a secondary, or a simulation, where hardly any of many new rows has a record.

    Args:
        name: The secondary.
        linked: Its links.
        predicted: How many rows are predicted: the last ones that are linked.
        least: ``linkage.least_linked``.
        observe: The secondary's own, or a simulation's.
    """
    there = linked.linked_rows()[-predicted:]
    if predicted >= _MANY_ROWS and there.mean() < least:
        observe(
            Warned(
                text=f"links of {name}: {there.sum():,} of {predicted:,} new rows are linked; are "
                f"their keys written as in training?"
            )
        )


def kept_top(
    config: FederationConfig, model: SavedModel, table: PartyTable, *, device: torch.device
) -> nn.Module:
    """Return the primary's half of the network, for one request after another.

    Args:
        config: The federation file.
        model: The primary's.
        table: Any rows, for the names of their features.
        device: Where it computes.

    Raises:
        ConfigError: If the kept weights do not fit.
    """
    top = build_top(config, table, model.head)
    model.into(top)
    return top.to(device)


def top_model(
    config: FederationConfig,
    model: SavedModel,
    top: nn.Module,
    table: PartyTable,
    linked: LinkedPrimary,
    exchange: Exchange,
    *,
    request: Request,
    device: torch.device,
) -> TopModel:
    """Return the primary's half of the network with the rows of a request.

    Raises:
        DataError: If the new rows have other features than the model.
    """
    features = features_of(config.primary, table, model)
    asked = request.rows
    part = model.primary
    assert part is not None, "the primary asks"
    active = [rank - 1 for rank in exchange.ranks]
    similarities = None
    if linked.similarities is not None:
        # The top model finds each secondary's at its rank.
        told = linked.similarities[asked]
        # numpy would spread one secondary's over any number of places, and over none.
        assert told.shape[1] == len(active), "one of each secondary that answers"
        similarities = np.full((len(told), len(config.secondaries), told.shape[2]), np.nan, "f4")
        similarities[:, active] = told
    if in_blocks(config) and len(active) < len(config.secondaries):
        exchange = PresentBlocks(exchange, blocks=len(config.secondaries))
    read, keys = read_by_top(
        config,
        table,
        features=torch.from_numpy(features).to(device),
        keys=torch.from_numpy(linked.keys[asked]).to(device),
    )
    at_work = CorrectingTopModel if config.top_corrects else TopModel
    return at_work(
        top,
        PrimaryInputs(
            features=read,
            keys=keys,
            similarities=None
            if similarities is None
            else torch.from_numpy(similarities).to(device),
            base=None
            if part.base is None
            else torch.from_numpy(part.base.margins(own_inputs(table))).to(device),
            first_row=int(asked[0]),
        ),
        exchange,
        batch_size=config.training.batch_size,
        scale=part.scale,
    )


def unlinked_outputs(
    config: FederationConfig, model: SavedModel, table: PartyTable, *, device: torch.device
) -> Tensor:
    """Return the outputs for rows that nothing is linked to, shape (rows, outputs).

    With a base, they are those of the best model of the primary alone; otherwise those of the top
    model, with zero as the average of no record. A key that is not known counts as the mean one.

    Reveals:
        Nothing: no party is asked.
    """
    part = model.primary
    assert part is not None, "the primary answers"
    if model.key_scale is not None:
        means = np.broadcast_to(np.array(model.key_scale.centre), table.keys.shape)
        table = replace(table, keys=means)
    if part.alone is not None:
        return alone_outputs(model, table, device=device)
    return _top_outputs(config, model, table, device=device)


def _top_outputs(
    config: FederationConfig, model: SavedModel, table: PartyTable, *, device: torch.device
) -> Tensor:
    """Return the top model's outputs, with zero as the average of no record."""
    features = torch.from_numpy(features_of(config.primary, table, model)).to(device)
    top = kept_top(config, model, table, device=device)
    rows, secondaries = len(features), len(config.secondaries)
    keys = features.new_zeros((rows, table.key_dim))
    if model.key_scale is not None:
        scaler = KeyScaler(
            centre=np.array(model.key_scale.centre), width=np.array(model.key_scale.width)
        )
        keys = torch.from_numpy(scaler.apply(table.keys)).to(device)
    read, keys = read_by_top(config, table, features=features, keys=keys)
    similarities = None
    if config.family.needs_similarities(config.model):
        links = config.model.neighbours
        similarities = features.new_full((rows, secondaries, links), float("nan"))
    with torch.no_grad():
        outputs: Tensor = top.eval()(
            read,
            keys,
            features.new_zeros((rows, *config.family.cut_shape(config.model))),
            similarities,
        )
    return outputs


def _outputs_without_partners(
    config: FederationConfig, model: SavedModel, table: PartyTable, *, device: torch.device
) -> Tensor:
    """Return what each part of the primary's half says of rows, shape (rows, outputs of all)."""
    part = model.primary
    assert part is not None, "the primary answers"
    found = [
        torch.from_numpy(one.margins(own_inputs(table))).to(device)
        for one in (part.alone, part.base)
        if one is not None
    ]
    if not answers_alone(model):
        found.append(_top_outputs(config, model, table, device=device))
    return torch.hstack([one.float() for one in found])


def alone_outputs(model: SavedModel, table: PartyTable, *, device: torch.device) -> Tensor:
    """Return the outputs of the best model of the primary alone, shape (rows, outputs).

    Reveals:
        Nothing: no party is asked.
    """
    assert model.primary is not None, "the primary answers"
    assert model.primary.alone is not None, "there is a base"
    return torch.from_numpy(model.primary.alone.margins(own_inputs(table))).to(device)


def answers_alone(model: SavedModel) -> bool:
    """Whether the primary's model answers without its partners."""
    return model.primary is not None and model.primary.used == "alone"


def made_alone(model: SavedModel, *, threshold: float | None = None) -> SavedModel:
    """Return the primary's model as it answers without partners; itself where there is no base.

    Args:
        model: The primary's.
        threshold: Of the best model alone, of a binary task; None: that of the model.
    """
    part = model.primary
    if part is None or part.alone is None:
        return model
    chosen = part.threshold if threshold is None else threshold
    return replace(model, primary=replace(part, used="alone", threshold=chosen))


def answered(
    config: FederationConfig,
    model: SavedModel,
    rows: NamedRows,
    release: Callable[[PartyTable], tuple[Tensor, float]],
    *,
    device: torch.device,
    without: tuple[str, ...] = (),
) -> Predictions:
    """Have the rows that can be linked released, and answer for all; see :func:`answer_of`.

    Where the primary's model answers alone, nothing is released.

    Args:
        config: The federation file.
        model: The primary's.
        rows: The new rows.
        release: Returns the outputs for rows that can be linked, and what releasing them cost.
        device: Where outputs are.
        without: Secondaries that are absent.

    Raises:
        DataError: If the rows have other features than the model, or one has no finite
            prediction; nothing is released then.

    Reveals:
        What ``release`` reveals.
    """
    require_finite_outputs(
        rows.table,
        features_of(config.primary, rows.table, model),
        lambda table: _outputs_without_partners(config, model, table, device=device),
    )
    outputs, spent = torch.empty((0, model.head.outputs), device=device), 0.0
    if rows.linkable.any():
        linkable = rows.table.take(np.flatnonzero(rows.linkable))
        if answers_alone(model):
            outputs = alone_outputs(model, linkable, device=device)
        else:
            outputs, spent = release(linkable)
    answer = answer_of(config, model, rows, outputs)
    return replace(answer, without=without, epsilon=spent if math.isfinite(spent) else None)


def answer_of(
    config: FederationConfig, model: SavedModel, rows: NamedRows, outputs: Tensor
) -> Predictions:
    """Return predictions from outputs, with metrics where all rows have labels.

    Args:
        config: The federation file.
        model: The primary's.
        rows: The new rows; those without a key are predicted without the secondaries, and noted.
        outputs: Of the rows that can be linked, shape (linkable rows, outputs).
    """
    part, table, linkable = model.primary, rows.table, rows.linkable
    assert part is not None, "the primary asks"
    notes = None
    if not linkable.all():
        alone = unlinked_outputs(
            config, model, table.take(np.flatnonzero(~linkable)), device=outputs.device
        )
        whole = alone.new_empty((len(linkable), alone.shape[1]))
        linked = torch.from_numpy(linkable).to(outputs.device)
        whole[linked] = outputs
        whole[~linked] = alone
        outputs, notes = whole, ["" if one else NO_KEY for one in linkable]
    metrics = None
    if table.labels is not None and table.labelled is None:
        labels = table.labels
        if part.label_scaler is not None:
            labels = part.label_scaler.apply(labels)
        targets = torch.from_numpy(labels)
        kind = targets if part.head.task == "multiclass" else targets.to(torch.float32)
        metrics = part.head.measured(outputs, kind, threshold=part.threshold)
    found = predictions_of(
        outputs,
        part.head,
        classes=part.classes,
        label_scaler=part.label_scaler,
        threshold=part.threshold,
        rows=range(1, len(outputs) + 1) if rows.names is None else rows.names,
    )
    return replace(found, row_name=rows.row_name, notes=notes, metrics=metrics, used=part.used)


def require_one_model(primary: SavedModel, run: str, name: str) -> None:
    """Refuse a party whose model another run has trained.

    Raises:
        ConfigError: Naming it.
    """
    if run != primary.run:
        raise ConfigError(
            f"model of {name!r}: was trained by run {run}, and that of {primary.party!r} by run "
            f"{primary.run}; halves of one network belong to one run"
        )


def _not_again(kept: KeyTable, new: KeyTable) -> Int64[np.ndarray, " others"]:
    """Return which rows of a kept table have a key that no new row has."""
    # pandas loads with it, and a party that has no table of its own reads requests too.
    with loading():
        import pandas as pd

    again = np.ones(kept.num_rows, dtype=np.bool_)
    for name, column in kept.columns.items():
        again &= pd.Series(column).isin(new.columns[name]).to_numpy()
    maybe = np.flatnonzero(again)
    mine, theirs = (
        pd.MultiIndex.from_arrays([table.columns[name] for name in kept.columns])
        for table in (kept.take(maybe), new)
    )
    again[maybe] = mine.isin(theirs)
    return np.flatnonzero(~again)


def _joined(first: KeyTable, second: KeyTable) -> KeyTable:
    """Return the rows of two key tables, one below the other."""
    return KeyTable(
        name=second.name,
        columns={
            name: np.concatenate([first.columns[name], column])
            for name, column in second.columns.items()
        },
    )


# Requests that the primary answers alone: no party is waited for.


class AlonePredictor:
    """A kept model that answers without the primary's partners, in sessions like any other."""

    def __init__(
        self, config: FederationConfig, model: SavedModel, *, without: tuple[str, ...] = ()
    ) -> None:
        """Make it.

        Args:
            config: The federation file.
            model: The primary's, which answers alone. Where it has no base, rows are answered as
                those that nothing is linked to.
            without: Secondaries that are absent.
        """
        self.config = config
        self.model = model
        self.without = without
        self.broken = False
        """Whether parties were left in the middle of a request: there are none."""

    @contextmanager
    def session(self) -> "Iterator[AlonePredictor]":
        """Begin at once."""
        yield self

    def check(self) -> None:
        """Do nothing: no party can be lost."""

    def budgets(self) -> list[PredictionBudget]:
        """Return no budget: nothing is charged."""
        return []

    def ask(
        self,
        rows: NamedRows,
        *,
        observe: Observer = unheard,  # noqa: ARG002 - a session like others
    ) -> Predictions:
        """Return predictions of new rows; see :meth:`Predictor.predict`.

        Reveals:
            Nothing: no party is asked.
        """
        return answered(
            self.config,
            self.model,
            rows,
            self._unlinked,
            device=torch.device("cpu"),
            without=self.without,
        )

    def _unlinked(self, rows: PartyTable) -> tuple[Tensor, float]:
        return unlinked_outputs(self.config, self.model, rows, device=torch.device("cpu")), 0.0
