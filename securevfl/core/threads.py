"""Number of threads for computing: small tables are computed faster by one thread.

Libraries start a thread per core, and these spin while they wait for each other. On cores shared
with another program, a fit of 25,000 rows took twenty times the CPU time of one thread.
"""

import contextlib
from collections.abc import Iterator
from typing import Final

CELLS_A_THREAD: Final = 2_000_000
"""Numbers of a table that are worth one more thread."""


@contextlib.contextmanager
def few_threads(cells: int) -> Iterator[None]:
    """Compute in the block with a number of threads that suits the size of a table.

    One thread, and one more for each :data:`CELLS_A_THREAD` numbers, but never more than before.

    Args:
        cells: Numbers in the table.
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
