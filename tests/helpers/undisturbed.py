"""A simulation of a federation file, as its parties' processes compute."""

from pathlib import Path

import torch

from securevfl import RunResult
from securevfl.testing import run_in_process


def undisturbed(path: Path, out: Path) -> RunResult:
    """Simulate all that a run has, in one thread: what to compare one with that was disturbed."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return run_in_process(path, out, with_alone=True)
    finally:
        torch.set_num_threads(threads)
