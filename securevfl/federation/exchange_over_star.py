"""The primary's end of a federation between processes."""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor

from securevfl.config.sections import RuntimeSettings
from securevfl.federation.messages import RoundKind
from securevfl.federation.rounds import EpochMark, RoundCounter, RoundPlan
from securevfl.mpc.codec import decode_sum, to_float
from securevfl.mpc.ring_format import RingFormat
from securevfl.mpc.secure_mean import decode_mean, encode_weighted
from securevfl.mpc.sum_to import SumTo
from securevfl.transport.message import Message
from securevfl.transport.star import PrimaryTransport


class PrimaryWire:
    """The primary's end of the wire, from which CrypTen's reveal gets the masked words."""

    def __init__(
        self, transport: PrimaryTransport, names: Mapping[int, str], *, deadline_s: float
    ) -> None:
        self._transport = transport
        self._names = names
        self._deadline_s = deadline_s

    def collect_sum(
        self, round_number: int, count: int, ranks: Sequence[int]
    ) -> Int64[Tensor, " words"]:
        """Receive one share from every rank and return their sum modulo 2^64.

        Reveals:
            To the primary: masked words, whose sum alone means anything.
        """
        total = np.zeros(count, dtype=np.int64)
        shares = self._transport.receive_each(
            [self._names[rank] for rank in ranks],
            RoundKind.SHARE,
            round_number=round_number,
            deadline_s=self._deadline_s,
        )
        for message in shares:
            words = message.tensor("words", dtype=np.int64, shape=(count,))
            np.add(total, words, out=total)
        return torch.from_numpy(total)

    def send_words(self, round_number: int, words: Tensor) -> None:
        """Refuse: the primary keeps its own words to itself.

        Reveals:
            Nothing.
        """
        raise NotImplementedError("the primary collects words and sends none")


class FederatedExchange:
    """An exchange with secondaries in other processes, over the authenticated star."""

    def __init__(
        self,
        transport: PrimaryTransport,
        *,
        names: Mapping[int, str],
        sum_to: SumTo,
        ring: RingFormat,
        slots: int,
        cut_shape: tuple[int, int],
        runtime: RuntimeSettings,
        device: torch.device,
        rounds: RoundCounter,
    ) -> None:
        self.transport = transport
        self.names = dict(names)
        self.sum_to = sum_to
        self.ring = ring
        self.slots = slots
        self.cut_shape = cut_shape
        self.runtime = runtime
        self.device = device
        self.rounds = rounds

    @property
    def ranks(self) -> tuple[int, ...]:
        """Ranks of all secondaries."""
        return tuple(self.names)

    def release(self, plan: RoundPlan) -> Float[Tensor, "batch positions width"]:
        """Announce the round and return the average of the active secondaries.

        Reveals:
            What :meth:`securevfl.federation.rounds.Exchange.release` reveals.
        """
        self._tell(
            plan.active,
            Message(
                kind=RoundKind.PLAN,
                round_number=plan.round_number,
                meta={"active": list(plan.active), "purpose": plan.purpose},
                tensors={"rows": plan.rows},
            ),
        )
        shape = (len(plan.rows), *self.cut_shape)
        elements = int(np.prod(shape))
        zeros = torch.zeros(self.ring.words(elements), dtype=torch.int64)
        total = self.sum_to(zeros, round_number=plan.round_number, active=plan.active)
        assert total is not None, "the primary's reveal returns the total"
        units = decode_sum(
            total.to(self.device), self.ring, elements=elements, parties_active=len(plan.active)
        )
        return to_float(units, self.ring, divisor=len(plan.active) * self.slots).view(shape)

    def return_gradient(
        self, plan: RoundPlan, gradient: Float[Tensor, "batch positions width"]
    ) -> None:
        """Send the gradient of the aggregate to every active secondary.

        Reveals:
            What :meth:`securevfl.federation.rounds.Exchange.return_gradient` reveals.
        """
        self._tell(
            plan.active,
            Message(
                kind=RoundKind.GRADIENT,
                round_number=plan.round_number,
                meta={},
                tensors={"gradient": gradient.detach().cpu().numpy()},
            ),
        )

    def average_positions(self, own: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Average the positional encodings of all parties through the secure mean.

        Reveals:
            What :meth:`securevfl.federation.rounds.Exchange.average_positions` reveals.
        """
        round_number = self.rounds.next()
        self._tell(self.ranks, Message(kind=RoundKind.AVERAGE, round_number=round_number, meta={}))
        words = encode_weighted(own, weight=1, parties=len(self.names) + 1)
        total = self.sum_to(words, round_number=round_number, active=self.ranks)
        assert total is not None, "the primary's reveal returns the total"
        mean = decode_mean(total, {name: own[name].shape for name in own})
        self._tell(
            self.ranks,
            Message(
                kind=RoundKind.MEAN,
                round_number=round_number,
                meta={},
                tensors={name: value.cpu().numpy() for name, value in mean.items()},
            ),
        )
        return mean

    def end_epoch(self, mark: EpochMark) -> None:
        """Tell every secondary what to keep.

        Reveals:
            What :meth:`securevfl.federation.rounds.Exchange.end_epoch` reveals.
        """
        self._tell(
            self.ranks,
            Message(
                kind=RoundKind.EPOCH,
                round_number=0,
                meta={"epoch": mark.epoch, "best": mark.best, "restore_best": mark.restore_best},
            ),
        )

    def _tell(self, ranks: Sequence[int], message: Message) -> None:
        self.transport.broadcast([self.names[rank] for rank in ranks], message)
