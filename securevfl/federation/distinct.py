"""Each record of a batch once: what a bottom model computes of it serves every link to it."""

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from securevfl.models.row_by_row import Forward
from securevfl.models.split import DistinctBottom


def represent_distinct(
    bottom: Forward,
    features: Float[Tensor, "records features"],
    keys: Float[Tensor, "records dimension"],
    index: Int64[Tensor, "batch links"],
    present: Bool[Tensor, "batch links"],
) -> Float[Tensor, "batch links width"]:
    """Apply a recordwise bottom model to each linked record once, and gather by link.

    A batch links to a record many times (K links a row, and near rows share records); the model's
    work and its gradient's shrink by as much. Dropout, if the model has any, is then the same for
    all links to a record.

    Args:
        bottom: A recordwise model, see :class:`securevfl.models.split.Bottom`.
        features: All of the secondary's records.
        keys: Their keys.
        index: Record of each link; anything valid where there is none.
        present: Which links there are.
    """
    if bool(present.any()):
        # A record that nobody linked must not stand in for none: batch norm would look at it.
        index = torch.where(present, index, index[present][0])
    records, place = _distinct(index, len(features))
    alone = torch.ones(len(records), 1, dtype=torch.bool, device=index.device)
    vectors = bottom(features[records].unsqueeze(1), keys[records].unsqueeze(1), alone).squeeze(1)
    gathered: Tensor = vectors.index_select(0, place.flatten()).view(*index.shape, -1)
    return gathered if bool(present.all()) else gathered * present.unsqueeze(-1)


def represent_linked(
    bottom: DistinctBottom,
    features: Float[Tensor, "records features"],
    keys: Float[Tensor, "records dimension"],
    index: Int64[Tensor, "batch links"],
    present: Bool[Tensor, "batch links"],
) -> Float[Tensor, "batch positions width"]:
    """Apply a bottom model whose links see one another, with each linked record given once.

    An absent link has a record of zeros, as it has where each link is given by itself: whatever a
    model makes of an empty slot, no record of the table stands in it.

    Args:
        bottom: The model.
        features: All of the secondary's records.
        keys: Their keys.
        index: Record of each link; anything valid where there is none.
        present: Which links there are.
    """
    records, found = _distinct(index[present], len(features))
    features, keys = features[records], keys[records]
    if len(found) == index.numel():
        return bottom.of_distinct(features, keys, found.view_as(index), present)
    place = torch.full_like(index, len(records)).masked_scatter_(present, found)
    features, keys = (torch.cat([one, one.new_zeros(1, one.shape[1])]) for one in (features, keys))
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
