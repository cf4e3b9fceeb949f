"""A secondary's end of a federation between processes: wait, answer, learn, until done."""

import math
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
import torch
from torch import Tensor

from securevfl.config.sections import RuntimeSettings
from securevfl.core.errors import ProtocolError
from securevfl.federation.messages import RoundKind
from securevfl.federation.rounds import EpochMark, RoundPlan
from securevfl.federation.secondary import Secondary
from securevfl.mpc.codec import encode
from securevfl.mpc.secure_mean import encode_weighted
from securevfl.mpc.sum_to import SumTo
from securevfl.transport.message import Message, StarKind
from securevfl.transport.star import SecondaryTransport

_NEXT: Final = (
    RoundKind.PLAN,
    RoundKind.AVERAGE,
    RoundKind.EPOCH,
    StarKind.DONE,
)
_PURPOSES: Final = ("release", "train", "validation", "test")


class SecondaryWire:
    """A secondary's end of the wire, into which CrypTen's reveal puts the masked words."""

    def __init__(self, transport: SecondaryTransport) -> None:
        self._transport = transport

    def send_words(self, round_number: int, words: Tensor) -> None:
        """Send this round's share.

        Reveals:
            To the primary: words masked by keys that it does not have.
        """
        self._transport.send(
            Message(
                kind=RoundKind.SHARE,
                round_number=round_number,
                meta={},
                tensors={"words": words.numpy()},
            )
        )

    def collect_sum(self, round_number: int, count: int, ranks: Sequence[int]) -> Tensor:
        """Refuse: only the primary collects.

        Reveals:
            Nothing.
        """
        raise NotImplementedError("only the primary collects words")


class SecondaryServer:
    """Answer the primary's messages with one :class:`Secondary`."""

    def __init__(
        self,
        secondary: Secondary,
        transport: SecondaryTransport,
        sum_to: SumTo,
        *,
        cut_shape: tuple[int, int],
        parties: int,
        min_active: int,
        runtime: RuntimeSettings,
        device: torch.device,
        end_epoch: Callable[[EpochMark], None],
        log: Callable[..., None],
    ) -> None:
        self.secondary = secondary
        self.transport = transport
        self.sum_to = sum_to
        self.cut_shape = cut_shape
        self.parties = parties
        self.min_active = min_active
        self.runtime = runtime
        self.device = device
        self.end_epoch = end_epoch
        self.log = log

    def serve(self) -> None:
        """Answer until the primary says that the run is done.

        Raises:
            ProtocolError: If the primary leaves the protocol, fails or falls silent.
            PrivacyError: If a release that it asks for is forbidden; the ledger has decided.

        Reveals:
            To the primary: what :meth:`Exchange.release` and :meth:`Exchange.average_positions`
            say.
        """
        while True:
            message = self.transport.receive(
                _NEXT, round_number=None, deadline_s=self.runtime.idle_timeout_s
            )
            if message.kind is RoundKind.PLAN:
                self._round(self._read_plan(message))
            elif message.kind is RoundKind.AVERAGE:
                self._average(message.round_number)
            elif message.kind is RoundKind.EPOCH:
                self._epoch(message)
            else:
                return

    def _round(self, plan: RoundPlan) -> None:
        ring = self.secondary.contribution.ring
        count = ring.words(len(plan.rows) * math.prod(self.cut_shape))
        self.sum_to.prepare(count, round_number=plan.round_number, active=plan.active)
        units = self.secondary.answer(plan)
        words = encode(units, ring, reuse=True).cpu()
        self.sum_to(words, round_number=plan.round_number, active=plan.active)
        self.log(
            "released",
            round_number=plan.round_number,
            rows=len(plan.rows),
            purpose=plan.purpose,
            epsilon=self.secondary.epsilon_spent,
        )
        if plan.wants_gradient:
            message = self.transport.receive(
                RoundKind.GRADIENT,
                round_number=plan.round_number,
                deadline_s=self.runtime.round_timeout_s,
            )
            shape = (len(plan.rows), *self.cut_shape)
            gradient = message.tensor("gradient", dtype=np.float32, shape=shape)
            self.secondary.learn(plan, torch.from_numpy(gradient).to(self.device))

    def _average(self, round_number: int) -> None:
        own = self.secondary.position_weights()
        ranks = tuple(range(1, self.parties))
        self.sum_to(
            encode_weighted(own, weight=1, parties=self.parties),
            round_number=round_number,
            active=ranks,
        )
        message = self.transport.receive(
            RoundKind.MEAN,
            round_number=round_number,
            deadline_s=self.runtime.round_timeout_s,
        )
        mean = {
            name: torch.from_numpy(message.tensor(name, dtype=np.float32, shape=tuple(value.shape)))
            for name, value in own.items()
        }
        self.secondary.load_position_weights(mean)

    def _epoch(self, message: Message) -> None:
        epoch = message.figure("epoch", int)
        if epoch < 1:
            raise ProtocolError(f"the primary ended epoch {epoch}; epochs count from 1")
        self.end_epoch(
            EpochMark(
                epoch=epoch,
                best=message.figure("best", bool),
                restore_best=message.figure("restore_best", bool),
            )
        )

    def _read_plan(self, message: Message) -> RoundPlan:
        rows = message.tensor("rows", dtype=np.int64, shape=(None,))
        purpose = message.figure("purpose", str)
        active = message.figure("active", list)
        ranks = range(1, self.parties)
        if not len(rows):
            raise ProtocolError(f"round {message.round_number}: the primary named no rows")
        if purpose not in _PURPOSES:
            raise ProtocolError(f"round {message.round_number}: unknown purpose {purpose!r}")
        if not all(type(rank) is int for rank in active) or active != sorted(
            set(active) & set(ranks)
        ):
            raise ProtocolError(f"round {message.round_number}: impossible parties {active!r}")
        if len(active) < self.min_active:
            raise ProtocolError(
                f"round {message.round_number}: {len(active)} secondaries are fewer than the "
                f"{self.min_active} that the noise was calibrated for"
            )
        return RoundPlan(
            round_number=message.round_number, rows=rows, active=tuple(active), purpose=purpose
        )
