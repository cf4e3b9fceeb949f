"""Encoding, masking and decoding agree with plain integers for every input in range."""

import numpy as np
import torch
from helpers import ring_reference as reference
from helpers.ring_keys import random_pair_keys
from hypothesis import given, settings
from hypothesis import strategies as st

from securevfl.mpc.codec import RingFormat, decode_sum, encode, quantise, require_row_norms
from securevfl.mpc.masks import PairwiseMasks

formats = st.builds(
    lambda lanes, parties, part, bits: RingFormat(
        precision_bits=bits,
        lanes=lanes,
        parties=parties,
        bound_units=max(1, int(RingFormat.largest_bound(lanes=lanes, parties=parties) * part)),
    ),
    lanes=st.sampled_from([2, 3, 4]),
    parties=st.integers(1, 12),
    part=st.floats(0.0001, 1.0),
    bits=st.integers(0, 20),
)


@settings(deadline=None, max_examples=150)
@given(formats, st.integers(0, 23), st.integers(0, 2**32 - 1), st.data())
def test_masked_sums_equal_the_twins(fmt, elements, seed, data) -> None:
    """Any active set, any size, every lane count, values up to the very bound."""
    count = data.draw(st.integers(1, fmt.parties))
    active = tuple(range(1, count + 1))
    generator = np.random.default_rng(seed)
    keys = random_pair_keys(active)
    total = torch.zeros(fmt.words(elements), dtype=torch.int64)
    twin = []
    expected = np.zeros(elements, np.int64)
    for rank in active:
        bound = fmt.bound_units
        units = generator.integers(-bound, bound + 1, elements)
        units[generator.random(elements) < 0.2] = generator.choice([-bound, bound])
        expected += units
        words = encode(torch.from_numpy(units.astype(np.int32)), fmt)
        assert words.tolist() == reference.as_signed(reference.encode(units.tolist(), fmt))
        PairwiseMasks(rank, keys[rank]).apply(words, round_number=1, active=active)
        total += words
        mask = reference.mask(
            len(words), rank=rank, pair_keys=keys[rank], round_number=1, active=active
        )
        twin.append(reference.add([reference.encode(units.tolist(), fmt), mask]))

    assert total.tolist() == reference.as_signed(reference.add(twin))
    decoded = decode_sum(total, fmt, elements=elements, parties_active=count)
    assert decoded.tolist() == expected.tolist()


@settings(deadline=None, max_examples=150)
@given(
    st.lists(st.floats(-1, 1, width=32), min_size=1, max_size=40),
    st.integers(0, 20),
    st.booleans(),
)
def test_quantised_values_are_the_twins_and_never_larger(values, bits, double) -> None:
    """Towards zero, exactly, in float32 and float64; hence no norm can grow."""
    fmt = RingFormat(precision_bits=bits, lanes=2, parties=2, bound_units=2**bits)
    x = torch.tensor(values, dtype=torch.float64 if double else torch.float32)

    units = quantise(x, fmt)

    assert units.tolist() == reference.quantise([float(v) for v in x], fmt)
    assert bool((units.double().abs() <= x.double().abs() * 2**bits).all())
    norm = float(x.double().norm())
    require_row_norms(units.view(1, -1), fmt, clip_norm=max(norm, 1e-9) * (1 + 1e-12))


@settings(deadline=None, max_examples=60)
@given(formats, st.lists(st.integers(-1000, 1000), max_size=20))
def test_reusing_memory_changes_nothing(fmt, units) -> None:
    """Packing in place gives the same words."""
    tensor = torch.tensor(units, dtype=torch.int32).clamp(-fmt.bound_units, fmt.bound_units)

    assert torch.equal(encode(tensor, fmt), encode(tensor.clone(), fmt, reuse=True))
