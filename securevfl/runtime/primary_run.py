"""The primary's part in a run, from the first release to the test, over any exchange."""

import hashlib
import math
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Int64
from torch import Tensor

from securevfl.config.federation import key_spec
from securevfl.core import progress
from securevfl.core.errors import ConfigError
from securevfl.data.rows import consecutive_batches
from securevfl.data.tables import PartyTable
from securevfl.federation.base import (
    Base,
    Choice,
    choose,
    digest_of_rows,
    fit_base,
    label_scaler_of,
)
from securevfl.federation.build import build_primary, save_primary
from securevfl.federation.messages import EpochMark
from securevfl.federation.released_labels import drawn_labels
from securevfl.federation.rounds.exchanges import ReleasedRows, RoundExchange, release_once
from securevfl.federation.rounds.kept_rounds import CachedRows
from securevfl.federation.rounds.network_primary import NetworkPrimary
from securevfl.federation.rounds.primary import Primary, PrimaryData
from securevfl.federation.rounds.recording import Recorder
from securevfl.federation.run_plan import RunPlan
from securevfl.federation.session.membership import Presence
from securevfl.federation.session.party_files import PartyFiles
from securevfl.federation.stage import OtherParts, PrimaryContext, run_stages
from securevfl.ledger.countersigning import Countersigning, epoch_point
from securevfl.linkage.spec import LinkedPrimary
from securevfl.linkage.stage.party_keys import keys_of
from securevfl.models.family import share_of_base
from securevfl.models.tasks import Evaluation, evaluate
from securevfl.runtime import metrics_file
from securevfl.runtime.alignment_report import report_alignment
from securevfl.runtime.own_network import train_own_network
from securevfl.runtime.predictions import FILE as PREDICTIONS
from securevfl.runtime.predictions import predictions_of
from securevfl.runtime.remaining_budget import covers_epoch, covers_test_rows
from securevfl.runtime.run_options import RunOptions


class PrimaryRun:
    """The primary's part in a run: releases, training, choice of who answers, test."""

    def __init__(
        self,
        plan: RunPlan,
        table: PartyTable,
        data: PrimaryData,
        linked: LinkedPrimary,
        files: PartyFiles,
        exchange: RoundExchange,
        options: RunOptions,
        *,
        countersigning: Countersigning | None = None,
        presence: Presence | None = None,
        parts: OtherParts,
    ) -> None:
        """Build the primary's half of the network, and report how many rows are aligned.

        Args:
            plan: The run, with where it starts.
            table: The primary's table.
            data: The same as tensors.
            linked: How its keys were linked.
            files: The primary's own; its ledger is open.
            exchange: Rounds with the secondaries.
            options: Where and how; an observer, and models from Python.
            countersigning: Where ledger heads are exchanged; None in a simulation.
            presence: Record of which secondaries took part, and when; None where all always do.
            parts: The other parties' parts of stages.
        """
        self.started = time.monotonic()
        self.plan = plan
        self.table = table
        self.data = data
        self.linked = linked
        self.files = files
        self.ledger = files.ledger
        self.checkpoints = files.checkpoints
        self.exchange = exchange
        self.options = options
        self.countersigning = countersigning
        self.presence = presence
        self.is_placebo = False
        """Whether its outputs for test rows are all that is wanted."""
        self.alignment = report_alignment(
            plan.config,
            linked.alignment,
            training_rows=len(data.training_rows),
            log=files.log,
            observe=options.observe,
        )
        """How many rows are linked where, for the run's figures."""
        self.base = options.fitted_base
        """Averaged with the joint model; None until it is fitted, or without a base."""
        noised = plan.config.privacy.mechanism != "none"
        self._epsilon = self.ledger.epsilon_spent if noised else math.inf
        """Epsilon before the exchange's first charge."""
        if exchange.recorder is not None:
            hold_primary(exchange.recorder, table, data)
        self.primary = build_primary(
            plan, table, data, exchange, observe=self._observe, estimator=options.top
        )
        self._stages = {
            stage.name: stage.primary(
                PrimaryContext(
                    plan=plan,
                    table=table,
                    primary=self.primary,
                    linked=linked,
                    files=files,
                    peers=parts.peers(stage.name),
                    run_folder=options.run_folder,
                    data_root=options.data_root,
                    observe=self._observe,
                    estimator=options.base,
                    open_channels=parts.open_channels,
                    here=parts.here.get(stage.name, ()),
                )
            )
            for stage in run_stages(plan.config)
        }
        self.choice: Choice | None = None
        """Who answers, once the model is trained; None where there is no base."""
        self.tested: Evaluation | None = None
        """Of the test rows, by the model that answers, once they are asked for."""
        self.joint_outputs: Tensor | None = None
        """Of the joint model for the test rows."""
        self.placebo: Tensor | None = None
        """The same of a simulation in which partners' rows were permuted; None: there was none."""
        self.links: dict[str, Any] | None = None
        """In a simulation, each secondary's counts of links, for the run's figures."""
        self.linked_rows: dict[str, Any] | None = None
        """Linked-row count that each secondary has reported, for the run's figures."""

    def prepare(self) -> None:
        """Do what stages do between linking and training.

        Reveals:
            What the stages' messages say.
        """
        for part in self._stages.values():
            part.prepare()

    def end_stages(self) -> None:
        """Let helpers of stages go, once nothing more is asked for."""
        for part in self._stages.values():
            part.end()

    def stage_figures(self) -> dict[str, Mapping[str, Any]]:
        """Return the figures of each stage that has some, by its name."""
        figures = {name: part.figures for name, part in self._stages.items()}
        return {name: content for name, content in figures.items() if content is not None}

    def conclude(self, stage: str, traffic: Mapping[str, Mapping[str, int]]) -> dict[str, Any]:
        """Return the figures of a run that ends when a stage is prepared.

        Raises:
            ConfigError: If runs of this federation file have nothing of that stage.
        """
        if stage not in self._stages:
            raise ConfigError(f"{stage}: runs of this federation file have no such stage")
        return self._stages[stage].conclude(traffic, self.alignment)

    def _spending(self) -> dict[str, Any]:
        """Return the bytes and the epsilon so far, for an event and an epoch's line."""
        charged = self.exchange.epsilon_spent
        epsilon = self._epsilon if charged is None else charged
        spent = {"epsilon": epsilon} if math.isfinite(epsilon) else {}
        return {"bytes": self.exchange.peers.traffic, **spent}

    def _observe(self, event: progress.ProgressEvent) -> None:
        if isinstance(
            event, progress.Stage | progress.RowsReleased | progress.RoundDone | progress.EpochDone
        ):
            event = replace(event, **self._spending())
        self.options.observe(event)

    def train(self) -> None:
        """Make all releases and train the top model (and, through gradients, bottom models).

        It starts afresh, or resumes from the epoch that the plan's facts name.

        Raises:
            SecondariesBackError: Between two epochs, if an absent secondary calls.
            BudgetExceededError: If what a resumed run has left does not cover a release.
            DataError: If the metric that training goes by is not defined for a split's labels;
                nothing was released then.

        Reveals:
            What the methods of :class:`~securevfl.federation.rounds.exchanges.Exchange` say.
        """
        self.primary.require_measurable()
        self.base = base = self._fit_base()
        self._tell_labels()
        if self.plan.facts.resume_epoch:
            self.checkpoints.load(self.plan.facts.resume_epoch, self.primary.load_state)
        else:
            self.checkpoints.forget_after(0)
        if self.plan.regime.releases_once:
            self._train_on_one_release(base)
            return
        primary, presence = self.primary, self.presence
        primary.may_go_on = self._may_go_on
        if presence is not None:
            primary.continues_with_others(presence.since)
        primary.train(after_epoch=self._save_and_countersign)
        self._conclude(base)

    def _fit_base(self) -> Base | None:
        """Fit the base, and let the joint model begin at it; a resumed run fits the same again."""
        if not self.plan.config.base.exists:
            return None
        fitted = self.base
        if fitted is None or fitted.fitted_to != digest_of_rows(self.data.split):
            self._observe(progress.Stage(text="fitting the base"))
            fitted = fit_base(self.plan.config, self.table, self.data, self.options.base)
        self.primary.take_base(fitted.margins)
        return fitted

    def _tell_labels(self) -> None:
        """Charge for the labels that secondaries receive; randomise them where promised."""
        if isinstance(self.primary, NetworkPrimary):
            self.primary.drawn = drawn_labels(
                self.plan, self.data, ledger=self.ledger, files=self.checkpoints.files
            )
        for part in self._stages.values():
            part.begin()

    def _train_on_one_release(self, base: Base | None) -> None:
        rows = np.arange(len(self.data.targets), dtype=np.int64)
        parts = consecutive_batches(rows, batch_size=self.plan.config.training.batch_size)
        kept = CachedRows(self.checkpoints.files, parts, shape=self.plan.cut.shape)
        self.exchange.charged_before = kept.asked_again(self.ledger.released_rows)
        released = bool(kept.missing())
        if released:
            self._observe(progress.Stage(text="releasing rows", of=self.plan.releases.rounds))
            if self.plan.releases.fitting and not self.ledger.encoder_fitted:
                # Secondaries fit, each for itself, when the first row is asked for.
                self._epsilon = self.ledger.charge_fitting()
            for part in self._stages.values():
                part.before_release()
            self.ledger.require_same_release(self._release_digest(rows))
        aggregates = release_once(self.exchange, kept, observe=self._observe)
        if released and self.countersigning is not None:
            self.countersigning.request("released")
        cache = ReleasedRows(
            aggregates,
            ranks=self.exchange.ranks,
            rounds=self.exchange.rounds,
            device=self.data.features.device,
        )
        secondaries, self.primary.exchange = self.primary.exchange, cache
        try:
            self.primary.train(after_epoch=self._save)
            self._conclude(base)
        finally:
            self.primary.exchange = secondaries

    def _release_digest(self, rows: Int64[np.ndarray, " rows"]) -> str:
        """Return the hash of what the primary knows of a release; secondaries know the rest."""
        made = hashlib.sha256(self.plan.config.settings_digest.encode())
        made.update(rows.tobytes())
        return made.hexdigest()

    def _conclude(self, base: Base | None) -> None:
        """Go back to the best epoch, decide who answers, and test."""
        self.primary.restore_best()
        if base is not None:
            self._observe(
                progress.Stage(text="training the primary's own network, without partners")
            )
            self.choice = choose(
                self.plan.config, self.table, self.primary, base, own=self.train_own_network()
            )
        self._test()

    def train_own_network(self) -> Primary | None:
        """Return the network without partners; None where all that there is corrects the base."""
        if self.is_placebo or share_of_base(self.primary.top) == 1:
            return None
        data, estimator = self.primary.data, self.options.top
        return train_own_network(self.plan, self.table, data, estimator=estimator)

    def _test(self) -> None:
        """Measure the model that answers on the test rows, if the budget has room."""
        choice, outputs = self.choice, self._test_outputs()
        if outputs is not None and not self.is_placebo:
            self._measure(outputs, self.primary.threshold if choice is None else choice.threshold)

    def keep(self) -> None:
        """Save the primary's part of the model, once it is trained."""
        save_primary(
            self.plan,
            self.table,
            self.linked,
            keys_of(key_spec(self.plan.config), self.table),
            self.primary,
            self.ledger,
            metrics={} if self.tested is None else self.tested.metrics,
            choice=self.choice,
            folder=self.files.folder,
        )

    def _test_outputs(self) -> Tensor | None:
        """Return the test rows' outputs of the model that answers; None: no budget is left."""
        primary, choice, rows = self.primary, self.choice, self.data.split.test
        if (choice is None or choice.asks(primary)) and self.plan.regime.learns:
            # A simulation cannot be lost.
            files = None if self.countersigning is None else self.checkpoints.files
            if not covers_test_rows(primary, self.plan, self.ledger, files):
                self.options.observe(progress.Warned(text=metrics_file.UNTESTED))
                return None
        joint = primary.predict(rows, "test") if choice is None else choice.joint_outputs(primary)
        self.joint_outputs = joint
        return joint if choice is None else choice.select_outputs(joint, rows)

    def _measure(self, outputs: Tensor, threshold: float) -> None:
        """Measure outputs for the test rows, and write what they predict."""
        rows, primary = self.data.split.test, self.primary
        self.tested = evaluate(
            outputs,
            self.data.targets[torch.from_numpy(rows).to(outputs.device)],
            primary.head,
            classes=self.table.classes,
            threshold=threshold,
            seed=self.plan.config.federation.seed,
        )
        predictions_of(
            outputs,
            primary.head,
            classes=self.table.classes,
            label_scaler=label_scaler_of(self.table, self.data.split, primary.head),
            threshold=threshold,
            rows=(rows + 1).tolist(),
        ).write(self.files.folder.parent.parent / PREDICTIONS)

    def _may_go_on(self) -> bool:
        """Return whether the budget covers one more epoch, and what comes after it."""
        if not covers_epoch(self.plan, self.data.split, self.ledger):
            return False
        # A party that calls and never joins holds no run up: each session does an epoch.
        if self.presence is not None and self.primary.epoch > self.plan.facts.resume_epoch:
            self.presence.let_back()
        return True

    def _save_and_countersign(self, mark: EpochMark) -> None:
        self._save(mark)
        if self.countersigning is not None:
            self.countersigning.meet(epoch_point(mark.epoch))

    def _save(self, mark: EpochMark) -> None:
        self.primary.history[-1].update(self._spending())
        if mark.best:
            self.checkpoints.save_best(mark.epoch, self.primary.best_weights)
        self.checkpoints.save(mark.epoch, self.primary.state())


def hold_primary(recorder: Recorder, table: PartyTable, data: PrimaryData) -> None:
    """Record what the primary holds: columns, keys, labels, similarities, which row is for what."""
    recorder.hold(
        features=data.features,
        keys=data.keys,
        targets=data.targets,
        similarities=data.similarities,
        train=data.training_rows,
        validation=data.split.validation,
        test=data.split.test,
    )
    recorder.hold_keys(table)
