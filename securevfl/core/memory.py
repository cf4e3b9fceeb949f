"""A process's memory: what is kept, what is looked through for garbage, how much was held.

A training step frees and allocates the same few megabytes again and again. By default glibc
returns such blocks to the system, which then has to hand out zeroed pages one fault at a time: on
a virtual machine 2 ms for the 2.5 MB of one message, more than encrypting it ten times over.
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

# The most that glibc takes on a 64-bit system (mallopt(3)); larger blocks are rare and long-lived.
_KEEP_BYTES: Final = 32 << 20


# Linux and most others count ru_maxrss in KiB, macOS in bytes.
RSS_UNIT: Final = 1 if sys.platform == "darwin" else 1024

_THRESHOLDS: Final = (700, 1, 1)
"""Collection thresholds: new objects, and smaller collections before a larger one."""

# Whether :func:`loading` has put objects out of the collector's sight. To count them walks all.
_has_frozen = False


def peak_memory_bytes() -> int | None:
    """Return the largest resident memory that this process has had since its program began.

    None where the system does not say (Windows).

    The system's usual figure (``ru_maxrss``) is inherited by a started program: on Linux it is
    never below what its parent held. ``VmHWM`` begins anew with the program.
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
    """Tell the C library's allocator to keep up to 32 MiB that were freed; call once at start.

    Returns:
        Whether the allocator took it; other C libraries than glibc have no such setting, and
        nothing depends on it but speed.
    """
    mallopt = _of_glibc("mallopt")
    if mallopt is None:
        return False
    taken = [mallopt(name, _KEEP_BYTES) for name in (_M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD)]
    return all(taken)


def give_back_memory() -> bool:
    """Free unreachable objects, and return all free pages to the system.

    For the time between two sessions of a run. What a session frees leaves holes, which the next
    one does not fill evenly: a primary that lost many would grow a little with each.

    Returns:
        Whether the allocator handed anything back; other C libraries than glibc have no such call.
    """
    gc.collect()
    trim = _of_glibc("malloc_trim")
    return trim is not None and bool(trim(ctypes.c_size_t(0)))


def _of_glibc(name: str) -> Callable[..., int] | None:
    """Return a function of the C library, or None where it has none of that name."""
    if not sys.platform.startswith("linux"):
        return None
    return getattr(ctypes.CDLL(None), name, None)


@contextlib.contextmanager
def loading() -> Iterator[None]:
    """Import modules in the block without looking for garbage, now or later, in what they made.

    350,000 objects are made while torch and what stands on it load, and they stay. Python would
    walk all of them again and again, a sixth of the seconds in which a party starts.

    Nothing is put out of the collector's sight by a block that loads nothing: a party goes through
    here in every session, and of what it holds then, a session that is lost leaves circles.
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
                gc.collect()  # what is garbage by now would stay as well
            gc.freeze()
            # What is left is little, so that all of it may be walked often: full collections alone
            # free the tuples that Python keeps, and wait for a quarter of what the last one saw.
            gc.collect()
            gc.set_threshold(*_THRESHOLDS)
            _has_frozen = True
        if was_on:
            gc.enable()
