"""SplitAvg as a CrypTen program: secondaries share their rows, and add up shares.

With ``mpc.engine = "crypten"`` every secondary's words are CrypTen tensors that all active ones
share. Each adds its shares up and sends the result to the primary, under its pairwise masks as
always. Only at the primary do the shares add up to the sum, which is equal to that of ``"masked"``
to the bit.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch

from securevfl.mpc.crypten_bridge import ArithmeticSharedTensor, CrypTenSumTo
from securevfl.mpc.on_shares import Seat, computing
from securevfl.mpc.sum_to import Words


class SharedSum:
    """The sum between processes by CrypTen's shares, for ``mpc.engine = "crypten"``."""

    def __init__(self, revealed: CrypTenSumTo, seat: Seat) -> None:
        """Make it.

        Args:
            revealed: Masks this secondary's share, and reveals the sum to the primary.
            seat: This secondary's seat among all secondaries.
        """
        self._revealed, self._seat = revealed, seat

    def __call__(self, words: Words, *, round_number: int, active: Sequence[int]) -> Words | None:
        """Share ``words``, add up the shares and contribute the result; see :class:`SumTo`.

        Raises:
            ProtocolError: If the round's mask was used before, or a peer fails.

        Reveals:
            As :class:`securevfl.mpc.crypten_bridge.CrypTenSumTo`.
        """
        seat, others = replace(self._seat, world=tuple(sorted(active))), torch.zeros_like(words)
        with computing(seat, number=round_number) as communicator:
            own = communicator.get_rank()
            shared = [
                ArithmeticSharedTensor(words if src == own else others, precision=0, src=src)
                for src in range(communicator.get_world_size())
            ]
            total = sum(shared[1:], shared[0]).share
        return self._revealed(total, round_number=round_number, active=active)

    def bind(self, message_digest: bytes, ranks: Sequence[int]) -> None:
        """Bind a message of the primary; see :class:`securevfl.mpc.sum_to.SumTo`.

        Reveals:
            Nothing.
        """
        self._revealed.bind(message_digest, ranks)

    def prepare(self, count: int, *, round_number: int, active: Sequence[int]) -> None:
        """Start computing this round's mask in the background.

        Raises:
            ProtocolError: If the round's mask was used before.

        Reveals:
            Nothing.
        """
        self._revealed.prepare(count, round_number=round_number, active=active)
