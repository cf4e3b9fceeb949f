"""Inputs at random from a target's seeds: those that are taken become seeds too."""

from collections.abc import Iterator
from contextlib import suppress
from random import Random
from typing import Final

from helpers.fuzzing.mutation import havoc
from helpers.fuzzing.target import Target

_MOST_SEEDS: Final = 500


def mutated(target: Target, data: bytes, random: Random) -> bytes:
    """Return another input made of one."""
    if target.mutate is not None and random.random() < 0.6:
        with suppress(Exception):  # what has no structure any more is altered byte by byte
            return target.mutate(data, random)
    return havoc(data, random, target.words)


def inputs(target: Target, *, seed: int, count: int) -> Iterator[bytes]:
    """Yield the target's own seeds, then so many inputs made of them, the same for a seed."""
    random, pool = Random(f"{target.name} {seed}"), list(target.seeds())
    yield from pool
    for _ in range(count):
        data = random.choice(pool)
        for _ in range(random.choice((1, 1, 1, 2, 4))):
            data = mutated(target, data, random)
        yield data
        # What was altered once is where the next alteration begins, now and then.
        if random.random() < 0.02:
            if len(pool) < _MOST_SEEDS:
                pool.append(data)
            else:
                pool[random.randrange(len(target.seeds()), len(pool))] = data
