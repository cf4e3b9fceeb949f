"""Simulations of a federation file, as its parties' processes compute."""

from pathlib import Path
from typing import Any

import torch

from securevfl.config.reading import read_federation
from securevfl.core.progress import Observer, unheard
from securevfl.runtime.run_options import RunOptions
from securevfl.runtime.run_tables import read_tables
from securevfl.runtime.simulation import RunResult, simulate_federation


def simulated(
    path: Path,
    out: Path,
    *,
    observe: Observer = unheard,
    record_mib: float | None = None,
    **options: Any,
) -> RunResult:
    """Simulate a federation file, without models of the primary alone: two thirds of the time."""
    config = read_federation(path)
    tables = read_tables(config, path.parent)
    where = RunOptions(run_folder=out, observe=observe, record_mib=record_mib)
    return simulate_federation(config, tables, where, **{"with_alone": False, **options})


def undisturbed(path: Path, out: Path) -> RunResult:
    """Simulate all that a run has, in one thread: what to compare one with that was disturbed."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return simulated(path, out, with_alone=True)
    finally:
        torch.set_num_threads(threads)
