"""Requests for predictions that the primary answers by itself: nobody is waited for."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool
from torch import Tensor

from securevfl.config.federation import FederationConfig
from securevfl.core.progress import Observer, unheard
from securevfl.data.tables import PartyTable
from securevfl.federation.kept_model import KeptModel
from securevfl.federation.prediction_budget import PredictionBudget
from securevfl.runtime.predicting import answered, unlinked_outputs
from securevfl.runtime.predictions import Predictions


class AlonePredictor:
    """A kept model that answers without the primary's partners, in sessions like any other."""

    def __init__(
        self, config: FederationConfig, model: KeptModel, *, without: tuple[str, ...] = ()
    ) -> None:
        """Make it.

        Args:
            config: The federation file.
            model: The primary's, which answers alone. Where it has no base, rows are answered as
                those that nothing is linked to.
            without: Secondaries that are absent.
        """
        self.config = config
        self.model = model
        self.without = without
        self.broken = False
        """Whether parties were left in the middle of a request: there are none."""

    @contextmanager
    def session(self) -> "Iterator[AlonePredictor]":
        """Begin at once."""
        yield self

    def check(self) -> None:
        """Do nothing: no party can be lost."""

    def budgets(self) -> list[PredictionBudget]:
        """Return no budget: nothing is charged."""
        return []

    def ask(
        self,
        new: PartyTable,
        *,
        linkable: Bool[np.ndarray, " rows"] | None = None,
        names: Sequence[Any] | None = None,
        row_name: str = "row",
        observe: Observer = unheard,  # noqa: ARG002 - a Session
    ) -> Predictions:
        """Return predictions of new rows; see :meth:`Predictor.predict`.

        Reveals:
            Nothing: nobody is asked.
        """
        return answered(
            self.config,
            self.model,
            new,
            self._unlinked,
            linkable=linkable,
            names=names,
            row_name=row_name,
            device=torch.device("cpu"),
            without=self.without,
        )

    def _unlinked(self, rows: PartyTable) -> tuple[Tensor, float]:
        return unlinked_outputs(self.config, self.model, rows, device=torch.device("cpu")), 0.0
