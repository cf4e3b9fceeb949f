"""FedSim's estimate, before any training, of what similarities are worth over simpler linkage."""

from typing import Literal, get_args

import numpy as np
from jaxtyping import Bool, Float64

from securevfl.core import checks
from securevfl.core.errors import DataError
from securevfl.linkage.links import LinkTable

Simpler = Literal["exact", "top1sim", "avgsim"]
"""Methods that FedSim is compared with, by which links they use as matches."""


def estimated_improvement(links: LinkTable, *, over: Simpler) -> float:
    """Return Delta: how much of the links' similarity a simpler method loses or blurs, per row.

    ``Delta_i = sum_(matches) (1 - s_ij) + sum_(others) s_ij``, averaged over the rows i. A match
    that is not quite similar is redundant information, a similar record that is no match is lost.

    Args:
        links: K links a row, with their distances. Records beyond the K-th count nothing: FedSim
            does not use them either.
        over: ``exact`` matches links of distance 0, ``top1sim`` the first link, ``avgsim`` all K.

    Returns:
        A number from 0 to K.

    Raises:
        ConfigError: If ``over`` is another method.
        DataError: If there are no links.

    References:
        [FedSim] Definition 1. The paper says "scaled similarity" and not how: here s is 1 for the
        nearest link of all and 0 for the farthest.
    """
    checks.one_of(get_args(Simpler), over=over)
    present = links.present
    if not present.any():
        raise DataError("Delta: there are no links")
    similarity = scaled_similarities(links)
    matches = present.copy()
    if over == "top1sim":
        matches[:, 1:] = False
    elif over == "exact":
        matches &= links.distances == 0
    parts = np.where(matches, 1 - similarity, similarity)
    return float(np.where(present, parts, 0).sum() / links.num_rows)


def scaled_similarities(links: LinkTable) -> Float64[np.ndarray, "rows links"]:
    """Return similarities in [0, 1]: 1 for the nearest link of all, 0 for the farthest and none."""
    present: Bool[np.ndarray, "rows links"] = links.present
    distances = links.distances[present]
    spread = distances.max() - distances.min()
    scaled = np.zeros(links.distances.shape)
    scaled[present] = (distances.max() - distances) / spread if spread > 0 else 1.0
    return scaled
