"""Pretraining between processes: messages, their validation, exchange and server."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Final

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Bool, Float, Float32, Int64
from torch import Tensor

from securevfl.core.errors import ProtocolError
from securevfl.core.progress import Observer, ProgressEvent, Stage, Warned
from securevfl.data.tables import PartyTable
from securevfl.federation.messages import Mean, RoundKind
from securevfl.federation.pretraining.learner_with_records import IterationFigures
from securevfl.federation.pretraining.pretraining_exchange import (
    PretrainingSecondary,
    projection_cut,
    projection_words,
)
from securevfl.federation.pretraining.pretraining_run import build_pretraining_secondary, build_run
from securevfl.federation.pretraining.pretraining_stage import (
    earlier_figures,
    hand_over,
    load_checkpoint,
    run_pretraining,
    save_encoders,
    wants_pretraining,
)
from securevfl.federation.rounds.over_star import sum_to_primary
from securevfl.federation.rounds.primary import Primary
from securevfl.federation.rounds.secondary import Secondary
from securevfl.federation.run_plan import RunPlan
from securevfl.federation.session.allowance import Allowance
from securevfl.federation.session.party_files import PartyFiles
from securevfl.linkage.links import Alignment
from securevfl.linkage.spec import LinkedSecondary
from securevfl.mpc.sum_to import SumTo, decode_mean, encode_weighted, words_needed
from securevfl.transport.message import DeclaredMessage, MessageKind, TypedMessage, wire
from securevfl.transport.star import PrimaryTransport, SecondaryTransport

# The messages of pretraining, each checked where it is read.


class PretrainingKind(MessageKind):
    """What parties tell one another to pretrain."""

    PRETRAIN = 32
    CROSS = 33
    PROJECTIONS = 34
    LOCAL = 35
    TOPS = 36
    PRETRAINED = 37


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class IterationBegin(DeclaredMessage):
    """An iteration of pretraining begins.

    It names the primary's rows that are held out for validation and testing.
    """

    KIND: ClassVar = PretrainingKind.PRETRAIN
    WAY: ClassVar = "primary to every secondary"

    iteration: int
    """Counts from 0."""

    held_out: Int64[np.ndarray, " _rows"]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class CrossBatch(DeclaredMessage):
    """Row ids of a batch and the primary's projections of them.

    The projections carry the noise that ``pretraining.primary_sends`` or ``iso_projections`` asks
    for.
    """

    KIND: ClassVar = PretrainingKind.CROSS
    WAY: ClassVar = "primary to every secondary"

    round_number: int
    rows: Int64[np.ndarray, " some_rows"]
    sent: Float32[np.ndarray, "some_rows width"]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Projections(DeclaredMessage):
    """The secondary's projections of the batch in clear.

    Only in a plain exchange; in an averaged one the secondary sends a share.
    """

    KIND: ClassVar = PretrainingKind.PROJECTIONS
    WAY: ClassVar = "secondary to primary"

    round_number: int
    vectors: Float32[np.ndarray, "*shape"]


@dataclass(frozen=True, kw_only=True, slots=True)
class LearnLocally(DeclaredMessage):
    """Learn from your own records. Tells nothing else."""

    KIND: ClassVar = PretrainingKind.LOCAL
    WAY: ClassVar = "primary to every secondary"

    iteration: int


@dataclass(frozen=True, kw_only=True, slots=True)
class TopsRequest(DeclaredMessage):
    """Send your local top encoder's words. Tells nothing else."""

    KIND: ClassVar = PretrainingKind.TOPS
    WAY: ClassVar = "primary to every secondary"

    round_number: int


@dataclass(frozen=True, kw_only=True, slots=True)
class IterationEnd(DeclaredMessage):
    """So many iterations are done, and whether it was the last."""

    KIND: ClassVar = PretrainingKind.PRETRAINED
    WAY: ClassVar = "primary to every secondary"

    iterations: int = wire(least=1)
    last: bool


# What the primary may still ask of one secondary in pretraining, and nothing besides.


class PretrainingAllowance:
    """The plan of pretraining and what was used of it: whoever handles a message asks here first.

    Iterations come in order, each with the steps that the family has: batches of rows that are
    linked here and not held out, each row so often as ``pretraining.cross_epochs`` says; local
    learning once; an average of local top encoders once. What is held out stays what it was.
    """

    def __init__(
        self, plan: RunPlan, session: Allowance, *, linked: Bool[np.ndarray, " rows"]
    ) -> None:
        """Make it.

        Args:
            plan: The run.
            session: What the session allows; it keeps the round numbers.
            linked: Which of the primary's rows have a link at this secondary.
        """
        settings, facts = plan.config.pretraining, plan.facts
        self._session = session
        self._steps = plan.config.family.pretraining
        self._total = settings.iterations
        self._passes = settings.cross_epochs
        self._batch_size = settings.batch_size
        self._rows = facts.rows
        self._linked = linked
        self._own = facts.train_rows + facts.unlabelled_rows
        self._done = min(facts.resume_pretraining, settings.iterations)
        # Where all is learned already, the last iteration is opened once more, and stays empty.
        self._empty = self._done == settings.iterations
        self._held_out: np.ndarray | None = None
        self._uses = np.zeros(facts.rows, dtype=np.int64)
        self._batches = 0
        self._open = False
        self._steps_done: set[str] = set()

    def admit_begin(self, begin: IterationBegin) -> None:
        """Take the beginning of an iteration into account, or refuse it.

        Raises:
            ProtocolError: If it is not due, or holds out other rows than before.
        """
        due = self._total - 1 if self._empty else self._done
        if self._open or begin.iteration != due or due >= self._total:
            raise ProtocolError(
                f"pretraining: iteration {begin.iteration + 1} is not due; {self._done} of "
                f"{self._total} are done"
            )
        held = begin.held_out
        outside = len(held) and (held.min() < 0 or held.max() >= self._rows)
        if (
            outside
            or len(np.unique(held)) != self._rows - self._own
            or len(held) != len(np.unique(held))
        ):
            raise ProtocolError(
                f"pretraining: the primary holds out {len(held)} rows; its validation and test "
                f"rows are {self._rows - self._own}"
            )
        if self._held_out is not None and not np.array_equal(held, self._held_out):
            raise ProtocolError("pretraining: the primary holds out other rows than before")
        self._held_out = held
        self._open = True
        self._uses[:] = 0
        self._batches = 0
        self._steps_done.clear()

    def admit_batch(self, batch: CrossBatch) -> None:
        """Take a batch into account, or refuse it.

        Raises:
            ProtocolError: If no batch is due, or it names rows that it must not.
        """
        where, rows = f"round {batch.round_number}", batch.rows
        self._session.take_round(batch.round_number)
        self._require_step("cross", after={"local", "aggregate"}, where=where)
        most = self._passes * math.ceil(self._own / self._batch_size)
        if len(rows) > self._batch_size or self._batches >= most:
            raise ProtocolError(
                f"{where}: the primary names {len(rows)} rows in batch {self._batches + 1} of an "
                f"iteration, which has at most {most} of {self._batch_size}"
            )
        if rows.min() < 0 or rows.max() >= self._rows:
            raise ProtocolError(
                f"{where}: the primary names rows outside the {self._rows} that it has"
            )
        strangers = int((~self._linked[rows]).sum())
        if strangers:
            raise ProtocolError(
                f"{where}: the primary names {strangers} rows that have no link here, and only "
                f"aligned rows are learned from across parties"
            )
        held = np.zeros(0, dtype=np.int64) if self._held_out is None else self._held_out
        again = len(np.unique(rows)) != len(rows) or (self._uses[rows] >= self._passes).any()
        if again or np.isin(rows, held).any():
            raise ProtocolError(
                f"{where}: the primary names rows that are held out, or more often than "
                f"pretraining.cross_epochs = {self._passes}"
            )
        self._uses[rows] += 1
        self._batches += 1

    def admit_local(self, told: LearnLocally) -> None:
        """Take local learning into account, or refuse it.

        Raises:
            ProtocolError: If it is not due.
        """
        if told.iteration != self._done:
            raise ProtocolError(f"pretraining: iteration {told.iteration + 1} is not due")
        self._require_step("local", after={"local", "aggregate"}, where="local learning")
        self._steps_done.add("local")

    def admit_tops(self, round_number: int) -> None:
        """Take an average of local top encoders into account, or refuse it.

        Raises:
            ProtocolError: If it is not due.
        """
        self._session.take_round(round_number)
        self._require_step("aggregate", after={"aggregate"}, where=f"round {round_number}")
        self._steps_done.add("aggregate")

    def admit_end(self, end: IterationEnd) -> None:
        """Take the end of an iteration into account, or refuse it.

        Raises:
            ProtocolError: If it is not due.
        """
        due = self._total if self._empty else self._done + 1
        if not self._open or end.iterations != due or end.last != (due == self._total):
            raise ProtocolError(
                f"pretraining: the end of iteration {end.iterations} is not due; {self._done} of "
                f"{self._total} are done"
            )
        self._open = False
        self._done = due

    def _require_step(self, step: str, *, after: set[str], where: str) -> None:
        if not self._open or self._empty or step not in self._steps or after & self._steps_done:
            raise ProtocolError(f"{where}: the step {step!r} of pretraining is not due")


# Pretraining between processes: the primary's exchange and a secondary's server.

_STEPS: Final = (
    PretrainingKind.PRETRAIN,
    PretrainingKind.CROSS,
    PretrainingKind.LOCAL,
    PretrainingKind.TOPS,
    PretrainingKind.PRETRAINED,
)


class FederatedPretraining:
    """The primary's way to secondaries in other processes, over the authenticated star."""

    def __init__(self, transport: PrimaryTransport, plan: RunPlan, *, device: torch.device) -> None:
        """Make it.

        Args:
            transport: The primary's end of the star.
            plan: The run.
            device: Where the primary computes.
        """
        settings, self._runtime = plan.config.pretraining, plan.config.runtime
        self.transport = transport
        self.names = plan.secondaries
        self.plain = settings.exchange == "plain"
        self.device = device
        self.cut = projection_cut(settings.projection_width, parties=len(self.names))
        # Between two messages a secondary may go through all of its records.
        self.sum_to = sum_to_primary(transport, self.names, deadline_s=self._runtime.idle_timeout_s)

    def begin_iteration(self, iteration: int, held_out: npt.NDArray[np.int64]) -> None:
        """Announce an iteration.

        Reveals:
            What :meth:`PretrainingExchange.begin_iteration` reveals.
        """
        self._tell(IterationBegin(iteration=iteration, held_out=held_out))

    def cross(
        self,
        rows: npt.NDArray[np.int64],
        sent: Float[Tensor, "batch width"],
        *,
        round_number: int,
    ) -> list[Float[Tensor, "batch width"]]:
        """Exchange projections.

        Reveals:
            What :meth:`PretrainingExchange.cross` reveals.
        """
        own = sent.detach().cpu().numpy()
        self._tell(CrossBatch(round_number=round_number, rows=rows, sent=own))
        shape = tuple(sent.shape)
        if self.plain:
            messages = self.transport.receive_each(
                list(self.names.values()),
                PretrainingKind.PROJECTIONS,
                round_number=round_number,
                deadline_s=self._runtime.idle_timeout_s,
            )
            theirs = {
                message.sender: Projections.from_message(message, shape=shape).vectors
                for message in messages
            }
            # By rank, not by arrival: a sum of floats depends on its order.
            return [torch.from_numpy(theirs[name]).to(self.device) for name in self.names.values()]
        total = self.sum_to(
            self.cut.zeros(len(rows)), round_number=round_number, active=tuple(self.names)
        )
        assert total is not None, "the primary's reveal returns the total"
        return [self.cut.decode(total.to(self.device), rows=len(rows), active=len(self.names))]

    def local(self, iteration: int) -> None:
        """Let every secondary learn from its own records; the primary goes on meanwhile.

        Reveals:
            Nothing.
        """
        self._tell(LearnLocally(iteration=iteration))

    def aggregate(
        self, own: Mapping[str, Tensor], *, weight: int, round_number: int
    ) -> dict[str, Tensor]:
        """Average the local top encoders of all parties through the secure mean.

        Reveals:
            What :meth:`PretrainingExchange.aggregate` reveals.
        """
        self._tell(TopsRequest(round_number=round_number))
        words = encode_weighted(own, weight=weight, parties=len(self.names) + 1).cpu()
        total = self.sum_to(words, round_number=round_number, active=tuple(self.names))
        assert total is not None, "the primary's reveal returns the total"
        mean = decode_mean(total, {name: own[name].shape for name in own})
        values = {name: value.cpu().numpy() for name, value in mean.items()}
        self._tell(Mean(round_number=round_number, values=values))
        return mean

    def end_iteration(self, iterations: int, *, last: bool) -> list[IterationFigures]:
        """Let every secondary save; their figures stay with them.

        Reveals:
            What :meth:`PretrainingExchange.end_iteration` reveals.
        """
        self._tell(IterationEnd(iterations=iterations, last=last))
        return []

    def _tell(self, told: TypedMessage) -> None:
        self.transport.broadcast(list(self.names.values()), told.to_message())


class PretrainingServer:
    """Answer the primary's messages of pretraining with one :class:`PretrainingSecondary`."""

    def __init__(
        self,
        secondary: PretrainingSecondary,
        transport: SecondaryTransport,
        sum_to: SumTo,
        plan: RunPlan,
        *,
        allowance: PretrainingAllowance,
        device: torch.device,
        log: Callable[..., None],
    ) -> None:
        """Make it.

        Args:
            secondary: Who answers.
            transport: This party's end of the star.
            sum_to: Its end of secure sums.
            plan: The run, as this party has computed it.
            allowance: What the primary may ask for.
            device: Where it computes.
            log: Its log.
        """
        settings, self._runtime = plan.config.pretraining, plan.config.runtime
        self.secondary = secondary
        self.transport = transport
        self.sum_to = sum_to
        self.plain = settings.exchange == "plain"
        self.allowance = allowance
        self.device = device
        self.log = log
        self.ranks = tuple(plan.secondaries)
        self.cut = projection_cut(settings.projection_width, parties=len(self.ranks))

    def serve(self) -> None:
        """Answer until the last iteration is done.

        Raises:
            ProtocolError: If the primary leaves the protocol, fails or falls silent.
            PrivacyError: If training diverges.

        Reveals:
            To the primary: what :class:`PretrainingExchange` says of each of its methods.
        """
        last = False
        while not last:
            message = self.transport.receive(
                _STEPS, round_number=None, deadline_s=self._runtime.idle_timeout_s
            )
            self.sum_to.bind(message.digest(), self.ranks)
            if message.kind is PretrainingKind.PRETRAIN:
                begin = IterationBegin.from_message(message)
                self.allowance.admit_begin(begin)
                self.secondary.begin_iteration(begin.iteration, begin.held_out)
            elif message.kind is PretrainingKind.CROSS:
                self._cross(CrossBatch.from_message(message, width=self.cut.shape[0]))
            elif message.kind is PretrainingKind.LOCAL:
                told = LearnLocally.from_message(message)
                self.allowance.admit_local(told)
                self.secondary.learning.learn_local(told.iteration)
            elif message.kind is PretrainingKind.TOPS:
                self._aggregate(message.round_number)
            else:
                last = self._end(IterationEnd.from_message(message))

    def _cross(self, batch: CrossBatch) -> None:
        self.allowance.admit_batch(batch)
        number = batch.round_number
        if not self.plain:
            count = self.cut.words(len(batch.rows))
            self.sum_to.prepare(count, round_number=number, active=self.ranks)
        vectors = self.secondary.project(batch.rows, round_number=number)
        if self.plain:
            clear = Projections(round_number=number, vectors=vectors.cpu().numpy())
            self.transport.send(clear.to_message())
        else:
            words = projection_words(vectors, self.cut).cpu()
            self.sum_to(words, round_number=number, active=self.ranks)
        self.secondary.learn_cross(torch.from_numpy(batch.sent).to(self.device))

    def _aggregate(self, round_number: int) -> None:
        self.allowance.admit_tops(round_number)
        learning = self.secondary.learning
        own = learning.shared_weights()
        parties = len(self.ranks) + 1
        shapes = {name: tuple(value.shape) for name, value in own.items()}
        self.sum_to.prepare(words_needed(shapes), round_number=round_number, active=self.ranks)
        words = encode_weighted(own, weight=learning.weight, parties=parties).cpu()
        self.sum_to(words, round_number=round_number, active=self.ranks)
        message = self.transport.receive(
            RoundKind.MEAN,
            round_number=round_number,
            deadline_s=self._runtime.idle_timeout_s,
        )
        self.sum_to.bind(message.digest(), self.ranks)
        mean = Mean.from_message(message, shapes=shapes).values
        learning.load_shared(
            {name: torch.from_numpy(value).to(self.device) for name, value in mean.items()}
        )

    def _end(self, end: IterationEnd) -> bool:
        self.allowance.admit_end(end)
        figures = self.secondary.end_iteration(end.iterations, last=end.last)
        self.log(
            "pretrained",
            iterations=end.iterations,
            cross_loss=figures.cross_loss,
            cross_spread=figures.cross_spread,
            local_loss=figures.local_loss,
            local_spread=figures.local_spread,
        )
        return end.last


# Pretraining as a stage of a party's own process.


def pretrain_as_primary(
    plan: RunPlan,
    table: PartyTable,
    primary: Primary,
    transport: PrimaryTransport,
    files: PartyFiles,
    *,
    alignment: Alignment | None,
    run_folder: Path,
    observe: Observer,
) -> dict[str, Any] | None:
    """Let the primary's model start from pretrained encoders, where its family has such.

    Args:
        plan: The run.
        table: The primary's table.
        primary: The primary with its top model.
        transport: Its end of the star.
        files: Its own.
        alignment: Which rows are linked where; None where nothing is learned across parties.
        run_folder: Gets ``pretraining.json``.
        observe: Hears of progress.

    Returns:
        What pretraining came to, for ``metrics.json``; None if there was none.

    Reveals:
        What :class:`securevfl.federation.pretraining.pretraining_exchange.PretrainingExchange`
        says.
    """
    config, start = plan.config, plan.facts.resume_pretraining
    if plan.facts.resume_epoch:
        return earlier_figures(run_folder)
    load_checkpoint(config, table.name, primary.top)
    if not wants_pretraining(config):
        return None
    observe(Stage(text="pretraining", of=config.pretraining.iterations))
    exchange = FederatedPretraining(transport, plan, device=primary.data.features.device)
    run = build_run(
        config,
        table,
        primary,
        exchange,
        files,
        alignment=alignment,
        start=start,
        observe=observe,
    )
    figures = run_pretraining(run, config, run_folder, start=start, split=primary.data.split)
    encoders = run.learning.learner.encoders()
    save_encoders(files.folder, encoders)
    hand_over(config, primary.top, encoders, party=table.name)
    return figures


def pretrain_as_secondary(
    plan: RunPlan,
    table: PartyTable,
    secondary: Secondary,
    transport: SecondaryTransport,
    sum_to: SumTo,
    files: PartyFiles,
    *,
    linked: LinkedSecondary,
    observe: Observer,
) -> None:
    """Let a secondary's model start from pretrained encoders, where its family has such.

    Args:
        plan: The run.
        table: The party's table.
        secondary: The party with its bottom model.
        transport: Its end of the star.
        sum_to: Its end of secure sums.
        files: Its own.
        linked: What linking left here.
        observe: Hears of warnings.

    Reveals:
        What :class:`PretrainingServer` reveals.
    """
    config = plan.config
    if plan.facts.resume_epoch:
        return
    load_checkpoint(config, table.name, secondary.bottom)
    if not wants_pretraining(config):
        return

    def warn(event: ProgressEvent) -> None:
        if isinstance(event, Warned):
            files.log("warning", text=event.text)
        observe(event)

    part = build_pretraining_secondary(
        config,
        table,
        secondary.data,
        files.checkpoints,
        start=plan.facts.resume_pretraining,
        observe=warn,
    )
    PretrainingServer(
        part,
        transport,
        sum_to,
        plan,
        allowance=PretrainingAllowance(plan, secondary.allowance, linked=linked.linked_rows()),
        device=secondary.device,
        log=files.log,
    ).serve()
    encoders = part.learning.learner.encoders()
    save_encoders(files.folder, encoders)
    hand_over(config, secondary.bottom, encoders, party=table.name)
