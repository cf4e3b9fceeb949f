"""A secondary's records as its bottom model computes them.

What the model computes of a record serves every link to it in a batch.
"""

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from securevfl.core.devices import to_device
from securevfl.federation.rounds import updates
from securevfl.federation.rounds.cut import CutRows
from securevfl.models.building import Forward
from securevfl.models.family import DistinctBottom

LinkIndex = Int64[Tensor, "batch links"]
"""Record of each link; any valid index where a slot holds no record."""

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


def gather_records(
    features: Float[Tensor, "records features"],
    keys: Float[Tensor, "records dimension"],
    index: LinkIndex,
    present: LinkMask,
) -> updates.LinkedRecords:
    """Return the records of links, one link at a time.

    Args:
        features: All of the secondary's records.
        keys: Their keys.
        index: Record of each link, on the host; anything valid where there is none.
        present: Which links there are, on the host.
    """
    device, full = features.device, bool(present.all())
    index, present = to_device(index, device), to_device(present, device)
    features, keys = features[index], keys[index]
    if not full:
        # Whatever a model makes of an empty slot, no record must stand in it.
        empty = ~present.unsqueeze(-1)
        features, keys = features.masked_fill(empty, 0.0), keys.masked_fill(empty, 0.0)
    return updates.LinkedRecords(features=features, keys=keys, present=present)
