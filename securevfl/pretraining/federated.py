"""Pretraining between processes: the primary's exchange and a secondary's server."""

from collections.abc import Callable, Mapping
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Float
from torch import Tensor

from securevfl.federation.exchange_over_star import sum_to_primary
from securevfl.federation.messages import Mean, RoundKind
from securevfl.federation.run_plan import RunPlan
from securevfl.mpc.secure_mean import decode_mean, encode_weighted, words_needed
from securevfl.mpc.sum_to import SumTo
from securevfl.pretraining.allowance import PretrainingAllowance
from securevfl.pretraining.exchange import (
    projection_cut,
    projection_words,
)
from securevfl.pretraining.learner_with_records import IterationFigures
from securevfl.pretraining.messages import (
    CrossBatch,
    IterationBegin,
    IterationEnd,
    LearnLocally,
    PretrainingKind,
    Projections,
    TopsRequest,
)
from securevfl.pretraining.secondary import PretrainingSecondary
from securevfl.transport.message import TypedMessage
from securevfl.transport.star import PrimaryTransport, SecondaryTransport

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
