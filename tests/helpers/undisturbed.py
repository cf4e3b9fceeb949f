"""A federation that nobody leaves, to compare with."""

from pathlib import Path

import torch

from securevfl.config.reading import read_federation
from securevfl.runtime.run_tables import read_tables
from securevfl.runtime.simulation import RunResult, simulate_federation


def undisturbed(path: Path, out: Path) -> RunResult:
    """Simulate a federation file in one thread, as its parties' processes compute."""
    config = read_federation(path)
    tables = read_tables(config, path.parent)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return simulate_federation(config, tables, out, device=torch.device("cpu"))
    finally:
        torch.set_num_threads(threads)
