"""Sums of all records that picked a row: what one record can change, exhaustively, in integers."""

import math

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from securevfl.federation.rounds.cut import CutLayer, MeanOfPooledRecords
from securevfl.linkage.metrics.points import EuclideanKeys
from securevfl.linkage.sampling import PickedLinks, eligible_pairs
from securevfl.mpc.codec import RingFormat

CLIP = 1.0
WIDTH = 5


def row_sums(keys, records, vectors, *, cap: int, slots: int) -> torch.Tensor:
    """Return the integers that would be released for every row, before noise."""
    ring = RingFormat.choose(clip_norm=CLIP * slots, noise_share_std=0.0, parties=2)
    cut = CutLayer(ring=ring, slots=slots, shape=(1, WIDTH), clip_norm=CLIP)
    pooled = MeanOfPooledRecords(cut)
    if not len(records):
        return torch.zeros(len(keys), WIDTH, dtype=torch.float64)
    pairs = eligible_pairs(EuclideanKeys(primary=keys, records=records), cap=cap)
    links = PickedLinks(pairs=pairs, sample=np.ones(len(records), dtype=bool))
    table = links.link(np.arange(len(keys)))
    index = torch.as_tensor(table.indices)
    batch = vectors[index.clamp_min(0)] * (index >= 0).unsqueeze(-1)
    units = pooled.units(pooled.clip(batch), bounded=True)
    return units[:, 0].double() * ring.granularity


@settings(deadline=None, max_examples=40)
@given(
    seed=st.integers(0, 2**32 - 1),
    rows=st.integers(1, 5),
    records=st.integers(1, 9),
    cap=st.integers(1, 3),
    slots=st.integers(1, 3),
)
def test_one_record_moves_at_most_m_rows_by_at_most_the_clip_norm(
    seed: int, rows: int, records: int, cap: int, slots: int
) -> None:
    """Removing each record in turn: at most m rows change, each by C and one rounding at most."""
    random = np.random.default_rng(seed)
    # A coarse grid, so that ties and crowded rows are common.
    keys = random.integers(0, 3, (rows, 2)).astype(np.float64)
    theirs = random.integers(0, 3, (records, 2)).astype(np.float64)
    vectors = torch.as_tensor(random.normal(size=(records, WIDTH)), dtype=torch.float32) * 3
    whole = row_sums(keys, theirs, vectors, cap=cap, slots=slots)

    for gone in range(records):
        kept = np.delete(np.arange(records), gone)
        without = row_sums(keys, theirs[kept], vectors[torch.as_tensor(kept)], cap=cap, slots=slots)
        change = torch.linalg.vector_norm(whole - without, dim=1)

        assert int((change > 0).sum()) <= cap
        # A sum that was drawn back is rounded once more: less than one unit of 2^-16 a coordinate.
        assert float(change.max()) <= CLIP + math.sqrt(WIDTH) * 2.0**-16


@settings(deadline=None, max_examples=40)
@given(seed=st.integers(0, 2**32 - 1), records=st.integers(1, 30), slots=st.integers(1, 4))
def test_no_sum_leaves_the_ball(seed: int, records: int, slots: int) -> None:
    """However many records pick a row, its sum has norm K C at most: what the ring is made for."""
    random = np.random.default_rng(seed)
    keys = np.zeros((1, 2))
    vectors = torch.as_tensor(random.normal(size=(records, WIDTH)) + 2, dtype=torch.float32)

    sums = row_sums(keys, np.zeros((records, 2)), vectors, cap=1, slots=slots)

    assert float(torch.linalg.vector_norm(sums, dim=1).max()) <= CLIP * slots
    if records > 3 * slots:
        # All vectors point the same way, so the bound is reached: drawing back does not overdo it.
        assert float(torch.linalg.vector_norm(sums, dim=1).max()) > 0.99 * CLIP * slots
