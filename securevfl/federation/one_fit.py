"""The primary of a frozen run whose top model is fitted in one go, in place of epochs."""

from collections.abc import Callable

from securevfl.federation.primary import Primary
from securevfl.federation.rounds import EpochMark


class OneFitPrimary(Primary):
    """Fits its top model once, to the released rows that are for training.

    Its one epoch is the fit. What training rows get is out of fold, so they choose lambda, and say
    who answers, beside validation rows.
    """

    @property
    def epochs(self) -> int:
        """The fit."""
        return 1

    def train(self, *, after_epoch: Callable[[EpochMark], None]) -> None:
        """Fit the top model, unless a checkpoint has brought it back.

        Args:
            after_epoch: Called when it is fitted.
        """
        if not self.finished:
            self._run_epoch(after_epoch)
