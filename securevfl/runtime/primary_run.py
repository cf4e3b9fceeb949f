"""The primary's part in a run, from the first release to the last figure, over any exchange."""

import hashlib
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Int64
from torch import Tensor

from securevfl.config.federation import key_spec, link_spec
from securevfl.core import progress
from securevfl.core.errors import BudgetExceededError
from securevfl.core.formatting import finite_or_none
from securevfl.core.progress import Stage, unheard
from securevfl.data.tables import PartyTable, RowSplit, consecutive_batches
from securevfl.federation.base import (
    Base,
    Choice,
    choose,
    digest_of_rows,
    fit_base,
    label_scaler_of,
    own_inputs,
    train_alone,
)
from securevfl.federation.build import build_primary, save_primary
from securevfl.federation.messages import EpochMark
from securevfl.federation.released_labels import drawn_labels
from securevfl.federation.rounds.exchanges import ReleasedRows, RoundExchange, release_once
from securevfl.federation.rounds.kept_rounds import CachedRows, CachedTestRounds
from securevfl.federation.rounds.network_primary import NetworkPrimary
from securevfl.federation.rounds.primary import Primary, PrimaryData
from securevfl.federation.rounds.recording import Recorder
from securevfl.federation.run_plan import RoundCounter, RunPlan
from securevfl.federation.session.party_files import PartyFiles
from securevfl.federation.stage import OtherParts, PrimaryContext, run_stages
from securevfl.ledger.chain import now
from securevfl.ledger.countersigning import Countersigning, epoch_point
from securevfl.ledger.ledger import Ledger
from securevfl.linkage.spec import LinkedPrimary
from securevfl.linkage.stage.linkage_parts import protection_of
from securevfl.linkage.stage.party_keys import keys_of
from securevfl.models.alone.gain import AloneMeasured, Placebo, measure_alone
from securevfl.models.family import share_of_base
from securevfl.models.tasks import Evaluation, Metrics, evaluate
from securevfl.runtime import run_folder
from securevfl.runtime.predictions import FILE as PREDICTIONS
from securevfl.runtime.predictions import predictions_of
from securevfl.runtime.run_options import RunOptions
from securevfl.version import __version__


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
        self.is_for_comparison = False
        """Whether its outputs for test rows are all that is wanted."""
        self.alignment = self._report_alignment()
        """How many rows are linked where, for the run's figures; None where linking counts none."""
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
        self.without_noise: Tensor | None = None
        """The same of a simulation without noise; None: there was none."""
        self.links: dict[str, Any] | None = None
        """In a simulation, each secondary's counts of links, for the run's figures."""
        self.linked_rows: dict[str, Any] | None = None
        """Linked-row count that each secondary has reported, for the run's figures."""

    def _report_alignment(self) -> dict[str, Any] | None:
        """Report how many rows are aligned, and warn where no setting bounds a link's distance."""
        alignment, spec = self.linked.alignment, link_spec(self.plan.config)
        if alignment is None:
            return None
        limit, unit = finite_or_none(spec.choice.max_distance), protection_of(spec).unit(spec)
        rows = {"training_rows": len(self.data.training_rows)}
        figures = {**alignment.figures(max_distance=limit, unit=unit), **rows}
        self.files.log("aligned", **figures)
        counts = {name: figures[name] for name in ("aligned", "rows", "by_secondary")}
        self.options.observe(progress.RowsAligned(**counts))
        if figures["warning"] is not None:
            self.options.observe(progress.Warned(text=figures["warning"]))
        return figures

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
        self.primary.may_go_on = lambda: covers_epoch(self.plan, self.data.split, self.ledger)
        self.primary.train(after_epoch=self._save_and_countersign)
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
            self._observe(progress.Stage(text="own network, no partners"))
            self.choice = choose(
                self.plan.config, self.table, self.primary, base, own=self.train_own_network()
            )
        self._test()

    def train_own_network(self) -> Primary | None:
        """Train the family's top model without partners, as the run trains it with them.

        A family's network averaged with the base may gain because two models that err differently
        are better together, whatever partners know. So the joint model has to be better than the
        average of the base with this network: it has the run's settings, seed, rows and links, and
        differs from the joint model's top model by what partners' columns say alone. How near links
        are follows from keys that both know. Pretrained weights, which partners had a part in, are
        not taken.

        Returns:
            The primary at its best epoch; None where all that there is corrects the base.

        Reveals:
            Nothing: no party is asked.
        """
        if self.is_for_comparison or share_of_base(self.primary.top) == 1:
            return None
        plan, data, shape = self.plan, self.primary.data, self.plan.cut.shape
        # Zeros, as if no linked record said anything.
        nothing = ReleasedRows(
            torch.zeros((1, *shape)).expand(len(data.targets), *shape),
            ranks=tuple(plan.ranks[party.name] for party in plan.config.secondaries),
            rounds=RoundCounter(),
            device=data.features.device,
        )
        top = self.options.top
        own = build_primary(plan, self.table, data, nothing, observe=unheard, estimator=top)
        if data.base is not None:
            own.take_base(data.base)
        own.train(after_epoch=lambda _mark: None)
        own.restore_best()
        return own

    def _test(self) -> None:
        """Measure the model that answers on the test rows, if the budget has room."""
        choice, outputs = self.choice, self._test_outputs()
        if outputs is not None and not self.is_for_comparison:
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
        asks = self.plan.regime.learns and (choice is None or choice.asks())
        if asks and not covers_test_rounds(self.ledger, self._missing_test_rounds()):
            self.options.observe(progress.Warned(text=run_folder.UNTESTED))
            return None
        joint = primary.predict(rows, "test") if choice is None else choice.joint_outputs(primary)
        self.joint_outputs = joint
        return joint if choice is None else choice.select_outputs(joint, rows)

    def _missing_test_rounds(self) -> list[int]:
        """Return the rows of each test round that the primary, at its best epoch, has not seen.

        Where a run can be lost, its exchange keeps test rounds from now on.
        """
        primary, plan = self.primary, self.plan
        parts = consecutive_batches(
            primary.data.split.test, batch_size=plan.config.training.batch_size
        )
        # A simulation cannot be lost.
        if self.countersigning is None or not isinstance(primary.exchange, RoundExchange):
            return [len(part) for part in parts]
        primary.exchange.test_rounds = kept = CachedTestRounds(
            self.checkpoints.files,
            parts,
            top=primary.top,
            ranks=primary.exchange.ranks,
            shape=plan.cut.shape,
        )
        return kept.missing()

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


def covers_epoch(plan: RunPlan, split: RowSplit, ledger: Ledger) -> bool:
    """Return whether one more epoch and the final test fit into the budget.

    A run that was resumed has less left than a fresh one: it stops early rather than fail. Where
    room is kept for a loss (:attr:`FederationConfig.reserves_budget`), it is left as it is.
    """
    batch, spare = plan.config.training.batch_size, int(plan.config.reserves_budget)
    parts = (len(split.train), len(split.validation), *[len(split.test)] * (1 + spare))
    return _covers(
        ledger,
        rounds=sum(math.ceil(rows / batch) for rows in parts),
        rows=sum(parts),
        passes=1 + spare,
    )


def covers_test_rounds(ledger: Ledger, rounds: Sequence[int]) -> bool:
    """Return whether the budget covers test rounds of so many rows each."""
    # Each row is of one part of the table: a session's test rows are part of a pass it has made.
    passes = 0 if ledger.sessions[-1].passes else 1
    return _covers(ledger, rounds=len(rounds), rows=sum(rounds), passes=passes)


def _covers(ledger: Ledger, *, rounds: int, rows: int, passes: int) -> bool:
    try:
        ledger.require_room(rounds=rounds, row_releases=rows, passes=passes)
    except BudgetExceededError:
        return False
    return True


def measure_run(
    run: PrimaryRun,
    folder: Path,
    *,
    mode: str,
    traffic: Mapping[str, Mapping[str, int]],
    with_alone: bool = True,
) -> run_folder.RunFigures:
    """Measure the primary alone if asked for; return the run's figures.

    The run folder gets ``history.csv``; the figures are written when all of them are known.

    Args:
        run: Trained and tested.
        folder: The run's.
        mode: ``simulated`` or ``federated``.
        traffic: Bytes that each party sent and received.
        with_alone: Whether to measure.

    Reveals:
        Nothing: the primary works alone here.
    """
    tested = run.tested
    placebos = {} if tested is None else _placebos(run, with_alone=with_alone)
    outputs, alone = run.joint_outputs, None
    if with_alone and tested is not None and outputs is not None:
        alone = _measure_alone(run, outputs, placebos)
    primary, config, head = run.primary, run.plan.config, run.data.head
    choice = run.choice
    validation = primary.best_validation if choice is None else choice.validation
    run_folder.write_history(folder, primary.history)
    return run_folder.RunFigures(
        federation=config.federation.name,
        task=config.federation.task,
        family=config.family.name,
        metric=head.metric_name,
        higher_is_better=head.higher_is_better,
        train=primary.best_line["train"],
        validation=head.headline(validation),
        test=None if tested is None else head.headline(tested.metrics),
        alone_test=None if alone is None else head.headline(alone.metrics),
        alone=None if alone is None else alone.as_json(),
        gain=None if alone is None else alone.gain.as_json(),
        placebos={name: _test_metrics(run, outputs) for name, outputs in placebos.items()},
        without_noise=None if run.without_noise is None else _test_metrics(run, run.without_noise),
        validation_metrics=validation,
        test_metrics={} if tested is None else tested.metrics,
        evaluation={} if tested is None else tested.as_json(),
        untested=run_folder.UNTESTED if tested is None else None,
        base=None if choice is None else choice.as_json(config),
        joint_test_metrics=None if choice is None else choice.joint_test,
        epochs=primary.epoch,
        best_epoch=primary.best_epoch,
        seconds=round(time.monotonic() - run.started, 3),
        ended=now(),
        rows={
            "train": len(run.data.split.train),
            "validation": len(run.data.split.validation),
            "test": len(run.data.split.test),
        },
        parties=len(config.parties),
        bytes={name: dict(row) for name, row in traffic.items()},
        mode=mode,
        engine=config.engine,
        privacy=run_folder.privacy_figures(run.plan, run.ledger),
        stages=run.stage_figures(),
        alignment=run.alignment,
        links=run.links,
        announced_keys=run.linked.announced,
        linked_rows=run.linked_rows,
        run=run.plan.facts.run,
        ledger=str(run.files.run_ledger.relative_to(folder)),
        version=__version__,
    )


def _test_metrics(run: PrimaryRun, outputs: Tensor) -> Metrics:
    """Return every metric of outputs for the test rows."""
    rows = torch.from_numpy(run.data.split.test).to(outputs.device)
    targets = run.data.targets[rows]
    return run.data.head.metrics(outputs, targets, threshold=run.primary.threshold)


def _placebos(run: PrimaryRun, *, with_alone: bool) -> dict[Placebo, Tensor]:
    """Return the outputs of every placebo for the test rows."""
    placebos: dict[Placebo, Tensor] = {}
    own = None if run.choice is None else run.choice.own
    if run.choice is None and with_alone:
        own = run.train_own_network()
    if own is not None:
        placebos["own"] = own.predict(run.data.split.test, "test")
    if run.placebo is not None:
        placebos["permuted"] = run.placebo
    return placebos


def _measure_alone(
    run: PrimaryRun, outputs: Tensor, placebos: Mapping[Placebo, Tensor]
) -> AloneMeasured:
    run.options.observe(Stage(text="fitting the primary alone"))
    rows, choice = run.data.split.test, run.choice
    return measure_alone(
        train_alone(run.plan.config, run.table, run.data) if choice is None else choice.alone,
        own_inputs(run.table).take(rows),
        run.data.targets[torch.from_numpy(rows).to(outputs.device)],
        outputs,
        threshold=run.primary.threshold,
        seed=run.plan.config.federation.seed,
        decision=None if choice is None else choice.decision,
        placebos=placebos,
    )
