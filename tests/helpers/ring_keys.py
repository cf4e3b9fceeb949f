"""Keys and values for tests of sums, not about how parties come by them."""

import itertools
import os

import torch


def random_pair_keys(ranks: tuple[int, ...]) -> dict[int, dict[int, bytes]]:
    """Return, for every rank, its key with every other rank."""
    keys: dict[int, dict[int, bytes]] = {rank: {} for rank in ranks}
    for low, high in itertools.combinations(ranks, 2):
        keys[low][high] = keys[high][low] = os.urandom(32)
    return keys


def bounded_values(rank: int, elements: int) -> torch.Tensor:
    """Return a secondary's representation, the same in its process and in the test."""
    generator = torch.Generator().manual_seed(rank)
    return torch.rand(elements, generator=generator) * 2 - 1
