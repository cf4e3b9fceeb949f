"""A process's memory: freed memory, garbage collection, peak size.

A training step frees and allocates the same few megabytes again and again. By default glibc returns
such blocks to the system, which then provides zeroed pages, one page fault at a time: on a virtual
machine 2 ms for the 2.5 MB of one message, ten times the time to encrypt it.
"""

import contextlib
import ctypes
import gc
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

# Constants of glibc's malloc.h.
_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3

# The largest value that glibc accepts on a 64-bit system (mallopt(3)); larger blocks are rare and
# long-lived.
_KEEP_BYTES: Final = 32 << 20


# Linux and most others count ru_maxrss in KiB, macOS in bytes.
RSS_UNIT: Final = 1 if sys.platform == "darwin" else 1024

_THRESHOLDS: Final = (700, 1, 1)
"""Collection thresholds: new objects, and smaller collections before a larger one."""

# Whether :func:`loading` has frozen objects; counting frozen objects would visit all of them.
_has_frozen = False


def peak_memory_bytes() -> int | None:
    """Return this process's peak resident memory since its program started.

    None where the system does not report it (Windows).

    A started program inherits the usual figure (``ru_maxrss``): on Linux it is never below its
    parent's memory. ``VmHWM`` starts anew with the program.
    """
    try:
        status = Path("/proc/self/status").read_text(encoding="ascii")
    except OSError:
        status = ""
    for line in status.splitlines():
        name, _, value = line.partition(":")
        if name == "VmHWM":
            return int(value.split()[0]) * 1024
    try:
        import resource
    except ImportError:
        return None
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * RSS_UNIT


def keep_freed_memory() -> bool:
    """Make the C library's allocator keep up to 32 MiB of freed memory; call it once at start.

    Returns:
        Whether the allocator accepted the setting, which only glibc has; only speed depends on it.
    """
    mallopt = _of_glibc("mallopt")
    if mallopt is None:
        return False
    taken = [mallopt(name, _KEEP_BYTES) for name in (_M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD)]
    return all(taken)


def give_back_memory() -> bool:
    """Free unreachable objects, and return all free pages to the system.

    To be called between two sessions of a run: freed memory has holes that the next session does
    not fill evenly, so a primary would grow a little with each lost session.

    Returns:
        Whether the allocator returned anything; C libraries other than glibc have no such call.
    """
    gc.collect()
    trim = _of_glibc("malloc_trim")
    return trim is not None and bool(trim(ctypes.c_size_t(0)))


def _of_glibc(name: str) -> Callable[..., int] | None:
    """Return a function of glibc; None if the C library has no function of that name."""
    if not sys.platform.startswith("linux"):
        return None
    return getattr(ctypes.CDLL(None), name, None)


@contextlib.contextmanager
def loading() -> Iterator[None]:
    """Import modules in the block, and exclude their objects from garbage collection for good.

    Loading torch and its dependents creates 350,000 objects that stay. Python would visit all of
    them again and again, for a sixth of the time that a party takes to start.

    A block that loads nothing freezes nothing: a party enters one in every session, and a lost
    session leaves reference cycles that must be collected.
    """
    global _has_frozen
    known = len(sys.modules)
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if not _has_frozen or len(sys.modules) > known:
            if _has_frozen:
                gc.collect()  # garbage would be frozen as well
            gc.freeze()
            # Few objects are left, so full collections may be frequent. Only these free the tuples
            # that Python caches, and by default they wait until a quarter of all objects is new.
            gc.collect()
            gc.set_threshold(*_THRESHOLDS)
            _has_frozen = True
        if was_on:
            gc.enable()
