"""The primary of a frozen run whose top model is fitted in one go, in place of epochs."""

from collections.abc import Callable

from torch import nn

from securevfl.core.progress import Observer
from securevfl.federation.primary import Primary, PrimaryData
from securevfl.federation.rounds import EpochMark, Exchange
from securevfl.federation.run_plan import RunPlan


class OneFitPrimary(Primary):
    """Fits its top model once, to the released rows that are for training.

    Its one epoch is the fit. What training rows get is out of fold, so they choose lambda, and say
    who answers, beside validation rows.
    """

    def __init__(
        self,
        plan: RunPlan,
        data: PrimaryData,
        top: nn.Module,
        exchange: Exchange,
        *,
        observe: Observer,
    ) -> None:
        """Make it.

        Args:
            plan: The run.
            data: The primary's table.
            top: Not fitted yet.
            exchange: Where released rows are.
            observe: Hears of progress.
        """
        super().__init__(plan, data, top, exchange, observe=observe)
        self.epochs = 1

    def train(self, *, after_epoch: Callable[[EpochMark], None]) -> None:
        """Fit the top model, unless a checkpoint has brought it back.

        Args:
            after_epoch: Called when it is fitted.
        """
        if not self.finished:
            self._run_epoch(after_epoch)
