"""A secondary's records at work: what its bottom model makes of the links to them."""

import copy
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor, nn

from securevfl.federation.distinct import represent_distinct, represent_linked
from securevfl.federation.dropout_stream import DropoutStream
from securevfl.federation.updates import GradientUnits, LinkedRecords, RowGradients
from securevfl.models.row_by_row import Forward
from securevfl.models.row_by_row import row_by_row as each_row
from securevfl.models.split import DistinctBottom


@dataclass(kw_only=True, eq=False)
class OwnRecords:
    """A bottom model and the records that it sees, as tensors on one device."""

    bottom: nn.Module
    """The model; an audit puts another one in its place."""

    features: Float[Tensor, "records features"]
    keys: Float[Tensor, "records dimension"]

    row_by_row: bool
    """Whether the model sees one row alone, whoever wrote it."""

    apart: bool
    """Whether each link is computed in a place of its own: wherever anything is promised.

    How many records a batch links to is the size of a matrix product, which may decide the last
    bits of every row of it; and one record more or less must leave other rows as they are.
    """

    @property
    def module(self) -> nn.Module:
        """The model, as :class:`federation.workers.Work` calls it."""
        return self.bottom

    @property
    def forward(self) -> Forward:
        """The model as it is evaluated."""
        return each_row(self.bottom) if self.row_by_row else self.bottom

    def linked(
        self, index: Int64[Tensor, "batch links"], present: Bool[Tensor, "batch links"]
    ) -> LinkedRecords:
        """Return the records of links, each link by itself.

        Args:
            index: Record of each link; anything valid where there is none.
            present: Which links there are.
        """
        features, keys = self.features[index], self.keys[index]
        if not bool(present.all()):
            # Whatever a model makes of an empty slot, no record must stand in it.
            empty = ~present.unsqueeze(-1)
            features, keys = features.masked_fill(empty, 0.0), keys.masked_fill(empty, 0.0)
        return LinkedRecords(features=features, keys=keys, present=present)

    def on(self, device: torch.device) -> "OwnRecords":
        """Return a copy on a device."""
        return replace(
            self,
            bottom=copy.deepcopy(self.bottom).to(device),
            features=self.features.to(device),
            keys=self.keys.to(device),
        )

    def taught(
        self,
        index: Int64[Tensor, "batch links"],
        present: Bool[Tensor, "batch links"],
        *,
        clip_norm: float,
        units: GradientUnits,
        stream: DropoutStream,
    ) -> RowGradients:
        """Return a batch of rows whose gradients are clipped one by one.

        Args:
            index: Record of each link; anything valid where there is none.
            present: Which links there are.
            clip_norm: ``C`` of releases.
            units: Adds the gradients up.
            stream: Of dropped units.
        """
        return RowGradients(
            self.bottom,
            self.linked(index, present),
            forward=self.forward,
            clip_norm=clip_norm,
            units=units,
            stream=stream,
        )

    def __call__(
        self, index: Int64[Tensor, "batch links"], present: Bool[Tensor, "batch links"]
    ) -> Float[Tensor, "batch positions width"]:
        """Return the representation of a batch of rows.

        Args:
            index: Record of each link; anything valid where there is none.
            present: Which links there are.
        """
        features, keys = self.features, self.keys
        if not self.apart and self.bottom.recordwise:
            return represent_distinct(self.forward, features, keys, index, present)
        if not self.apart and isinstance(self.bottom, DistinctBottom) and not self.row_by_row:
            return represent_linked(self.bottom, features, keys, index, present)
        linked = self.linked(index, present)
        return self.forward(linked.features, linked.keys, linked.present)
