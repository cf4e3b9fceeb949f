"""The clip bound holds in exact arithmetic for whatever a model may put out."""

import math
from fractions import Fraction

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from securevfl.dp.clipping import clip_records, clip_rows

values = st.lists(
    st.floats(allow_nan=False, allow_infinity=False, width=32), min_size=1, max_size=12
)


@settings(deadline=None, max_examples=200)
@given(values, st.floats(1e-3, 1e3))
def test_no_row_is_longer_than_the_clip_norm(row, clip_norm) -> None:
    """The squared norm in fractions, so that no rounding hides an excess."""
    for clip in (clip_rows, clip_records):
        clipped = clip(torch.tensor(row).view(1, 1, -1), clip_norm)

        squared = sum(Fraction(float(v)) ** 2 for v in clipped.reshape(-1))
        assert squared <= Fraction(clip_norm) ** 2


@settings(deadline=None, max_examples=100)
@given(values)
def test_clipping_never_turns_a_row_around(row) -> None:
    """Signs stay, and nothing grows."""
    x = torch.tensor(row).view(1, 1, -1)
    clipped = clip_rows(x, 1.0)

    assert bool((clipped.abs() <= x.abs()).all())
    assert all(
        math.copysign(1, a) == math.copysign(1, b) or b == 0
        for a, b in zip(x.reshape(-1).tolist(), clipped.reshape(-1).tolist(), strict=True)
    )
