import subprocess
import sys

import pytest
from helpers.patience import PATIENCE_S


def test_kept_memory_is_not_faulted_in_again() -> None:
    """With glibc, freed blocks are reused: a loop of 8 MB blocks takes next to no page faults."""
    code = """
import resource, sys
import numpy as np
from securevfl.core.memory import keep_freed_memory
if not keep_freed_memory():
    sys.exit(0)
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        np.ones(1 << 20)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
faults()
sys.exit(0 if faults() < 2048 else 1)
"""
    done = subprocess.run([sys.executable, "-c", code], timeout=PATIENCE_S, check=False)

    assert done.returncode == 0


def test_loading_leaves_the_collector_as_it_was() -> None:
    """Nothing is looked for while modules load, also where one fails; afterwards it is again."""
    code = """
import gc
from securevfl.core.memory import loading
try:
    with loading():
        assert not gc.isenabled()
        import securevfl.no_such_module
except ImportError:
    assert gc.isenabled() and gc.get_freeze_count() > 1000
gc.disable()
with loading():
    pass
assert not gc.isenabled()
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=PATIENCE_S)


def test_loading_again_keeps_no_garbage() -> None:
    """What circles held before it is freed: each session of a party that waits loads again."""
    text = """
import gc
import weakref
from securevfl.core.memory import loading

class Session:
    def __init__(self):
        self.itself = self

gc.disable()
with loading():
    pass
lost = weakref.ref(Session())
assert lost() is not None
with loading():
    pass
gc.collect()
assert lost() is None
"""
    done = subprocess.run(
        [sys.executable, "-c", text], check=False, timeout=PATIENCE_S, capture_output=True
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(sys.version_info >= (3, 14), reason="it collects in steps, none of them full")
def test_full_collections_come_soon_though_much_was_loaded() -> None:
    """They alone free the tuples that Python keeps of those that were freed, of each epoch more."""
    text = """
import gc
from securevfl.core.memory import loading
made = [[] for _ in range(400_000)]
gc.collect()
with loading():
    pass
before = gc.get_stats()[2]["collections"]
for _ in range(20):
    kept = [[] for _ in range(1000)]
assert gc.get_stats()[2]["collections"] > before
"""
    done = subprocess.run(
        [sys.executable, "-c", text], check=False, timeout=PATIENCE_S, capture_output=True
    )
    assert done.returncode == 0, done.stderr


def test_memory_is_given_back_though_some_of_it_is_in_use() -> None:
    """Between small things that stay, 64 MiB that a circle held go back to the system."""
    text = """
import sys
from securevfl.core.memory import give_back_memory, keep_freed_memory

def held():
    with open("/proc/self/smaps_rollup") as lines:
        return sum(int(line.split()[1]) for line in lines if line.startswith("Anonymous:")) >> 10

class Session:
    def __init__(self):
        self.itself = self
        self.blocks = []

if not keep_freed_memory():
    sys.exit(0)
session, stays = Session(), []
for _ in range(1024):
    session.blocks.append(bytes(1 << 16))
    stays.append(bytes(1024))
full = held()
del session
assert give_back_memory()
assert full - held() > 48, (full, held())
"""
    done = subprocess.run(
        [sys.executable, "-c", text], check=False, timeout=PATIENCE_S, capture_output=True
    )
    assert done.returncode == 0, done.stderr
