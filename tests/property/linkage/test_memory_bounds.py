"""Memory stays within what each module states, also where every distance ties."""

import tracemalloc
from collections.abc import Callable
from importlib.util import find_spec

import numpy as np
import pytest
from helpers.nearest import nearest_codes, nearest_records, nearest_texts

from securevfl.linkage.links import LinkTable

MIB = 2**20
K = 10


def peak_mib(link: Callable[[], LinkTable]) -> float:
    """Return the most memory that numpy and Python held meanwhile, without what was there."""
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        links = link()
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    return (most - before - 2 * links.indices.nbytes) / MIB


@pytest.mark.parametrize("tied", [False, True])
def test_texts_take_112_mib(tied: bool) -> None:
    """16 MiB of distances that are two bytes wide, of 900 x 25,000 pairs."""
    letters = np.array(list("abcdefgh"))
    words = ["".join(row) for row in letters[np.random.default_rng(0).integers(0, 8, (25_900, 4))]]
    records = ["ab"] * 25_000 if tied else words[900:]
    records[0] = "a" * 300

    assert peak_mib(lambda: nearest_texts(words[:900], records, K)) < 112


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("backend", ["numpy", "faiss"])
def test_codes_take_112_mib(backend: str, tied: bool) -> None:
    """Of 250 x 20,000 pairs of 128 bits."""
    if find_spec(backend) is None:
        pytest.skip("faiss is an optional dependency")
    codes = np.random.default_rng(0).integers(0, 256, (20_250, 16), dtype=np.uint8)
    if tied:
        codes[250:] = codes[0]

    assert peak_mib(lambda: nearest_codes(codes[:250], codes[250:], K, backend=backend)) < 112


@pytest.mark.parametrize("tied", [False, True])
def test_coordinates_take_64_bytes_a_candidate(tied: bool) -> None:
    """At most 2^19 candidates of 16 + 2 x 24 bytes, and as much for sorting ties."""
    keys = np.random.default_rng(0).random((60_000, 2))
    if tied:
        keys = np.round(keys, 1)

    assert peak_mib(lambda: nearest_records(keys[:55_000], keys[55_000:], K)) < 64
