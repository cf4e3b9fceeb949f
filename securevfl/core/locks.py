"""One process at a time at a file that is open: by the system's own lock, or a file beside it.

Linux and macOS lock the open file itself, and nothing is left beside it. Windows has no ``fcntl``:
there :mod:`filelock` holds ``NAME.lock`` beside the file, and lookers keep one another out too.
"""

from collections.abc import Callable
from pathlib import Path

_ON_ITSELF: bool
try:
    import fcntl
except ImportError:  # Windows
    _ON_ITSELF = False
else:
    _ON_ITSELF = True


def lock(handle: int, path: Path, *, shared: bool) -> Callable[[], None]:
    """Take the lock of a file now, without waiting.

    Args:
        handle: The open file.
        path: Where it lies.
        shared: Whether others may take it too, to look only.

    Returns:
        What lets go of it. Where the lock is on the file itself, closing ``handle`` does that too.

    Raises:
        BlockingIOError: If another process has it.
        OSError: As the system says it.
    """
    if _ON_ITSELF:
        fcntl.flock(handle, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        return lambda: None
    import filelock

    beside = filelock.FileLock(f"{path}.lock", timeout=0, thread_local=False)
    try:
        beside.acquire()
    except filelock.Timeout:
        raise BlockingIOError(f"{path} is locked") from None
    return beside.release
