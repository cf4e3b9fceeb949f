"""Counts with Gaussian noise: distribution functions of columns, and how many rows are linked.

Each of c columns has its records counted by cell. One record adds 1 to one cell of each column, so
it moves all counts together by at most sqrt(c). The number of the primary's rows that are linked
moves by a record's m rows at most (:func:`securevfl.dp.sensitivity.linked_rows_sensitivity`).
"""

import math
from typing import Final

import numpy as np
import torch
from jaxtyping import Float64, Int64

from securevfl.core import checks
from securevfl.core.errors import PrivacyError
from securevfl.dp.moments import LARGEST_STD_UNITS
from securevfl.dp.ring_noise import MIN_STD_UNITS, ExactDiscreteGaussian


def cell_counts(
    values: Float64[np.ndarray, "records columns"], edges: Float64[np.ndarray, " edges"]
) -> Int64[np.ndarray, "columns cells"]:
    """Return how many records each cell of each column has; see :func:`noised_ranks`."""
    finite = values[np.isfinite(values).all(axis=1)]
    cells = len(edges) - 1
    places = np.clip(np.searchsorted(edges, finite, side="right") - 1, 0, cells - 1)
    counts = [np.bincount(column, minlength=cells) for column in places.T]
    return np.array(counts, dtype=np.int64).reshape(values.shape[1], cells)


def noised_ranks(
    values: Float64[np.ndarray, "records columns"],
    edges: Float64[np.ndarray, " edges"],
    *,
    noise_multiplier: float | None,
) -> Float64[np.ndarray, "columns cells"]:
    """Return the rank of each cell of each column, from noised counts of records by cell.

    A cell's rank is the share of records below it, and half of the share in it: so many equal
    values have the rank of their middle. Noised shares are made to rise: each becomes the middle
    of the largest before it and the least after it.

    Args:
        values: One line for each record, a function of that record alone. A line that is not
            finite counts as no record; a value beyond the edges counts in the cell nearest to it.
        edges: Ascending, independent of the records.
        noise_multiplier: Noise over the change that one record makes; None adds none.

    Raises:
        PrivacyError: If the noise is too large to be drawn.

    Reveals:
        As much as one Gaussian release with that multiplier, of the unit "one record of this
        table, added or removed"; the caller says to whom.
    """
    counts = cell_counts(values, edges)
    columns, bits = len(counts), 0
    if noise_multiplier is not None:
        checks.positive(noise_multiplier=noise_multiplier)
        std = noise_multiplier * math.sqrt(columns)
        bits = max(0, math.ceil(math.log2(MIN_STD_UNITS / std)))
        if std > LARGEST_STD_UNITS:
            raise PrivacyError(
                f"encoder.share: noise of {noise_multiplier:.3g} times what a record can change "
                f"leaves nothing of {columns} columns' distributions; raise the share, or epsilon"
            )
        drawn = ExactDiscreteGaussian(std * 2.0**bits).sample(counts.shape)
        counts = (counts << bits) + drawn.to(torch.int64).numpy()
    ranks = np.zeros(counts.shape)
    for column, total in enumerate(counts.sum(axis=1)):
        below = np.cumsum(counts[column]) / max(int(total), 1 << bits)
        shares = np.clip([0.0, *below[:-1], 1.0], 0.0, 1.0)
        largest, least = np.maximum.accumulate(shares), np.minimum.accumulate(shares[::-1])[::-1]
        shares = (largest + least) / 2
        ranks[column] = (shares[:-1] + shares[1:]) / 2
    return ranks


_ROWS_STD_UNITS: Final = 2.0**16


def noised_rows(count: int, *, rows: int, std: float) -> int:
    """Return a number of rows behind noise, rounded to a whole one within the table.

    Noise is drawn in parts of a row, so fine that the accounting of integers holds, and that no
    rounding of halves is seen.

    Args:
        count: The number, from 0 to ``rows``.
        rows: Of the table.
        std: Standard deviation of the noise, in rows; 0 adds none.

    Reveals:
        As much as one Gaussian release of deviation ``std``; the caller says to whom.
    """
    noised = count
    if std > 0:
        bits = max(0, math.ceil(math.log2(_ROWS_STD_UNITS / std)))
        noise = int(ExactDiscreteGaussian(std * 2.0**bits).sample((1,)))
        noised = ((count << bits) + noise + (1 << bits >> 1)) >> bits
    return min(max(noised, 0), rows)
