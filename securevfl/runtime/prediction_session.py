"""Requests for predictions of one model, one after another: alone, or with partners."""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from securevfl.config.federation import FederationConfig
from securevfl.core.progress import Observer, Stage, unheard
from securevfl.data.scaling import KeyScaler
from securevfl.data.tables import PartyTable
from securevfl.federation.base import features_of, own_inputs
from securevfl.federation.rounds.exchanges import Exchange, SimulatedExchange
from securevfl.federation.rounds.fitted_primary import read_by_top
from securevfl.federation.run_plan import PredictionBudget, RunPlan, plan_prediction
from securevfl.federation.saved_model import PrimaryPart, SavedModel
from securevfl.federation.session.membership import absent_names
from securevfl.federation.session.party_files import PartyFiles
from securevfl.ledger.ledger import Ledger
from securevfl.linkage.spec import LinkedPrimary, LinkSpec
from securevfl.linkage.stage.linking import Linker
from securevfl.linkage.stage.party_keys import keys_of
from securevfl.models.tasks import Metrics
from securevfl.runtime.prediction_request import (
    KeptSecondary,
    NamedRows,
    Request,
    answers_alone,
    expected_blocks,
    kept_top,
    prediction_spec,
    request_of,
    require_finite_outputs,
    top_model,
)
from securevfl.runtime.predictions import NO_KEY, Predictions, predictions_of


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

    def budgets(self) -> list[PredictionBudget]:
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
        config, scale = self.config, self.model.key_scale
        features = torch.from_numpy(features_of(config.primary, table, self.model)).to(self.device)
        top = kept_top(config, self.model, table, device=self.device)
        rows, secondaries = len(features), len(config.secondaries)
        keys = features.new_zeros((rows, table.key_dim))
        if scale is not None:
            scaler = KeyScaler(centre=np.array(scale.centre), width=np.array(scale.width))
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
        self, plan: RunPlan, spec: LinkSpec, request: Request, observe: Observer
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
        plan = plan_prediction(config, request.facts, noise_share_std=model.noise_share_std)
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

    def budgets(self) -> list[PredictionBudget]:
        """Return what predictions have spent at every party, and what is left."""
        return [files.prediction_budget(self.model.run) for files in self._files.values()]

    @contextmanager
    def _link(
        self, plan: RunPlan, spec: LinkSpec, request: Request, observe: Observer
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
