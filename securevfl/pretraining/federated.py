"""Pretraining between processes: the primary's exchange and a secondary's server."""

from collections.abc import Callable, Mapping
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Float
from torch import Tensor

from securevfl.config.sections import RuntimeSettings
from securevfl.core.errors import ProtocolError
from securevfl.federation.messages import RoundKind
from securevfl.mpc.secure_mean import decode_mean, encode_weighted, words_needed
from securevfl.mpc.sum_to import SumTo
from securevfl.pretraining.exchange import (
    projection_mean,
    projection_ring,
    projection_words,
)
from securevfl.pretraining.learner_with_records import IterationFigures
from securevfl.pretraining.messages import PretrainingKind
from securevfl.pretraining.secondary import PretrainingSecondary
from securevfl.transport.message import Message
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

    def __init__(
        self,
        transport: PrimaryTransport,
        *,
        names: Mapping[int, str],
        sum_to: SumTo,
        plain: bool,
        runtime: RuntimeSettings,
        device: torch.device,
    ) -> None:
        self.transport = transport
        self.names = dict(names)
        self.sum_to = sum_to
        self.plain = plain
        self.runtime = runtime
        self.device = device
        self.ring = projection_ring(len(self.names))

    def begin_iteration(self, iteration: int, held_out: npt.NDArray[np.int64]) -> None:
        """Announce an iteration.

        Reveals:
            What :meth:`PretrainingExchange.begin_iteration` reveals.
        """
        self._tell(
            Message(
                kind=PretrainingKind.PRETRAIN,
                meta={"iteration": iteration},
                tensors={"held_out": held_out},
            )
        )

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
        self._tell(
            Message(
                kind=PretrainingKind.CROSS,
                round_number=round_number,
                tensors={"rows": rows, "sent": sent.detach().cpu().numpy()},
            )
        )
        shape = tuple(sent.shape)
        if self.plain:
            messages = self.transport.receive_each(
                list(self.names.values()),
                PretrainingKind.PROJECTIONS,
                round_number=round_number,
                deadline_s=self.runtime.idle_timeout_s,
            )
            theirs = {
                message.sender: message.tensor("vectors", dtype=np.float32, shape=shape)
                for message in messages
            }
            # By rank, not by arrival: a sum of floats depends on its order.
            return [torch.from_numpy(theirs[name]).to(self.device) for name in self.names.values()]
        count = self.ring.words(sent.numel())
        total = self.sum_to(
            torch.zeros(count, dtype=torch.int64),
            round_number=round_number,
            active=tuple(self.names),
        )
        assert total is not None, "the primary's reveal returns the total"
        return [
            projection_mean(total.to(self.device), self.ring, shape=shape, parties=len(self.names))
        ]

    def local(self, iteration: int) -> None:
        """Let every secondary learn from its own records; the primary goes on meanwhile.

        Reveals:
            Nothing.
        """
        self._tell(Message(kind=PretrainingKind.LOCAL, meta={"iteration": iteration}))

    def aggregate(
        self, own: Mapping[str, Tensor], *, weight: int, round_number: int
    ) -> dict[str, Tensor]:
        """Average the local top encoders of all parties through the secure mean.

        Reveals:
            What :meth:`PretrainingExchange.aggregate` reveals.
        """
        self._tell(Message(kind=PretrainingKind.TOPS, round_number=round_number))
        words = encode_weighted(own, weight=weight, parties=len(self.names) + 1).cpu()
        total = self.sum_to(words, round_number=round_number, active=tuple(self.names))
        assert total is not None, "the primary's reveal returns the total"
        mean = decode_mean(total, {name: own[name].shape for name in own})
        self._tell(
            Message(
                kind=RoundKind.MEAN,
                round_number=round_number,
                tensors={name: value.cpu().numpy() for name, value in mean.items()},
            )
        )
        return mean

    def end_iteration(self, iterations: int, *, last: bool) -> list[IterationFigures]:
        """Let every secondary save; their figures stay with them.

        Reveals:
            What :meth:`PretrainingExchange.end_iteration` reveals.
        """
        meta = {"iterations": iterations, "last": last}
        self._tell(Message(kind=PretrainingKind.PRETRAINED, meta=meta))
        return []

    def _tell(self, message: Message) -> None:
        self.transport.broadcast(list(self.names.values()), message)


class PretrainingServer:
    """Answer the primary's messages of pretraining with one :class:`PretrainingSecondary`."""

    def __init__(
        self,
        secondary: PretrainingSecondary,
        transport: SecondaryTransport,
        sum_to: SumTo,
        *,
        parties: int,
        width: int,
        plain: bool,
        runtime: RuntimeSettings,
        device: torch.device,
        log: Callable[..., None],
    ) -> None:
        self.secondary = secondary
        self.transport = transport
        self.sum_to = sum_to
        self.parties = parties
        self.width = width
        self.plain = plain
        self.runtime = runtime
        self.device = device
        self.log = log
        self.ring = projection_ring(parties - 1)

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
                _STEPS, round_number=None, deadline_s=self.runtime.idle_timeout_s
            )
            if message.kind is PretrainingKind.PRETRAIN:
                held_out = message.tensor("held_out", dtype=np.int64, shape=(None,))
                self.secondary.begin_iteration(message.figure("iteration", int), held_out)
            elif message.kind is PretrainingKind.CROSS:
                self._cross(message)
            elif message.kind is PretrainingKind.LOCAL:
                self.secondary.learning.learn_local(message.figure("iteration", int))
            elif message.kind is PretrainingKind.TOPS:
                self._aggregate(message.round_number)
            else:
                last = self._end(message)

    def _cross(self, message: Message) -> None:
        rows = message.tensor("rows", dtype=np.int64, shape=(None,))
        sent = message.tensor("sent", dtype=np.float32, shape=(len(rows), self.width))
        number = message.round_number
        if not len(rows):
            raise ProtocolError(f"round {number}: the primary named no rows")
        active = tuple(range(1, self.parties))
        if not self.plain:
            count = self.ring.words(len(rows) * self.width)
            self.sum_to.prepare(count, round_number=number, active=active)
        vectors = self.secondary.project(rows, round_number=number)
        if self.plain:
            self.transport.send(
                Message(
                    kind=PretrainingKind.PROJECTIONS,
                    round_number=number,
                    tensors={"vectors": vectors.cpu().numpy()},
                )
            )
        else:
            words = projection_words(vectors, self.ring).cpu()
            self.sum_to(words, round_number=number, active=active)
        self.secondary.learn_cross(torch.from_numpy(sent).to(self.device))

    def _aggregate(self, round_number: int) -> None:
        learning = self.secondary.learning
        own = learning.shared_weights()
        active = tuple(range(1, self.parties))
        shapes = {name: tuple(value.shape) for name, value in own.items()}
        self.sum_to.prepare(words_needed(shapes), round_number=round_number, active=active)
        words = encode_weighted(own, weight=learning.weight, parties=self.parties).cpu()
        self.sum_to(words, round_number=round_number, active=active)
        message = self.transport.receive(
            RoundKind.MEAN,
            round_number=round_number,
            deadline_s=self.runtime.idle_timeout_s,
        )
        learning.load_shared(
            {
                name: torch.from_numpy(message.tensor(name, dtype=np.float32, shape=shape)).to(
                    self.device
                )
                for name, shape in shapes.items()
            }
        )

    def _end(self, message: Message) -> bool:
        iterations, last = message.figure("iterations", int), message.figure("last", bool)
        if iterations < 1:
            raise ProtocolError(f"the primary ended {iterations} iterations; they count from 1")
        figures = self.secondary.end_iteration(iterations, last=last)
        self.log(
            "pretrained",
            iterations=iterations,
            cross_loss=figures.cross_loss,
            cross_spread=figures.cross_spread,
            local_loss=figures.local_loss,
            local_spread=figures.local_spread,
        )
        return last
