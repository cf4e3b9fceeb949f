"""Requests for predictions of one saved model, one after another: alone, or with partners."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import torch
from jaxtyping import Bool, Float32, Int64
from torch import Tensor, nn

from securevfl.config.federation import FederationConfig
from securevfl.config.sections import PartySettings
from securevfl.core.errors import ConfigError, DataError
from securevfl.core.memory import loading
from securevfl.core.progress import Observer, Stage, Warned, unheard
from securevfl.data.tables import KeyTable, PartyTable
from securevfl.federation import run_plan
from securevfl.federation.base import features_of, own_inputs
from securevfl.federation.build import BottomAtWork, bottom_at_work, build_secondary, build_top
from securevfl.federation.rounds.exchanges import Exchange, SimulatedExchange
from securevfl.federation.rounds.fitted_primary import read_by_top
from securevfl.federation.rounds.primary import PrimaryInputs, TopModel
from securevfl.federation.rounds.secondary import Secondary
from securevfl.federation.saved_model import PrimaryPart, SavedModel
from securevfl.federation.session.membership import absent_names, session_spec
from securevfl.federation.session.party_files import PartyFiles
from securevfl.ledger.ledger import Ledger
from securevfl.linkage.spec import LinkedPrimary, LinkedSecondary, LinkSpec
from securevfl.linkage.stage.linkage_parts import protection_of
from securevfl.linkage.stage.linking import Linker
from securevfl.linkage.stage.party_keys import keys_of
from securevfl.models.tasks import Metrics
from securevfl.runtime.predictions import NO_KEY, Predictions, predictions_of

# Of fewer new rows it means nothing if none has a record.
_MANY_ROWS: Final = 20


@dataclass(frozen=True, kw_only=True, eq=False)
class Request:
    """New rows, and how they are to be linked."""

    facts: run_plan.RunFacts
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
    kept = model.primary_part.keys
    keys = new
    if kept is not None:
        others = kept.take(_not_again(kept, new)).columns
        joined = {
            name: np.concatenate([others[name], column]) for name, column in new.columns.items()
        }
        keys = KeyTable(name=new.name, columns=joined)
    everybody = tuple(config.ranks[party.name] for party in config.secondaries)
    facts = run_plan.prediction_facts(
        run=run_plan.new_run(),
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
    spec = session_spec(config, active)
    settings = protection_of(spec).settings_for_new_rows(
        spec.hiding.settings,
        trained_rows=None if model.primary is None else model.primary.rows,
    )
    return replace(
        spec,
        hiding=replace(spec.hiding, settings=settings),
        choice=replace(spec.choice, counted=False),
        key_scale=model.key_scale,
        similarity_scale=model.similarity_scale,
    )


class KeptSecondary:
    """A secondary's saved half of the network, for one request after another."""

    def __init__(
        self, party: PartySettings, table: PartyTable, model: SavedModel, *, device: torch.device
    ) -> None:
        self.model = model
        self.table = table
        self._party = party
        self._device = device
        self._bottom: BottomAtWork | None = None

    def with_links(
        self,
        plan: run_plan.RunPlan,
        linked: LinkedSecondary,
        ledger: Ledger,
        *,
        observe: Observer = unheard,
        after_round: int = 0,
    ) -> Secondary:
        """Return the secondary with the links of a request.

        Args:
            plan: The request.
            linked: Its links.
            ledger: Its own, open for the request.
            observe: Called with a warning where hardly any of many new rows has a record.
            after_round: Round numbers up to it were used before in this session.

        Raises:
            SecureVflError: What :func:`securevfl.federation.build.bottom_at_work` raises.
        """
        party, config = self._party, plan.config
        if self._bottom is None:
            self._bottom = bottom_at_work(
                plan, party, self.table, device=self._device, model=self.model
            )
        there = linked.linked_rows()[-plan.facts.predicted_rows :]
        if len(there) >= _MANY_ROWS and there.mean() < config.linkage.least_linked:
            text = (
                f"links of {party.name}: {there.sum():,} of {len(there):,} new rows are linked; "
                f"are their keys written as in training?"
            )
            observe(Warned(text=text))
        return build_secondary(
            plan,
            party,
            self.table,
            linked,
            ledger,
            device=self._device,
            kept_bottom=self._bottom,
            after_round=after_round,
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
    part = model.primary_part
    active = [rank - 1 for rank in exchange.ranks]
    similarities = None
    if linked.similarities is not None:
        # The top model finds each secondary's at its rank.
        asked_similarities = linked.similarities[asked]
        # numpy would spread one secondary's over any number of places, and over none.
        assert asked_similarities.shape[1] == len(active), "one of each secondary that answers"
        similarities = np.full(
            (len(asked_similarities), len(config.secondaries), asked_similarities.shape[2]),
            np.nan,
            "f4",
        )
        similarities[:, active] = asked_similarities
    read, keys = read_by_top(
        config,
        table,
        features=torch.from_numpy(features).to(device),
        keys=torch.from_numpy(linked.keys[asked]).to(device),
    )
    return TopModel(
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
        precision=config.training.precision,
    )


def expected_blocks(plan: run_plan.RunPlan) -> int | None:
    """Return how many blocks the top model expects, where some secondaries of these are absent.

    None where none is absent, or an average is not made of blocks.
    """
    trained = len(plan.config.secondaries)
    return trained if plan.config.in_blocks and len(plan.secondaries) < trained else None


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
    """Mask of the rows that have a key. The others are predicted without the secondaries, and cost
    nothing; where keys are numbers, they have a substitute that nothing is linked by."""

    @classmethod
    def all_of(cls, table: PartyTable) -> "NamedRows":
        """Return the rows of a table that all have keys."""
        return cls(table=table, linkable=np.ones(table.num_rows, dtype=np.bool_))


_ORDINARY: Final = 1e9
"""Values up to here, scaled and as they are, are not looked at further."""

_LARGEST: Final = 1e30
"""Largest size of an output without partners; their average adds what float32 still holds."""


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
    output_values = outputs(table.take(suspects))
    good = torch.all(output_values.abs() <= _LARGEST, dim=1).cpu().numpy()
    if not good.all():
        row = int(suspects[~good][0])
        raise NotFiniteError(
            f"row {row + 1}: the model has no finite prediction for it; a number in it is far "
            f"beyond those of training"
        )


class PredictionSession:
    """Requests to a model that answers alone: no party is waited for, and nothing is charged.

    Its subclasses ask the secondaries, in this process or over the star.
    """

    broken = False
    """True if an error has left the parties in the middle of a request."""

    def __init__(
        self,
        config: FederationConfig,
        model: SavedModel,
        *,
        device: torch.device = torch.device("cpu"),  # noqa: B008 - a value
        active: tuple[int, ...] | None = None,
        observe: Observer = unheard,
    ) -> None:
        """Make it.

        Args:
            config: The federation file.
            model: The primary's. Where it answers alone without a base, rows are answered as those
                that nothing is linked to.
            device: Where it computes.
            active: Ranks of the secondaries that answer; None: all.
            observe: Called with progress of requests that bring no observer of their own.
        """
        self.config = config
        self.model = model
        self.device = device
        self.active = active
        self.observe = observe

    def check(self) -> None:
        """Raise what ended the session, if anything has.

        Raises:
            ProtocolError: Naming the party that is lost or left the protocol.
        """

    def budgets(self) -> list[run_plan.PredictionBudget]:
        """Return what predictions have spent at the parties whose ledgers are here."""
        return []

    def ask(self, rows: NamedRows, *, observe: Observer | None = None) -> Predictions:
        """Return predictions of new rows.

        Args:
            rows: Encoded as the model's schema says. Those without a key are predicted without the
                secondaries, and cost nothing.
            observe: Called with progress; default: the session's observer.

        Raises:
            BudgetExceededError: If a ledger that is here does not cover the request; nothing was
                released or sent then.
            DataError: If the rows have other features than the model.
            ProtocolError: If another party refuses, leaves the protocol or fails.

        Reveals:
            What linking reveals of the rows' keys, and to the primary one average a row; nothing
            where the model answers alone.
        """
        model, table, linkable = self.model, rows.table, rows.linkable
        features = features_of(self.config.primary, table, model)
        require_finite_outputs(table, features, self._outputs_without_partners)
        outputs, spent = torch.empty((0, model.head.outputs), device=self.device), 0.0
        if linkable.any():
            linked = table.take(np.flatnonzero(linkable))
            if answers_alone(model):
                outputs = self._alone_outputs(linked)
            else:
                outputs, spent = self._release(linked, observe or self.observe)
        notes = None
        if not linkable.all():
            alone = self._unlinked_outputs(table.take(np.flatnonzero(~linkable)))
            whole = alone.new_empty((len(linkable), alone.shape[1]))
            there = torch.from_numpy(linkable).to(outputs.device)
            whole[there] = outputs
            whole[~there] = alone
            outputs, notes = whole, ["" if has_key else NO_KEY for has_key in linkable]
        part = self._part
        predictions = predictions_of(
            outputs,
            part.head,
            classes=part.classes,
            label_scaler=part.label_scaler,
            threshold=part.threshold,
            rows=range(1, len(outputs) + 1) if rows.names is None else rows.names,
        )
        return replace(
            predictions,
            row_name=rows.row_name,
            notes=notes,
            metrics=self._metrics(table, outputs),
            used=part.used,
            without=absent_names(self.config, self.active),
            epsilon=spent if math.isfinite(spent) else None,
        )

    @property
    def _part(self) -> PrimaryPart:
        return self.model.primary_part

    def _release(self, table: PartyTable, observe: Observer) -> tuple[Tensor, float]:  # noqa: ARG002
        """Return the outputs for rows that can be linked, and what releasing them cost."""
        return self._unlinked_outputs(table), 0.0

    def _metrics(self, table: PartyTable, outputs: Tensor) -> Metrics | None:
        """Return the metrics of rows that all have labels; None of others."""
        labels, part = table.labels, self._part
        if labels is None or table.labelled is not None:
            return None
        if part.label_scaler is not None:
            labels = part.label_scaler.apply(labels)
        targets = torch.from_numpy(labels)
        kind = targets if part.head.task == "multiclass" else targets.to(torch.float32)
        return part.head.measure(outputs, kind, threshold=part.threshold)

    def _unlinked_outputs(self, table: PartyTable) -> Tensor:
        """Return the outputs for rows that nothing is linked to, shape (rows, outputs).

        With a base, they are those of the best model of the primary alone; otherwise those of the
        top model, with zero as the average of no record. A key that is not known counts as the
        mean one.
        """
        scale = self.model.key_scale
        if scale is not None:
            table = replace(table, keys=np.broadcast_to(np.array(scale.centre), table.keys.shape))
        return self._alone_outputs(table)

    def _alone_outputs(self, table: PartyTable) -> Tensor:
        """Return the outputs of the best model of the primary alone, shape (rows, outputs).

        Without a base they are the top model's, with zero as the average of no record.
        """
        alone = self._part.alone
        if alone is None:
            return self._top_outputs(table)
        return torch.from_numpy(alone.margins(own_inputs(table))).to(self.device)

    def _top_outputs(self, table: PartyTable) -> Tensor:
        """Return the top model's outputs, with zero as the average of no record."""
        config, scaler = self.config, self.model.key_scale
        features = torch.from_numpy(features_of(config.primary, table, self.model)).to(self.device)
        top = kept_top(config, self.model, table, device=self.device)
        rows, secondaries = len(features), len(config.secondaries)
        keys = features.new_zeros((rows, table.key_dim))
        if scaler is not None:
            keys = torch.from_numpy(scaler.apply(table.keys)).to(self.device)
        read, keys = read_by_top(config, table, features=features, keys=keys)
        similarities = None
        if config.family.needs_similarities(config.model):
            links = config.model.neighbours
            similarities = features.new_full((rows, secondaries, links), float("nan"))
        nothing = features.new_zeros((rows, *config.family.cut_shape(config.model)))
        with torch.no_grad():
            outputs: Tensor = top.eval()(read, keys, nothing, similarities)
        return outputs

    def _outputs_without_partners(self, table: PartyTable) -> Tensor:
        """Return what each part of the primary's half says of rows, (rows, outputs of all)."""
        parts = [
            torch.from_numpy(model.margins(own_inputs(table))).to(self.device)
            for model in (self._part.alone, self._part.base)
            if model is not None
        ]
        if not answers_alone(self.model):
            parts.append(self._top_outputs(table))
        return torch.hstack([part.float() for part in parts])


@dataclass(frozen=True, kw_only=True, eq=False)
class LinkedRequest:
    """A request that the secondaries are about to answer."""

    primary: LinkedPrimary
    exchange: Exchange
    ledgers: Sequence[Ledger]
    """The primary's, and those of secondaries in this process: open, and charged by rounds."""


class SessionWithPartners(PredictionSession):
    """Requests that the secondaries answer; a subclass knows where they are."""

    _top: nn.Module | None = None

    def _link(
        self, plan: run_plan.RunPlan, spec: LinkSpec, request: Request, observe: Observer
    ) -> AbstractContextManager[LinkedRequest]:
        """Open ledgers for a request, and link it; the block makes its rounds.

        Raises:
            BudgetExceededError: If a ledger does not cover it, before anything is sent.
        """
        raise NotImplementedError

    def _release(self, table: PartyTable, observe: Observer) -> tuple[Tensor, float]:
        config, model, device = self.config, self.model, self.device
        spec = prediction_spec(config, model, active=self.active)
        request = request_of(config, model, keys_of(spec.keys, table), active=self.active)
        plan = run_plan.plan_prediction(
            config, request.facts, noise_share_std=model.noise_share_std
        )
        with self._link(plan, spec, request, observe) as linked:
            if self._top is None:
                self._top = kept_top(config, model, table, device=device)
            top = top_model(
                config,
                model,
                self._top,
                table,
                linked.primary,
                linked.exchange,
                request=request,
                device=device,
            )
            outputs = top.predict(request.rows, "predict")
        return outputs, max(ledger.epsilon_spent for ledger in linked.ledgers)


class SimulatedSession(SessionWithPartners):
    """Requests with all parties in this process; every ledger is charged as in a real request."""

    def __init__(
        self,
        config: FederationConfig,
        model: SavedModel,
        secondaries: Mapping[str, KeptSecondary],
        files: Mapping[str, PartyFiles],
        **more: Any,
    ) -> None:
        """Make it.

        Args:
            config: The federation file.
            model: The primary's.
            secondaries: Those that are there, by name.
            files: Every party's, by name, the primary's first; their ledgers are held.
            **more: See :class:`PredictionSession`.
        """
        super().__init__(config, model, **more)
        self._secondaries = secondaries
        self._files = files

    def budgets(self) -> list[run_plan.PredictionBudget]:
        """Return what predictions have spent at every party, and what is left."""
        return [files.prediction_budget(self.model.run) for files in self._files.values()]

    @contextmanager
    def _link(
        self, plan: run_plan.RunPlan, spec: LinkSpec, request: Request, observe: Observer
    ) -> Iterator[LinkedRequest]:
        observe(Stage(text="linking", of=len(self._secondaries)))
        keys = {name: keys_of(spec.keys, kept.table) for name, kept in self._secondaries.items()}
        ledgers = {
            name: files.open_prediction(plan, model=self.model.run, keys=keys.get(name))
            for name, files in self._files.items()
        }
        link = Linker(spec, request.keys)
        parties = {}
        with ExitStack() as built:
            for name, kept in self._secondaries.items():
                scale = kept.model.similarity_scale
                linked = link(keys[name], similarity_scale=scale)
                secondary = kept.with_links(plan, linked, ledgers[name], observe=observe)
                built.callback(secondary.close)
                parties[plan.ranks[name]] = secondary
            yield LinkedRequest(
                primary=link.primary,
                exchange=SimulatedExchange(
                    parties,
                    plan.cut,
                    ledger=ledgers[self.config.primary.name],
                    blocks=expected_blocks(plan),
                ),
                ledgers=list(ledgers.values()),
            )
