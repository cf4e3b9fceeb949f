"""Augmentation of tables for self-supervised pretraining.

It draws on the generator's device, so that one seed gives one view on any device.
"""

import math
from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from securevfl.core import checks
from securevfl.models.fedhssl.encoders import CategoricalColumn, continuous_places


class CorruptedFeatures:
    """Augmentation that replaces some features of each row by the same features of other rows.

    In each row, ``round(rate * M)`` of the M numbers, drawn afresh, get the value of a random row
    of the table: a draw from the column's empirical marginal. The same share of categorical columns
    becomes "replaced", which an encoder gives an untrained embedding. If that share is no whole
    number of columns, some rows get one more than others.

    References:
        [SCARF] Algorithm 1 (rate c, uniform over the training rows of each column); [FedHSSL] V-A:
        30 % of the features, and categorical ones as extra untrained embeddings.

    Differs from [SCARF]: it corrupts one of two views; FedHSSL's Algorithm 1 (line 19) augments
    both, and so does our pretraining.
    """

    def __init__(
        self,
        table: Float[Tensor, "table_rows features"],
        *,
        rate: float = 0.3,
        columns: Sequence[CategoricalColumn] = (),
    ) -> None:
        """Store the table that values are drawn from.

        Args:
            table: The party's own training rows, scaled as the batches will be.
            rate: Share of the features that a view replaces, in [0, 1].
            columns: Its categorical columns.

        Raises:
            ConfigError: If the rate or a column is out of range, or the table is empty.
        """
        checks.closed_unit(rate=rate)
        checks.at_least(1, table_rows=len(table))
        self._table = table
        self._columns = tuple(columns)
        self._places = [
            torch.tensor(column.places, device=table.device) for column in self._columns
        ]
        self._continuous = torch.tensor(
            continuous_places(table.shape[1], columns), dtype=torch.int64, device=table.device
        )
        self._numbers = round(rate * len(self._continuous))
        self._words = rate * len(self._columns)

    def __call__(
        self, batch: Float[Tensor, "rows features"], generator: torch.Generator
    ) -> Float[Tensor, "rows features"]:
        """Return a corrupted copy."""
        view = batch.clone()
        if self._numbers:
            which = _choose(len(batch), len(self._continuous), self._numbers, generator)
            donors = torch.randint(
                len(self._table), which.shape, generator=generator, device=generator.device
            )
            places = self._continuous[which.to(batch.device)]
            # Position of the value in the flattened table: one index is faster than two.
            donors = donors.to(self._table.device).mul_(self._table.shape[1]).add_(places)
            view.scatter_(1, places, self._table.take(donors))
        if self._words:
            self._replace_words(view, generator)
        return view

    def _replace_words(
        self, view: Float[Tensor, "rows features"], generator: torch.Generator
    ) -> None:
        # Not rounded like the numbers: 0.3 of one column would always be none.
        most = math.ceil(self._words)
        chosen = _choose(len(view), len(self._columns), most, generator).to(view.device)
        drawn = torch.rand(len(view), generator=generator, device=generator.device)
        spared = drawn.to(view.device) < most - self._words
        chosen[spared, -1] = len(self._columns)
        for number, (column, places) in enumerate(zip(self._columns, self._places, strict=True)):
            rows = (chosen == number).any(dim=1)
            replaced = 0.0 if column.one_hot else float(column.categories)
            view[:, places] = torch.where(rows[:, None], replaced, view[:, places])


def _choose(
    rows: int, available: int, number: int, generator: torch.Generator
) -> Int[Tensor, "rows number"]:
    """Draw ``number`` distinct integers below ``available`` for each row."""
    order = torch.rand(rows, available, generator=generator, device=generator.device)
    return order.topk(number, dim=1, sorted=False).indices
