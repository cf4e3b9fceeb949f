"""Random pair keys for tests that are not about how parties agree on them."""

import itertools
import os


def random_pair_keys(ranks: tuple[int, ...]) -> dict[int, dict[int, bytes]]:
    """Return, for every rank, its key with every other rank."""
    keys: dict[int, dict[int, bytes]] = {rank: {} for rank in ranks}
    for low, high in itertools.combinations(ranks, 2):
        keys[low][high] = keys[high][low] = os.urandom(32)
    return keys
