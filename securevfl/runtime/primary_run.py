"""The primary's run from the first release to the last figure, over any exchange.

A family's network averaged with the base may gain because two models that err differently are
better together, whatever partners know. So the same network is trained with nothing in the place
of releases, and the joint model has to be better than the average of that with the base.
"""

import hashlib
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from jaxtyping import Int64
from torch import Tensor, nn

from securevfl.config.federation import FederationConfig, key_spec, link_spec
from securevfl.core import progress
from securevfl.core.errors import BudgetExceededError
from securevfl.core.formatting import finite_or_none
from securevfl.data.rows import RowSplit, consecutive_batches
from securevfl.data.tables import PartyTable
from securevfl.federation.base import Base, Choice, choose, digest_of_rows, fit_base, train_alone
from securevfl.federation.build import build_primary, save_primary
from securevfl.federation.messages import EpochMark, RoundPlan
from securevfl.federation.party_inputs import label_scaler_of, own_inputs
from securevfl.federation.rounds import exchanges
from securevfl.federation.rounds.cut import CutRows
from securevfl.federation.rounds.network_primary import NetworkPrimary
from securevfl.federation.rounds.primary import Primary, PrimaryData
from securevfl.federation.rounds.recording import AVERAGE, Recorder
from securevfl.federation.run_plan import RoundCounter, RunPlan
from securevfl.federation.session.attendance import Presence
from securevfl.federation.session.party_files import PartyFiles
from securevfl.federation.state_folder import DamagedError, StateFolder
from securevfl.ledger.chain import now
from securevfl.ledger.countersigning import Countersigning, epoch_point
from securevfl.ledger.ledger import Ledger
from securevfl.linkage.links import Alignment
from securevfl.linkage.spec import LinkedPrimary
from securevfl.linkage.stage.linking import protection_of
from securevfl.linkage.stage.party_keys import keys_of
from securevfl.models.alone.gain import AloneMeasured, Placebo, measure_alone
from securevfl.models.family import share_of_base
from securevfl.models.layers import PositionsTaken
from securevfl.models.tasks import Evaluation, Metrics, evaluate
from securevfl.runtime import run_folder
from securevfl.runtime.predictions import FILE as PREDICTIONS
from securevfl.runtime.predictions import predictions_of
from securevfl.stages.assist.assisted_boosting import AssistPrimary, release_labels
from securevfl.stages.class_means.class_labels import ClassLabels, class_labels_of, drawn_labels
from securevfl.version import __version__


def train_own_network(
    plan: RunPlan, table: PartyTable, data: PrimaryData, *, estimator: Any = None
) -> Primary:
    """Train the family's top model without partners, as the run trains it with them.

    It has the run's settings, seed, rows and links, so that it differs from the joint model's top
    model by what partners' columns say alone: how near links are follows from keys that both know.
    Pretrained weights, which partners had a part in, are not taken.

    Args:
        plan: The run.
        table: The primary's table.
        data: The same as tensors, with the base.
        estimator: Of scikit-learn, as a top model that no federation file can name.

    Returns:
        The primary at its best epoch.

    Reveals:
        Nothing: no party is asked.
    """
    shape = plan.cut.shape
    zeros = torch.zeros((1, *shape)).expand(len(data.targets), *shape)
    ranks = tuple(plan.ranks[party.name] for party in plan.config.secondaries)
    # Zeros, as if no linked record said anything.
    exchange = exchanges.ReleasedRows(
        zeros, ranks=ranks, rounds=RoundCounter(), device=data.features.device
    )
    own = build_primary(plan, table, data, exchange, observe=progress.unheard, estimator=estimator)
    if data.base is not None:
        own.take_base(data.base)
    own.train(after_epoch=_keep_nothing)
    own.restore_best()
    return own


def _keep_nothing(_mark: EpochMark) -> None:
    pass


class KeptTestRounds(exchanges.ExchangeAround):
    """An exchange that asks only for test rows that it has not yet: a file each round."""

    def __init__(
        self,
        inner: exchanges.Exchange,
        files: StateFolder,
        parts: Sequence[Tensor],
        *,
        top: nn.Module,
        shape: tuple[int, ...],
        device: torch.device,
    ) -> None:
        """Find out what is kept.

        Args:
            inner: Where the secondaries are.
            files: The primary's; they name the run.
            parts: Row ids of every test round, in order; int64.
            top: The primary's half of the model that is tested. What is kept of another model, or
                of other secondaries, is asked for again.
            shape: Of one row of the cut, (L, H).
            device: Where the top model computes.
        """
        super().__init__(inner)
        self._files = files
        self._parts = parts
        self._model = _digest(top, inner.ranks)
        self._shape = shape
        self._device = device
        self._kept: list[Tensor] = []
        # Rounds are kept in order, so what comes behind one that is missing is of another model.
        for number in range(len(parts)):
            aggregate = self._read(number)
            if aggregate is None:
                break
            self._kept.append(aggregate)

    def missing(self) -> list[int]:
        """Return how many rows each round has that is still to be asked for."""
        return [len(part) for part in self._parts[len(self._kept) :]]

    def release_each(self, plans: Iterator[RoundPlan]) -> Iterator[tuple[RoundPlan, CutRows]]:
        """Yield the averages of all test rounds: first those that are kept, then fresh ones.

        Reveals:
            What the inner exchange reveals, of the rounds that are not kept.
        """
        before = len(self._kept)
        for aggregate, plan in zip(tuple(self._kept), plans, strict=False):
            yield plan, aggregate.to(self._device)
        for number, (plan, aggregate) in enumerate(self.inner.release_each(plans), before):
            state = {"model": self._model, "rows": self._parts[number]}
            self._files.write(_name(number), {**state, "aggregate": aggregate.cpu()})
            self._kept.append(aggregate)
            yield plan, aggregate

    def _read(self, number: int) -> Tensor | None:
        try:
            state = self._files.read(_name(number))
        except (FileNotFoundError, DamagedError):
            return None
        rows, aggregate = state.get("rows"), state.get("aggregate")
        part = self._parts[number]
        if not isinstance(rows, Tensor) or not isinstance(aggregate, Tensor):
            return None
        if state.get("model") != self._model or not torch.equal(rows, part):
            return None
        return aggregate if aggregate.shape == (len(part), *self._shape) else None


def _digest(top: nn.Module, ranks: tuple[int, ...]) -> str:
    """Return the hash of a model and of who answers.

    An epoch that is trained once more, behind other noise, is another model of the same number.
    """
    made = hashlib.sha256(repr(ranks).encode())
    for name, value in sorted(top.state_dict().items()):
        made.update(name.encode())
        made.update(value.detach().cpu().contiguous().numpy().tobytes())
    return made.hexdigest()


def _name(number: int) -> str:
    return f"tested/{number + 1}.pt"


def for_an_epoch(plan: RunPlan, split: RowSplit, ledger: Ledger) -> bool:
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


def for_test_rows(
    primary: Primary, plan: RunPlan, ledger: Ledger, files: StateFolder | None
) -> bool:
    """Return whether the budget covers the test rows that the primary has not seen yet.

    Args:
        primary: At its best epoch. Its exchange keeps test rounds from now on, where there is a
            place for them.
        plan: The run.
        ledger: The primary's.
        files: Its own; None keeps nothing.
    """
    data = primary.data
    parts = consecutive_batches(data.split.test, batch_size=plan.config.training.batch_size)
    missing = [len(part) for part in parts]
    if files is not None:
        kept = KeptTestRounds(
            primary.exchange,
            files,
            [torch.from_numpy(part) for part in parts],
            top=primary.top,
            shape=plan.cut.shape,
            device=data.features.device,
        )
        primary.exchange, missing = kept, kept.missing()
    return for_test_rounds(ledger, missing)


def for_test_rounds(ledger: Ledger, rounds: Sequence[int]) -> bool:
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


class RecordedExchange(exchanges.ExchangeAround):
    """An exchange whose averages are recorded in the primary's own folder."""

    def __init__(self, inner: exchanges.Exchange, recorder: Recorder) -> None:
        super().__init__(inner)
        self._recorder = recorder

    def release_each(self, plans: Iterator[RoundPlan]) -> Iterator[tuple[RoundPlan, CutRows]]:
        """Yield the inner exchange's averages.

        Reveals:
            What the inner exchange reveals.
        """
        for plan, average in self.inner.release_each(plans):
            self._recorder.take(
                AVERAGE,
                round_number=plan.round_number,
                rows=plan.rows,
                active=plan.active,
                purpose=plan.purpose,
                average=average,
            )
            yield plan, average


def hold_primary(recorder: Recorder, data: PrimaryData) -> None:
    """Keep what the primary holds: columns, keys, labels, similarities, which row is for what."""
    recorder.hold(
        features=data.features,
        keys=data.keys,
        targets=data.targets,
        similarities=data.similarities,
        train=data.training_rows,
        validation=data.split.validation,
        test=data.split.test,
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class OwnModels:
    """Models from Python that no federation file can name."""

    base: Any = None
    """An estimator of scikit-learn, where the file's ``base.estimator`` is ``python``."""
    top: Any = None
    """The same where ``model.top`` is one from Python."""
    fitted: Base | None = None
    """The base of another run of the same table, seed and ``[base]``; taken if its rows were split
    alike."""


@dataclass(frozen=True, kw_only=True, eq=False)
class OtherParties:
    """The other parties of a run, as the primary reaches them."""

    exchange: exchanges.Exchange
    """Rounds with the secondaries."""
    traffic: Callable[[], int] = lambda: 0
    """Returns the bytes that the primary has sent and received so far."""
    countersigning: Countersigning | None = None
    """Where ledger heads are exchanged; None in a simulation."""
    fit_class_means: Callable[[Callable[[Sequence[str]], ClassLabels]], None] | None = None
    """Lets secondaries fit class means, where their encoders are such."""
    presence: Presence | None = None
    """Record of which secondaries took part, and when; None where all always do."""
    recorder: Recorder | None = None
    """Records what the primary receives and holds, where that is asked for."""


class PrimaryRun:
    """Training, test, comparison with the primary alone, and figures of one run."""

    def __init__(
        self,
        plan: RunPlan,
        table: PartyTable,
        data: PrimaryData,
        linked: LinkedPrimary,
        files: PartyFiles,
        others: OtherParties,
        *,
        observe: progress.Observer,
        own: OwnModels = OwnModels(),
    ) -> None:
        """Build the primary's half of the network.

        Args:
            plan: The run, with where it starts.
            table: The primary's table.
            data: The same as tensors.
            linked: How its keys were linked.
            files: The primary's own; its ledger is open.
            others: The other parties.
            observe: Called with progress.
            own: Models from Python.
        """
        self._start = time.monotonic()
        self.plan = plan
        self.table = table
        self.data = data
        self.linked = linked
        self.files = files
        self.ledger = files.ledger
        self.checkpoints = files.checkpoints
        self._others = others
        self._observe = observe
        self._own = own
        self.base = own.fitted
        """Averaged with the joint model; None until it is fitted, or without a base."""
        noised = plan.config.privacy.mechanism != "none"
        self._epsilon = self.ledger.epsilon_spent if noised else math.inf
        exchange = others.exchange
        if others.recorder is not None:
            exchange = RecordedExchange(exchange, others.recorder)
            hold_primary(others.recorder, data)
            others.recorder.hold_keys(table)
        self.exchange = exchanges.ChargedExchange(exchange, self.ledger, self._note_epsilon)
        self.primary = build_primary(
            plan, table, data, self.exchange, observe=self._tell, estimator=own.top
        )
        self.choice: Choice | None = None
        """Who answers, once the model is trained; None where there is no base."""
        self.tested: Evaluation | None = None
        """Of the test rows, by the model that answers, once they are asked for."""
        self.joint_outputs: Tensor | None = None
        """Of the joint model for the test rows."""
        self.placebo: Tensor | None = None
        """The same of a simulation in which partners' rows were permuted; None: there was none."""
        self.is_placebo = False
        """Whether its outputs for test rows are all that is wanted."""
        self.pretraining: dict[str, Any] | None = None
        """The figures of pretraining, which become part of the run's."""
        self.alignment: dict[str, Any] | None = None
        """How many rows are linked where, which becomes part of the run's figures too."""
        self.links: dict[str, Any] | None = None
        """In a simulation, each secondary's counts of links, which do too."""
        self.linked_rows: dict[str, Any] | None = None
        """What each secondary has said of the rows that are linked there, likewise."""

    def _note_epsilon(self, epsilon: float) -> None:
        self._epsilon = epsilon

    def _figures(self) -> dict[str, Any]:
        spent = {"epsilon": self._epsilon} if math.isfinite(self._epsilon) else {}
        return {"bytes": self._others.traffic(), **spent}

    def _tell(self, event: progress.ProgressEvent) -> None:
        if isinstance(
            event, progress.Stage | progress.RowsReleased | progress.RoundDone | progress.EpochDone
        ):
            event = replace(event, **self._figures())
        self._observe(event)

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
        else:
            self._train_by_rounds(base)

    def _fit_base(self) -> Base | None:
        """Fit the base, and let the joint model begin at it; a resumed run fits the same again."""
        if not self.plan.config.base.exists:
            return None
        fitted = self.base
        if fitted is None or fitted.fitted_to != digest_of_rows(self.data.split):
            self._tell(progress.Stage(text="fitting the base"))
            fitted = fit_base(self.plan.config, self.table, self.data, self._own.base)
        self.primary.take_base(fitted.margins)
        return fitted

    def _tell_labels(self) -> None:
        """Charge for the labels that secondaries receive; randomise them where promised."""
        if isinstance(self.primary, NetworkPrimary):
            self.primary.drawn = drawn_labels(
                self.plan, self.data, ledger=self.ledger, files=self.checkpoints.files
            )
        if not isinstance(self.primary, AssistPrimary):
            return
        labels = release_labels(
            self.plan,
            self.table,
            self.data,
            ledger=self.ledger,
            files=self.checkpoints.files,
            estimator=self._own.base,
        )
        self.primary.use_released_labels(labels)

    def _train_on_one_release(self, base: Base | None) -> None:
        rows = np.arange(len(self.data.targets), dtype=np.int64)
        parts = consecutive_batches(rows, batch_size=self.plan.config.training.batch_size)
        kept = exchanges.CachedRows(self.checkpoints.files, parts, shape=self.plan.cut.shape)
        self.exchange.booked_before = kept.asked_again(self.ledger.released_rows)
        released = bool(kept.missing())
        if released:
            self._tell(progress.Stage(text="releasing rows", of=self.plan.releases.rounds))
            if self.plan.releases.fitting and not self.ledger.encoder_fitted:
                # Secondaries fit, each for itself, when the first row is asked for.
                self._note_epsilon(self.ledger.charge_fitting())
            if self._others.fit_class_means is not None:
                self._tell(progress.Stage(text="fitting class means"))
                files = self.checkpoints.files
                self._others.fit_class_means(
                    partial(class_labels_of, self.plan, self.data, self.table, self.ledger, files)
                )
            self.ledger.require_same_release(self._release_digest(rows))
        aggregates = exchanges.release_once(self.exchange, kept, observe=self._tell)
        if released and self._others.countersigning is not None:
            self._others.countersigning.request("released")
        cache = exchanges.ReleasedRows(
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

    def _train_by_rounds(self, base: Base | None) -> None:
        self.primary.may_go_on = self._room_for_an_epoch
        if self._others.presence is not None:
            self.primary.continues_with_others(self._others.presence.since)
        self.primary.train(after_epoch=self._save_and_countersign)
        self._conclude(base)

    def _conclude(self, base: Base | None) -> None:
        """Go back to the best epoch, decide who answers, and test."""
        self.primary.restore_best()
        if base is not None:
            self._tell(progress.Stage(text="training the primary's own network, without partners"))
            self.choice = choose(
                self.plan.config, self.table, self.primary, base, own=self._own_network()
            )
        self._test()

    def _own_network(self) -> Primary | None:
        """Return the network without partners; None where all that there is corrects the base."""
        if self.is_placebo or share_of_base(self.primary.top) == 1:
            return None
        return train_own_network(self.plan, self.table, self.primary.data, estimator=self._own.top)

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
            files = None if self._others.countersigning is None else self.checkpoints.files
            if not for_test_rows(primary, self.plan, self.ledger, files):
                self._observe(progress.Warned(text=run_folder.UNTESTED))
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

    def _room_for_an_epoch(self) -> bool:
        """Return whether the budget covers one more epoch, and what comes after it."""
        if not for_an_epoch(self.plan, self.data.split, self.ledger):
            return False
        # A party that calls and never joins holds no run up: each session does an epoch.
        if self._others.presence is not None and self.primary.epoch > self.plan.facts.resume_epoch:
            self._others.presence.let_back()
        return True

    def _save_and_countersign(self, mark: EpochMark) -> None:
        self._save(mark)
        if self._others.countersigning is not None:
            self._others.countersigning.meet(epoch_point(mark.epoch))

    def _save(self, mark: EpochMark) -> None:
        self.primary.history[-1].update(self._figures())
        if mark.best:
            self.checkpoints.save_best(mark.epoch, self.primary.best_weights)
        self.checkpoints.save(mark.epoch, self.primary.state())

    def finish(
        self,
        folder: Path,
        *,
        mode: str,
        traffic: Mapping[str, Mapping[str, int]],
        with_alone: bool = True,
        positions: Mapping[str, PositionsTaken] = MappingProxyType({}),
    ) -> run_folder.RunFigures:
        """Measure the primary alone if asked for; return the run's figures.

        The run folder gets ``history.csv`` and, where the top model can tell, ``explanation.json``;
        the figures are written when all of them are known.

        Args:
            folder: The run's.
            mode: ``simulated`` or ``federated``.
            traffic: Bytes that each party sent and received.
            with_alone: Whether to measure.
            positions: Secondaries' positional encodings around the first average, by name, where a
                simulation shows them.

        Reveals:
            Nothing: the primary works alone here.
        """
        tested = self.tested
        placebos = {} if tested is None else self._placebos(with_alone=with_alone)
        alone = None
        if with_alone and tested is not None and self.joint_outputs is not None:
            alone = self._measure_alone(self.joint_outputs, placebos)
        primary, config, head = self.primary, self.plan.config, self.data.head
        choice = self.choice
        validation = primary.best_validation if choice is None else choice.validation
        run_folder.write_history(folder, primary.history)
        run_folder.write_explanation(folder, primary.explanation(positions), for_others=True)
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
            placebos={name: self._test_metrics(outputs) for name, outputs in placebos.items()},
            validation_metrics=validation,
            test_metrics={} if tested is None else tested.metrics,
            evaluation={} if tested is None else tested.as_json(),
            untested=run_folder.UNTESTED if tested is None else None,
            base=None if choice is None else choice.as_json(config),
            joint_test_metrics=None if choice is None else choice.joint_test,
            epochs=primary.epoch,
            best_epoch=primary.best_epoch,
            seconds=round(time.monotonic() - self._start, 3),
            ended=now(),
            rows={
                "train": len(self.data.split.train),
                "validation": len(self.data.split.validation),
                "test": len(self.data.split.test),
            },
            parties=len(config.parties),
            bytes={name: dict(row) for name, row in traffic.items()},
            mode=mode,
            privacy=run_folder.privacy_figures(self.plan, self.ledger),
            pretraining=self.pretraining,
            alignment=self.alignment,
            links=self.links,
            announced_keys=self.linked.announced,
            linked_rows=self.linked_rows,
            absences=None
            if self._others.presence is None
            else self._others.presence.absences() or None,
            run=self.plan.facts.run,
            ledger=str(self.files.run_ledger.relative_to(folder)),
            version=__version__,
        )

    def _test_metrics(self, outputs: Tensor) -> Metrics:
        """Return every metric of outputs for the test rows."""
        rows = torch.from_numpy(self.data.split.test).to(outputs.device)
        targets = self.data.targets[rows]
        return self.data.head.metrics(outputs, targets, threshold=self.primary.threshold)

    def _placebos(self, *, with_alone: bool) -> dict[Placebo, Tensor]:
        """Return the outputs of every placebo for the test rows."""
        placebos: dict[Placebo, Tensor] = {}
        own = None if self.choice is None else self.choice.own
        if self.choice is None and with_alone:
            own = self._own_network()
        if own is not None:
            placebos["own"] = own.predict(self.data.split.test, "test")
        if self.placebo is not None:
            placebos["permuted"] = self.placebo
        return placebos

    def _measure_alone(self, outputs: Tensor, placebos: Mapping[Placebo, Tensor]) -> AloneMeasured:
        self._observe(progress.Stage(text="fitting the primary alone"))
        rows, choice = self.data.split.test, self.choice
        return measure_alone(
            train_alone(self.plan.config, self.table, self.data)
            if choice is None
            else choice.alone,
            own_inputs(self.table).take(rows),
            self.data.targets[torch.from_numpy(rows).to(outputs.device)],
            outputs,
            threshold=self.primary.threshold,
            seed=self.plan.config.federation.seed,
            used="joint" if choice is None else choice.decision.used,
            placebos=placebos,
        )


def report_alignment(
    config: FederationConfig,
    alignment: Alignment | None,
    *,
    training_rows: int,
    log: Callable[..., None],
    observe: progress.Observer,
) -> dict[str, Any] | None:
    """Report how many rows are aligned, and warn where no setting bounds a link's distance.

    Args:
        config: The federation file.
        alignment: What linking has counted; None where it does not count.
        training_rows: Labelled rows that the joint model learns from.
        log: The primary's log.
        observe: Called with the counts and the warning.

    Returns:
        Counts and the warning, for ``metrics.json``; None where linking does not count.
    """
    if alignment is None:
        return None
    spec = link_spec(config)
    figures = {
        **alignment.figures(
            max_distance=finite_or_none(spec.choice.max_distance),
            unit=protection_of(spec).unit(spec),
        ),
        "training_rows": training_rows,
    }
    log("aligned", **figures)
    observe(
        progress.RowsAligned(
            aligned=figures["aligned"], rows=figures["rows"], by_secondary=figures["by_secondary"]
        )
    )
    if figures["warning"] is not None:
        observe(progress.Warned(text=figures["warning"]))
    return figures
