"""A secondary's end of a federation between processes: wait, answer, learn, until done."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final

import torch

from securevfl.core.conventions import PRIMARY_RANK
from securevfl.core.errors import ProtocolError
from securevfl.federation.exchange import ROUNDS_AHEAD, EpochMark
from securevfl.federation.messages import Announcement, EpochEnd, Gradient, Mean, RoundKind
from securevfl.federation.rounds.secondary import Secondary
from securevfl.federation.run_plan import RunPlan
from securevfl.federation.session.handshake import Rejoin
from securevfl.ledger.countersigning import Countersigning, LedgerKind
from securevfl.mpc.sum_to import SumTo, encode_weighted
from securevfl.transport.message import Message, MessageKind, StarKind
from securevfl.transport.star import SecondaryTransport

_NEXT: Final = (RoundKind.PLAN, RoundKind.AVERAGE, RoundKind.EPOCH)


class SecondaryServer:
    """Answer the primary's messages with one :class:`Secondary`."""

    def __init__(
        self,
        secondary: Secondary,
        transport: SecondaryTransport,
        sum_to: SumTo,
        plan: RunPlan,
        *,
        end_epoch: Callable[[EpochMark], None],
        log: Callable[..., None],
        countersigning: Countersigning | None = None,
        also: Mapping[MessageKind, Callable[[Message], None]] = MappingProxyType({}),
    ) -> None:
        """Make it.

        Args:
            secondary: Who answers.
            transport: This party's end of the star.
            sum_to: Its end of secure sums.
            plan: The run, as this party has computed it.
            end_epoch: Keeps what an epoch's end asks for.
            log: This party's log.
            countersigning: Where ledger heads are exchanged, before the run may end; None for
                rounds that no ledger of a table is charged with.
            also: What is done with messages of kinds that rounds know nothing of.
        """
        self.secondary = secondary
        self.transport = transport
        self.sum_to = sum_to
        self.plan = plan
        self.end_epoch = end_epoch
        self.log = log
        self.countersigning = countersigning
        self._also = also
        self._runtime = plan.config.runtime
        self._ranks = tuple(plan.secondaries)
        # With a ledger to countersign, DONE is due after the end's heads and at no other time.
        last = StarKind.DONE if countersigning is None else LedgerKind.COUNTERSIGN
        rejoin = (RoundKind.REJOIN,) if plan.config.continues_on_loss else ()
        self._next = (*_NEXT, *secondary.hears, *also, *rejoin, last)

    def serve(self) -> bool:
        """Answer until the primary says that the run is done, or that a party is back.

        Returns:
            Whether the run is done; if not, this party joins the next session.

        Raises:
            ProtocolError: If the primary leaves the protocol, announces more rounds ahead than it
                may, fails or falls silent.
            PrivacyError: If a release that it asks for is forbidden; the ledger has decided.

        Reveals:
            To the primary: what :meth:`Exchange.release` and :meth:`Exchange.average_positions`
            say, and what is done with other kinds of messages.
        """
        while True:
            message = self.transport.receive(
                self._next, round_number=None, deadline_s=self._runtime.idle_timeout_s
            )
            if message.kind is RoundKind.PLAN:
                self._round(message)
                continue
            # All others go to every secondary of the session.
            self.sum_to.bind(message.digest(), self._ranks)
            if message.kind is RoundKind.AVERAGE:
                self._average(message.round_number)
            elif message.kind is RoundKind.EPOCH:
                mark = EpochEnd.from_message(message).mark
                self.secondary.allowance.admit_epoch(mark)
                self.end_epoch(mark)
            elif message.kind in self.secondary.hears:
                answer = self.secondary.hear(message)
                if answer is not None:
                    self.transport.send(answer.to_message())
            elif message.kind in self._also:
                self._also[message.kind](message)
            elif message.kind is RoundKind.REJOIN:
                absent = set(self.plan.ranks.values()) - {PRIMARY_RANK, *self._ranks}
                Rejoin.from_message(message, absent=sorted(absent))
                self.secondary.allowance.admit_rejoin()
                return False
            elif self._ends(message):
                return True

    def serve_pass(self) -> int:
        """Answer the rounds of one pass over the plan's rows, and return the last one's number.

        Raises:
            ProtocolError: As :meth:`serve`.
            PrivacyError: As :meth:`serve`.

        Reveals:
            To the primary: what :meth:`Exchange.release` says.
        """
        number = 0
        for _ in range(self.plan.releases.rounds):
            message = self.transport.receive(
                RoundKind.PLAN, round_number=None, deadline_s=self._runtime.idle_timeout_s
            )
            self._round(message)
            number = message.round_number
        return number

    def _ends(self, message: Message) -> bool:
        """Return whether the run ends with a message: one that countersigns its end, or is DONE."""
        if self.countersigning is None:
            self.secondary.allowance.admit_done()
            return True
        if not self.countersigning.answer(message):
            return False
        self.secondary.allowance.admit_done()
        self.transport.receive(
            StarKind.DONE, round_number=None, deadline_s=self._runtime.idle_timeout_s
        )
        return True

    def _round(self, message: Message) -> None:
        plan = Announcement.from_message(message).plan
        self.sum_to.bind(message.digest(), plan.active)
        # Whoever has not had this round's answer may have announced so many and no more.
        if (waiting := self.transport.waiting) >= ROUNDS_AHEAD:
            raise ProtocolError(
                f"round {plan.round_number}: the primary has sent {waiting} messages behind it; "
                f"it may announce {ROUNDS_AHEAD} rounds ahead"
            )

        def prepare() -> None:
            count = self.plan.cut.words(len(plan.rows))
            self.sum_to.prepare(count, round_number=plan.round_number, active=plan.active)

        words = self.secondary.answer(plan, admitted=prepare).cpu()
        self.sum_to(words, round_number=plan.round_number, active=plan.active)
        self.log(
            "released",
            round_number=plan.round_number,
            rows=len(plan.rows),
            purpose=plan.purpose,
            epsilon=self.secondary.epsilon_spent,
            not_finite=self.secondary.not_finite,
        )
        if plan.wants_gradient and self.plan.learns:
            message = self.transport.receive(
                RoundKind.GRADIENT,
                round_number=plan.round_number,
                deadline_s=self._runtime.round_timeout_s,
            )
            self.sum_to.bind(message.digest(), plan.active)
            shape = (len(plan.rows), *self.plan.cut.shape)
            gradient = torch.from_numpy(Gradient.from_message(message, shape=shape).gradient)
            self.secondary.learn(plan, gradient.to(self.secondary.device))

    def _average(self, round_number: int) -> None:
        own = self.secondary.share_positions(round_number)
        self.sum_to(
            encode_weighted(own, weight=1, parties=len(self._ranks) + 1).cpu(),
            round_number=round_number,
            active=self._ranks,
        )
        message = self.transport.receive(
            RoundKind.MEAN,
            round_number=round_number,
            deadline_s=self._runtime.round_timeout_s,
        )
        self.sum_to.bind(message.digest(), self._ranks)
        shapes = {name: tuple(value.shape) for name, value in own.items()}
        mean = Mean.from_message(message, shapes=shapes).values
        self.secondary.load_position_weights(
            {name: torch.from_numpy(value) for name, value in mean.items()}
        )
