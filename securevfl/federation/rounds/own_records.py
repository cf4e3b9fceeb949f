"""A secondary's records as its bottom model computes them.

What the model computes of a record serves every link to it in a batch.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor, nn

from securevfl.core.devices import Precision, computing_in, to_device, widen_floats
from securevfl.federation.rounds import updates
from securevfl.federation.rounds.cut import CutRows
from securevfl.federation.rounds.dropout import DropoutStream
from securevfl.models.building import Forward
from securevfl.models.building import row_by_row as each_row
from securevfl.models.cuda_graphs import Network
from securevfl.models.family import DistinctBottom

LinkIndex = Int64[Tensor, "batch links"]
"""Record of each link; anything valid where there is none."""

LinkMask = Bool[Tensor, "batch links"]
"""True for each link that exists."""


def represent_distinct(
    bottom: Forward,
    features: Float[Tensor, "records features"],
    keys: Float[Tensor, "records dimension"],
    index: LinkIndex,
    present: LinkMask,
) -> Float[Tensor, "batch links width"]:
    """Apply a recordwise bottom model to each linked record once, and gather by link.

    A batch links to a record many times (K links a row, and near rows share records); the model's
    work and its gradient's shrink by as much. Dropout, if the model has any, is then the same for
    all links to a record.

    Args:
        bottom: A recordwise model, see :class:`securevfl.models.family.Bottom`.
        features: All of the secondary's records.
        keys: Their keys.
        index: Record of each link, on the host; anything valid where there is none.
        present: Which links there are, on the host.
    """
    if bool(present.any()):
        # A record that nobody linked must not stand in for none: batch norm would look at it.
        index = torch.where(present, index, index[present][0])
    device, full = features.device, bool(present.all())
    records, place = (to_device(part, device) for part in _distinct(index, len(features)))
    alone = torch.ones(len(records), 1, dtype=torch.bool, device=device)
    vectors = bottom(features[records].unsqueeze(1), keys[records].unsqueeze(1), alone).squeeze(1)
    gathered: Tensor = vectors.index_select(0, place.flatten()).view(*index.shape, -1)
    return gathered if full else gathered * to_device(present, device).unsqueeze(-1)


def represent_linked(
    bottom: DistinctBottom,
    features: Float[Tensor, "records features"],
    keys: Float[Tensor, "records dimension"],
    index: LinkIndex,
    present: LinkMask,
) -> CutRows:
    """Apply a bottom model whose links see one another, with each linked record given once.

    An absent link has a record of zeros, as it has where each link is given by itself: whatever a
    model makes of an empty slot, no record of the table stands in it.

    Args:
        bottom: The model.
        features: All of the secondary's records.
        keys: Their keys.
        index: Record of each link, on the host; anything valid where there is none.
        present: Which links there are, on the host.
    """
    device = features.device
    records, inverse = _distinct(index[present], len(features))
    full = len(inverse) == index.numel()
    if full:
        place = inverse.view_as(index)
    else:
        place = torch.full_like(index, len(records)).masked_scatter_(present, inverse)
    records, place, present = (to_device(part, device) for part in (records, place, present))
    features, keys = features[records], keys[records]
    if not full:
        features, keys = (
            torch.cat([array, array.new_zeros(1, array.shape[1])]) for array in (features, keys)
        )
    return bottom.of_distinct(features, keys, place, present)


def _distinct(
    index: Int64[Tensor, "*links"], num_records: int
) -> tuple[Int64[Tensor, " records"], Int64[Tensor, "*links"]]:
    """Return the records in rising order, and the place of each link's record among them."""
    if num_records > 4 * index.numel():
        return index.unique(return_inverse=True)
    # Marking the records of a table that is not much larger is cheaper than sorting the links.
    seen = torch.zeros(num_records, dtype=torch.bool, device=index.device)
    seen[index.flatten()] = True
    place = seen.cumsum(0).sub_(1)
    return seen.nonzero().squeeze(1), place[index]


@dataclass(kw_only=True, eq=False)
class OwnRecords:
    """A bottom model and the records that it sees, as tensors on one device."""

    bottom: nn.Module
    """The model; an audit puts another one in its place."""

    features: Float[Tensor, "records features"]
    keys: Float[Tensor, "records dimension"]

    row_by_row: bool
    """True if the model is given one row at a time, as installed families are."""

    apart: bool
    """True if each link is computed in a place of its own: wherever anything is promised.

    How many records a batch links to is the size of a matrix product, which may decide the last
    bits of every row of it; and one record more or less must leave other rows as they are.
    """

    precision: Precision = "float32"
    """Precision in which the model computes; its output is float32."""

    network: Network | None = None
    """The model as a GPU replays it."""

    @property
    def forward(self) -> Forward:
        """The model as it is evaluated."""
        return each_row(self.bottom) if self.row_by_row else self.bottom

    def gather(self, index: LinkIndex, present: LinkMask) -> updates.LinkedRecords:
        """Return the records of links, one link at a time.

        Args:
            index: Record of each link, on the host; anything valid where there is none.
            present: Which links there are, on the host.
        """
        device, full = self.features.device, bool(present.all())
        index, present = to_device(index, device), to_device(present, device)
        features, keys = self.features[index], self.keys[index]
        if not full:
            # Whatever a model makes of an empty slot, no record must stand in it.
            empty = ~present.unsqueeze(-1)
            features, keys = features.masked_fill(empty, 0.0), keys.masked_fill(empty, 0.0)
        return updates.LinkedRecords(features=features, keys=keys, present=present)

    def row_gradients(
        self,
        index: LinkIndex,
        present: LinkMask,
        *,
        clip_norm: float,
        noise: updates.GradientNoise,
        stream: DropoutStream,
    ) -> updates.RowGradients:
        """Return a batch of rows whose gradients are clipped one by one.

        Args:
            index: Record of each link, on the host; anything valid where there is none.
            present: Which links there are, on the host.
            clip_norm: ``C`` of releases.
            noise: Adds the gradients up.
            stream: Of dropped units.
        """
        return updates.RowGradients(
            self.bottom,
            self.gather(index, present),
            forward=self.forward,
            clip_norm=clip_norm,
            noise=noise,
            stream=stream,
            precision=self.precision,
        )

    def __call__(self, index: LinkIndex, present: LinkMask) -> CutRows:
        """Return the representation of a batch of rows.

        Args:
            index: Record of each link, on the host; anything valid where there is none.
            present: Which links there are, on the host.
        """
        features, keys = self.features, self.keys
        # What a GPU replays is as large in every round, however many records are linked.
        apart = self.apart or (self.network is not None and features.is_cuda)
        with computing_in(self.precision, features.device):
            if not apart and self.bottom.recordwise:
                vectors = represent_distinct(self.forward, features, keys, index, present)
            elif not apart and isinstance(self.bottom, DistinctBottom) and not self.row_by_row:
                vectors = represent_linked(self.bottom, features, keys, index, present)
            else:
                linked = self.gather(index, present)
                forward = self.network or self.forward
                vectors = forward(linked.features, linked.keys, linked.present)
            return widen_floats(vectors)
