"""How many threads compute: small sums are done sooner by one.

Libraries start a thread a core, and these wait for each other by spinning. On a core that another
program also uses, a fit of 25,000 rows then took twenty times the CPU time of one thread.
"""

import contextlib
from collections.abc import Iterator
from typing import Final

CELLS_A_THREAD: Final = 2_000_000
"""Numbers of a table that are worth one more thread."""


@contextlib.contextmanager
def few_threads(cells: int) -> Iterator[None]:
    """Compute in the block with one thread, and one more for every so many numbers of a table.

    Never with more than before.

    Args:
        cells: Numbers of the table that is computed with.
    """
    import torch
    from threadpoolctl import threadpool_info, threadpool_limits  # type: ignore[import-untyped]

    most = 1 + cells // CELLS_A_THREAD
    before = torch.get_num_threads()
    limits = {pool["prefix"]: min(most, pool["num_threads"]) for pool in threadpool_info()}
    torch.set_num_threads(min(most, before))
    try:
        with threadpool_limits(limits):
            yield
    finally:
        torch.set_num_threads(before)
