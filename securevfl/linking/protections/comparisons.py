"""How often a coordinator may have a party's keys compared: every pair once."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Int64

from securevfl.core.errors import ProtocolError


class Comparisons:
    """Counts with how many of another party's keys each of one's own was compared.

    A search compares every pair at most once, with grid cells or without. Whoever asks for more
    asks for something that the federation file has not agreed to.
    """

    def __init__(self, own: int, others: int) -> None:
        """Make it.

        Args:
            own: How many keys this party has.
            others: How many the other one has.
        """
        self._others = others
        self._compared = np.zeros(own, dtype=np.int64)

    def admit_all(
        self, blocks: Sequence[np.ndarray], others: Int64[np.ndarray, " blocks"], *, sender: str
    ) -> None:
        """Take the blocks of an exchange into account, or refuse them; see :meth:`admit`.

        Args:
            blocks: Numbers of this party's keys, those of each block.
            others: For each block, with how many of the other's they are compared.
            sender: Who asks.
        """
        for chosen, count in zip(blocks, others.tolist(), strict=True):
            self.admit(chosen, count, sender=sender)

    def admit(self, chosen: Int64[np.ndarray, " block"], others: int, *, sender: str) -> None:
        """Take a block into account, or refuse it.

        Args:
            chosen: Numbers of this party's keys.
            others: With how many of the other's each of them is compared.
            sender: Who asks.

        Raises:
            ProtocolError: If a key is named twice, or a pair would be compared again.
        """
        again = not 1 <= others <= self._others or len(np.unique(chosen)) != len(chosen)
        if again or (self._compared[chosen] + others > self._others).any():
            raise ProtocolError(
                f"{sender}: asks to compare {len(chosen)} keys with {others} others, and every "
                f"pair of the {len(self._compared)} and {self._others} is compared once"
            )
        self._compared[chosen] += others
